"""The streamed rows of the table: gathers and reduce-scatters by every way, one program a number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion

GATHERS = ("p2p", "ring", "broadcast", "all_gather")
SCATTERS = ("p2p", "ring", "reduce", "reduce_scatter")


def streamed(ranks: int, chunks: int) -> Fusion:
    """Rows that are gathered for products, each time of a tensor of its own; products whose rows or columns are summed and scattered."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"], a=hw.f32["M", "L@x"], b=hw.f32["L@x", "N"])
    def streamed(x, w, a, b):
        gathered = [(hw.copy(x) @ w).stream("M", chunks=chunks, algorithm=by).named(f"gathered_{by}") for by in GATHERS]
        scaled = []
        for by in ("p2p", "ring"):  # a kernel in the loop, whose result lies over what arrived
            arrived = hw.reshard(hw.copy(x), "M", "K").stream("M", chunks=chunks, algorithm=by)
            scaled.append(((arrived * 2).stream("M", chunks=chunks) @ w).stream("M", chunks=chunks).named(f"scaled_{by}"))
        rows = [hw.reshard(a @ b, "M@x", "N").stream("M", chunks=chunks, algorithm=by).named(f"rows_{by}") for by in SCATTERS]
        ways = [by for by in SCATTERS if by != "ring"]  # a ring passes contiguous blocks on
        columns = [hw.reshard(a @ b, "M", "N@x").stream("N", chunks=chunks, algorithm=by).named(f"columns_{by}") for by in ways]
        return (*gathered, *scaled, *rows, *columns)

    return streamed


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_compiled(ranks: int, target: str) -> None:
    for pieces in (1, 2) if ranks < 8 else (1,):
        fusion = streamed(ranks, pieces * ranks)
        program = hw.compile(fusion, target=target)
        random = np.random.default_rng(ranks)
        size = 2 * pieces * ranks * ranks
        shapes = {"x": (size, 5), "w": (5, size), "a": (size, 3 * ranks), "b": (3 * ranks, size)}
        given = {name: random.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}
        for name, result in zip(fusion.outputs, program.run(**given), strict=True):
            want = given["a"] @ given["b"] if name.startswith(("rows", "columns")) else given["x"] @ given["w"]
            want = want * 2 if name.startswith("scaled") else want
            np.testing.assert_array_equal(result, want, err_msg=f"%{name}")
        program.close()
