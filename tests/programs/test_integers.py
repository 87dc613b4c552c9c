"""Integers as NumPy has them: each value is itself, beyond those that a float has, and sums and products wrap around."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

LARGE = [(hw.i64, 2**53 + 1), (hw.i64, 2**63 - 1), (hw.i64, -(2**63)), (hw.u64, 2**64 - 1), (hw.u32, 2**32 - 1), (hw.i8, -128)]


@pytest.mark.parametrize(("dtype", "value"), LARGE, ids=str)
def test_pad_keeps_every_integer(dtype: DType, value: int) -> None:
    fusion = hw.fusion(x=dtype["M"])(lambda x: hw.pad(x, (1, 0), value=value))
    assert Fusion.parse(str(fusion)) == fusion
    program = hw.compile(fusion)
    assert str(hw.HostProgram.parse(program.host_ir)) == program.host_ir
    x = np.array([1], numpy_dtype(dtype))
    np.testing.assert_array_equal(program.run(x), np.array([value, 1], x.dtype))


def test_a_slice_begins_at_no_integer_beyond_64_bits() -> None:
    with pytest.raises(hw.errors.ProgramError, match=r"dim 0 cannot start at 9223372036854775808; pass an int"):
        hw.fusion(x=hw.f32[4])(lambda x: hw.dynamic_slice(x, (2**63,), (2,)))


WRAPPING: tuple[Callable[[Any], Any], ...] = (
    lambda x: x + 1 > x,
    lambda x: x * 2 // 2 == x,
    lambda x: abs(x) >= 0,
    lambda x: (x + x) // 2 * x,
)


@pytest.mark.usefixtures("optimised_kernels")
@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs a GPU")])]
)
@pytest.mark.parametrize("dtype", [hw.i8, hw.i32, hw.i64], ids=str)
def test_integers_wrap_around(target: str, dtype: DType) -> None:
    """In the same kernel, too, where a compiler may take an overflow for what does not happen."""
    kind = np.iinfo(numpy_dtype(dtype))
    x = np.array([kind.max, kind.min, 5, -1, kind.max // 2 + 1], kind.dtype)
    with np.errstate(over="ignore"):
        for number, make in enumerate(WRAPPING):
            np.testing.assert_array_equal(hw.compile(hw.fusion(x=dtype["M"])(make), target=target).run(x), make(x), err_msg=str(number))
        total, product = hw.compile(hw.fusion(x=dtype["M"])(lambda x: (hw.sum(x * 3), hw.prod(x))), target=target).run(x)
        assert (total, product) == (np.sum(x * x.dtype.type(3), dtype=x.dtype), np.prod(x, dtype=x.dtype))
