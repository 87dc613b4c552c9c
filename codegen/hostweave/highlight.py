"""Colours for terminals."""

from __future__ import annotations

import sys


def highlighted(text: str, language: str) -> str:
    """`text` with colours where stdout is a terminal, as it is elsewhere. `language` is cpp or ir."""
    if not sys.stdout.isatty():
        return text
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import CppLexer, LlvmLexer

    return str(highlight(text, CppLexer() if language == "cpp" else LlvmLexer(), TerminalFormatter()))
