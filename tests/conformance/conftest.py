"""The suite is written once, and runs on CPU ranks and on as many GPUs as there are."""

from __future__ import annotations

import pytest

from hostweave.build.cuda import gpus


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    """Of a test with a parameter `ranks`, or a `mesh`."""
    params = request.node.callspec.params
    ranks = params["ranks"] if "ranks" in params else params["mesh"].size
    if request.param == "cuda" and ranks > len(gpus()):
        pytest.skip(f"needs {ranks} GPUs, and there are {len(gpus())}")
    return str(request.param)
