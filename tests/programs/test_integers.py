"""Integers as NumPy has them: each value is itself, beyond those that a float has."""

import numpy as np
import pytest

import hostweave as hw
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
