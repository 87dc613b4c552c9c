"""A compiled program as a Python module that does not need Hostweave.

`run` takes global arrays and runs all ranks in this process. `World` and `Program` are for one rank per process. If TARGET is "cpu",
devices are simulated, and arrays are NumPy arrays. If TARGET is "cuda", arrays are PyTorch tensors.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = Path(__file__).parent
_ABOUT = json.loads((_FOLDER / "program.json").read_text())
NAME: str = _ABOUT["name"]
TARGET: str = _ABOUT["target"]
RANKS: int = _ABOUT["ranks"]
# Values of hw_dtype.
_CODES = {
    "float32": 0, "float64": 1, "float16": 2, "int8": 3, "uint8": 8, "bool": 8, "int32": 10, "uint32": 12, "bfloat16": 14,
    "int16": 20, "uint16": 22, "int64": 24, "uint64": 26, "float8_e4m3fn": 28, "float8_e5m2": 29,
}  # fmt: skip

if TARGET == "cuda":
    import torch  # torch also loads the CUDA libraries that the program is linked with
else:
    import ml_dtypes


@dataclass(frozen=True)
class Parameter:
    """An input or output of the program."""

    name: str
    type: str  # with the sharding, such as bf16[M@x, K]
    dtype: str  # name in NumPy and PyTorch
    blocks: tuple[tuple[tuple[int, tuple[int, ...]], ...] | None, ...]  # by rank and dim: (number of pieces, own pieces)
    memory: str  # the donated input whose memory an output overwrites, or ""
    at: int  # position in the struct of the C API

    @property
    def ndim(self) -> int:
        return next(len(blocks) for blocks in self.blocks if blocks is not None)

    def block(self, shape: Sequence[int], rank: int) -> list[np.ndarray[Any, Any]]:
        """Indices of a rank's block in a global array of this shape, one array per dim."""
        blocks = self.blocks[rank]
        assert blocks is not None
        return [
            np.concatenate([np.arange(size)[piece * (step := -(-size // count)) : (piece + 1) * step] for piece in own])
            for size, (count, own) in zip(shape, blocks, strict=True)
        ]


def _parameters(side: str) -> tuple[Parameter, ...]:
    layouts = [
        tuple(None if of is None else tuple((count, tuple(own)) for count, own in of) for of in layout) for layout in _ABOUT["layouts"]
    ]
    return tuple(Parameter(*about[:3], layouts[about[3]], *about[4:]) for about in _ABOUT[side])


INPUTS = _parameters("inputs")
OUTPUTS = _parameters("outputs")


class _Shape(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_int), ("dims", ctypes.c_int64 * 8)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("shape", _Shape),
        ("device", ctypes.c_int),
        ("global_shape", _Shape),
    ]


_library = ctypes.CDLL(str(_FOLDER / "program.so"))
_library.hw_last_error.restype = ctypes.c_char_p


def _call(function: str, *arguments: Any) -> None:
    """Calls a function of the C API. Raises ValueError if an array is wrong, and RuntimeError for other failures."""
    if status := getattr(_library, function)(*arguments):
        text = f"{NAME}: {_library.hw_last_error().decode()}"
        raise ValueError(text) if status == 1 else RuntimeError(text)


_ranks_are = ""  # "threads" or "processes"; "" until one is used


def _decide(what: str, function: str, *arguments: Any) -> None:
    global _ranks_are
    if _ranks_are not in ("", what):
        raise RuntimeError(f"{NAME}: the ranks of this process are {_ranks_are} already; use `run` or `World` in a process, not both")
    if not _ranks_are:
        _call(function, *arguments)
        _ranks_are = what


def new_id() -> bytes:
    """Makes the id of a new world. One rank makes the id and sends it to all ranks, for example by torch.distributed or a file."""
    _decide("processes", "hw_use_processes")
    return _new_id()


def _new_id() -> bytes:
    made = ctypes.create_string_buffer(128)
    _call("hw_new_id", made)
    return made.raw


class World:
    """One of the RANKS ranks. Creating a World or a Program is collective: every rank takes part."""

    def __init__(self, id: bytes, rank: int, device: int | None = None):
        """Joins the world with this id. `device` is a GPU of this host; the default is number `rank`. The CPU target ignores `device`."""
        _decide("processes", "hw_use_processes")
        self._join(id, rank, 0 if TARGET == "cpu" else rank if device is None else device)

    def _join(self, id: bytes, rank: int, device: int) -> None:
        self._handle = ctypes.c_void_p()
        self.rank, self.device = rank, device
        _call("hw_world_create", id, ctypes.c_int(device), ctypes.c_int(rank), ctypes.c_int(RANKS), ctypes.byref(self._handle))

    def close(self) -> None:
        """Leaves the world. Close the program first."""
        if self._handle:
            _call("hw_world_destroy", self._handle)
            self._handle = ctypes.c_void_p()


class Program:
    """The program on one rank: `y = Program(world)(x, w)` with local arrays."""

    def __init__(self, world: World):
        self._world, self._prepared = world, None
        self._handle = ctypes.c_void_p()
        self._shapes = (_Shape * max(1, len(OUTPUTS)))()
        _call(f"{NAME}_create", world._handle, ctypes.byref(self._handle))

    def prepare(self, *arrays: Any, global_shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """Allocates memory and makes plans for arrays of these shapes. All ranks must prepare.

        A call prepares first if its shapes differ from the last prepared shapes. `global_shapes` gives, by name, the global shapes of
        inputs whose dims are not divided evenly among the ranks. Raises ValueError if the arrays do not fit INPUTS, and RuntimeError for
        other failures.
        """
        inputs = self._tensors(INPUTS, arrays, global_shapes or {})
        _call(f"{NAME}_prepare", self._handle, inputs, self._shapes)
        self._prepared = _key(arrays, global_shapes)

    def __call__(self, *arrays: Any, global_shapes: Mapping[str, Sequence[int]] | None = None) -> Any:
        """Returns the local output, or a tuple of several outputs. If TARGET is "cuda", enqueues the call on PyTorch's current stream.

        Pass None for an input that this rank does not hold. An output that this rank does not hold is None. For an output in the memory of
        a donated input, the returned array is that input. Raises the errors of `prepare`.
        """
        if self._prepared != _key(arrays, global_shapes):
            self.prepare(*arrays, global_shapes=global_shapes)
        by_name = dict(zip((each.name for each in INPUTS), arrays, strict=True))
        results = [
            None
            if each.blocks[self._world.rank] is None
            else by_name[each.memory]
            if each.memory
            else _empty(self._shape(each), each.dtype, self._world.device)
            for each in OUTPUTS
        ]
        inputs, outputs = self._tensors(INPUTS, arrays, global_shapes or {}), self._tensors(OUTPUTS, results, {})
        _call(f"{NAME}_run", self._handle, inputs, outputs, ctypes.c_void_p(_stream(self._world.device)))
        if TARGET == "cpu":
            _call("hw_wheel_synchronize")
        return results[0] if len(results) == 1 else tuple(results)

    def close(self) -> None:
        """Waits for the enqueued calls, and frees the memory of the program."""
        if self._handle:
            _call("hw_wheel_synchronize")
            _call(f"{NAME}_destroy", self._handle)
            self._handle = ctypes.c_void_p()

    def _shape(self, output: Parameter) -> list[int]:
        shape = self._shapes[output.at]
        return list(shape.dims[: shape.ndim])

    def _tensors(self, parameters: Sequence[Parameter], arrays: Sequence[Any], global_shapes: Mapping[str, Sequence[int]]) -> Any:
        """Returns the struct of inputs or outputs of the C API, as an array of hw_tensor."""
        tensors = (_Tensor * max(1, len(parameters)))()
        for each, array in _given(parameters, arrays):
            if each.blocks[self._world.rank] is not None:
                _expect(each, array)
                device = self._world.device if TARGET == "cpu" else array.device.index
                shape, global_shape = (_Shape(len(of), tuple(of)) for of in (array.shape, global_shapes.get(each.name, ())))
                tensors[each.at] = _Tensor(_address(array), _CODES[each.dtype], shape, device, global_shape)
        return tensors


def run(*arrays: Any) -> Any:
    """Returns the global output, or a tuple of several outputs, for global arrays in the order of INPUTS.

    All ranks run as threads of this process, on simulated devices or on the first RANKS GPUs. Raises ValueError if an array
    does not fit its parameter, and RuntimeError for other failures, such as too few GPUs.
    """
    given = _given(INPUTS, arrays)
    for each, array in given:
        _expect(each, array)
    _decide("threads", "hw_use_devices", ctypes.c_int(RANKS))
    id, shapes = _new_id(), {each.name: array.shape for each, array in given}
    prepared = threading.Barrier(RANKS)
    outputs = dict[int, tuple[Any, ...]]()
    errors = list[BaseException]()

    def run_rank(rank: int) -> None:
        try:
            world = World.__new__(World)
            world._join(id, rank, rank)
            program = Program(world)
            own = [None if each.blocks[rank] is None else _taken(array, each.block(array.shape, rank), rank) for each, array in given]
            program.prepare(*own, global_shapes=shapes)
            prepared.wait()
            results = program(*own, global_shapes=shapes)
            outputs[rank] = (results,) if len(OUTPUTS) == 1 else results
            program.close()
            world.close()
        except BaseException as error:
            errors.append(error)
            prepared.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    joined = [_joined(each, [outputs[rank][at] for rank in range(RANKS)]) for at, each in enumerate(OUTPUTS)]
    return joined[0] if len(joined) == 1 else tuple(joined)


def _joined(parameter: Parameter, locals: Sequence[Any]) -> Any:
    """Assembles the global array of an output from the local arrays."""
    held = [rank for rank, blocks in enumerate(parameter.blocks) if blocks is not None]
    shape = []
    for dim in range(locals[held[0]].ndim):
        by_pieces = {parameter.blocks[rank][dim][1]: locals[rank].shape[dim] for rank in held}
        shape.append(sum(by_pieces.values()))
    result = _empty(shape, parameter.dtype, 0)
    for rank in held:
        _put(result, parameter.block(shape, rank), locals[rank])
    return result


def _given(parameters: Sequence[Parameter], arrays: Sequence[Any]) -> list[tuple[Parameter, Any]]:
    """Pairs of a parameter and its array. Raises ValueError if their numbers differ."""
    if len(arrays) != len(parameters):
        raise ValueError(f"{NAME}: {len(arrays)} arrays; pass {len(parameters)}: {', '.join(each.name for each in parameters)}")
    return list(zip(parameters, arrays, strict=True))


def _expect(parameter: Parameter, array: Any) -> None:
    """Raises ValueError unless `array` is a contiguous array of the parameter's dtype and number of dims."""
    kind = torch.Tensor if TARGET == "cuda" else np.ndarray
    if not isinstance(array, kind):
        what = f"{kind.__module__}.{kind.__name__}"
        raise ValueError(f"{NAME}: {parameter.name}: a {type(array).__name__} is given; pass a {what} of type {parameter.type}")
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype != parameter.dtype or array.ndim != parameter.ndim:
        raise ValueError(f"{NAME}: {parameter.name}: a {dtype} array of shape {list(array.shape)} is given; pass a {parameter.type}")
    if not (array.is_contiguous() if TARGET == "cuda" else array.flags.c_contiguous):
        raise ValueError(f"{NAME}: {parameter.name}: the array is not contiguous; pass a contiguous copy")


def _key(arrays: Sequence[Any], global_shapes: Mapping[str, Sequence[int]] | None) -> Any:
    """Key of a call. Calls with equal keys need only one `prepare`."""
    return [array is not None and tuple(array.shape) for array in arrays], {name: tuple(of) for name, of in (global_shapes or {}).items()}


# --- arrays of both targets -------------------------------------------------------------------------------------------


def _address(array: Any) -> int:
    return int(array.data_ptr() if TARGET == "cuda" else array.ctypes.data)


def _empty(shape: Sequence[int], dtype: str, device: int) -> Any:
    if TARGET == "cuda":
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=f"cuda:{device}")
    return np.empty(tuple(shape), getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


def _taken(array: Any, block: Sequence[np.ndarray[Any, Any]], device: int) -> Any:
    """Copies a block of a global array to the device."""
    if TARGET == "cuda":
        for dim, own in enumerate(block):
            array = array.index_select(dim, torch.from_numpy(own).to(array.device))
        return array.to(f"cuda:{device}", copy=True).contiguous()
    return np.ascontiguousarray(array[np.ix_(*block)]) if block else array.copy()


def _put(result: Any, block: Sequence[np.ndarray[Any, Any]], local: Any) -> None:
    """Writes a local array to its block of the global array."""
    if TARGET == "cuda":
        local, block = local.to(result.device), [torch.from_numpy(own).to(result.device) for own in block]
        result[torch.meshgrid(*block, indexing="ij") if block else ...] = local
    else:
        result[np.ix_(*block) if block else ...] = local


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if TARGET == "cuda" else 0
