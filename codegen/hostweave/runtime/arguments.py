"""Checks of arrays against the parameters of a program, and the inputs that `Program.bind` binds."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from math import prod
from numbers import Number

from hostweave.base.errors import ArgumentError, SizeError, did_you_mean
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.runtime.arrays import Array, ArrayLibrary, ArrayView, library_of, view
from hostweave.targets.target import Target
from hostweave.types.mesh import Mesh, local_range
from hostweave.types.tensor import Shape, TensorType, block_of, holds
from hostweave.types.zigzag import Zigzag


def ordered_inputs(
    program: str, parameters: Sequence[Parameter], bound: Container[str], given: Sequence[Array], named: Mapping[str, Array]
) -> tuple[Array, ...]:
    """Arguments of a call in the order of `parameters`, which are the inputs that are not bound."""
    names = [parameter.name for parameter in parameters]
    arrays = dict(zip(names, given, strict=False))

    def signature() -> str:  # slow, so only for errors
        return f"the program takes {', '.join(f'{p.name}: {p.type}' for p in parameters)}"

    if len(given) > len(names):
        inputs = "1 input" if len(names) == 1 else f"{len(names)} inputs"
        raise ArgumentError(f"{program}: {len(given)} positional arrays for {inputs}; {signature()}")
    if duplicates := [name for name in named if name in arrays]:
        raise ArgumentError(f"{program}: argument {duplicates[0]} is given by position and by name; omit one of them")
    arrays |= named
    if already_bound := [name for name in named if name in bound]:
        raise ArgumentError(f"{program}: argument {already_bound[0]} is bound; omit it, or call the program without this binding")
    if unknown := [name for name in named if name not in names]:
        raise ArgumentError(f"{program}: there is no argument {', '.join(sorted(unknown))}; {signature()}")
    if missing := [name for name in names if name not in arrays]:
        raise ArgumentError(f"{program}: missing argument {', '.join(sorted(missing))}; {signature()}")
    return tuple(arrays[name] for name in names)


def expect_count(program: str, parameters: Sequence[Parameter], arrays: Sequence[Array]) -> None:
    if len(arrays) != len(parameters):
        signature = ", ".join(f"{p.name}: {p.type}" for p in parameters)
        raise ArgumentError(f"{program}: takes {len(parameters)} arrays ({signature}), not {len(arrays)}; pass one per input")


def accept(program: str, target: Target, name: str, type_: TensorType, array: Array) -> tuple[ArrayLibrary, Array]:
    """Checks an array against a parameter's type. Returns the array's library, and the array in the form of `ArrayLibrary.accept`."""
    try:
        library = library_of(array)
    except TypeError as error:
        remedy = "pass np.asarray(value)" if isinstance(array, Number) else "pass a NumPy, PyTorch, CuPy or JAX array"
        raise ArgumentError(f"{program}: {name}: {error}; {remedy}") from None
    try:
        array = library.accept(array)
    except TypeError as error:
        raise ArgumentError(f"{program}: {name}: {error}") from None
    dtype, shape = library.dtype(array), array.shape
    if dtype != type_.dtype or len(shape) != len(type_.dims):
        mismatch = f"{program}: {name}: expected {type_}, got {dtype}[{', '.join(map(str, shape))}]"
        remedy = f"pass an array of {len(type_.dims)} dims"
        if isinstance(dtype, str):
            advice = "pass real and imaginary part as two arrays" if dtype.startswith("complex") else f"cast it to {type_.dtype}"
            remedy = f"programs have no {dtype}: {advice}"
        elif dtype != type_.dtype:
            remedy = f"cast it, or compile for {dtype}"
        raise ArgumentError(f"{mismatch}; {remedy}")
    if library.address(array) == 0 and prod(shape):
        raise ArgumentError(f"{program}: {name}: the data pointer is null, but the array has elements; pass an array with memory")
    try:
        target.expect_device(library.device(array))
    except TypeError as error:
        raise ArgumentError(f"{program}: {name}: {error}") from None
    return library, array


def local_shard(program: str, name: str, type_: TensorType, mesh: Mesh, array: Array) -> Array:
    """Local block of a torch DTensor, or any other array unchanged."""
    if not hasattr(type(array), "to_local"):
        return array
    axes, placements = tuple(array.device_mesh.mesh_dim_names or ()), tuple(array.placements)
    if any(isinstance(dim.axes, Zigzag) for dim in type_.dims):
        why = f"expected {type_}, and DTensor placements cannot express zigzag order"
        raise ArgumentError(f"{program}: {name}: {why}; pass a tensor of this rank's two pieces")
    sizes = dict(type_.mesh_in(mesh).axes)
    mismatched_axes = [axis for axis, size in zip(axes, array.device_mesh.shape, strict=False) if size != sizes.get(axis, 1)]
    if not axes or mismatched_axes:
        found = ", ".join(f"{axis}={size}" for axis, size in zip(axes, array.device_mesh.shape, strict=False)) or "dims without names"
        remedy = "create the device mesh with the names and sizes of these axes"
        raise ArgumentError(f"{program}: {name}: is a DTensor on a mesh of {found}, and the program is for {mesh}; {remedy}")
    axes_by_dim: list[tuple[str, ...]] = [() for _ in array.shape]
    for axis, placement in zip(axes, placements, strict=True):
        if placement.is_shard() and sizes.get(axis, 1) > 1:
            axes_by_dim[placement.dim] += (axis,)
    expected_axes = [tuple(axis for axis in dim.axes if sizes[axis] > 1) for dim in type_.dims]
    if any(placement.is_partial() for placement in placements) or axes_by_dim != expected_axes:
        dim_of_axis = {axis: dim for dim, of in enumerate(type_.dims) for axis in of.axes}
        wanted = ", ".join(f"Shard({dim_of_axis[axis]})" if axis in dim_of_axis else "Replicate()" for axis in axes)
        got = f"got a DTensor placed as [{', '.join(map(repr, placements))}]"
        raise ArgumentError(f"{program}: {name}: expected {type_}, {got}; call .redistribute(placements=[{wanted}])")
    return array.to_local()


def expect_writable(where: str, library: ArrayLibrary, array: Array) -> None:
    if not library.is_writable(array):
        raise ArgumentError(f"{where}: is donated but read-only; pass a writable array, such as a copy")


class BoundInputs:
    """Bound arrays by name, and the inputs that calls still take. Calls make the checks that need other inputs or the rank's device."""

    def __init__(self, host: HostProgram, target: Target, arrays: Mapping[str, Array], before: BoundInputs | None = None):
        self._host = host
        types = self._types = {parameter.name: parameter.type for parameter in host.arguments}
        self.arrays: dict[str, tuple[ArrayLibrary, Array]] = dict(before.arrays) if before else {}
        for name, array in arrays.items():
            where = f"{host.name}: bind: {name}"
            if name in self.arrays:
                raise ArgumentError(f"{where}: is bound already; omit it, or bind the original program")
            if name in {output.memory for output in host.results}:
                raise ArgumentError(f"{where}: is donated, so each call writes to it; pass it to each call")
            if name not in types:
                raise ArgumentError(f"{where}: there is no such input; {did_you_mean(name, types)}")
            library, accepted = accept(f"{host.name}: bind", target, name, types[name], array)
            _check_sizes(where, types[name], host.mesh, tuple(accepted.shape))
            self.arrays[name] = library, accepted
        self.unbound: tuple[Parameter, ...] = tuple(parameter for parameter in host.arguments if parameter.name not in self.arrays)

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(array.shape) for name, (_, array) in self.arrays.items()}

    @cached_property
    def blocks(self) -> list[dict[str, ArrayView]]:
        """For each rank, the rank's blocks of the bound arrays. The arrays must be global."""
        return [
            {name: block(*library_and_array, self._types[name], self._host.mesh, rank) for name, library_and_array in self.arrays.items()}
            for rank in range(self._host.mesh.size)
        ]


