"""Mark for tests that compile for CUDA, and functions that detect CUDA on this machine."""

from __future__ import annotations

import ctypes
import os

import pytest

from hostweave.base.errors import BuildError
from hostweave.build.cuda import find_cuda
from hostweave.targets.target import find_target


def nccl() -> int:
    """Version of the linked NCCL, such as 22900, or 0 if NCCL is not installed."""
    part = next((part for part in find_cuda().libraries if "nccl" in part.name), None)
    version = ctypes.c_int()
    if part is None or part.path is None or ctypes.CDLL(str(part.path)).ncclGetVersion(ctypes.byref(version)) != 0:
        return 0
    return version.value


def quick_options() -> tuple[str, ...]:
    """Options that disable the optimisations of NVRTC. With CUDA 13, NVRTC then takes a third of the time. With CUDA 12, NVRTC takes
    almost the same time."""
    try:
        compiler = find_target("cuda").toolchain().kernel_compiler
    except BuildError:
        return ()
    assert compiler
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(compiler.library)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return ("--Ofast-compile=max",) if major.value >= 13 else ("--ptxas-options=-O0",)


def compiles() -> bool:
    """True if CUDA's headers and libraries are installed. Also true if HOSTWEAVE_REQUIRE_CUDA is set, so that tests in CI fail if CUDA is
    missing."""
    try:
        find_target("cuda").toolchain()
    except BuildError:
        return bool(os.environ.get("HOSTWEAVE_REQUIRE_CUDA"))
    return True


needs_cuda = pytest.mark.extra("cuda")
