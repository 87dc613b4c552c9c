"""The templates, which lay out what Python decided: a file of C++ each, and a macro for each instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hostweave.base.paths import TEMPLATES
from hostweave.emit.layout import format_cpp

COMMON = "common"  # the file of macros that belong to no transport


def rendered(path: str, **values: object) -> str:
    """The text of one file: its template, laid out as clang-format would where it is C++."""
    text = _environment().get_template(f"{path}.j2").render(values)
    return format_cpp(text) if path.endswith((".h", ".cpp", ".cu")) else text


def lay_out(macro: str, file: str = COMMON, **values: object) -> str:
    """The C++ lines of an instruction, by the macro of its name."""
    return _macros(file)[macro](**values)


@cache
def _macros(file: str) -> dict[str, Callable[..., str]]:
    return vars(_environment().get_template(f"instructions/{file}.j2").module)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters |= {"braced": braced, "lines": _lines}
    return environment


def braced(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _lines(lines: Iterable[str], before: str = "") -> str:
    return "".join(f"{before}{line}\n" for line in lines)
