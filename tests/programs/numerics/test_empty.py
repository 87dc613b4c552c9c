"""Reductions of zero elements have the semantics of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError


@hw.block(x=hw.f32["M", "N"])
def largest_of_rows(x):
    return hw.max(x * 2, axis=1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value", "ignore:Degrees of freedom")
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_reductions_with_a_value_for_no_elements(axis: int | tuple[int, int], target: str) -> None:
    functions = ("sum", "prod", "mean", "var")
    program = hw.compile(hw.fusion(x=hw.f32["M", "N"])(lambda x: tuple(getattr(hw, name)(x, axis) for name in functions)), target)
    for shape in ((0, 3), (3, 0), (0, 0), (2, 3)):
        x = np.ones(shape, np.float32)
        for name, result in zip(functions, program.run(x=x), strict=True):
            np.testing.assert_array_equal(result, getattr(np, name)(x, axis), err_msg=f"{name} of {shape}")
    program.close()


@pytest.mark.parametrize("kind", ["max", "min", "argmax"])
def test_reductions_without_a_value_for_no_elements(kind: str, target: str) -> None:
    reduce = getattr(hw, kind)
    program = hw.compile(hw.fusion(x=hw.f32["M", "N"])(lambda x: (hw.exp(x), reduce(x, 1))), target)
    with pytest.raises(ArgumentError, match=rf"N = 0: there is no {kind} of no elements; pass at least 1"):
        program.run(x=np.zeros((2, 0), np.float32))
    assert program.run(x=np.zeros((0, 3), np.float32))[1].shape == (0,)
    assert program.run(x=np.ones((2, 3), np.float32))[1].shape == (2,)
    program.close()


@pytest.mark.parametrize("kind", ["max", "min", "argmax"])
def test_reductions_without_a_value_for_a_known_size_0(kind: str) -> None:
    text = f"fusion @f(%x: i64[4, 0]) {{\n  %y: i64[4] = {kind}(%x, axis=(1,))\n  return %y\n}}\n"
    message = rf"text:2: {kind}: i64\[4, 0\] has no elements along axis=\(1,\), so it has no {kind}; reduce a dim with elements"
    with pytest.raises(ProgramError, match=message):
        hw.Fusion.parse(text)


def test_a_rank_may_have_no_rows() -> None:
    """2 ranks have 2 and 1 of 3 rows, 1 and 0 of one row, and none of zero rows."""
    program = hw.compile(hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])(lambda x: hw.max(x, "M")))
    for rows in (3, 1):
        x = -np.arange(1.0, 1 + 4 * rows, dtype=np.float32).reshape(rows, 4)
        np.testing.assert_array_equal(program.run(x=x), x.max(0))
    with pytest.raises(ArgumentError, match="M = 0: there is no max of no elements"):
        program.run(x=np.zeros((0, 4), np.float32))


def test_a_dim_in_zigzag() -> None:
    program = hw.compile(hw.fusion(mesh=hw.Mesh(x=2, y=2), x=hw.f32["M@zigzag(x)", "N@zigzag(y)"])(lambda x: x + 1))
    for shape in ((0, 4), (4, 0), (4, 4)):
        np.testing.assert_array_equal(program.run(np.zeros(shape, np.float32)), np.ones(shape, np.float32))


def test_in_blocks_and_of_slices() -> None:
    program = hw.compile(hw.fusion(x=hw.f32["M", "N"], y=hw.f32["M", "N"])(lambda x, y: (largest_of_rows(x), hw.min(y[:, 2:], 1))))
    with pytest.raises(ArgumentError, match="N - 2 = 0: there is no min of no elements"):
        program.run(x=np.zeros((3, 2), np.float32), y=np.zeros((3, 2), np.float32))
    only = hw.compile(hw.fusion(x=hw.f32["M", "N"])(lambda x: largest_of_rows(x)))
    with pytest.raises(ArgumentError, match="N = 0: there is no max of no elements"):
        only.run(x=np.zeros((3, 0), np.float32))
