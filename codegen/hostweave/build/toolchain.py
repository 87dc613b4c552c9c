"""The host compiler, its flags, and the libraries that a program links to."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hostweave.base.errors import BuildError
from hostweave.base.paths import NATIVE
from hostweave.build.nvrtc import Nvrtc

MODULE_FILE = "hostweave_program.so"
LIBRARIES_FILE = "libraries"  # lists the cached libraries that a module needs, dependencies first
# Files that have no hot loops. To save time, module.cpp includes these files, and is compiled with -O1.
ONLY_ENQUEUE, ENQUEUING = ("program.cpp", "binding.cpp"), "module.cpp"
GLUE = NATIVE / "glue" / "module.cpp.o"  # makes a program's objects a Python module
INSTALLED = (NATIVE / "libhostweave_cpu.so", GLUE)
KERNELS_AS_CPP = ("-x", "c++", "-fwrapv")  # signed integers wrap around, as in NumPy
FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")


@dataclass(frozen=True)
class Toolchain:
    """Compilers, include folders and libraries that build programs for one target on this machine."""

    target: str
    compiler: Path
    include_folders: tuple[Path, ...]
    libraries: tuple[Path, ...]  # in addition to libhostweave_<target>.so
    kernel_compiler: Nvrtc | None = None  # if None, `compiler` compiles the kernels as C++
    together: tuple[str, ...] = ONLY_ENQUEUE  # files of a program that are compiled as one unit

    def compile(self, source: str, output: str) -> list[str]:
        folders = [f"-I{folder}" for folder in self.include_folders] + (["-DHOSTWEAVE_JIT"] if self.kernel_compiler else [])
        language = KERNELS_AS_CPP if source.endswith(".cu") else ()
        level = "-O1" if source == ENQUEUING else "-O2"
        return [str(self.compiler), level, *FLAGS, *folders, *language, "-c", source, "-o", output]

    def link(self, objects: list[str], output: str, libraries: tuple[Library, ...] = (), soname: str = "") -> list[str]:
        """Command that links objects into a shared library. The rpath omits cached libraries, because the process loads these libraries
        first."""
        files = (*(library.path for library in libraries), *self.libraries)
        on_rpath = (*(library.path for library in libraries if not library.soname), *self.libraries)
        rpath_flags = [f"-Wl,-rpath,{folder}" for folder in dict.fromkeys(file.parent for file in on_rpath)]
        soname_flags = [f"-Wl,-soname,{soname}"] if soname else []
        return [str(self.compiler), "-shared", *soname_flags, *objects, *map(str, files), *rpath_flags, "-o", output]

    @cached_property
    def stamp(self) -> str:
        """Stamp of the target, flags, compiler, libraries, include folders, Python ABI and GPU architecture."""
        files = (self.compiler, *INSTALLED, *self.libraries, *([self.kernel_compiler.library] if self.kernel_compiler else []))
        python, arch = importlib.machinery.EXTENSION_SUFFIXES[0], self.kernel_compiler.arch if self.kernel_compiler else ""
        return "\n".join((self.target, arch, python, *FLAGS, *map(_file_stamp, files), *map(str, self.include_folders)))


@dataclass(frozen=True)
class Library:
    """A library of the runtime, which `make` builds at `path`. A cached library has a unique `soname`. The process loads the library before
    the module, so the dynamic loader finds the library by its soname."""

    path: Path
    make: Callable[[], object]
    soname: str = ""


def find_compiler() -> Path:
    """Returns the C++ compiler: CXX, or the first of c++, g++ and clang++ on PATH. Raises BuildError if there is none."""
    requested = os.environ.get("CXX")
    for name in (requested,) if requested else ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Path(path)
    if requested:
        raise BuildError(f"no C++ compiler: CXX={requested} is not on PATH; unset CXX, or install that compiler")
    raise BuildError("no C++ compiler: none of c++, g++ and clang++ is on PATH; apt install g++")


def openblas_root() -> Path:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise BuildError("scipy_openblas32, whose BLAS the CPU target uses, is not installed; pip install scipy-openblas32")
    return Path(spec.origin).parent


def require_native() -> None:
    for path in INSTALLED:
        if not path.is_file():
            raise BuildError(f"{path} is not there: the source tree is not built; pip install .")


def _file_stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return f"{path} absent"
    return f"{path} {status.st_size} {status.st_mtime_ns}"
