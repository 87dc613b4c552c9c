"""On the CPU target, casts between 8-bit floats and f32 equal those of ml_dtypes, for all 8-bit floats except infinities."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.types.tensor import DType


@pytest.mark.parametrize(("dtype", "numpy"), [(hw.f8e4m3, ml_dtypes.float8_e4m3fn), (hw.f8e5m2, ml_dtypes.float8_e5m2)], ids=str)
def test_casts(dtype: DType, numpy: type) -> None:
    @hw.fusion(x=dtype["N"], v=hw.f32["M"])
    def casts(x: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.astype(x, hw.f32), hw.astype(v, dtype)

    x = np.arange(256).astype(np.uint8).view(numpy)
    finite = np.sort(x.astype(np.float32)[np.isfinite(x.astype(np.float32))])
    between = (finite[1:] + finite[:-1]) / 2  # values halfway between two neighbours
    v = np.concatenate([finite, between, between * 1.01, between * 0.99, [np.nan]]).astype(np.float32)
    wide, narrow = hw.compile(casts).run(x=x, v=v)
    np.testing.assert_array_equal(wide[np.isfinite(wide)], x.astype(np.float32)[np.isfinite(wide)])
    assert (np.isnan(wide) == np.isnan(x.astype(np.float32))).all()
    np.testing.assert_array_equal(narrow.astype(np.float32), v.astype(numpy).astype(np.float32))
