"""Terminal colours for C++ and the text of both IRs."""

import os
import sys
from functools import cache

from pygments import highlight
from pygments.formatters import TerminalFormatter
from pygments.lexer import RegexLexer, words
from pygments.lexers import CppLexer
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, Punctuation, String, Text

from hostweave.fusion_ir.ops import OPS
from hostweave.host_ir.text import WORDS
from hostweave.types.tensor import DTYPES


def show(text: str, language: str) -> None:
    """Prints a text, in colours if `has_colours()`. `language` is cpp or ir."""
    if has_colours():
        text = highlight(text, CppLexer(stripnl=False, ensurenl=False) if language == "cpp" else ir_lexer(), TerminalFormatter())
    print(text, end="")


def has_colours() -> bool:
    """True if stdout is a terminal that shows colours, and the user has not set NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@cache
def ir_lexer() -> RegexLexer:
    """Lexer of both IRs and of the loops of kernels. A character that occurs in none of them becomes an Error token."""
    declarations = ("fusion", "function", "block", "kernel", "host", "user_kernel", "loops", "cpu", "return", "else")
    header = ("mesh", "channels", "streams", "events", "uneven", "ranks")
    attributes = (*header, "pinned", "async", "partial", "grid", "size", "in", "out", "of", "by", "on")

    class IrLexer(RegexLexer):
        name = "Hostweave IR"
        tokens = {  # noqa: RUF012  as Pygments wants it
            "root": [
                (r"\s+", Text.Whitespace),
                (r"^@@ [-+,\d ]+ @@$", Generic.Subheading),  # header of a hunk in `inspect --after all`
                (r"#[^\n]*", Comment.Single),
                (r'"(?:[^"\\\n]|\\.)*"', String),
                (r"%[A-Za-z_]\w*", Name),  # no colour, because most of the text consists of values
                (r"(?<![\w)])@[A-Za-z_]\w*", Name.Function),
                (r"@[A-Za-z_]\w*", Name.Decorator),  # the mesh axis of M@x
                (r"\d+\.(?!\.)\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|(?:inf|nan)\b", Number.Float),
                (r"\d+", Number.Integer),
                (words(DTYPES, suffix=r"(?=\[)"), Keyword.Type),
                (words(declarations, prefix=r"\b", suffix=r"\b"), Keyword.Declaration),
                (words((*WORDS, *OPS), prefix=r"\b", suffix=r"\b(?!=)"), Keyword),
                (words((*attributes, "true", "false", "none"), prefix=r"\b", suffix=r"\b"), Keyword),
                (r"[A-Za-z_]\w*", Name),
                (r"->|==|!=|<=|>=|\.\.|[-+*/%<>=]", Operator),
                (r"[(){}\[\],:;.]", Punctuation),
            ]
        }

    return IrLexer(stripnl=False, ensurenl=False)
