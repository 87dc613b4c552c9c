"""Arrays of the caller's library: NumPy, PyTorch, CuPy, JAX, and other libraries that support DLPack.

Slicing and assignment need no methods of `ArrayLibrary`, because all libraries have the same syntax.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostweave.base.errors import ExecutionError
from hostweave.targets.target import CPU_DEVICE
from hostweave.types.numpy_dtypes import dtype_of_name, numpy_dtype
from hostweave.types.tensor import DType

Array = Any  # an array of any supported library


class ArrayLibrary(Protocol):
    """Operations of an array library, with common defaults."""

    gives_copies: bool = False  # True if `give` may copy; a copy does not show later writes to the array

    def accept(self, array: Array) -> Array:
        """Returns the array in the form that the other methods take, if possible without a copy. Raises TypeError with the reason if a
        program cannot use the array."""
        return array

    def state(self, array: Array) -> tuple[Any, ...] | None:
        """Key of the address and of all properties that a call checks. Arrays with equal keys need no new check. None if each call must
        check the array."""
        return None

    def give(self, array: Array) -> Array:
        """Converts an array from the form of `accept` to the form for the caller."""
        return array

    def dtype(self, array: Array) -> DType | str:
        """Element type, or the name of the type if Hostweave lacks the type."""
        return dtype_of_name(array.dtype.name)

    def device(self, array: Array) -> int:
        """Index of the GPU, or CPU_DEVICE."""

    def address(self, array: Array) -> int: ...

    def contiguous(self, array: Array) -> Array:
        """Returns the array if it is contiguous, otherwise a copy on the same device."""

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array: ...

    def is_contiguous(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous)

    def is_writable(self, array: Array) -> bool:
        return True

    def stream(self, device: int) -> int:
        """The library's current cudaStream_t on a GPU."""
        return 0

    def on_stream(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """Makes `empty` allocate for use on a cudaStream_t."""
        return nullcontext()

    def wait(self, device: int) -> None:
        """Waits for all work on the library's current stream of `device`."""
        return


class ArrayView(NamedTuple):
    """A contiguous array for native code. `array` keeps the memory alive. `ArrayView(shape)` means no array."""

    global_shape: tuple[int, ...]  # shape of the whole array
    address: int = 0
    shape: tuple[int, ...] = ()
    bytes: int = 0
    device: int = CPU_DEVICE
    array: Array = None


def view(library: ArrayLibrary, array: Array, dtype: DType, global_shape: tuple[int, ...]) -> ArrayView:
    shape = tuple(array.shape)
    return ArrayView(global_shape, library.address(array), shape, prod(shape) * dtype.itemsize, library.device(array), array)


class ForeignBuffer(NamedTuple):
    """A contiguous array that other code owns, given by its address."""

    address: int
    shape: tuple[int, ...]
    dtype: DType
    device: int


def _no_memory(what: object, shape: Iterable[int], error: Exception | None = None) -> ExecutionError:
    said = f" ({str(error).partition(chr(10))[0]})" if error else ""
    return ExecutionError(f"there is no memory for {what}{list(shape)}{said}; use smaller arrays")


def library_of(array: Array) -> ArrayLibrary:
    """Library of an array. Raises TypeError if the value is not an array."""
    if isinstance(array, np.ndarray):
        return _NUMPY
    if (torch := sys.modules.get("torch")) and isinstance(array, torch.Tensor):  # includes subclasses that other packages define
        return _TORCH
    if isinstance(array, ForeignBuffer):
        return _BUFFERS
    package = type(array).__module__.partition(".")[0]
    if package == "cupy":
        return _CUPY
    if package in ("jax", "jaxlib"):
        return _JAX
    if hasattr(type(array), "__dlpack__") or "__dlpack__" in getattr(array, "__dict__", {}):  # hasattr(array, ...) could run code
        return _AnyDLPack(array)
    raise TypeError(f"expected an array, got {type(array).__name__}")


def states_of(arrays: Iterable[Array]) -> tuple[Any, ...] | None:
    """Keys of the arrays, with () for each None. Returns None if an array has no key."""
    try:
        states = tuple(() if array is None else library_of(array).state(array) for array in arrays)
    except (TypeError, RuntimeError):  # for example, the array has no memory
        return None
    return None if None in states else states


class NumpyLibrary(ArrayLibrary):
    def accept(self, array: Array) -> Array:
        if not array.dtype.isnative:
            raise TypeError("its byte order is not native; call .astype with the native dtype")
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("masked arrays are not supported; call .filled(value)")
        return array

    def state(self, array: Array) -> tuple[Any, ...] | None:
        if self.gives_copies or isinstance(array, np.ma.MaskedArray):  # a mask is not part of the key
            return None
        at = array.__array_interface__
        return array.dtype, at["shape"], at["strides"], at["data"]  # data has the address and the read-only flag

    def device(self, array: Array) -> int:
        return CPU_DEVICE

    def address(self, array: Array) -> int:
        return int(array.__array_interface__["data"][0])

    def contiguous(self, array: Array) -> Array:
        try:
            return array if array.flags.c_contiguous else array.copy(order="C")
        except MemoryError:
            raise _no_memory(f"a contiguous copy of {array.dtype}", array.shape) from None

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        try:
            return np.empty(shape, numpy_dtype(dtype))
        except (ValueError, MemoryError):
            raise _no_memory(dtype, shape) from None

    def is_writable(self, array: Array) -> bool:
        return bool(array.flags.writeable)


class _Buffers(NumpyLibrary):
    def state(self, array: Array) -> tuple[Any, ...] | None:
        return tuple(array)

    def accept(self, array: Array) -> Array:
        return array

    def dtype(self, array: Array) -> DType | str:
        return array.dtype  # type: ignore[no-any-return]

    def device(self, array: Array) -> int:
        return int(array.device)

    def address(self, array: Array) -> int:
        return int(array.address)

    def is_contiguous(self, array: Array) -> bool:
        return True

    def is_writable(self, array: Array) -> bool:
        return True


class _Jax(NumpyLibrary):
    """JAX arrays. A call converts its inputs to NumPy arrays, and its results to JAX arrays."""

    gives_copies: bool = True

    def accept(self, array: Array) -> Array:
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError("is traced by JAX and has no values; inside jax.jit use program.as_jax_ffi()")
        try:
            return np.asarray(array)
        except RuntimeError as error:  # the array was donated, or is partly on other hosts
            raise TypeError(f"JAX cannot give its values ({error}); pass an array that is not deleted, and is only on this host") from error

    def give(self, array: Array) -> Array:
        return sys.modules["jax"].numpy.asarray(array)


class _AnyDLPack(NumpyLibrary):
    """Arrays in host memory, of any other library with DLPack."""

    gives_copies: bool = True  # the library may copy

    def __init__(self, array: Array):
        try:
            namespace = array.__array_namespace__()
        except Exception:  # the library may raise any exception
            namespace = np
        self._namespace = namespace if hasattr(namespace, "from_dlpack") else np

    def accept(self, array: Array) -> Array:
        try:
            return np.from_dlpack(array)
        except Exception as error:  # the library may raise any exception
            raise TypeError(f"its library's DLPack fails ({error}); pass a NumPy, PyTorch, CuPy or JAX array") from error

    def give(self, array: Array) -> Array:
        return self._namespace.from_dlpack(array)


class _Torch(ArrayLibrary):
    def accept(self, array: Array) -> Array:
        torch = sys.modules["torch"]
        if array.is_nested:
            raise TypeError("ragged tensors are not supported; call .to_padded_tensor(value)")
        if array.layout != torch.strided:
            raise TypeError(f"its layout is {array.layout}; call .to_dense()")
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f'it is on {array.device}; call .to("cpu") or .to("cuda")')
        if hasattr(array, "to_local"):
            raise TypeError(f"it is a {type(array).__name__}, which is distributed; pass .to_local()")
        if not _has_memory(array):
            raise TypeError(f"it is a {type(array).__name__} without memory; pass a torch.Tensor with the values")
        if array.is_neg():
            raise TypeError("its negation is pending; call .resolve_neg()")
        if array.requires_grad and torch.is_grad_enabled():
            raise TypeError("requires grad, but programs have no gradients; call .detach(), or run the program under torch.no_grad()")
        return array.detach()

    def state(self, array: Array) -> tuple[Any, ...] | None:
        torch = sys.modules["torch"]
        if type(array) not in (torch.Tensor, torch.nn.Parameter) or array.layout != torch.strided or array.is_neg():
            return None
        if array.requires_grad and torch.is_grad_enabled():
            return None
        return array.dtype, array.shape, array.device, array.data_ptr(), array.is_contiguous()

    def dtype(self, array: Array) -> DType | str:
        return dtype_of_name(str(array.dtype).removeprefix("torch."))

    def device(self, array: Array) -> int:
        return CPU_DEVICE if array.device.type == "cpu" else int(array.device.index)

    def address(self, array: Array) -> int:
        return int(array.data_ptr())

    def contiguous(self, array: Array) -> Array:
        try:
            return array.contiguous()
        except RuntimeError as error:
            raise _no_memory(f"a contiguous copy of {array.dtype}", array.shape, error) from error

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        torch = sys.modules["torch"]
        try:
            return torch.empty(shape, dtype=getattr(torch, dtype.long_name), device="cpu" if device == CPU_DEVICE else f"cuda:{device}")
        except RuntimeError as error:
            raise _no_memory(dtype, shape, error) from error

    def is_contiguous(self, array: Array) -> bool:
        return bool(array.is_contiguous())

    def stream(self, device: int) -> int:
        return int(sys.modules["torch"]._C._cuda_getCurrentRawStream(device))  # current_stream would create an object

    def on_stream(self, stream: int, device: int) -> AbstractContextManager[Any]:
        cuda = sys.modules["torch"].cuda
        context: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(stream, device=device))
        return context

    def wait(self, device: int) -> None:
        if device != CPU_DEVICE:
            sys.modules["torch"].cuda.current_stream(device).synchronize()


