"""Commands that build exported projects without optimisations."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hostweave.build.cuda import find_cuda
from hostweave.build.toolchain import openblas_root

CUDA = find_cuda()
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/local/cuda/bin"])  # cmake and ninja may be from pip.
OPENBLAS = f"-DHOSTWEAVE_OPENBLAS_ROOT={openblas_root()}"
NVCC = shutil.which("nvcc", path=TOOLS)
NVCC_OPTIONS = subprocess.run([NVCC, "--help"], capture_output=True, text=True, check=True).stdout if NVCC else ""
# Environment that selects cmake, ninja and settings, so that the commands need not name them.
QUICK = {
    **os.environ,
    "PATH": TOOLS,
    "CMAKE_GENERATOR": "Ninja",
    "CMAKE_BUILD_TYPE": "Debug",
    "CMAKE_TOOLCHAIN_FILE": str(Path(__file__).with_name("quick.cmake")),
    "NVCC_APPEND_FLAGS": "--Ofast-compile=max" if "--Ofast-compile" in NVCC_OPTIONS else "",  # CUDA 12.9 and later have --Ofast-compile.
}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder of an exported project."""
    return subprocess.run(command, cwd=folder, env=QUICK, capture_output=True, text=True)


def for_cuda() -> tuple[str, ...]:
    """CMake settings of projects for CUDA."""
    found = (part.path for part in (*CUDA.headers, *CUDA.libraries, *CUDA.cudnn) if part.path)
    prefixes = dict.fromkeys(str(folder.parent) for path in found for folder in path.parents if folder.name in ("include", "lib", "lib64"))
    return "-DHOSTWEAVE_TARGET=cuda", f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"
