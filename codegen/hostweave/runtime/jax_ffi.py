"""Programs as XLA custom calls inside jax.jit. Implements `Program.as_jax_ffi`."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hostweave.base.errors import ArgumentError, ExecutionError, optional, reason_of
from hostweave.base.forks import reset_after_fork
from hostweave.base.paths import BUILDER, RUNTIME
from hostweave.build.cache import get_or_make, name_of, opened, stamp_of
from hostweave.build.make import make_runtime
from hostweave.runtime.arguments import expect_count
from hostweave.runtime.arrays import Array, ForeignBuffer
from hostweave.runtime.group import Group, current
from hostweave.targets.target import CPU_DEVICE, find_target
from hostweave.types.numpy_dtypes import dtype_of_name, numpy_dtype
from hostweave.types.tensor import DType, local_outputs

Program = Any  # hostweave.api.Program
ArgumentTypes = tuple[tuple[tuple[int, ...], DType], ...]  # shapes and dtypes

_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # target -> XLA platform
_LIBRARY = "libhostweave_jax.so"


# Custom calls of traced functions, with the addresses and the stream as parameters. Compiled functions refer to them by index.
_calls: list[Callable[[Any, int | None], None]] = []
_calls_lock = reset_after_fork(threading.Lock())


def jax_call(program: Program) -> Callable[..., Any]:
    name, host = program.name, program.host
    jax = optional("jax", f"{name}: as_jax_ffi")
    if donated := [output.memory for output in host.results if output.memory]:
        raise ArgumentError(f"{name}: as_jax_ffi: donates {', '.join(donated)}, but JAX arrays cannot change; omit donate=")
    if on_submeshes := [p.name for p in (*host.arguments, *host.results) if p.type.mesh]:
        raise ArgumentError(f"{name}: as_jax_ffi: {', '.join(on_submeshes)}: not on all ranks; reshard to the whole mesh")
    inputs, call_indices = {p.name: p.type for p in host.arguments}, dict[Any, int]()

    def function(*arrays: Array) -> Any:
        group = _group(name)
        wide = [f"{p.name}: {p.type}" for p in (*host.arguments, *host.results) if _is_narrowed(jax, p.type.dtype)]
        if wide:
            remedy = "call jax.config.update('jax_enable_x64', True)"
            raise ArgumentError(f"{name}: as_jax_ffi: JAX has no arrays of 64-bit dtypes by default ({', '.join(wide)}); {remedy}")
        expect_count(name, host.arguments, arrays)
        input_types = tuple(_shape_and_dtype(name, p, array) for p, array in zip(host.arguments, arrays, strict=True))
        shapes = {p.name: shape for p, (shape, _) in zip(host.arguments, input_types, strict=True)}
        outputs = local_outputs(name, program.mesh, inputs, [p.type for p in host.results], shapes, group.rank)
        output_types = tuple((shape, p.type.dtype) for shape, p in zip(outputs, host.results, strict=True))
        with _calls_lock:
            key = call_indices.setdefault((group, input_types), len(_calls))
            if key == len(_calls):
                _calls.append(partial(_call, program, group, input_types, output_types, _device(jax, program)))
        types = [jax.ShapeDtypeStruct(shape, numpy_dtype(dtype)) for shape, dtype in output_types]
        target = _register(jax, program.target.name)
        call = jax.ffi.ffi_call(target, types if len(types) > 1 else types[0], has_side_effect=True)
        results = call(*arrays, key=np.int64(key))
        return tuple(results) if len(types) > 1 else results

    function.__name__ = function.__qualname__ = name
    return function


def _call(
    program: Program, group: Group, inputs: ArgumentTypes, outputs: ArgumentTypes, device: int, addresses: Any, stream: int | None
) -> None:
    buffers = [ForeignBuffer(addresses[i] or 0, *argument, device) for i, argument in enumerate((*inputs, *outputs))]
    out, on = buffers[len(inputs) :], None if device == CPU_DEVICE else stream or 0
    program(*buffers[: len(inputs)], out=out if len(out) > 1 else out[0], stream=on, group=group)


def _is_narrowed(jax: Any, dtype: DType) -> bool:
    """True if JAX replaces the dtype by one of fewer bits. A program would then read and write beyond JAX's arrays."""
    return bool(jax.dtypes.canonicalize_dtype(numpy_dtype(dtype)) != numpy_dtype(dtype))


def _group(name: str) -> Group:
    group = current()
    if group is None:
        raise ExecutionError(f"{name}: this process has not joined a group; call hw.init first")
    if group.in_process and group.count > 1:
        raise ArgumentError(f"{name}: as_jax_ffi: ranks are threads, but JAX needs one process per device; start processes")
    group.expect_working()
    return group


def _shape_and_dtype(name: str, parameter: Any, array: Array) -> tuple[tuple[int, ...], DType]:
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise ArgumentError(f"{name}: {parameter.name}: expected an array, got {type(array).__name__}; pass a JAX array")
    dtype, type_ = dtype_of_name(str(array.dtype)), parameter.type
    if dtype != type_.dtype or len(array.shape) != len(type_.dims):
        got = f"{dtype}[{', '.join(map(str, array.shape))}]"
        remedy = "cast it" if dtype != type_.dtype else f"pass an array of {len(type_.dims)} dims"
        raise ArgumentError(f"{name}: {parameter.name}: expected {type_}, got {got}; {remedy}")
    return tuple(array.shape), type_.dtype


def _device(jax: Any, program: Program) -> int:
    """Index of JAX's only device in this process."""
    backend, name = program.target.name, f"{program.name}: as_jax_ffi"
    try:
        devices = jax.local_devices(backend=backend)
    except RuntimeError as error:
        raise ArgumentError(
            f"{name}: is for the target {backend}, but JAX has no such devices ({error}); compile for another target"
        ) from None
    if len(devices) != 1:
        raise ArgumentError(
            f"{name}: JAX has {len(devices)} devices in this process, but a rank has one; set CUDA_VISIBLE_DEVICES, "
            "or call jax.distributed.initialize(local_device_ids=...)"
        )
    return CPU_DEVICE if backend == "cpu" else int(devices[0].local_hardware_id)


def _run(key: int, addresses: Any, stream: int | None, problem: int, size: int) -> int:
    """Runs a call. Threads of XLA call this function."""
    try:
        _calls[key](addresses, stream)
        return 0
    except BaseException as error:
        text = reason_of(error).encode()[: size - 1] + b"\0"
        ctypes.memmove(problem, text, len(text))
        return 1


_native_run = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)(_run)


@cache
def _register(jax: Any, target: str) -> str:
    library, name = _library(Path(jax.ffi.include_dir()), import_module("jaxlib").__version__), f"hostweave_jax_{target}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform=_PLATFORMS[target])
    return name


@cache
def _library(include: Path, version: str) -> ctypes.CDLL:
    """Native handler of the calls, compiled on first use with the headers of the installed JAX."""
    toolchain = replace(find_target("cpu").toolchain(), include_folders=(include,), libraries=())
    made_by = *map(stamp_of, (BUILDER, RUNTIME)), toolchain.stamp, version
    files = [RUNTIME / "jax" / "ffi_handler.cpp"]
    folder = get_or_make(name_of("runtime_jax", *made_by), lambda folder: make_runtime(folder, files, toolchain, _LIBRARY))
    with opened(folder / _LIBRARY) as file:
        library = ctypes.CDLL(file)
    library.hostweave_jax_calls(_native_run)
    return library
