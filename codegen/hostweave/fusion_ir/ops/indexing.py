"""Ops that read or write at computed indices, and ops that need whole rows, such as cumulative sums and sorting.

An op with indices as operands also has an operand `rows` for each indexed dim: the global indices that the rank holds. The dim may be
sharded: at indices of other ranks, `take` reads zeros, and writes are omitted.
"""

from dataclasses import replace
from typing import Any

from hostweave.fusion_ir.index_map import ONE, IndexMap, Labels, aligned, numbered
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import AXIS, DESCENDING, FIRST, GROUPS, HALVES, ORDER
from hostweave.fusion_ir.ops.definition import Infer, Mismatch, OpDef, Types, broadcast, checked_axis, require, same_dtype, unsharded
from hostweave.types.size import Size
from hostweave.types.tensor import INTS, NUMBERS, Dim, DType, TensorType, i32, i64

OPS: dict[str, OpDef] = {}

MAX_BLOCK_SORT = 2048  # maximum number of elements that one block sorts, and so selects from a longer row: hw::kSorted
INDEXED, OTHER = "v", "w"  # labels of the indexed dim, and of the unrelated dim of a source, update or result


def _replaced(type: TensorType, axis: int, size: Size) -> TensorType:
    return TensorType(type.dtype, tuple(Dim(size if i == axis else dim) for i, dim in enumerate(type.shape)))


def _rows(rows: TensorType, size: Size | None = None) -> Size:
    """Size of an indexed dim. Checks that `rows` is a vector of i64, with `size` elements if given."""
    if rows.dtype != i64 or len(rows.dims) != 1 or size not in (None, rows.shape[0]):
        raise Mismatch(f"rows: {rows} are not the i64 indices of a dim{'' if size is None else f' of size {size}'}; use iota")
    return rows.shape[0]


def _index(types: Types, op: Op) -> TensorType:
    require(types[0], INTS)
    _rows(types[1])
    return TensorType(i64, unsharded(types[0]).dims)


def _checked(np: Any, ids: Any, rows: Any) -> Any:
    wrong = (ids < 0) | (ids >= len(rows))
    if wrong.any():
        raise IndexError(f"index {ids[wrong].flat[0]} is out of range for a dim of {len(rows)} elements")
    return ids.astype(np.int64)


def _indices(types: Types, op: Op) -> IndexMap:
    labels = numbered(types[0].shape)
    return IndexMap((labels, (INDEXED,)), labels, unwalked=frozenset((INDEXED,)))


OPS["index"] = OpDef(2, _index, _indices, _checked, cpp="hw::index({0}, {1})", cost=2, whole="looked up", counts=True)

# The op `start` clamps the start of a slice to the valid range.
OPS["start"] = replace(OPS["index"], numpy=lambda np, ids, rows: np.clip(ids, 0, len(rows) - 1).astype(np.int64), cpp="hw::start({0}, {1})")


def _at(index: TensorType, beside: TensorType) -> None:
    if index.dtype != i64 or len(index.dims) != len(beside.dims):
        raise Mismatch(f"{index} is not an i64 tensor with as many dims as {beside}; use hw.expand_dims")


def _take(types: Types, op: Op) -> TensorType:
    x, index, rows = types
    axis = checked_axis(op[AXIS], x)
    _at(index, x)
    _rows(rows, x.shape[axis])
    return _replaced(TensorType(x.dtype, broadcast((_replaced(x, axis, ONE), _replaced(index, axis, ONE)))), axis, index.shape[axis])


def _held(np: Any, index: Any, rows: Any) -> tuple[Any, Any]:
    """Local position of each index (0 if another rank holds the index), and True for each index that this rank holds."""
    local = index - (rows[0] if len(rows) else 0)
    held = (local >= 0) & (local < len(rows))
    return np.where(held, local, 0), held


