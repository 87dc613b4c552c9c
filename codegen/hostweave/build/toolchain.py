"""The compiler, its flags, and what a program is linked with."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from hostweave.base.errors import BuildError
from hostweave.base.paths import NATIVE
from hostweave.build.nvrtc import Unit

MODULE_FILE = "hostweave_program.so"
LIBRARIES_FILE = "libraries"  # the libraries of the cache that a module needs, each behind those that it needs itself
# The files of a program in which no loop is hot: at -O2 a compiler takes twice as long for them, and as long again for two as for one.
ONLY_ENQUEUE, ENQUEUING = ("program.cpp", "binding.cpp"), "module.cpp"
GLUE = NATIVE / "glue" / "module.cpp.o"  # what makes a Python module of a program's objects
INSTALLED = (NATIVE / "libhostweave_cpu.so", GLUE)
KERNELS_AS_CPP = ("-x", "c++", "-fwrapv")  # their ints wrap around, as those of NumPy do
FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")


class KernelCompiler(Protocol):
    """A library that compiles generated kernels for GPUs; `arch` is what they are."""

    @property
    def library(self) -> Path: ...
    @property
    def arch(self) -> str: ...

    def compile(self, unit: Unit, folder: Path) -> bytes:
        """The binary of a unit of the program in `folder`. Raises BuildError where it does not compile."""


@dataclass(frozen=True)
class Toolchain:
    """What builds programs for one target on this machine."""

    target: str
    compiler: Path
    include_folders: tuple[Path, ...]
    libraries: tuple[Path, ...]  # beyond libhostweave_<target>.so
    kernel_compiler: KernelCompiler | None = None  # where there is none, `compiler` takes the kernels as C++

    def compile(self, source: str, into: str) -> list[str]:
        """The command that compiles one file in the current folder."""
        folders = [f"-I{folder}" for folder in self.include_folders] + (["-DHOSTWEAVE_JIT"] if self.kernel_compiler else [])
        language = KERNELS_AS_CPP if source.endswith(".cu") else ()
        level = "-O1" if source == ENQUEUING else "-O2"
        return [str(self.compiler), level, *FLAGS, *folders, *language, "-c", source, "-o", into]

    def link(self, objects: list[str], into: str, libraries: tuple[Library, ...] = (), soname: str = "") -> list[str]:
        """The command that links objects into a shared library, which finds its libraries wherever they are now.

        One that has a `soname` is found by that name alone, among those that the process has loaded.
        """
        files = (*(library.path for library in libraries), *self.libraries)
        searched = (*(library.path for library in libraries if not library.soname), *self.libraries)
        folders = dict.fromkeys(file.parent for file in searched)
        named = [f"-Wl,-soname,{soname}"] if soname else []
        return [str(self.compiler), "-shared", *named, *objects, *map(str, files), *(f"-Wl,-rpath,{f}" for f in folders), "-o", into]

    @cached_property
    def stamp(self) -> str:
        """Changes when the compiler, the libraries, the Python ABI or the GPU's architecture change. Starts no process."""
        files = (self.compiler, *INSTALLED, *self.libraries, *([self.kernel_compiler.library] if self.kernel_compiler else []))
        python, arch = importlib.machinery.EXTENSION_SUFFIXES[0], self.kernel_compiler.arch if self.kernel_compiler else ""
        return "\n".join((self.target, arch, python, *FLAGS, *map(_file_stamp, files), *map(str, self.include_folders)))


@dataclass(frozen=True)
class Library:
    """A library of the runtime: where it is once `make` has been called, which raises BuildError where that fails.

    One of the cache has a `soname` of its own: the loader, which would open a path again, finds it among the libraries that
    `load` has opened and checked.
    """

    path: Path
    make: Callable[[], object]
    soname: str = ""


def find_compiler() -> Path:
    """The C++ compiler: CXX, else the first of c++, g++ and clang++ on PATH. Raises BuildError where there is none."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Path(path)
    if wanted:
        raise BuildError(f"no C++ compiler: CXX={wanted} is not on PATH; unset CXX, or install that compiler")
    raise BuildError("no C++ compiler: none of c++, g++ and clang++ is on PATH; apt install g++")


def openblas_root() -> Path:
    """The folder of the BLAS that the package depends on."""
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise BuildError("scipy_openblas32, whose BLAS the CPU target uses, is not installed; pip install scipy-openblas32")
    return Path(spec.origin).parent


def require_native() -> None:
    """Raises BuildError where the installation has not built its own parts."""
    for path in INSTALLED:
        if not path.is_file():
            raise BuildError(f"{path} is not there: hostweave is used from a source tree that is not built; pip install .")


def _file_stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return f"{path} absent"
    return f"{path} {status.st_size} {status.st_mtime_ns}"
