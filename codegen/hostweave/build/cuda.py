"""Finds CUDA headers and libraries: in NCCL_HOME, the toolkit, the pip wheels, then the system. Each of these places may be incomplete."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path

from hostweave.base.errors import BuildError

DEFAULT_MAJOR = 13  # version to recommend if none is installed
TOOLKIT, SYSTEM = Path("/usr/local/cuda"), Path("/usr")
_INCLUDES = ("include", "include/cccl")
_LIBRARIES = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")


@dataclass(frozen=True)
class CudaFile:
    """A header or library that a build needs, and its pip package. The path is None if the file was not found."""

    name: str
    path: Path | None
    package: str


@dataclass(frozen=True)
class Cuda:
    major: int
    headers: tuple[CudaFile, ...]
    libraries: tuple[CudaFile, ...]  # linked to every program
    nvrtc: CudaFile
    cudnn: tuple[CudaFile, CudaFile]  # header and library, for programs with attention
    nvtx: CudaFile  # header of NVTX ranges

    @property
    def missing(self) -> tuple[CudaFile, ...]:
        return tuple(file for file in (*self.headers, *self.libraries, self.nvrtc) if file.path is None)

    def require(self) -> Cuda:
        """Raises BuildError if a file is missing that every program needs. cuDNN and NVTX are optional."""
        if self.missing:
            names = ", ".join(file.name for file in self.missing)
            packages = " ".join(dict.fromkeys(file.package for file in self.missing))
            raise BuildError(f"target cuda: {names} not found in the CUDA toolkit or the pip wheels; pip install {packages}")
        return self

    def require_cudnn(self) -> tuple[Path, Path]:
        header, library = self.cudnn
        if header.path is None or library.path is None:
            names = ", ".join(file.name for file in self.cudnn if file.path is None)
            raise BuildError(f"target cuda: attention needs cuDNN, and {names} not found; pip install {library.package}")
        return header.path, library.path

    @property
    def include_folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(file.path.parents[file.name.count("/")] for file in (*self.headers, self.nvtx) if file.path))


def find_cuda() -> Cuda:
    """The first complete CUDA version on this machine. If no version is complete, the first version, or the default version."""
    roots = folders_to_search()
    majors = {root: _major_of(root) for root in roots}
    majors_to_try = dict.fromkeys(major for major in majors.values() if major) or (DEFAULT_MAJOR,)
    candidates = [_find(major, [root for root in roots if majors[root] in (None, major)]) for major in majors_to_try]
    return next((found for found in candidates if not found.missing), candidates[0])


def _find(major: int, roots: list[Path]) -> Cuda:
    wheel = "" if major >= 13 else f"-cu{major}"
    crt = "nvidia-cuda-crt" if major >= 13 else f"nvidia-cuda-nvcc{wheel}"

    def find(folders: tuple[str, ...], packages: dict[str, str]) -> Iterator[CudaFile]:
        for name, package in packages.items():
            candidates_of_file = (root / folder / name for root in roots for folder in folders)
            yield CudaFile(name, next((file for file in candidates_of_file if file.is_file()), None), package)

    headers = {
        "cuda_runtime_api.h": f"nvidia-cuda-runtime{wheel}",
        "crt/host_defines.h": crt,
        "nv/target": f"nvidia-cuda-cccl{wheel}",
        "cublasLt.h": f"nvidia-cublas{wheel}",
        "nccl.h": f"nvidia-nccl-cu{major}",
    }
    libraries = {
        f"libcudart.so.{major}": f"nvidia-cuda-runtime{wheel}",
        f"libcublasLt.so.{major}": f"nvidia-cublas{wheel}",
        "libnccl.so.2": f"nvidia-nccl-cu{major}",
        f"libnvrtc.so.{major}": f"nvidia-cuda-nvrtc{wheel}",
    }
    *linked, nvrtc = find(_LIBRARIES, libraries)
    cudnn = f"nvidia-cudnn-cu{major}"
    (nvtx,) = find(_INCLUDES, {"nvtx3/nvToolsExt.h": f"nvidia-nvtx{wheel}"})
    (header,), (library,) = find(_INCLUDES, {"cudnn.h": cudnn}), find(_LIBRARIES, {"libcudnn.so.9": cudnn})
    return Cuda(major, tuple(find(_INCLUDES, headers)), tuple(linked), nvrtc, (header, library), nvtx)


# Figures of `Machine` that the driver reports, with their numbers of CUdevice_attribute.
_LIMITS = {"multiprocessors": 16, "warp": 10, "block_threads": 1, "registers": 82}
_CLUSTER_LAUNCH, _CLUSTER_BLOCKS = 120, 8  # attribute of GPUs with clusters, and the portable maximum of blocks of a cluster


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str  # "sm_90"
    limits: tuple[tuple[str, int], ...] = ()  # figures of `Machine` that the driver reports


@cache
def gpus() -> tuple[Gpu, ...]:
    """GPUs that the driver reports. Empty without a driver."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


