"""Mixtures of experts on GPUs. Tests the layer and its gradients for each of ROUTINGS, and a graph whose routing changes between
replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe_reference import ROUTINGS, TOP, arrays, experts_of, one_device

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file, programs_in
from hostweave.fusion_ir.ir import Fusion

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]


def programs(ranks: int) -> dict[str, hw.Program]:
    constants = {"mesh": hw.Mesh(ep=ranks), "EXPERTS": experts_of(ranks), "TOP": TOP, "dtype": hw.f32}
    found = programs_in(load_file(EXAMPLES / "moe.py", constants)).items()
    return {name: hw.compile(fusion, target="cuda") for name, fusion in found if isinstance(fusion, Fusion)}


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2, 4) if ranks <= len(gpus())])
def test_every_routing(ranks: int) -> None:
    compiled = programs(ranks)
    for routing in ROUTINGS:
        given = {name: array.astype(np.float32) for name, array in arrays(routing, ranks).items()}
        y, gradients = one_device(**{name: array.astype(np.float64) if name != "bias" else array for name, array in given.items()})
        without = {name: array for name, array in given.items() if name != "dy"}
        first = compiled["moe"].run(**without)
        np.testing.assert_allclose(first, y, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(first, compiled["moe"].run(**without))  # Results are deterministic.
        for got, want in zip(compiled["moe_backward"].run(**given), gradients, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_routing_changes_between_replays() -> None:
    torch: Any = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    group, compiled = hw.init(), programs(1)["moe"]
    tensors = {name: torch.from_numpy(array.astype(np.float32)).cuda() for name, array in arrays("learned", 1).items() if name != "dy"}
    replay = compiled.capture(**tensors, group=group)
    for routing in ROUTINGS:
        given = arrays(routing, 1)
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(given[name].astype(np.float32)))
        y, _ = one_device(**given)
        np.testing.assert_allclose(replay().cpu().numpy(), y, rtol=1e-3, atol=1e-3)
    group.close()
