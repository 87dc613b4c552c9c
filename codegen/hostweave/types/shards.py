"""Splits global arrays into the blocks of the ranks, and joins them, at bound sizes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hostweave.base.errors import ArgumentError
from hostweave.types.mesh import Mesh
from hostweave.types.rank_sizes import local_range
from hostweave.types.tensor import TensorType

if TYPE_CHECKING:
    from numpy.typing import NDArray


Shape = tuple[int, ...]


def shard(type_: TensorType, array: NDArray[Any], rank: int, mesh: Mesh) -> NDArray[Any]:
    """The block of a global array that `rank` holds, a view. Raises ArgumentError where the shape does not fit, or the rank has none."""
    return array[checked_block(type_, array.shape, rank, mesh, "shard")]


def checked_block(type_: TensorType, shape: Shape, rank: int, mesh: Mesh, word: str) -> tuple[slice, ...]:
    """`block_of` for what a user gives: raises ArgumentError where the shape does not fit, or the rank has none."""
    if not holds(type_, mesh, rank):
        raise ArgumentError(f"{word}: rank {rank} has nothing of {type_}; ask a rank of its mesh")
    _check_rank(type_, shape)
    bind_sizes(word, mesh, {"array": type_}, {"array": shape}, None)
    return block_of(type_, mesh, rank, shape)


def unshard(type_: TensorType, arrays: Sequence[NDArray[Any]], mesh: Mesh) -> NDArray[Any]:
    """The global array of the blocks of all ranks, in rank order; where ranks hold copies the last one's is taken.

    Raises ArgumentError where there is not one array a rank, or where a shape does not fit.
    """
    import numpy as np

    mesh = type_.mesh_in(mesh)
    if len(arrays) != mesh.size:
        raise ArgumentError(f"unshard: {len(arrays)} arrays for the {mesh.size} ranks of {mesh}; pass one a rank, in rank order")
    for array in arrays:
        _check_rank(type_, array.shape)
    shape = shape_of_global(type_, mesh, {rank: array.shape for rank, array in zip(mesh.all_ranks, arrays, strict=True)})
    result = np.empty(shape, arrays[0].dtype)
    for rank, array in zip(mesh.all_ranks, arrays, strict=True):
        if array.shape != (wanted := block_shape(type_, mesh, rank, shape)):
            raise ArgumentError(
                f"unshard: rank {rank} holds {list(array.shape)}, not its block {list(wanted)} of {list(shape)}; pass what it holds"
            )
        result[block_of(type_, mesh, rank, shape)] = array
    return result


def shape_of_global(type_: TensorType, mesh: Mesh, shapes: Sequence[Shape] | Mapping[int, Shape]) -> Shape:
    """The shape of the global array of which the ranks hold blocks of these shapes: along each dim what the ranks that split it hold."""
    mesh = type_.mesh_in(mesh)
    return tuple(sum(shapes[rank][i] for rank in mesh.process_group(mesh.all_ranks[0], dim.axes)) for i, dim in enumerate(type_.dims))


def holds(type_: TensorType, mesh: Mesh, rank: int) -> bool:
    """Whether a rank has anything of it: none has that is not in its mesh."""
    return rank in type_.mesh_in(mesh).all_ranks


def _check_rank(type_: TensorType, shape: Shape) -> None:
    if len(shape) != len(type_.dims):
        raise ArgumentError(f"an array of {len(shape)} dims is not a {type_}; pass one of {len(type_.dims)} dims")


def global_shape(type_: TensorType, sizes: Mapping[str, int]) -> Shape:
    return tuple(size.bind(sizes) for size in type_.shape)


def block_shape(type_: TensorType, mesh: Mesh, rank: int, shape: Sequence[int]) -> Shape:
    """The shape of what a rank holds of a global array of `shape`."""
    return tuple(part.stop - part.start for part in block_of(type_, mesh, rank, shape))


def block_of(type_: TensorType, mesh: Mesh, rank: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """The block of a global array of `shape` that `rank`, one of its mesh, holds. The first axis of a dim splits it outermost."""
    mesh = type_.mesh_in(mesh)
    ranges = [
        local_range(size, mesh.size_of(dim.axes), mesh.rank_in_group(rank, dim.axes)) for dim, size in zip(type_.dims, shape, strict=True)
    ]
    return tuple(slice(part.start, part.stop) for part in ranges)


def local_outputs(
    program: str, mesh: Mesh, inputs: Mapping[str, TensorType], outputs: Sequence[TensorType], shapes: Mapping[str, Shape], rank: int
) -> list[Shape]:
    """The shapes of a rank's outputs, for its inputs of these shapes, where each rank has an even share of every sharded dim.

    Raises ArgumentError where a shape does not fit its type, or a name has two sizes.
    """
    even = {
        name: tuple(size * mesh.size_of(dim.axes) for size, dim in zip(shapes[name], type_.dims, strict=True))
        for name, type_ in inputs.items()
    }
    sizes = bind_sizes(program, mesh, inputs, even, None)
    return [block_shape(type_, mesh, rank, global_shape(type_, sizes)) for type_ in outputs]


def bind_sizes(
    program: str,
    mesh: Mesh,
    inputs: Mapping[str, TensorType],
    shapes: Mapping[str, Shape],
    uneven: Container[str] | None = (),
) -> dict[str, int]:
    """The size of every name in the types of the inputs; those in `uneven` need not divide, with None no size need.

    Raises ArgumentError where a shape does not fit its type, a name has two sizes, or ranks cannot share a dim evenly.
    """
    sizes: dict[str, int] = {}
    bound_by: dict[str, str] = {}
    for name, type_ in inputs.items():
        for dim_size, size in zip(type_.shape, shapes[name], strict=True):
            if symbol := dim_size.name:
                if sizes.setdefault(symbol, size) != size:
                    other, known = bound_by[symbol], sizes[symbol]
                    raise ArgumentError(f"{program}: {name}: {dim_size} is {size} here and {known} in {other}; pass arrays that agree")
                bound_by.setdefault(symbol, name)
    for name, type_ in inputs.items():
        for index, (dim, size) in enumerate(zip(type_.dims, shapes[name], strict=True)):
            place = f"{program}: {name}: dim {index}"
            try:
                wanted = dim.size.bind(sizes) if all(symbol in sizes for symbol in dim.size.symbols) else size
            except ValueError as error:
                raise ArgumentError(f"{place} is {size}; no size fits, because {error}") from None
            if wanted != size:
                raise ArgumentError(f"{place} is {size}; {wanted} is wanted{'' if dim.size.is_int else f' for {dim.size}'}")
            parts = type_.mesh_in(mesh).size_of(dim.axes)
            if size % parts and uneven is not None and not dim.size.is_uneven(parts, uneven):
                raise ArgumentError(
                    f"{place} ({dim.size} = {size}) cannot be shared evenly by {parts} ranks along {', '.join(dim.axes)}; "
                    f"pad it to {-(-size // parts) * parts}"
                )
    return sizes