def _taken(np: Any, x: Any, index: Any, rows: Any, axis: int) -> Any:
    local, held = _held(np, index, rows)
    shape = np.broadcast_shapes(index.shape, tuple(1 if i == axis else size for i, size in enumerate(x.shape)))
    if not len(rows):
        return np.zeros(shape, x.dtype)
    whole = [x.shape[axis] if i == axis else size for i, size in enumerate(shape)]
    taken = np.take_along_axis(np.broadcast_to(x, whole), np.broadcast_to(local, shape), axis)
    return np.where(np.broadcast_to(held, shape), taken, np.zeros((), x.dtype))


def _looked_up(types: Types, op: Op) -> IndexMap:
    result = op.result.type.shape
    labels = numbered(result)
    x, index = (
        tuple(label if i != op[AXIS] else own for i, label in enumerate(aligned(type.shape, result, labels)))
        for type, own in ((types[0], INDEXED), (types[1], labels[op[AXIS]]))
    )
    return IndexMap((x, index, (INDEXED,)), labels, unwalked=frozenset((INDEXED,)))


OPS["take"] = OpDef(
    *(3, _take, _looked_up, _taken, (AXIS,)),
    cpp="{0}[{1} - {2}]",
    gathers=True,
    cost=4,
    partial="sum",
    linear="first",
    whole="looked up",
    makes="taken",
    is_exact=True,
)


