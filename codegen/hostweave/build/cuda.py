"""Finds the CUDA headers and libraries, in the toolkit first, then in the pip wheels. Either can be incomplete."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hostweave.errors import BuildError

DEFAULT_MAJOR = 13  # what to install where nothing is
_SYSTEM_INCLUDES = (Path("/usr/include"),)
_SYSTEM_LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))


@dataclass(frozen=True)
class Part:
    """A header or library that a build needs, where it was found, and the pip package that has it."""

    name: str
    path: Path | None
    package: str


@dataclass(frozen=True)
class Cuda:
    """What was found. `major` is the version of CUDA that all parts are of."""

    major: int
    headers: tuple[Part, ...]
    libraries: tuple[Part, ...]  # linked into every program
    nvrtc: Part

    @property
    def missing(self) -> tuple[Part, ...]:
        return tuple(part for part in (*self.headers, *self.libraries, self.nvrtc) if part.path is None)

    def require(self) -> Cuda:
        """Itself, where nothing is missing. Raises BuildError otherwise."""
        if self.missing:
            names = ", ".join(part.name for part in self.missing)
            packages = " ".join(dict.fromkeys(part.package for part in self.missing))
            raise BuildError(f"target cuda: {names} not found in the CUDA toolkit or the pip wheels; pip install {packages}")
        return self

    @property
    def include_folders(self) -> tuple[Path, ...]:
        folders = (_folder_of(part.path, part.name) for part in self.headers if part.path)
        return tuple(dict.fromkeys(folders))


def find_cuda() -> Cuda:
    """What this machine has of CUDA."""
    includes = [folder for root in _roots() for folder in (root / "include", root / "include" / "cccl")]
    includes = [folder for folder in (*includes, *_SYSTEM_INCLUDES) if folder.is_dir()]
    major = _major(includes)
    wheel = "" if major >= 13 else f"-cu{major}"
    crt = "nvidia-cuda-crt" if major >= 13 else f"nvidia-cuda-nvcc{wheel}"

    def header(name: str, package: str) -> Part:
        return Part(name, next((folder / name for folder in includes if (folder / name).is_file()), None), package)

    library_folders = _library_folders()

    def library(name: str, package: str) -> Part:
        return Part(name, next((folder / name for folder in library_folders if (folder / name).exists()), None), package)

    headers = (
        header("cuda_runtime_api.h", f"nvidia-cuda-runtime{wheel}"),
        header("crt/host_defines.h", crt),
        header("nv/target", f"nvidia-cuda-cccl{wheel}"),
        header("cublasLt.h", f"nvidia-cublas{wheel}"),
        header("nccl.h", f"nvidia-nccl-cu{major}"),
    )
    libraries = (
        library(f"libcudart.so.{major}", f"nvidia-cuda-runtime{wheel}"),
        library(f"libcublasLt.so.{major}", f"nvidia-cublas{wheel}"),
        library("libnccl.so.2", f"nvidia-nccl-cu{major}"),
    )
    return Cuda(major, headers, libraries, library(f"libnvrtc.so.{major}", f"nvidia-cuda-nvrtc{wheel}"))


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str  # "sm_90"


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver offers; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def driver_version() -> str | None:
    """The newest CUDA that the driver can run, such as "13.0"; None where there is no driver."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def arch() -> str:
    """The architecture to compile kernels for: HOSTWEAVE_CUDA_ARCH, else that of GPU 0, else sm_90."""
    return os.environ.get("HOSTWEAVE_CUDA_ARCH") or next((gpu.arch for gpu in gpus()), "sm_90")


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return Gpu(name.value.decode(), f"sm_{major.value}{minor.value}")


def _roots() -> list[Path]:
    """Folders with an `include` and a library folder: toolkits, then wheels."""
    nvcc = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    toolkits = [Path(name) for name in named if name] + ([Path(nvcc).resolve().parents[1]] if nvcc else [])
    spec = importlib.util.find_spec("nvidia")
    wheels = [child for base in (spec.submodule_search_locations or () if spec else ()) for child in sorted(Path(base).glob("*"))]
    return list(dict.fromkeys(root for root in (*toolkits, *wheels) if root.is_dir()))


def _library_folders() -> list[Path]:
    folders = [root / name for root in _roots() for name in ("lib64", "lib")]
    return [*folders, *_SYSTEM_LIBRARIES]


def _major(includes: list[Path]) -> int:
    for folder in includes:
        header = folder / "cuda_runtime_api.h"
        if header.is_file() and (version := _version(header)):
            return version // 1000
    return DEFAULT_MAJOR


def _version(header: Path) -> int | None:
    """CUDART_VERSION, which stands near the top of a long file."""
    with header.open(errors="replace") as lines:
        found = next((match for line in lines if (match := re.match(r"#define CUDART_VERSION\s+(\d+)", line))), None)
    return int(found[1]) if found else None


def _folder_of(path: Path, name: str) -> Path:
    """The include folder in which `name` is found."""
    return path.parents[name.count("/")]