def block(library: ArrayLibrary, array: Array, type_: TensorType, mesh: Mesh, rank: int) -> ArrayView:
    """View of the rank's block of a global array. The view has no array if the rank has no block."""
    if not holds(type_, mesh, rank):
        return ArrayView(tuple(array.shape))
    block_of_rank = array[block_of(type_, mesh, rank, array.shape)] if type_.axes else array
    return view(library, library.contiguous(block_of_rank), type_.dtype, tuple(array.shape))


def _check_sizes(where: str, type_: TensorType, mesh: Mesh, shape: Shape) -> None:
    """Checks dims with constant sizes: each dim must have the global size, or the local size of some rank."""
    mesh = type_.mesh_in(mesh)
    for index, (dim, size) in enumerate(zip(type_.dims, shape, strict=True)):
        if not dim.size.is_int:
            continue
        global_size, ranks = dim.size.bind({}), mesh.size_of(dim.axes)
        local_sizes = {len(local_range(global_size, ranks, rank)) for rank in range(ranks)}
        if size != global_size and size not in local_sizes:
            wanted = f"{global_size}" + (f", or {' or '.join(map(str, sorted(local_sizes)))} on a rank" if ranks > 1 else "")
            raise SizeError(f"{where}: dim {index} is {size}; it must be {wanted}; pass an array of type {type_}")
