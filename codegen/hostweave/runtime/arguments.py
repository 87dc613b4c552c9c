"""Whether an array is what a parameter of a program asks for, whatever its size."""

from __future__ import annotations

from hostweave.errors import ArgumentError
from hostweave.fusion.types import TensorType
from hostweave.runtime.arrays import HOST, Array, Library, library_of


def accept(program: str, target: str, name: str, type_: TensorType, array: Array) -> tuple[Library, Array]:
    """The library of an array, and the array as that works with it, not copied where that can be.

    Raises ArgumentError with the program's and the parameter's name where it is no array, or has another dtype or number of
    dims, or is on a GPU though the target is the CPU.
    """
    try:
        library = library_of(array)
    except TypeError as error:
        raise ArgumentError(f"{program}: {name}: {error}; pass a NumPy, PyTorch, CuPy or JAX array") from None
    try:
        array = library.accept(array)
    except TypeError as error:
        raise ArgumentError(f"{program}: {name}: {error}") from None
    dtype, shape = library.dtype(array), array.shape
    if dtype != type_.dtype or len(shape) != len(type_.dims):
        mismatch = f"{program}: {name}: expected {type_}, got {dtype}[{', '.join(map(str, shape))}]"
        remedy = f"cast it, or compile for {dtype}" if dtype != type_.dtype else f"pass an array of {len(type_.dims)} dims"
        raise ArgumentError(f"{mismatch}; {remedy}")
    if target == "cpu" and library.device(array) != HOST:
        raise ArgumentError(
            f"{program}: {name}: is on GPU {library.device(array)} and the program was compiled for the CPU; "
            "pass an array in host memory, or compile for cuda"
        )
    return library, array
