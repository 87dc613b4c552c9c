"""Constants that a program creates: hw.zeros, hw.ones, hw.full and hw.arange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError

X = np.arange(10, dtype=np.float32).reshape(5, 2)  # Two ranks have 3 and 2 rows.
MESH = hw.Mesh(x=2)


def computed(function: Callable[[hw.Tensor], Any]) -> Any:
    return hw.compile(hw.fusion(mesh=MESH, x=hw.f32["M@x", "N"])(function)).run(X)


@hw.block(x=hw.f32["M@x", "N"])
def plus_ones(x: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
    return x + hw.ones(("M", "N")), hw.zeros(3)


CASES: dict[str, tuple[Callable[[hw.Tensor], Any], Any]] = {
    "a result": (lambda x: hw.zeros(("M", 3)), np.zeros((5, 3), np.float32)),
    "no dims": (lambda x: hw.full((), 3) * x, 3 * X),
    "in a kernel": (lambda x: x + hw.ones(x.shape), X + 1),
    "sharded": (lambda x: hw.reshard(hw.full(("M", "N"), 2.5), "M@x", "N") * x, 2.5 * X),
    "other columns": (lambda x: hw.reshard(hw.full((4, "M"), 7, hw.i32), 4, "M@x"), np.full((4, 5), 7, np.int32)),
    "joined": (lambda x: hw.concat([hw.zeros((1, "N")), x], axis=0), np.concatenate([np.zeros((1, 2), np.float32), X])),
    "in a product": (lambda x: hw.ones((4, "M")) @ x, np.ones((4, 5), np.float32) @ X),
    "in a sum": (lambda x: hw.sum(hw.ones(("M", "N")), axis=0) + x[0], X[0] + 5),
    "of a function": (lambda x: plus_ones(plus_ones(x)[0])[0], X + 2),
    "twice": (lambda x: (hw.zeros(4), hw.zeros(4) + x[0, 0]), (np.zeros(4, np.float32), np.zeros(4, np.float32))),
    "a size": (lambda x: hw.ones("2*M"), np.ones(10, np.float32)),
    "numbers": (lambda x: hw.arange("M"), np.arange(5, dtype=np.int32)),
    "sharded numbers": (lambda x: hw.reshard(hw.arange("M"), "M@x"), np.arange(5, dtype=np.int32)),
    "numbers of rows": (lambda x: hw.arange("M", dtype=hw.f32)[:, None] * x, np.arange(5, dtype=np.float32)[:, None] * X),
    "from 1": (lambda x: hw.arange(1, "M"), np.arange(1, 5, dtype=np.int32)),
    "by 3": (lambda x: hw.arange(2, 11, 3, dtype=hw.f64), np.arange(2, 11, 3, dtype=np.float64)),
    "down": (lambda x: hw.arange(5, 0, -2, dtype=hw.i64), np.arange(5, 0, -2)),
    "half": (lambda x: hw.arange(0, "2*M", 2), np.arange(0, 10, 2, dtype=np.int32)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_of_constants(case: str) -> None:
    function, wanted = CASES[case]
    made = computed(function)
    for got, want in zip(*((made, wanted) if isinstance(made, tuple) else ((made,), (wanted,))), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_each_dtype() -> None:
    values = {
        hw.bool_: np.True_,
        hw.i8: np.int8(-128),
        hw.u8: np.uint8(255),
        hw.i64: np.int64(-(2**53)),
        hw.f16: np.float16(0.1),
        hw.bf16: ml_dtypes.bfloat16("-inf"),
        hw.f64: np.float64(1e300),
    }
    numbers = (True, -128, 255, -(2**53), 0.1, float("-inf"), 1e300)
    made = computed(lambda x: tuple(hw.full((3,), number, dtype) for number, dtype in zip(numbers, values, strict=True)))
    for got, wanted in zip(made, values.values(), strict=True):
        assert got.dtype == wanted.dtype
        assert (got == wanted).all()


REFUSED: dict[str, tuple[Callable[[hw.Tensor], Any], str]] = {
    "unknown": (lambda x: hw.zeros("Q"), "zeros: no input has a dim Q, so its size is unknown; add it to an input, or write an int"),
    "unknown end": (lambda x: hw.arange("Q"), "arange: no input has a dim Q"),
    "sharding": (lambda x: hw.zeros(("M@x",)), "zeros: not a size: 'M@x'"),
    "empty": (lambda x: hw.zeros(0), "zeros: a dim has at least one element, not 0"),
    "fraction": (
        lambda x: hw.full(2, 1.5, hw.i32),
        "full: i32 has no 1.5; give an int from -2147483648 to 2147483647, or a floating dtype",
    ),
    "range": (lambda x: hw.full(2, 300, hw.u8), "full: u8 has no 300; give an int from 0 to 255"),
    "infinite": (lambda x: hw.full(2, float("nan"), hw.i32), "full: i32 has no nan"),
    "two": (lambda x: hw.full(2, 2, hw.bool_), "full: bool has no 2; give an int from 0 to 1"),
    "tensor": (lambda x: hw.full(2, hw.sum(x)), "full: Tensor(f32[]) is not a Python number; use hw.broadcast_to on a tensor"),
    "dtype": (lambda x: hw.ones(2, float), "ones: <class 'float'> is not a dtype; use hw.f32, hw.bf16 and the like"),
    "no numbers": (lambda x: hw.arange(3, 3), "arange: from 3 to before 3 by 1, the range is empty"),
    "wide numbers": (lambda x: hw.arange(0, 300, 1, hw.u8), "arange: u8 has no 299; use a wider integer dtype"),
    "numbers below 0": (lambda x: hw.arange(-1, 3, 1, hw.u8), "arange: u8 has no -1; use a wider integer dtype"),
    "wide numbers as floats": (lambda x: hw.arange(0, 2**33, 2**30, hw.f64), "arange: i32 has no 7516192768; use a wider integer dtype"),
    "no size": (lambda x: hw.arange(0, "M", -1), "by -1, the number of elements cannot be written as a size; count up from 0 and compute"),
    "start": (lambda x: hw.arange("M", "N"), "arange: start='M', step=1: both must be ints"),
    "bools": (lambda x: hw.arange(3, dtype=hw.bool_), "arange: dtype bool is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_constants_that_are_refused(case: str) -> None:
    function, message = REFUSED[case]
    with pytest.raises(ProgramError) as caught:
        computed(function)
    assert message in str(caught.value)
    assert "test_constants.py" in str(caught.value)


@pytest.mark.parametrize("make", [hw.zeros, hw.ones, hw.arange, lambda size: hw.full(size, 1)])
def test_outside_of_a_fusion_the_name_is_the_users(make: Callable[[int], Any]) -> None:
    with pytest.raises(hw.errors.ProgramError, match=r"(zeros|ones|arange|full): no function is being traced; call it in the function"):
        make(3)
