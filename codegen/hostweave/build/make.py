"""Compiles and links, where the cache has not got it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hostweave.build.cache import digest_of, get_or_make, key_of
from hostweave.build.compile import run_together
from hostweave.build.nvrtc import compile_kernels
from hostweave.build.paths import NATIVE, RUNTIME, RUNTIME_INCLUDES
from hostweave.build.toolchain import MODULE_FILE, Toolchain, glue

_JIT_FILE = "kernels_jit.cpp"
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
    """Makes the module of the sources in `folder`, linked with the runtime `library`. Raises BuildError where that fails."""
    files = [name for name in sources if name.endswith((".cpp", ".cu"))]
    if toolchain.nvrtc and "kernels.cu" in files:
        text = compile_kernels(toolchain.nvrtc, folder / "kernels.cu", toolchain.arch, toolchain.include_folders)
        (folder / _JIT_FILE).write_text(text)
        files = [*(file for file in files if file != "kernels.cu"), _JIT_FILE]
    objects = [f"{file}.o" for file in files]
    run_together([toolchain.compile(*pair) for pair in zip(files, objects, strict=True)], folder)
    run_together([toolchain.link([*objects, *map(str, glue())], MODULE_FILE, (library,))], folder)
    for name in objects:
        (folder / name).unlink()
