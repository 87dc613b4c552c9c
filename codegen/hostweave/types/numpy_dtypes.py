"""The dtypes of NumPy, PyTorch and CuPy, by name, and casts that round as the targets do."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.types.tensor import DTYPES, DType, f8e4m3, f32

_DTYPE_OF = {dtype.long_name: dtype for dtype in DTYPES.values()}


def dtype_of_name(name: str) -> DType | str:
    """The dtype that NumPy and PyTorch call so, or the name where there is none."""
    return _DTYPE_OF.get(name, name)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's dtype of the same kind: bf16 and f8 are those of ml_dtypes."""
    import ml_dtypes  # noqa: F401  its import teaches NumPy the names

    return np.dtype(dtype.long_name)


def cast(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """The array in that dtype, as the targets cast: to small floats by f32, and to ints by i64. f8e4m3 ends at its largest number."""
    if dtype.kind in ("int", "uint") and array.dtype.kind not in "iub":
        return _to_ints(array.astype(np.float64)).astype(numpy_dtype(dtype))
    if dtype.kind == "float" and dtype.itemsize < f32.itemsize:
        array = array.astype(np.float32)
    if dtype == f8e4m3:
        array = np.clip(array, -448, 448)
    return array.astype(numpy_dtype(dtype))


def _to_ints(floats: NDArray[np.float64]) -> NDArray[np.uint64]:
    """The bits of i64, towards zero: of numbers that i64 does not have those of u64, and of all others -2**63."""
    is_signed, is_large = (floats >= -(2.0**63)) & (floats < 2.0**63), (floats >= 2.0**63) & (floats < 2.0**64)
    signed = np.where(is_signed, floats, -(2.0**63)).astype(np.int64).astype(np.uint64)
    return np.where(is_large, np.where(is_large, floats, 0).astype(np.uint64), signed)
