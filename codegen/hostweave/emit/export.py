"""A CMake project of one program, which builds and runs without Python."""

from __future__ import annotations

import shutil
from pathlib import Path

from hostweave.build.paths import RUNTIME
from hostweave.emit.main import main_view
from hostweave.emit.program import program_view
from hostweave.emit.render import kernel_files, rendered
from hostweave.host.ir import HostProgram


def export(program: HostProgram, folder: Path) -> None:
    """Writes the project to `folder`: the program, a main.cpp that runs and times it, the runtime's sources, and how to build them.

    `-DHOSTWEAVE_TARGET=cpu|cuda` chooses the target when it is configured. Raises ProgramError for what has no C++.
    """
    view = program_view(program)
    main = main_view(program, view)
    paths = ["program.h", "program.cpp", *kernel_files(view), "main.cpp", "CMakeLists.txt"]
    texts = {path: rendered(path, program=view, main=main) for path in paths}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        (folder / path).write_text(text)
    _copy_runtime(folder / "runtime")


def _copy_runtime(folder: Path) -> None:
    """All but the driver, by which Python calls a program."""
    for part in ("include", "src", "cpu", "sample"):
        shutil.copytree(RUNTIME / part, folder / part, dirs_exist_ok=True)