def _has_memory(tensor: Array) -> bool:
    plain = type(tensor) is sys.modules["torch"].Tensor
    try:  # The storage of a fake tensor is on another device, and `data_ptr()` of a fake tensor warns.
        return bool((plain or tensor.untyped_storage().device == tensor.device) and (tensor.numel() == 0 or tensor.data_ptr() != 0))
    except RuntimeError:
        return False


class _Cupy(ArrayLibrary):
    def device(self, array: Array) -> int:
        return int(array.device.id)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def contiguous(self, array: Array) -> Array:
        try:
            with array.device:
                return sys.modules["cupy"].ascontiguousarray(array).reshape(array.shape)
        except MemoryError as error:
            raise _no_memory(f"a contiguous copy of {array.dtype}", array.shape, error) from error

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        cupy = sys.modules["cupy"]
        try:
            with cupy.cuda.Device(device):
                return cupy.empty(shape, numpy_dtype(dtype))
        except (ValueError, MemoryError) as error:
            raise _no_memory(dtype, shape, error) from error

    def stream(self, device: int) -> int:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)

    def on_stream(self, stream: int, device: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = sys.modules["cupy"].cuda.ExternalStream(stream, device)
        return context

    def wait(self, device: int) -> None:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            cupy.cuda.get_current_stream().synchronize()


_NUMPY, _JAX, _TORCH, _CUPY, _BUFFERS = NumpyLibrary(), _Jax(), _Torch(), _Cupy(), _Buffers()
