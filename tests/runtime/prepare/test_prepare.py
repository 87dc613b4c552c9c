"""After `program.prepare`, calls of the prepared sizes make no plans and allocate nothing. The number of plans is limited."""

from __future__ import annotations

import ctypes
import gc
import re

import numpy as np
import pytest
from device_counters import counted
from processes import resident_bytes

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.base.paths import NATIVE

KEPT = 4096  # largest number of plans of one matmul
E, F = 8, 16
UP, DOWN = (np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32) for shape in ((E, F), (F, E)))


def mlp_on(ranks: int) -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["T", "E"], up=hw.f32["E", "F@x"], down=hw.f32["F@x", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(hw.maximum(hw.matmul(x, up), 0), down), "T", "E")

    return hw.compile(mlp)


LIBRARY = ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so"))
LIBRARY.hw_cpu_live_matmuls.restype = ctypes.c_uint64


def matmuls() -> int:
    """Number of matmul plans of all programs on the CPU device."""
    return int(LIBRARY.hw_cpu_live_matmuls())


def allocations() -> int:
    """Total number of allocations on the CPU device."""
    return counted()["allocations"]


@pytest.mark.parametrize(("ranks", "calls", "sizes"), [(1, 3_000, 1_000), (2, 200, 40)])
def test_a_server_of_varying_sizes(ranks: int, calls: int, sizes: int) -> None:
    """The memory of the process grows by less than 8 MiB."""
    program, threads = mlp_on(ranks), hw.Threads(ranks)
    order = [int(rows) for rows in np.random.default_rng(1).integers(1, sizes + 1, calls)]

    def on_rank(rank: int) -> None:
        hw.init(threads)
        model = program.bind(up=np.split(UP, ranks, 1)[rank].copy(), down=np.split(DOWN, ranks)[rank].copy())
        x = np.random.default_rng(2).integers(-2, 3, (sizes, E)).astype(np.float32)
        want, out = np.maximum(x @ UP, 0) @ DOWN, np.empty_like(x)
        model.prepare(*({"T": rows} for rows in range(1, sizes + 1)))
        for rows in order[: calls // 10]:
            model(x[:rows], out=out[:rows])
        hw.init().coordinator.gather("", 10)
        before = matmuls(), allocations(), resident_bytes()
        hw.init().coordinator.gather("", 10)
        for i, rows in enumerate(order):
            model(x[:rows], out=out[:rows])
            if i % 50 == 0:
                np.testing.assert_array_equal(out[:rows], want[:rows])
                out[:rows] = np.nan
        assert (matmuls(), allocations()) == before[:2]
        assert resident_bytes() < before[2] + (8 << 20)

    threads.run(on_rank)
    program.close()


def test_plans_are_bounded() -> None:
    """Plans of the last sizes are kept. Evicted plans are made again if needed."""
    program, threads = mlp_on(1), hw.Threads(1)
    gc.collect()
    before = matmuls()

    def on_rank(rank: int) -> None:
        hw.init(threads)
        model = program.bind(up=UP, down=DOWN)
        for round_ in range(2):
            model.prepare(*({"T": rows} for rows in range(1, KEPT + 500)))
            assert matmuls() - before == 2 * KEPT, round_
        for rows in (1, KEPT + 400, 3):
            x = np.ones((rows, E), np.float32)
            np.testing.assert_array_equal(model(x), np.maximum(x @ UP, 0) @ DOWN)
        assert matmuls() - before == 2 * KEPT
        program.close()

    threads.run(on_rank)
    assert matmuls() == before


def test_mistakes() -> None:
    program = mlp_on(1)
    with pytest.raises(ExecutionError, match=r"mlp: this process has not joined a group; call hw\.init first"):
        program.prepare({"T": 1})
    threads = hw.Threads(1)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        for wrong, message in (
            ({"S": 1}, "mlp: prepare: there is no size named S; the sizes of the program: T, E, F"),
            ({"T": -1}, "mlp: prepare: T=-1: a size is an int of at least 0"),
            ({"T": 4, "E": 2}, "mlp: prepare: the size F is missing; pass its global value"),
        ):
            with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
                program.prepare({"T": 1, "E": E, "F": F}, wrong)
        with pytest.raises(ArgumentError, match=r"mlp: up: rank 0 passes \[8, 16\]; its block of \[8, 32\] is \[8, 32\]"):
            program.bind(up=UP).prepare({"T": 1, "F": 32})
        program.prepare({"T": 2, "E": E, "F": F})
        np.testing.assert_array_equal(program(np.ones((2, E), np.float32), UP, DOWN), np.maximum(np.ones((2, E)) @ UP, 0) @ DOWN)

    threads.run(on_rank)
