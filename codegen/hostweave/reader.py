"""A cursor over the tokens of IR text, shared by the parsers of both IRs. Every complaint names line and column."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeVar

from hostweave.errors import ParseError, ProgramError
from hostweave.fusion.extent import Extent, part_of
from hostweave.fusion.types import DTYPES, MAX_RANKS, MAX_SIZE, Dim, DType, Mesh, Partial, TensorType, mesh_of_part

T = TypeVar("T")

DEEPEST = 64  # bodies and parentheses in one another: each is a call of Python's in whatever walks them

_TOKEN = re.compile(
    r"\s+|#[^\n]*|(?P<string>\"(?:[^\"\\\n]|\\.)*\")|(?P<number>-?\d+\.(?!\.)\d*(?:e[+-]?\d+)?|-?\d+e[+-]?\d+|-?(?:inf|nan)\b|\d+)|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<sign>->|==|!=|<=|>=|\.\.|[^\s\w])",
    re.ASCII,
)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Token(NamedTuple):
    text: str
    start: int


class Reader:
    def __init__(self, text: str):
        self.text = text
        self.tokens = [Token(m[0], m.start()) for m in _TOKEN.finditer(text) if m.lastgroup]
        self.at = 0
        self.depth = 0
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        for at, token in enumerate(self.tokens):
            if not token.text.isascii() and not token.text.startswith('"'):
                self.fail(f"{token.text!r} is no sign of the language; only strings and comments hold others than ASCII", at)
        # `M@dp,tp, K`: a comma goes on with axes where a mesh axis follows, so the axes must be known before the dims.
        self.axes = {axis for mesh in re.findall(r"\bmesh\(([^)]*)\)", text) for axis in re.findall(r"(\w+)\s*=", mesh)}

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        start = self.tokens[at].start if at < len(self.tokens) else len(self.text)
        line = self.line(at)
        column = start - self.text.rfind("\n", 0, start)
        raise ParseError(f"line {line}, column {column}: {message}")

    def line(self, at: int | None = None) -> int:
        """The line of a token, the present one by default."""
        at = self.at if at is None else at
        start = self.tokens[at].start if at < len(self.tokens) else len(self.text)
        return bisect_left(self.newlines, start) + 1

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
        if self.peek() != text:
            self.fail(f"expected {text!r}, found {self.found()}")
        self.at += 1

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
        if len(text) > len(str(MAX_SIZE)) or int(text) > MAX_SIZE:
            self.fail(f"an int of {len(text)} digits; the largest one is {MAX_SIZE}")
        return int(self.take())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside of one more body, or pair of parentheses."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"more than {DEEPEST} bodies or parentheses in one another; move the inner ones out")
        yield
        self.depth -= 1

    def list_of(self, item: Callable[[], T], closing: str) -> tuple[T, ...]:
        """Items between commas up to the closing sign, which is consumed."""
        items: list[T] = []
        while not self.accept(closing):
            if items:
                self.expect(",")
            items.append(item())
        return tuple(items)

    def named(self) -> str:
        """The name of a value: `%name`."""
        self.expect("%")
        return self.word("a name after '%'")

    def extent(self) -> Extent:
        start = self.at
        text = self.factor()
        while self.peek() in ("*", "/"):
            text += self.take() + self.factor()
        return self.as_extent(text, start)

    def as_extent(self, text: str, start: int) -> Extent:
        """The extent of a text that began at that token."""
        try:
            extent = Extent.of(text)
            for name in extent.names:
                if part_of(name):
                    mesh_of_part(name, Mesh())
        except ValueError as error:
            self.fail(str(error), start)
        if max(extent.coefficient, extent.divisor) > MAX_SIZE:
            self.fail(f"{extent} is more than {MAX_SIZE}, the largest size", start)
        return extent

    def factor(self) -> str:
        """A number, a name, `ceil(M/8)`, `part(M, x)` or `(M + 2)`."""
        text = str(self.integer()) if self.peek().isdigit() else self.take()
        if text in ("ceil", "part") and self.accept("("):
            text += "("
        if text.endswith("("):
            while text.count(")") < text.count("("):
                text += str(self.integer()) if self.peek().isdigit() else self.take()
        return text

    def dtype(self) -> DType:
        if self.peek() not in DTYPES:
            self.fail(f"unknown dtype {self.found()}; one of {', '.join(DTYPES)}")
        return DTYPES[self.take()]

    def dim(self) -> Dim:
        extent = self.extent()
        axes: list[str] = []
        if self.accept("@"):
            axes.append(self.word("a mesh axis"))
            while self.peek() == "," and self.peek(1) in self.axes:
                self.take()
                axes.append(self.take())
        return Dim(extent, tuple(axes))

    def tensor_type(self) -> TensorType:
        dtype = self.dtype()
        self.expect("[")
        dims = self.list_of(self.dim, "]")
        partial = None
        if self.accept("partial"):
            self.expect("(")
            op = self.word("a reduction")
            self.expect(",")
            over = [self.word("a mesh axis")]
            while self.accept(","):
                over.append(self.word("a mesh axis"))
            self.expect(")")
            partial = Partial(op, tuple(over))
        return TensorType(dtype, dims, partial, self.mesh() if self.accept("on") else None)

    def mesh(self) -> Mesh:
        """`mesh(dp=2, tp=4)`, or `mesh(x=2 of ranks 4, 5)` and `mesh(x=4 of ranks 4..8)` of some ranks of the program."""
        start = self.at
        self.expect("mesh")
        self.expect("(")
        axes: list[tuple[str, int]] = []
        members = None
        while not self.accept(")"):
            if self.peek(1) != "=" and self.accept("of"):
                members = self._ranks()
                self.expect(")")
                break
            if axes:
                self.expect(",")
            name = self.word("the name of a mesh axis")
            self.expect("=")
            axes.append((name, self.integer()))
        try:
            mesh = Mesh(tuple(axes), members)
        except ProgramError as error:
            self.fail(str(error), start)
        if len(mesh.all_ranks) != mesh.size:
            self.fail(f"{mesh} has {mesh.size} places for {len(mesh.all_ranks)} ranks; give every rank one")
        return mesh

    def _ranks(self) -> tuple[int, ...]:
        """`ranks 0, 1` or `ranks 4..8`."""
        self.expect("ranks")
        ranks = [self.integer()]
        if self.accept(".."):
            end = self.integer()
            if not ranks[0] < end <= MAX_RANKS:
                self.fail(f"ranks go from one to a greater one, {MAX_RANKS} at most, not from {ranks[0]} to {end}", self.at - 1)
            return tuple(range(ranks[0], end))
        while self.accept(","):
            ranks.append(self.integer())
        return tuple(ranks)
