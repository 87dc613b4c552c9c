"""The dtypes of NumPy, PyTorch and CuPy, by name, and casts that round as the targets do."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.types.tensor import DType, bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64

_DTYPE_OF = {
    "float64": f64,
    "float32": f32,
    "float16": f16,
    "bfloat16": bf16,
    "float8_e4m3fn": f8e4m3,
    "float8_e5m2": f8e5m2,
    "int64": i64,
    "int32": i32,
    "int16": i16,
    "int8": i8,
    "uint64": u64,
    "uint32": u32,
    "uint16": u16,
    "uint8": u8,
    "bool": bool_,
}
LIBRARY_NAMES = {dtype: name for name, dtype in _DTYPE_OF.items()}


def dtype_of_name(name: str) -> DType | str:
    """The dtype that NumPy and PyTorch call so, or the name where there is none."""
    return _DTYPE_OF.get(name, name)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's dtype of the same kind: bf16 and f8 are those of ml_dtypes."""
    import ml_dtypes  # noqa: F401  its import teaches NumPy the names

    return np.dtype(LIBRARY_NAMES[dtype])


def cast(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """The array in that dtype, as the targets and torch cast: to small floats by f32; f8e4m3 ends at its largest number."""
    if dtype.kind == "float" and dtype.itemsize < f32.itemsize:
        array = array.astype(np.float32)
    if dtype == f8e4m3:
        array = np.clip(array, -448, 448)
    return array.astype(numpy_dtype(dtype))
