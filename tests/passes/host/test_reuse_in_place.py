"""The pass reuse_in_place: a reduction may write to a donated input if each element is read only by the thread that writes it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw

SHAPES = [(3, 5), (64, 8), (1000, 3), (4, 4096), (4096, 4)]


@pytest.mark.parametrize("dtype", [hw.f32, hw.bf16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_behind_a_reduction_is_in_place(shape: tuple[int, int], axis: int, dtype: hw.DType) -> None:
    """An update of a bias from its gradient, for all schedules of the reduction: vectors, threads, blocks and parts of blocks."""
    kept = shape[1 - axis]

    @hw.fusion(donate={"w": 0, "v": 1}, x=dtype[shape], w=dtype[kept], v=hw.f32[kept])
    def update(x: Any, w: Any, v: Any) -> Any:
        g = hw.sum(hw.astype(x, hw.f32), axis)
        v = v * 0.5 + g * g
        return hw.astype(hw.astype(w, hw.f32) - g / (hw.sqrt(v) + 1), dtype), v

    program = hw.compile(update)
    assert "cudaMemcpyAsync" not in program.source
    random = np.random.default_rng(0)
    x, w, v = (random.random(size).astype(np.float32) for size in (shape, kept, kept))
    if dtype == hw.bf16:
        x, w = x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
    g = x.astype(np.float32).sum(axis)
    second = v * 0.5 + g * g
    first = w.astype(np.float32) - g / (np.sqrt(second) + 1)
    made = program.run(x=x, w=w, v=v)
    np.testing.assert_allclose(made[0].astype(np.float32), first, rtol=1e-4 if dtype == hw.f32 else 1e-2, atol=1e-4)
    np.testing.assert_allclose(made[1], second, rtol=1e-4)


def test_an_operand_that_all_threads_read_is_not_overwritten() -> None:
    """Every thread reads the scale, so the sum cannot be written to the memory of the scale. The sum is copied to that memory at the
    end."""

    @hw.fusion(donate={"s": 0}, x=hw.f32["M", "N"], s=hw.f32["M"])
    def update(x: Any, s: Any) -> Any:
        return s + hw.sum(x * s[:, None], 1)

    program = hw.compile(update)
    x, s = np.random.default_rng(1).random((70, 300)).astype(np.float32), np.arange(70, dtype=np.float32)
    assert "cudaMemcpyAsync" in program.source
    np.testing.assert_allclose(program.run(x=x, s=s.copy()), s + (x * s[:, None]).sum(1), rtol=1e-5)


def test_a_counter_is_counted_after_its_last_use() -> None:
    """The kernel that updates the counter is moved after the kernel that reads the counter, so that no copy is needed."""

    @hw.fusion(donate={"n": 0}, n=hw.i64[()], x=hw.f32["M", "N"])
    def step(n: Any, x: Any) -> Any:
        after = n + 1
        return after, x * hw.astype(n, hw.f32)

    program = hw.compile(step)
    launches = [line.split()[1] for line in str(program.host).splitlines() if line.startswith("  launch")]
    assert len(launches) == 2
    assert launches[-1].startswith("@add")
    assert "copy %" not in str(program.host)
    x = np.random.default_rng(0).random((5, 8)).astype(np.float32)
    for made, wanted in zip(program.run(n=np.asarray(3), x=x), (4, x * 3), strict=True):
        np.testing.assert_array_equal(made, wanted)
