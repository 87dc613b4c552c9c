"""Arrays in windows, which `Group.empty` allocates. A window is memory of a rank that the other ranks can access."""

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache, partial
from math import prod
from operator import itemgetter
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from hostweave.base.errors import ArgumentError
from hostweave.base.forks import reset_after_fork
from hostweave.build.program import build, load
from hostweave.build.toolchain import MODULE_FILE
from hostweave.emit import render
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.host_ir.size_requirements import MAX_SIZE
from hostweave.runtime.arguments import BoundInputs
from hostweave.runtime.arrays import Array, library_of
from hostweave.runtime.coordinator import ByteRange
from hostweave.targets.target import CPU_DEVICE, NAMES, find_target
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

# DLPack codes of types, by dtype or kind, and of CUDA devices.
_CODES = {"int": 0, "uint": 1, "float": 2, "bool": 6, "bf16": 4, "f8e4m3": 10, "f8e5m2": 12}
_CUDA = 2

_build_lock = reset_after_fork(threading.Lock())


class WindowPosition(NamedTuple):
    """Position of an array in window memory: number of the call of `empty`, and offset in bytes."""

    number: int
    offset: int


class WindowArray:
    """A contiguous array in GPU memory that the other ranks can access. Supports DLPack and `__cuda_array_interface__`.

    Example: `x = torch.from_dlpack(group.empty((M // 8, K), hw.bf16, target="cuda"))`.
    """

    def __init__(self, memory: Any, module: ModuleType, shape: tuple[int, ...], dtype: DType, device: int):
        self.shape, self.dtype, self.device = shape, dtype, device
        self._memory, self._module = memory, module

    def __repr__(self) -> str:
        return f"<array {self.dtype}[{', '.join(map(str, self.shape))}] in a window, on GPU {self.device}>"

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    def __dlpack__(self, **_: object) -> Any:
        """Exports the memory as a DLPack capsule. The consumer's stream does not matter, because no work is enqueued."""
        code = _CODES.get(self.dtype.name, _CODES[self.dtype.kind])
        return self._module.dlpack(self, self._memory.address, self.__dlpack_device__(), self.shape, code, 8 * self.dtype.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Raises AttributeError if NumPy does not have the dtype."""
        dtype = np.dtype(numpy_dtype(self.dtype))
        if dtype.isbuiltin != 1:
            raise AttributeError(f"{self.dtype} has no typestr of __cuda_array_interface__; use __dlpack__")
        return {"shape": self.shape, "typestr": dtype.str, "data": (self._memory.address, False), "version": 3, "strides": None}


class Windows:
    def __init__(self) -> None:
        self.allocated = 0  # number of allocated arrays, equal on all ranks
        # Window memory, sorted by address: (address, number of the array, bytes, weak reference to the memory).
        self._known: list[tuple[int, int, int, weakref.ref[Any]]] = []
        self._bound_names: weakref.WeakKeyDictionary[BoundInputs, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self.connected: set[str] = set()  # targets for which the ranks share memory

    def array(self, memory: Any, module: ModuleType, size: int, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Returns an array in window memory of `size` bytes. `position_of` finds the array while the memory is in use."""
        kept = [one for one in self._known if one[-1]() is not None and one[0] != memory.address]
        self._known = sorted([*kept, (memory.address, self.allocated, max(1, size), weakref.ref(memory))], key=itemgetter(0))
        if device != CPU_DEVICE:
            return WindowArray(memory, module, shape, dtype, device)
        interface = {"shape": (prod(shape) * dtype.itemsize,), "typestr": "|u1", "data": (memory.address, False), "version": 3}
        buffer = SimpleNamespace(__array_interface__=interface, memory=memory)  # arrays that view the buffer keep the memory alive
        return np.asarray(buffer).view(numpy_dtype(dtype)).reshape(shape)

    def position_of(self, address: int) -> WindowPosition | None:
        if not (at := bisect_right(self._known, address, key=itemgetter(0))):
            return None
        begin, number, size, memory = self._known[at - 1]
        return WindowPosition(number, address - begin) if address - begin < size and memory() is not None else None

    def names(self, bound: BoundInputs, arguments: Iterable[tuple[Parameter, Array]]) -> tuple[str, ...]:
        """Names of the bound inputs, and of the parameters in `arguments`, whose arrays are in windows."""
        if (names_of_bound := self._bound_names.get(bound)) is None:
            found = (name for name, (_, array) in bound.arrays.items() if self._position_of_array(array))
            names_of_bound = self._bound_names[bound] = tuple(found)
        return *names_of_bound, *(parameter.name for parameter, array in arguments if self._position_of_array(array))

    def _position_of_array(self, array: Array) -> WindowPosition | None:
        try:
            return self.position_of(library_of(array).address(array))
        except (TypeError, AttributeError, RuntimeError):  # the call will report that this is not an array
            return None


def window_positions(windows: Windows, host: HostProgram, spans: Iterable[ByteRange], has_outputs: bool) -> tuple[WindowPosition, ...]:
    positions, remedy = [], "pass an array of group.empty"
    addresses = {span.name: span.begin for span in spans}  # empty arrays have no span
    for parameter in (p for p in (*host.arguments, *host.results) if p.in_window):
        name, is_missing = parameter.name, parameter in host.results and not has_outputs
        position_of = windows.position_of(addresses[name]) if name in addresses else None
        if is_missing or (name in addresses and position_of is None):
            where = f"{host.name}: {'out=: ' * (parameter in host.results)}{name}"
            raise ArgumentError(f"{where}: is not in a window, but the program was compiled for an array in a window; {remedy}")
        positions += [position_of] if position_of else []
    return tuple(positions)


def checked_shape(shape: Sequence[int], dtype: DType, target: str) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else shape
    try:
        is_shape = all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0 for size in sizes)
    except TypeError:
        is_shape = False
    if not is_shape or isinstance(sizes, str):
        raise ArgumentError(f"group.empty: shape={shape!r} is not a tuple of ints of at least 0; pass the shape of this rank's array")
    if not isinstance(dtype, DType):
        raise ArgumentError(f"group.empty: dtype={dtype!r} is not a dtype of Hostweave; pass one such as hw.f32 or hw.bf16")
    if prod(map(int, sizes)) > MAX_SIZE:
        raise ArgumentError(f"group.empty: shape={shape!r} exceeds any memory; pass the shape of this rank's array")
    if not isinstance(target, str) or target not in NAMES:
        raise ArgumentError(f"group.empty: there is no target {target!r}; the targets are {' and '.join(NAMES)}")
    return tuple(int(size) for size in sizes)


@cache
def memory_module(target: str) -> ModuleType:
    """Module of an empty program, because the module of any program has the code for window memory."""
    host, on = HostProgram.parse("host @memory() -> () mesh(rank=1) {\n}\n"), find_target(target)
    with _build_lock:  # ranks may be threads
        folder = build(host.name, host.code, on.toolchain(), partial(on.runtime_libraries, requested=host.libraries), lambda: render(host))
        on.expect_memory()
        return load(folder / MODULE_FILE, on.dlopen_flags)