@cache
def pair_without_access() -> tuple[int, int] | None:
    """Two GPUs of which the first cannot access the memory of the second. None if all GPUs have peer access, or without a driver."""
    driver, has_access = _driver(), ctypes.c_int()
    if driver is None:
        return None
    for device, peer in permutations(range(len(gpus())), 2):
        if driver.cuDeviceCanAccessPeer(ctypes.byref(has_access), device, peer) != 0 or not has_access.value:
            return device, peer
    return None


def driver_version() -> str | None:
    """Newest CUDA version that the driver supports, such as "13.0"; None without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None:
        return None
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def loaded_nccl() -> tuple[int, ...] | None:
    """Version of the NCCL library that this process has loaded, or None. Programs use this library."""
    try:
        library, version = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD), ctypes.c_int()
    except OSError:
        return None
    library.ncclGetVersion(ctypes.byref(version))
    return version.value // 10000, version.value // 100 % 100, version.value % 100


def arch() -> str:
    """Architecture for kernels: HOSTWEAVE_CUDA_ARCH, the architecture of GPU 0, or sm_90. sm_90 becomes sm_90a, which has additional
    instructions."""
    found = os.environ.get("HOSTWEAVE_CUDA_ARCH") or next((gpu.arch for gpu in gpus()), "sm_90")
    return "sm_90a" if found == "sm_90" else found


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    limits = {figure: attribute(number) for figure, number in _LIMITS.items()}
    limits["cluster_blocks"] = _CLUSTER_BLOCKS if attribute(_CLUSTER_LAUNCH) else 1
    return Gpu(name.value.decode(), f"sm_{attribute(75)}{attribute(76)}", tuple(limits.items()))  # major and minor compute capability


def folders_to_search() -> list[Path]:
    """Folders that may contain CUDA: NCCL_HOME, toolkits, pip wheels (`nvidia/cu13`, `nvidia/<component>`), then the system's folders."""
    nvcc = shutil.which("nvcc")
    folders_in_environment = [os.environ.get("NCCL_HOME"), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    toolkits = [*(Path(name) for name in folders_in_environment if name), TOOLKIT, *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    spec = importlib.util.find_spec("nvidia")
    wheels = [child for base in (spec.submodule_search_locations or () if spec else ()) for child in sorted(Path(base).glob("*"))]
    return list(dict.fromkeys(root for root in (*toolkits, *wheels, SYSTEM) if root.is_dir()))


def _major_of(root: Path) -> int | None:
    """Major version according to CUDART_VERSION (such as 12040) or CUBLAS_VER_MAJOR in a header of the folder."""
    for header in (root / folder / name for folder in _INCLUDES for name in ("cuda_runtime_api.h", "cublas_api.h")):
        text = header.read_text(errors="replace") if header.is_file() else ""
        if found := re.search(r"^#define (?:CUDART_VERSION|CUBLAS_VER_MAJOR)\s+(\d+)", text, re.M):
            return int(found[1]) // (1000 if len(found[1]) > 3 else 1)
    return None
