"""Grouped matmuls on one GPU. Results are close to float64 for several routings, layouts and sizes. In graphs, offsets change between
replays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.build.cuda import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]
# Unit roundoffs of the sums and of the result, and half of the smallest subnormal number of f16. Only f16 underflows here. The error of a
# sum of n products is at most n unit roundoffs times the sum of the products' absolute values (Higham, Accuracy and Stability of Numerical
# Algorithms, 3.1; underflow: 2.2).
UNITS = {
    hw.f64: (2.0**-53, 0.0, 0.0),
    hw.f32: (2.0**-24, 0.0, 0.0),
    hw.f16: (2.0**-24, 2.0**-11, 2.0**-25),
    hw.bf16: (2.0**-24, 2.0**-8, 0.0),
}
# Rows, experts, K and N. 264 and 392 are not multiples of tiles. The last K and N are odd, so that operands are not aligned.
SIZES = [(40, 8, 128, 256), (700, 9, 256, 384), (4096, 8, 512, 1024), (2100, 8, 264, 392), (200, 5, 67, 129), (333, 5, 67, 129)]


def routings(t: int, experts: int) -> list[list[int]]:
    random = np.random.default_rng(t)
    return [
        [t * (e + 1) // experts for e in range(experts)],
        sorted(random.integers(0, t + 1, experts).tolist()),
        [0] * (experts - 1) + [t],
        [t] * experts,
        [0] * experts,
        [t // 3] + [t // 2] * (experts - 1),
    ]


def program(dtype: hw.DType) -> hw.Program:
    @hw.fusion(x=dtype["T", "K"], w=dtype["E", "K", "N"], v=dtype["E", "N", "K"], dy=dtype["T", "N"], ends=hw.i32["E"])
    def grouped(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, dy: hw.Tensor, ends: hw.Tensor) -> tuple[hw.Tensor, ...]:
        columns = hw.grouped_matmul(x, hw.permute_dims(v, (0, 2, 1)), ends)
        return hw.grouped_matmul(x, w, ends), columns, hw.grouped_matmul(x.T, dy, ends)

    return hw.compile(grouped, target="cuda")


@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_every_routing(dtype: hw.DType) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    of_torch = {hw.f64: torch.float64, hw.f32: torch.float32, hw.f16: torch.float16, hw.bf16: torch.bfloat16}[dtype]
    compiled = program(dtype)
    for t, experts, k, n in SIZES:
        torch.manual_seed(t)
        x, w, v, dy = (
            torch.randn(shape, device="cuda", dtype=torch.float64).to(of_torch)
            for shape in ((t, k), (experts, k, n), (experts, n, k), (t, n))
        )
        for ends in routings(t, experts):
            results = compiled.run(x=x, w=w, v=v, dy=dy, ends=torch.tensor(ends, dtype=torch.int32, device="cuda"))
            wide = [each.double() for each in (x, w, v, dy)]
            exact, terms = _in_groups(torch, ends, *wide), _in_groups(torch, ends, *(each.abs() for each in wide))
            of_sum, of_result, underflow = UNITS[dtype]
            for result, want, bound, count in zip(results, exact, terms, (k, k, t), strict=True):
                most = count * of_sum * bound + of_result * want.abs() + underflow
                assert ((result.double() - want).abs() <= most).all(), (t, ends)


def _in_groups(torch: Any, ends: list[int], x: Any, w: Any, v: Any, dy: Any) -> list[Any]:
    (t, k), (experts, _, n) = x.shape, w.shape
    made = [torch.zeros(shape, dtype=torch.float64, device="cuda") for shape in ((t, n), (t, n), (experts, k, n))]
    for e, (start, end) in enumerate(pairwise([0, *ends])):
        rows = slice(start, end)
        made[0][rows], made[1][rows], made[2][e] = x[rows] @ w[e], x[rows] @ v[e].T, x[rows].T @ dy[rows]
    return made


def test_offsets_change_between_replays() -> None:
    """A captured graph gives right results for new offsets, because the host does not read offsets."""
    torch: Any = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    compiled, (t, experts, k, n) = program(hw.bf16), SIZES[1]
    x, w, v, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in ((t, k), (experts, k, n), (experts, n, k), (t, n)))
    ends = torch.tensor(routings(t, experts)[0], dtype=torch.int32, device="cuda")
    group = hw.init()
    call = lambda: compiled(x=x, w=w, v=v, dy=dy, ends=ends)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for routing in routings(t, experts):
        ends.copy_(torch.tensor(routing, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, compiled.run(x=x, w=w, v=v, dy=dy, ends=ends), strict=True):
            assert torch.equal(got, want)
    group.close()
