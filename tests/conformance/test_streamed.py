"""Gathers and reduce-scatters in chunk loops with every algorithm. A program contains all algorithms that are tested with one transport."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_here import nccl

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion

GATHERS = {"auto": ("p2p", "ring", "broadcast", "all_gather"), "one_sided": ("put", "ring", "all_gather")}
SCATTERS = {"auto": ("p2p", "ring", "reduce", "reduce_scatter"), "one_sided": ("put", "ring", "reduce_scatter")}


def streamed(ranks: int, chunks: int, transport: str) -> Fusion:
    """A program with gathers, some before a matmul, and with reduce-scatters of the rows or columns of products. The program also has an
    all-reduce of slices of rows, and a reshard of a batch of matrices from rows to columns."""
    t = hw.f32["B", "M@x", "N"]

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"], a=hw.f32["M", "L@x"], b=hw.f32["L@x", "N"], t=t)
    def streamed(x, w, a, b, t):
        gathers, scatters = GATHERS[transport], SCATTERS[transport]
        gathered = [(hw.copy(x) @ w).stream("M", chunks=chunks, algorithm=by).named(f"gathered_{by}") for by in gathers]
        whole = [hw.reshard(hw.copy(x), "M", "K").stream("M", chunks=chunks, algorithm=by).named(f"whole_{by}") for by in gathers]
        summed = hw.reshard(a @ b, "M", "N").stream("M", chunks=2).named("rows_of_all")
        turned = hw.reshard(hw.copy(t), "B", "M", "N@x").stream("B", chunks=2).named("turned")
        scaled = []
        for by in (gathers[0], "ring"):  # With p2p, the result of the kernel is in the memory of the received chunk.
            arrived = hw.reshard(hw.copy(x), "M", "K").stream("M", chunks=chunks, algorithm=by)
            scaled.append(((arrived * 2).stream("M", chunks=chunks) @ w).stream("M", chunks=chunks).named(f"scaled_{by}"))
        rows = [hw.reshard(a @ b, "M@x", "N").stream("M", chunks=chunks, algorithm=by).named(f"rows_{by}") for by in scatters]
        ways = [by for by in scatters if by != "ring"]  # A ring needs contiguous blocks.
        columns = [hw.reshard(a @ b, "M", "N@x").stream("N", chunks=chunks, algorithm=by).named(f"columns_{by}") for by in ways]
        return (*gathered, *whole, summed, turned, *scaled, *rows, *columns)

    return streamed


CASES = [(1, "auto"), (2, "auto"), (3, "auto"), (3, "one_sided")]
MORE = [pytest.param(*case, marks=pytest.mark.more) for case in ((8, "auto"), (2, "one_sided"))]


@pytest.mark.parametrize(("ranks", "transport"), [*CASES, *MORE])
def test_compiled(ranks: int, transport: str, target: str) -> None:
    if target == "cuda" and transport == "one_sided" and nccl() < 22900:
        pytest.skip("needs NCCL 2.29 or later: set NCCL_HOME to its folder")
    for pieces in (2,) if transport == "one_sided" else (1, 2) if ranks < 8 else (1,):
        fusion = streamed(ranks, pieces * ranks, transport)
        program = hw.compile(fusion, target=target, options=hw.Options(transport=transport))
        random = np.random.default_rng(ranks)
        size = 2 * pieces * ranks * ranks
        shapes = {"x": (size, 5), "w": (5, size), "a": (size, 3 * ranks), "b": (3 * ranks, size), "t": (4, size, size)}
        given = {name: random.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}
        for name, result in zip(fusion.outputs, program.run(**given), strict=True):
            want = given["a"] @ given["b"] if name.startswith(("rows", "columns")) else given["x"] @ given["w"]
            want = want * 2 if name.startswith("scaled") else given.get({"whole": "x", "turned": "t"}.get(name.split("_")[0], ""), want)
            np.testing.assert_array_equal(result, want, err_msg=f"%{name}")
        program.close()
