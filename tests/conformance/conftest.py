"""Fixture that runs a test on CPU ranks, and also on GPUs if there is one for each rank."""

from __future__ import annotations

import pytest

from hostweave.build.cuda import gpus


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    """Target of a test. The test has a parameter `ranks` or `mesh`, or a parameter `pair` that is a key of PAIRS."""
    params = request.node.callspec.params
    mesh = request.module.PAIRS[params["pair"]][0] if "pair" in params else params.get("mesh")
    ranks = mesh.size if mesh else params["ranks"]
    if request.param == "cuda" and ranks > len(gpus()):
        pytest.skip(f"needs {ranks} GPUs, and there are {len(gpus())}")
    return str(request.param)
