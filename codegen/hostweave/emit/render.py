"""The generated sources of a host program."""

from __future__ import annotations

from hostweave.emit.program import Program
from hostweave.emit.templates import rendered
from hostweave.host_ir.ir import HostProgram

SOURCES = ("program.h", "program.cpp", "binding.cpp")
KERNEL_SOURCES = ("kernels.h", "kernels.cu")


def render(program: HostProgram) -> dict[str, str]:
    """The generated files, path -> text: program.h, program.cpp, binding.cpp and, where there are kernels, kernels.h and kernels.cu,
    where some are the user's user_kernels.cuh.

    The same program always gives the same bytes. Raises ProgramError for what has no C++.
    """
    emitted = Program(program)
    return {path: rendered(path, program=emitted) for path in (*SOURCES, *kernel_files(emitted))}


def kernel_files(program: Program) -> tuple[str, ...]:
    """The files of its kernels, where it has some."""
    return (*(KERNEL_SOURCES if program.kernel_names else ()), *(("user_kernels.cuh",) if program.user_kernels else ()))
