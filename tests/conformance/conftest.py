"""The suite is written once, and runs on CPU ranks and on as many GPUs as there are."""

from __future__ import annotations

import pytest

from hostweave.build.cuda import gpus


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    """Of a test with a parameter `ranks`, a `mesh`, or a `pair` of meshes of some program's ranks, from the module's PAIRS."""
    params = request.node.callspec.params
    mesh = request.module.PAIRS[params["pair"]][0] if "pair" in params else params.get("mesh")
    ranks = mesh.size if mesh else params["ranks"]
    if request.param == "cuda" and ranks > len(gpus()):
        pytest.skip(f"needs {ranks} GPUs, and there are {len(gpus())}")
    return str(request.param)
