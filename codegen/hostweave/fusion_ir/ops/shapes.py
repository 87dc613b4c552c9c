"""Ops that change the shape, or the order of elements."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from hostweave.fusion_ir.index_map import ONE, IndexMap, Labels, broadcasts, groups, numbered
from hostweave.fusion_ir.ir import Attribute, Op
from hostweave.fusion_ir.ops.attributes import AXES, AXIS, HIGH, INDEX, LOW, ORDER, START, STEP, VALUE
from hostweave.fusion_ir.ops.definition import Indices, Infer, Mismatch, OpDef, Types, checked_axes, checked_axis, elementwise, same_dtype
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, TensorType
from hostweave.types.zigzag import Zigzag

OPS: dict[str, OpDef] = {}


def is_element(op: Op) -> bool:
    """True for one index of the first dim, such as `w[0]`."""
    return op.kind == "select" and op[AXIS] == 0


def _expand_dims(types: Types, op: Op) -> TensorType:
    axes = checked_axes(op[AXES], len(types[0].dims) + len(op[AXES]))
    old = iter(types[0].shape)
    return TensorType(types[0].dtype, tuple(Dim(ONE if i in axes else next(old)) for i in range(len(types[0].dims) + len(axes))))


def _reshape(types: Types, op: Op) -> TensorType:
    if product(types[0].shape) != product(op.result.type.shape):
        raise Mismatch(f"{types[0]} differs in its number of elements from {_shape_text(op.result.type.shape)}; make the products equal")
    if any(not size.factors and size.divisor > 1 for size in op.result.type.shape):
        raise Mismatch(f"{_shape_text(op.result.type.shape)} has a size that is not whole; write whole sizes with the same product")
    return TensorType(types[0].dtype, tuple(Dim(size) for size in op.result.type.shape))


def _broadcast_to(types: Types, op: Op) -> TensorType:
    want = op.result.type.shape
    if not broadcasts(types[0].shape, want):
        raise Mismatch(f"{types[0]} does not broadcast to {_shape_text(want)}; dims are aligned from the right and must be equal or 1")
    return TensorType(types[0].dtype, tuple(Dim(size) for size in want))


def _shape_text(shape: tuple[Size, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _transpose(types: Types, op: Op) -> TensorType:
    axes = op[ORDER]
    if sorted(axes) != list(range(len(types[0].dims))):
        raise Mismatch(f"axes={axes} is not a permutation of the {len(types[0].dims)} dims of {types[0]}; name each dim once")
    return TensorType(types[0].dtype, tuple(Dim(types[0].shape[i]) for i in axes))


def _select(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, index = checked_axis(op[AXIS], x), op[INDEX]
    if x.shape[axis].is_int and not 0 <= index < int(x.shape[axis]):
        raise Mismatch(f"index {index} of dim {axis} of {x} is out of range; indices go from 0 to {int(x.shape[axis]) - 1}")
    return TensorType(x.dtype, tuple(Dim(size) for i, size in enumerate(x.shape) if i != axis))


def _slice(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, start, step = checked_axis(op[AXIS], x), op[START], op[STEP]
    if len(op.result.type.dims) != len(x.dims):
        raise Mismatch(f"{op.result.type} does not have the {len(x.dims)} dims of {x}; use select to drop one")
    taken, whole = op.result.type.shape[axis], x.shape[axis]
    if step < 1:
        raise Mismatch(f"step={step} is not at least 1")
    if whole.is_int and taken.is_int and not 0 <= start <= _end(start, int(taken), step) <= int(whole):
        why = f"{taken} elements from index {start} by step {step} exceed dim {axis} of {x}"
        raise Mismatch(f"{why}; indices go from 0 to {int(whole) - 1}")
    return TensorType(x.dtype, tuple(Dim(taken if i == axis else size) for i, size in enumerate(x.shape)))


def _end(start: int, taken: int, step: int) -> int:
    """Exclusive end index of a slice. Equals the start if the slice is empty."""
    return start + (taken - 1) * step + 1 if taken else start


def _concat(types: Types, op: Op) -> TensorType:
    first, dtype = types[0], same_dtype(types)
    axis = checked_axis(op[AXIS], first)
    for other in types[1:]:
        if len(other.dims) != len(first.dims):
            raise Mismatch(f"{first} and {other} differ in their number of dims; use hw.expand_dims or hw.reshape")
        for i, (have, want) in enumerate(zip(other.shape, first.shape, strict=True)):
            if i != axis and have != want:
                raise Mismatch(f"{first} and {other} differ in dim {i}; only dim {axis}, along which they are joined, may differ")
    size = sum((type.shape[axis] for type in types), Size(0))
    return TensorType(dtype, tuple(Dim(size if i == axis else e) for i, e in enumerate(first.shape)))


def _pad(types: Types, op: Op) -> TensorType:
    (x,) = types
    low, high = op[LOW], op[HIGH]
    if not len(low) == len(high) == len(x.dims):
        raise Mismatch(f"{len(low)} and {len(high)} widths for the {len(x.dims)} dims of {x}; give one per dim")
    if min((*low, *high), default=0) < 0:
        raise Mismatch(f"widths {low} before and {high} after are not all at least 0; use a slice to remove elements")
    return TensorType(x.dtype, tuple(Dim(size + a + b) for size, a, b in zip(x.shape, low, high, strict=True)))


def padded_dims(op: Op) -> tuple[int, ...]:
    low, high = op[LOW], op[HIGH]
    return tuple(i for i, widths in enumerate(zip(low, high, strict=True)) if any(widths))


def _numpy_slice(np: Any, x: Any, axis: int, start: int, step: int, shape: tuple[int, ...]) -> Any:
    first = start if start >= 0 else x.shape[axis] + start
    return x[(slice(None),) * axis + (slice(first, _end(first, shape[axis], step), step),)]


def _inserted(types: Types, op: Op) -> IndexMap:
    labels = numbered(types[0].shape)
    left = iter(labels)
    return IndexMap((labels,), tuple(None if i in op[AXES] else next(left) for i in range(len(labels) + len(op[AXES]))))


def _regrouped(types: Types, op: Op) -> IndexMap:
    """Index map of a reshape. An unchanged dim keeps its label. The outermost dims of a split or merge share a label in `outer`."""
    have: list[str | None] = [None] * len(types[0].dims)
    want: list[str | None] = [None] * len(op.result.type.dims)
    outer = set()
    for number, (left, right) in enumerate(groups(types[0].shape, op.result.type.shape)):
        if left and right:
            have[left[0]] = want[right[0]] = label = f"i{number}"
            if len(left) > 1 or len(right) > 1:
                outer.add(label)
    return IndexMap((tuple(have),), tuple(want), frozenset(outer))


def _regrouped_axes(x: TensorType, op: Op, mesh: Mesh) -> tuple[tuple[str, ...], ...] | None:
    """Mesh axes with which the result of a reshape needs no communication: [8@y,x] becomes [2@y, 4@x]. None if all axes need communication.

    The axes exist if three conditions hold for each group of merged or split dims, both in x and in the result. No dim is sharded in
    zigzag. The last sharded dim is split evenly. A rank holds one index of each dim before the last sharded dim.
    """
    shape = op.result.type.shape
    result: list[tuple[str, ...]] = [()] * len(shape)
    for left, right in groups(x.shape, shape):
        if len(left) == len(right) == 1:
            result[right[0]] = x.dims[left[0]].axes
            continue
        if any(isinstance(x.dims[i].axes, Zigzag) for i in left):
            return None
        last = max((i for i in left if x.dims[i].axes), default=-1)
        if any(i < last and not _has_one_index(x.dims[i], mesh) for i in left) or not (last < 0 or _is_even(x.dims[last], mesh)):
            return None
        axes = [axis for i in left for axis in x.dims[i].axes]
        for j in right:
            prefixes = (Dim(shape[j], tuple(axes[:count])) for count in range(len(axes), -1, -1))
            dim = next(prefix for prefix in prefixes if _is_even(prefix, mesh))
            result[j], axes = dim.axes, axes[len(dim.axes) :]
            if axes and not _has_one_index(dim, mesh):
                return None
    return tuple(result) if sum(map(len, result)) == len(x.axes) else None


def _has_one_index(dim: Dim, mesh: Mesh) -> bool:
    return dim.size.is_int and int(dim.size) == mesh.size_of(dim.axes)


def _is_even(dim: Dim, mesh: Mesh) -> bool:
    return not dim.size.is_uneven(mesh.size_of(dim.axes), ())


def _permuted(types: Types, op: Op) -> IndexMap:
    return IndexMap((numbered(types[0].shape),), tuple(f"i{i}" for i in op[ORDER]))


def _cut(types: Types, op: Op) -> IndexMap:
    labels: Labels = tuple(None if i == op[AXIS] else label for i, label in enumerate(numbered(types[0].shape)))
    return IndexMap((labels,), labels if op.kind == "slice" else tuple(filter(None, labels)))


def _joined(types: Types, op: Op) -> IndexMap:
    """Index map of concat and pad. Joined and padded dims have no label."""
    axes = padded_dims(op) if op.kind == "pad" else (op[AXIS],)
    labels: Labels = tuple(None if i in axes else label for i, label in enumerate(numbered(types[0].shape)))
    return IndexMap((labels,) * len(types), labels)


def _starts(types: Types, op: Op) -> tuple[dict[int, Size], ...]:
    return tuple({op[AXIS]: start} for start in accumulate((type.shape[op[AXIS]] for type in types[:-1]), initial=Size(0)))


def _view(kind: str, infer: Infer, map: Indices, numpy: Callable[..., Any], *attributes: Attribute[Any], **facts: Any) -> None:
    OPS[kind] = OpDef(1, infer, map, numpy, attributes, is_view=True, linear="first", **facts)


_SAME: dict[str, Any] = {"cpp": "{0}", "cost": 0}
_view("expand_dims", _expand_dims, _inserted, lambda np, x, axis: np.expand_dims(x, axis), AXES, makes="expanded", **_SAME)
_view(
    "reshape",
    _reshape,
    _regrouped,
    lambda np, x, shape: np.reshape(x, shape),
    target="shape",
    whole="split or merged",
    carried=_regrouped_axes,
    makes="reshaped",
    **_SAME,
)
_view("permute_dims", _transpose, _permuted, lambda np, x, axes: np.transpose(x, axes), ORDER, makes="transposed", **_SAME)
OPS["broadcast_to"] = OpDef(
    1,
    _broadcast_to,
    elementwise,
    lambda np, x, shape: np.broadcast_to(x, shape),
    target="shape",
    makes="broadcast",
    linear="first",
    **_SAME,
)
_view("select", _select, _cut, lambda np, x, axis, index: x[(slice(None),) * axis + (index,)], AXIS, INDEX, cuts=True)
_view("slice", _slice, _cut, _numpy_slice, AXIS, START, STEP, target="shape", whole="cut", makes="sliced", cuts=True)
OPS["concat"] = OpDef(
    *(None, _concat, _joined, lambda np, *arrays, axis: np.concatenate(arrays, axis), (AXIS,)),
    whole="joined",
    parts=_starts,
    makes="joined",
    linear="terms",
)
OPS["pad"] = OpDef(
    1,
    _pad,
    _joined,
    lambda np, x, low, high, value=0.0: np.pad(x, [*zip(low, high, strict=True)], constant_values=value),
    (LOW, HIGH, VALUE),
    whole="made longer",
    parts=lambda types, op: ({i: Size(op[LOW][i]) for i in padded_dims(op)},),
    makes="padded",
)
