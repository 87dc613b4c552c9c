"""Timelines measured on GPUs: each computation has a time, and events end after the events on which they depend."""

from __future__ import annotations

import pytest

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.timeline.events import COMPUTE

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SIZES = {"M": 8192, "K": 4096, "N": 4096}


def product(ranks: int) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["M", "K@x"], w=hw.bf16["K@x", "N"])
    def product(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(x, w), "M@x", "N")

    return product


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2) if ranks <= max(len(gpus()), 1)])
def test_times_of_gpus(ranks: int) -> None:
    program = hw.compile(product(ranks), target="cuda", options=hw.Options(sizes=SIZES))
    x, w = (torch.randn(SIZES[a], SIZES[b], dtype=torch.bfloat16) for a, b in ("MK", "KN"))
    report = program.timeline(x, w)
    found = report.measured
    assert found
    assert found.basis == f"measured on {gpus()[0].name}, the median of 20 calls"
    for event in found.events:
        assert 0 <= event.start <= event.end
        # The tolerance is 20 us, because clocks of GPUs differ.
        assert all(found.events[earlier].end <= event.end + 20 for earlier in event.after)
    computes = [event for event in found.of_rank(0) if event.kind == COMPUTE]
    assert computes
    assert all(event.micros > 0 for event in computes)
    assert found.micros >= max(event.end for event in computes)
    assert report.predicted.micros > 0
