"""The mark of tests that compile for CUDA, and where they run."""

from __future__ import annotations

import os

import pytest

from hostweave.base.errors import BuildError
from hostweave.targets.target import find_target


def _is_here() -> bool:
    """Headers and libraries; a GPU is not needed. Where HOSTWEAVE_REQUIRE_CUDA says that they must be, as in CI, the tests run and fail."""
    try:
        find_target("cuda").toolchain()
    except BuildError:
        return bool(os.environ.get("HOSTWEAVE_REQUIRE_CUDA"))
    return True


needs_cuda = pytest.mark.skipif(not _is_here(), reason="no CUDA headers and libraries: pip install '.[cuda13]'")
