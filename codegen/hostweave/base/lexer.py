"""Token cursor for the parsers of both IRs. Errors give the line and the column."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeVar

from hostweave.base.errors import ParseError

T = TypeVar("T")

MAX_DEPTH = 64  # nesting of bodies and parentheses; parsers and passes recurse at each level
MAX_INT = 2**63 - 1  # largest size, because C++ has sizes in int64_t

_TOKEN = re.compile(
    r"\s+|#[^\n]*|(?P<string>\"(?:[^\"\\\n]|\\.)*\")|(?P<number>-?\d+\.(?!\.)\d*(?:e[+-]?\d+)?|-?\d+e[+-]?\d+|-?(?:inf|nan)\b|\d+)|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<sign>->|==|!=|<=|>=|\.\.|[^\s\w])",
    re.ASCII,
)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Token(NamedTuple):
    text: str
    start: int


class Lexer:
    def __init__(self, text: str):
        self.text = text
        self.tokens = [Token(m[0], m.start()) for m in _TOKEN.finditer(text) if m.lastgroup]
        self.at = 0
        self.depth = 0
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        for at, token in enumerate(self.tokens):
            if not token.text.isascii() and not token.text.startswith('"'):
                self.fail(f"unexpected character {token.text!r}; only strings and comments may have non-ASCII characters", at)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        start = self._start(at)
        column = start - self.text.rfind("\n", 0, start)
        raise ParseError(f"line {self.line(at)}, column {column}: {message}")

    def line(self, at: int | None = None) -> int:
        """Line number of a token, by default of the current one."""
        return bisect_left(self.newlines, self._start(at)) + 1

    def _start(self, at: int | None) -> int:
        at = self.at if at is None else at
        return self.tokens[at].start if at < len(self.tokens) else len(self.text)

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead].text if self.at + ahead < len(self.tokens) else ""

    def found(self) -> str:
        return repr(self.peek()) if self.peek() else "the end of the text: is it complete?"

    def take(self) -> str:
        if not self.peek():
            self.fail("the text ends inside a program: is it complete?")
        self.at += 1
        return self.tokens[self.at - 1].text

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.found()}")

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False

    def word(self, what: str) -> str:
        if not _WORD.fullmatch(self.peek()):
            self.fail(f"expected {what}, found {self.found()}")
        return self.take()

    def integer(self) -> int:
        text = self.peek()
        if not text.isdigit():
            self.fail(f"expected an int, found {self.found()}")
        digits = text.lstrip("0")
        if len(digits) > len(str(MAX_INT)) or int(digits or "0") > MAX_INT:
            self.fail(f"an int of {len(digits)} digits is too large; the largest int is {MAX_INT}")
        self.at += 1
        return int(digits or "0")

    def number(self, what: str) -> int | float:
        start, sign = self.at, -1 if self.accept("-") else 1
        text = self.take()
        try:
            digits = text.lstrip("0") or "0"
            return sign * (int(digits) if text.isdigit() and len(digits) <= len(str(MAX_INT)) + 1 else float(text))
        except ValueError:
            self.fail(f"expected {what}", start)

    def within(self, item: Callable[[], T], signs: str = "()") -> T:
        self.expect(signs[0])
        found = item()
        self.expect(signs[1])
        return found

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enters a nesting level: a body, or parentheses."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"more than {MAX_DEPTH} nested bodies or parentheses; reduce the nesting")
        yield
        self.depth -= 1

    def repeated(self, word: str, item: Callable[[], T]) -> tuple[T, ...]:
        """Parses `word` and an item, as often as `word` is the next token."""
        items: list[T] = []
        while self.accept(word):
            items.append(item())
        return tuple(items)

    def separated(self, item: Callable[[], T]) -> tuple[T, ...]:
        return item(), *self.repeated(",", item)

    def list_of(self, item: Callable[[], T], closing: str) -> tuple[T, ...]:
        """Parses items separated by commas, up to and including the closing sign. A comma may follow the last item."""
        items: list[T] = []
        while not self.accept(closing):
            items.append(item())
            if self.peek() != closing:
                self.expect(",")
        return tuple(items)

    def enclosed(self, item: Callable[[], T], signs: str = "()") -> tuple[T, ...]:
        self.expect(signs[0])
        return self.list_of(item, signs[1])

    def global_name(self, what: str) -> str:
        """Parses the name of a program, function or kernel: `@name`."""
        self.expect("@")
        return self.word(f"the name of {what}")

    def named(self) -> str:
        """Parses the name of a value: `%name`."""
        self.expect("%")
        return self.word("a name after '%'")
