"""Timelines measured on GPUs: each instruction's time, in program order, with a total close to the time of a call."""

from __future__ import annotations

import statistics

import pytest

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.timeline.events import COMPUTE

torch = pytest.importorskip("torch", reason="what fills the GPU: pip install torch")

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
        assert all(found.events[earlier].end <= event.end + 20 for earlier in event.after)  # clocks of two GPUs
    whole = statistics.median(max(time.total_ms for time in call) for call in zip(*program.measure(x, w), strict=True)) * 1e3
    assert found.micros == pytest.approx(whole, rel=0.15)  # marks cost a little
    computes = [event.micros for event in found.of_rank(0) if event.kind == COMPUTE]
    flops = 2 * SIZES["M"] * SIZES["K"] * SIZES["N"] / ranks
    assert flops / (1e-6 * sum(computes)) > 2e14  # in a second, of bf16 on tensor cores
    assert report.predicted.micros == pytest.approx(whole, rel=0.25)  # by the figures of this kind of GPU, or of H200
