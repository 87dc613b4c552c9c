"""The pass reuse_in_place. A reduction may write to a donated input if only the thread that writes an element reads this element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import global_shape

SHAPES = [(3, 5), (64, 8), (1000, 3), (4, 4096), (4096, 4)]


@pytest.mark.parametrize("dtype", [hw.f32, hw.bf16], ids=str)
def test_an_update_after_a_reduction_is_in_place(dtype: hw.DType) -> None:
    """The gradient of a bias is reduced by threads, by blocks, or by tiles of columns. The same kernel updates the bias."""
    cases = [(shape, axis) for shape in SHAPES for axis in (0, 1)]
    types: dict[str, Any] = {}
    for at, (shape, axis) in enumerate(cases):
        types |= {f"x{at}": dtype[shape], f"w{at}": dtype[shape[1 - axis]], f"v{at}": hw.f32[shape[1 - axis]]}

    @hw.fusion(donate={name: 2 * int(name[1:]) + (name[0] == "v") for name in types if name[0] != "x"}, **types)
    def update(**given: Any) -> Any:
        results = []
        for at, (_, axis) in enumerate(cases):
            g = hw.sum(hw.astype(given[f"x{at}"], hw.f32), axis)
            v = given[f"v{at}"] * 0.5 + g * g
            results += [hw.astype(hw.astype(given[f"w{at}"], hw.f32) - g / (hw.sqrt(v) + 1), dtype), v]
        return tuple(results)

    program = hw.compile(update)
    assert "cudaMemcpyAsync" not in program.source
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {name: random.random(global_shape(type, {})).astype(numpy_dtype(type.dtype)) for name, type in types.items()}
    given = {name: array.astype(np.float32) for name, array in arrays.items()}
    made = program.run(**arrays)
    for at, (shape, axis) in enumerate(cases):
        g = given[f"x{at}"].sum(axis)
        second = given[f"v{at}"] * 0.5 + g * g
        first = given[f"w{at}"] - g / (np.sqrt(second) + 1)
        tolerance, where = 1e-4 if dtype == hw.f32 else 1e-2, f"axis {axis} of {shape}"
        np.testing.assert_allclose(made[2 * at].astype(np.float32), first, rtol=tolerance, atol=1e-4, err_msg=where)
        np.testing.assert_allclose(made[2 * at + 1], second, rtol=1e-4, err_msg=where)


def test_an_operand_that_all_threads_read_is_not_overwritten() -> None:
    """Many threads read each scale, so the kernel cannot write sums to the memory of the scales. The sums are copied there at the end."""

    @hw.fusion(donate={"s": 0}, x=hw.f32["M", "N"], s=hw.f32["M"])
    def update(x: Any, s: Any) -> Any:
        return s + hw.sum(x * s[:, None], 1)

    program = hw.compile(update)
    x, s = np.random.default_rng(1).random((70, 300)).astype(np.float32), np.arange(70, dtype=np.float32)
    assert "cudaMemcpyAsync" in program.source
    np.testing.assert_allclose(program.run(x=x, s=s.copy()), s + (x * s[:, None]).sum(1), rtol=1e-5)


def test_a_counter_is_counted_after_its_last_use() -> None:
    """The kernel that updates the counter moves after the kernel that reads the counter. So no copy is needed."""

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


def test_an_asynchronous_all_reduce_is_in_the_memory_of_its_result() -> None:
    """The gradient is computed and reduced in the memory of the result. The all-reduce runs on another stream while dx is computed."""
    mesh = hw.Mesh(x=2)

    @hw.fusion(mesh=mesh, x=hw.f32["T@x", "K"], dy=hw.f32["T@x", "N"], w=hw.f32["K", "N"])
    def gradients(x: Any, dy: Any, w: Any) -> Any:
        return hw.matmul(x.T, dy), hw.matmul(dy, w.T)

    program = hw.compile(gradients)
    assert "fork comm" in program.host.code
    assert "allocate" not in program.host.code
    x, dy, w = (np.random.default_rng(2).random(shape).astype(np.float32) for shape in ((8, 5), (8, 3), (5, 3)))
    dw, dx = program.run(x=x, dy=dy, w=w)
    np.testing.assert_allclose(dw, x.T @ dy, rtol=1e-5)
    np.testing.assert_allclose(dx, dy @ w.T, rtol=1e-5)