def _reverse_second(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, halves = checked_axis(op[AXIS], x), checked_axis(op[HALVES], x)
    if x.shape[halves] != Size(2) or axis == halves:
        raise Mismatch(f"halves={halves} must be a dim of {x} with size 2, other than axis={axis}")
    return unsharded(x)


def _reversed_alone(types: Types, op: Op) -> IndexMap:
    labels = numbered(types[0].shape)
    source = tuple(INDEXED if i == op[AXIS] else label for i, label in enumerate(labels))
    return IndexMap((source,), labels, blocks=((labels[op[HALVES]], 1),), unwalked=frozenset((INDEXED,)))


def _second_reversed(np: Any, x: Any, axis: int, halves: int) -> Any:
    first, second = np.split(x, 2, halves)
    return np.concatenate([first, np.flip(second, axis)], halves)


OPS["reverse_second"] = OpDef(
    *(1, _reverse_second, _reversed_alone, _second_reversed, (AXIS, HALVES)),
    cpp="{0}[half ? last - i : i]",
    gathers=True,
    linear="first",
    whole="reversed",
    makes="in_order",
)


def _scatter(types: Types, op: Op) -> TensorType:
    *into, index, source, rows = types
    axis = checked_axis(op[AXIS], source)
    _at(index, source)
    if index.shape[axis] != source.shape[axis]:
        raise Mismatch(f"{index} does not have an index for each element of dim {axis} of {source}; make these dims equal")
    if not into:
        require(source, NUMBERS)
    size = _rows(rows)
    result = _replaced(TensorType(source.dtype, broadcast((_replaced(index, axis, ONE), _replaced(source, axis, ONE)))), axis, size)
    for x in into:
        if (x.dtype, x.shape) != (result.dtype, result.shape):
            raise Mismatch(f"cannot scatter {source} to {x}: the result would be {result}; make dtypes and dims except dim {axis} equal")
    return result


def _scattered(np: Any, *arrays: Any, axis: int) -> Any:
    *into, index, source, rows = arrays
    local, held = _held(np, index, rows)
    shape = np.broadcast_shapes(index.shape, source.shape)
    local, held, source = (np.broadcast_to(array, shape) for array in (local, held, source))
    grid = np.nonzero(held)
    where = tuple(local[grid] if i == axis else at for i, at in enumerate(grid))
    if into:
        result = into[0].copy()
        result[where] = source[grid]
        return result
    result = np.zeros([len(rows) if i == axis else size for i, size in enumerate(shape)], source.dtype)
    np.add.at(result, where, source[grid])
    return result


def _sent(types: Types, op: Op) -> IndexMap:
    """Index map of scatters. If the source of a scatter_sum is sharded along the indexed dim, each rank adds its part of the source."""
    *into, index, source, _ = types
    result = op.result.type.shape
    labels = numbered(result)
    kept: Labels = tuple(INDEXED if i == op[AXIS] else label for i, label in enumerate(labels))
    sources = [aligned(type.shape, result, labels) for type in (index, source)]
    ends = [tuple(OTHER if i == op[AXIS] else label for i, label in enumerate(own)) for own in sources]
    return IndexMap((*(kept for _ in into), *ends, (INDEXED,)), kept, unwalked=frozenset((INDEXED, OTHER)))


_WRITES: dict[str, Any] = {"splits_fibers": True, "whole": "written by indices"}
OPS["scatter"] = OpDef(4, _scatter, _sent, _scattered, (AXIS,), fiber="hw::scatter", makes="scattered", **_WRITES)
OPS["scatter_sum"] = OpDef(3, _scatter, _sent, _scattered, (AXIS,), fiber="hw::scatter_sum", partial="sum", is_exact=True, **_WRITES)


def _update(types: Types, op: Op) -> TensorType:
    x, update, *starts_and_rows = types
    axes = op[ORDER]
    if len(update.dims) != len(x.dims) or len(starts_and_rows) != 2 * len(axes) or not set(axes) <= set(range(len(x.dims))):
        raise Mismatch(f"cannot write {update} to {x} along dims {axes}; use equally many dims, and a start and rows for each of {axes}")
    same_dtype((x, update))
    for axis, (have, size) in enumerate(zip(x.shape, update.shape, strict=True)):
        if axis not in axes and have != size:
            raise Mismatch(f"cannot write {update} to {x}: dim {axis} has no start, and its sizes differ; give it a start")
    for axis, start, rows in zip(axes, starts_and_rows[::2], starts_and_rows[1::2], strict=True):
        if start.dtype != i64 or len(start.dims) > min(axes) or start.shape != x.shape[: len(start.dims)]:
            wanted = f"an i64 without dims, or with leading dims of {x} that are not cut"
            raise Mismatch(f"the start {start} of dim {axis} must be {wanted}; use op start")
        _rows(rows, x.shape[axis])
    return unsharded(x)


def _updated(np: Any, x: Any, update: Any, *starts_and_rows: Any, axes: tuple[int, ...]) -> Any:
    """NumPy reference of dynamic_update_slice on local rows. If a start has dims, each batch has its own position."""
    if any(np.ndim(start) for start in starts_and_rows[::2]):

        def of(index: int) -> list[Any]:
            return [each[index] if number % 2 == 0 and np.ndim(each) else each for number, each in enumerate(starts_and_rows)]

        inner = tuple(axis - 1 for axis in axes)
        return np.stack([_updated(np, x[i], update[i], *of(i), axes=inner) for i in range(len(x))]) if len(x) else x.copy()
    result, into, taken = x.copy(), [slice(None)] * x.ndim, [slice(None)] * x.ndim
    for axis, start, rows in zip(axes, starts_and_rows[::2], starts_and_rows[1::2], strict=True):
        begin = int(start) - (int(rows[0]) if len(rows) else 0)
        first, last = max(begin, 0), max(min(begin + update.shape[axis], len(rows)), 0)
        into[axis], taken[axis] = slice(first, max(first, last)), slice(first - begin, max(first, last) - begin)
    result[tuple(into)] = update[tuple(taken)]
    return result


def _written(types: Types, op: Op) -> IndexMap:
    """Index map of dynamic_update_slice. If a dim with a start is sharded, a rank still needs the whole update along this dim."""
    labels = numbered(types[0].shape)
    kept, own = (tuple(f"{word}{i}" if i in op[ORDER] else label for i, label in enumerate(labels)) for word in (INDEXED, OTHER))
    unwalked = frozenset(f"{word}{i}" for i in op[ORDER] for word in (INDEXED, OTHER))
    axes = op[ORDER]
    of_starts_and_rows = [
        dims for i, start in zip(axes, types[2::2], strict=True) for dims in (labels[: len(start.dims)], (f"{INDEXED}{i}",))
    ]
    return IndexMap((kept, own, *of_starts_and_rows), kept, unwalked=unwalked)


OPS["dynamic_update_slice"] = OpDef(
    None, _update, _written, _updated, (ORDER,), updates=True, whole="written at positions from a tensor", makes="updated"
)


def _whole_rows(types: Types, op: Op) -> IndexMap:
    labels = numbered(types[0].shape)
    source, result = (tuple(own if i == op[AXIS] else label for i, label in enumerate(labels)) for own in (INDEXED, OTHER))
    return IndexMap((source,), result, unwalked=frozenset((INDEXED, OTHER)))


def _along(kinds: tuple[str, ...], dtype: DType | None = None) -> Infer:
    """Type rule of an op along a dim. The operand has one of `kinds`. The result has the operand's shape, and by default its dtype."""

    def infer(types: Types, op: Op) -> TensorType:
        require(types[0], kinds)
        checked_axis(op[AXIS], types[0])
        return TensorType(dtype or types[0].dtype, unsharded(types[0]).dims)

    return infer


def _order(types: Types, op: Op) -> TensorType:
    result, first = _along(NUMBERS, i64)(types, op), op[FIRST]
    size = result.shape[op[AXIS]]
    most = min(int(size), MAX_BLOCK_SORT) if size.is_int else MAX_BLOCK_SORT
    if not 0 <= first <= most:
        raise Mismatch(f"first={first} is not from 0 to {most}; write first=0 to order all elements")
    return _replaced(result, op[AXIS], Size(first)) if first else result


def _of_groups(types: Types, op: Op) -> TensorType:
    result = _along(INTS, i32)(types, op)
    return _replaced(result, op[AXIS], result.shape[op[AXIS]] * 2 + op[GROUPS])


def _group_order(np: Any, x: Any, axis: int, groups: int) -> Any:
    x = np.swapaxes(x, axis, -1)
    order = np.argsort(x, -1, stable=True)
    ends = np.sum(np.expand_dims(x, (x.ndim,)) <= np.arange(groups), axis=-2)
    positions = np.where(x < groups, np.argsort(order, -1, stable=True), 0)
    order = np.where(np.arange(x.shape[-1]) < ends[..., -1:], order, 0)
    return np.swapaxes(np.concatenate([ends, order, positions], -1).astype(np.int32), axis, -1)


def _argsort(np: Any, x: Any, axis: int, descending: bool = False, first: int = 0) -> Any:
    order = np.argsort(np.flip(x, axis) if descending else x, axis=axis, stable=True)
    if descending:
        order = x.shape[axis] - 1 - np.flip(order, axis)  # keeps the order of equal elements
    return np.take(order, np.arange(first or x.shape[axis]), axis)


OPS["cumsum"] = OpDef(
    1, _along(NUMBERS), _whole_rows, lambda np, x, axis: np.cumsum(x, axis, x.dtype), (AXIS,), fiber="hw::cumsum<{total}>", whole="added up"
)
OPS["argsort"] = OpDef(
    1, _order, _whole_rows, _argsort, (AXIS, DESCENDING, FIRST), fiber="hw::argsort<{descending}>", in_clusters=True, whole="ordered"
)
OPS["inverse_order"] = OpDef(  # each row of the operand is a permutation of 0, 1, ..., n - 1
    1,
    _along(INTS, i64),
    _whole_rows,
    lambda np, x, axis: np.argsort(x, axis=axis, stable=True),
    (AXIS,),
    fiber="hw::inverse_order",
    whole="ordered",
)
# The results are the ends of the groups, the indices sorted by group, and the position of each element in this order. Indices and
# positions of elements outside of all groups are 0.
OPS["group_order"] = OpDef(1, _of_groups, _whole_rows, _group_order, (AXIS, GROUPS), fiber="hw::group_order<{groups}>", whole="ordered")
