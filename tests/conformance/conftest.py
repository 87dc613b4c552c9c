"""Fixtures with which one suite runs on CPU ranks and on all available GPUs."""

from __future__ import annotations

import pytest

from hostweave.build.cuda import gpus


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    """Target of a test with a parameter `ranks`, a `mesh`, or a `pair` of meshes from the module's PAIRS."""
    params = request.node.callspec.params
    mesh = request.module.PAIRS[params["pair"]][0] if "pair" in params else params.get("mesh")
    ranks = mesh.size if mesh else params["ranks"]
    if request.param == "cuda" and ranks > len(gpus()):
        pytest.skip(f"needs {ranks} GPUs, and there are {len(gpus())}")
    return str(request.param)
