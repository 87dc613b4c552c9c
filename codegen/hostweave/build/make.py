"""Compiles and links, where the cache has not got it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hostweave.build.cache import digest_of, get_or_make, key_of, lookup, root
from hostweave.build.compile import run_together
from hostweave.build.nvrtc import compile_kernels
from hostweave.build.paths import NATIVE, RUNTIME, RUNTIME_INCLUDES
from hostweave.build.toolchain import MODULE_FILE, Toolchain, glue

_KERNELS, _JIT_FILE = "kernels.cu", "kernels_jit.cpp"
_SOURCES = (RUNTIME / "src", RUNTIME / "driver" / "src")


def runtime_library(toolchain: Toolchain) -> Path:
    """libhostweave_<target>.so: the CPU one comes with the installation, the CUDA one is compiled on first use."""
    if toolchain.target == "cpu":
        return NATIVE / "libhostweave_cpu.so"
    key = key_of(digest_of(*RUNTIME_INCLUDES, *_SOURCES), toolchain.stamp)
    return get_or_make(f"runtime_cuda-{key}", lambda folder: _make_runtime(folder, toolchain)) / "libhostweave_cuda.so"


def _make_runtime(folder: Path, toolchain: Toolchain) -> None:
    files = [path for path in sorted(path for folder in _SOURCES for path in folder.glob("*.cpp")) if not path.stem.endswith("_cpu")]
    run_together([[*toolchain.compile(str(file), f"{file.stem}.o"), "-fvisibility=default"] for file in files], folder)
    run_together([toolchain.link([f"{file.stem}.o" for file in files], "libhostweave_cuda.so")], folder)


def make_program(folder: Path, sources: Sequence[str], toolchain: Toolchain, library: Path) -> None:
    """Makes the module of the sources in `folder`, linked with the runtime `library`. Raises BuildError where that fails.

    The cache keeps every object by what it is compiled from: of a program that is changed, only what the change reaches is compiled.
    """
    files = [name for name in sources if name.endswith((".cpp", ".cu"))]
    runtime = digest_of(*RUNTIME_INCLUDES, RUNTIME / "cpu" / "include")
    entries = {file: f"objects/{file}-{key_of(*_read_by(folder, file), runtime, toolchain.stamp)}" for file in files}
    missing = [file for file in files if not lookup(entries[file])]
    _compile(folder, missing, toolchain)
    for file in missing:
        get_or_make(entries[file], partial(shutil.copy, folder / _object(file)))
        (folder / _object(file)).unlink()
    objects = [str(root() / entries[file] / _object(file)) for file in files]
    run_together([toolchain.link([*objects, *map(str, glue())], MODULE_FILE, (library,))], folder)


def _object(file: str) -> str:
    return f"{file}.o"


def _read_by(folder: Path, file: str) -> list[str]:
    """What a compiler takes from a program's folder: the file but for comments, whose lines count, and what it includes."""
    text = re.sub(r"^ *//.*", "//", (folder / file).read_text(), flags=re.M)
    included = re.findall(r'^#include "([^"]+)"', text, re.M)
    return [text, *(text for name in included if (folder / name).is_file() for text in _read_by(folder, name))]


def _compile(folder: Path, files: Sequence[str], toolchain: Toolchain) -> None:
    """Compiles files side by side, the kernels by NVRTC where the toolchain has it."""
    hosts = [file for file in files if not (toolchain.nvrtc and file == _KERNELS)]
    with ThreadPoolExecutor(1) as pool:
        arguments = (folder / _KERNELS, toolchain.arch, toolchain.include_folders)
        loader = pool.submit(compile_kernels, toolchain.nvrtc, *arguments) if toolchain.nvrtc and _KERNELS in files else None
        run_together([toolchain.compile(file, _object(file)) for file in hosts], folder)
    if loader:
        (folder / _JIT_FILE).write_text(loader.result())
        run_together([toolchain.compile(_JIT_FILE, _object(_KERNELS))], folder)
