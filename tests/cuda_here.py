"""The mark of tests that compile for CUDA, and what of CUDA is here."""

from __future__ import annotations

import ctypes
import os

import pytest

from hostweave.base.errors import BuildError
from hostweave.build.cuda import find_cuda
from hostweave.targets.target import find_target


def nccl() -> int:
    """The version of the library that programs are linked with, as 22900; 0 where there is none."""
    part = next((part for part in find_cuda().libraries if "nccl" in part.name), None)
    version = ctypes.c_int()
    if part is None or part.path is None or ctypes.CDLL(str(part.path)).ncclGetVersion(ctypes.byref(version)) != 0:
        return 0
    return version.value


def compiles() -> bool:
    """True if CUDA's headers and libraries are here, or HOSTWEAVE_REQUIRE_CUDA says, as in CI, that tests fail without them."""
    try:
        find_target("cuda").toolchain()
    except BuildError:
        return bool(os.environ.get("HOSTWEAVE_REQUIRE_CUDA"))
    return True


needs_cuda = pytest.mark.extra("cuda")
