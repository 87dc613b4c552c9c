"""The generated sources of a host program."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hostweave.base.paths import TEMPLATES
from hostweave.emit import program_views
from hostweave.emit.layout import format_cpp
from hostweave.emit.main import Main
from hostweave.emit.program import program_view
from hostweave.host_ir.ir import HostProgram

SOURCES = ("program.h", "program.cpp", "binding.cpp")
KERNEL_SOURCES = ("kernels.h", "kernels.cu")


def render(program: HostProgram) -> dict[str, str]:
    """The generated files, path -> text: program.h, program.cpp, binding.cpp and, where there are kernels, kernels.h and kernels.cu,
    where some are the user's user_kernels.cuh.

    The same program always gives the same bytes. Raises ProgramError for what has no C++.
    """
    view = program_view(program)
    return {path: rendered(path, program=view) for path in (*SOURCES, *kernel_files(view))}


def kernel_files(view: program_views.Program) -> tuple[str, ...]:
    """The files of its kernels, where it has some."""
    return (*(KERNEL_SOURCES if view.kernel_names else ()), *(("user_kernels.cuh",) if view.sources else ()))


def rendered(path: str, **values: program_views.Program | Main) -> str:
    """The text of one file: its template, laid out as clang-format would where it is C++."""
    text = _environment().get_template(f"{path}.j2").render(values)
    return format_cpp(text) if path.endswith((".h", ".cpp", ".cu")) else text


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
    environment.filters["braced"] = _braced
    return environment


def _braced(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"
