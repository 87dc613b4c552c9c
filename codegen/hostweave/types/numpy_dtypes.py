"""NumPy dtypes that match Hostweave dtypes, and casts with the rounding of generated code."""

from functools import cache
from typing import Any

import ml_dtypes  # noqa: F401  importing ml_dtypes registers bf16 and f8 with NumPy
import numpy as np
from numpy.typing import NDArray

from hostweave.types.tensor import DTYPES, INTS, DType, f8e4m3, f32

_DTYPE_OF = {dtype.long_name: dtype for dtype in DTYPES.values()}


def dtype_of_name(name: str) -> DType | str:
    """The dtype that NumPy and PyTorch call `name`, or `name` if there is none."""
    return _DTYPE_OF.get(name, name)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's dtype, which ml_dtypes defines for bf16 and f8."""
    return np.dtype(dtype.long_name)


@cache
def computing_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy dtype in which references compute: f64 for floats, otherwise the matching dtype."""
    return np.dtype(np.float64) if dtype.kind == "float" else numpy_dtype(dtype)


def cast(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Casts as generated code does. Casts to floats of at most 16 bits round to f32 first. Floats become ints through i64 or u64. f8e4m3
    saturates."""
    if dtype.kind in INTS and array.dtype.kind not in "iub":
        return _to_ints(array.astype(np.float64)).astype(numpy_dtype(dtype))
    if dtype.kind == "float" and dtype.itemsize < f32.itemsize:
        array = array.astype(np.float32)
    if dtype == f8e4m3:
        array = np.clip(array, -448, 448)
    return array.astype(numpy_dtype(dtype))


def _to_ints(floats: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Floats as bits of an i64, or of a u64 if a float fits only in a u64. A float that fits in neither gives the bits of -2**63."""
    is_signed, is_large = (floats >= -(2.0**63)) & (floats < 2.0**63), (floats >= 2.0**63) & (floats < 2.0**64)
    signed = np.where(is_signed, floats, -(2.0**63)).astype(np.int64).astype(np.uint64)
    return np.where(is_large, np.where(is_large, floats, 0).astype(np.uint64), signed)
