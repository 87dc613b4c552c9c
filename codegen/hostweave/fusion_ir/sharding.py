"""Propagates shardings through ops by their index maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.index_map import IndexMap
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS, index_map
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, Partial, TensorType
from hostweave.types.zigzag import Zigzag, pieces, some_of

Axes = tuple[str, ...]
Layout = tuple[Axes, ...]  # mesh axes of each dim


def layout(type: TensorType) -> Layout:
    return tuple(dim.axes for dim in type.dims)


def with_layout(type: TensorType, axes: Layout, partial: Partial | None = None) -> TensorType:
    if axes == layout(type) and partial == type.partial:
        return type
    dims = tuple(Dim(dim.size, a) for dim, a in zip(type.dims, axes, strict=True))
    return replace(type, dims=dims, partial=partial)


def with_axes(type: TensorType, dim: int, axes: Axes) -> TensorType:
    return with_layout(type, (*layout(type)[:dim], axes, *layout(type)[dim + 1 :]), type.partial)


@dataclass(frozen=True)
class ShardingRule:
    """Layouts of an op's operands and result. `result` follows from the operands. `reduced` maps reduced labels to their mesh axes, over
    which the result is partial."""

    indices: IndexMap
    shapes: tuple[tuple[Dim, ...], ...]  # dims of the operands
    result: Layout
    reduced: dict[str, Axes]
    taken: tuple[Layout, ...] | None = None  # required layouts of the operands, if `stated` or `carried` of OpDef gives layouts

    def takes(self, dim: int, wanted: Dim, mesh: Mesh) -> bool:
        """True if dim `dim` of the result, and all dims of operands with the same label, can be split like `wanted`, and if the result then
        follows from these operands."""
        label = self.indices.result[dim] if self.taken is None else None
        pairs = zip(self.indices.operands, self.shapes, strict=True)
        sources = [source for labels, dims in pairs for at, source in zip(labels, dims, strict=True) if at == label is not None]
        is_shared = label is not None and _is_shared(self.indices, label, wanted.axes, mesh)
        both = [pair for source in sources for pair in ((wanted, source), (Dim(source.size, wanted.axes), wanted))]
        return bool(sources) and is_shared and all(_splits_alike(self.indices, label, one, other, mesh) for one, other in both)

    @property
    def partial_axes(self) -> Axes:
        return tuple(axis for axes in self.reduced.values() for axis in axes)

    def operands(self, result: Layout) -> tuple[Layout, ...]:
        """Layouts of operands from which the op computes the layout `result`. Partial axes must not split the result."""
        if self.taken is not None:
            return self.taken
        axes = {**self.reduced, **{label: a for label, a in zip(self.indices.result, result, strict=True) if label is not None}}
        return tuple(tuple(axes.get(label, ()) if label is not None else () for label in labels) for labels in self.indices.operands)

    def computed(self, result: Layout) -> Layout:
        """Layout before the reduction of the partial result, if `result` is the layout after the reduction."""
        partial = self.partial_axes
        return tuple(some_of(axes, lambda axis: axis not in partial) for axes in result)


def flow(op: Op, operands: Sequence[TensorType], mesh: Mesh) -> ShardingRule:
    """Derives the sharding rule of an op. `mesh` is the mesh of the program.

    If a mesh axis splits dims of different labels, a label of the result takes precedence over a reduced label. Among labels of the result,
    earlier operands take precedence, or later operands if the op has `last_is_first`. For reduced labels, earlier operands come first.
    """
    mesh, definition = op.result.type.mesh_in(mesh), OPS[op.kind]
    indices, shapes = index_map(op, operands), tuple(type.dims for type in operands)
    if definition.stated:
        result_type, taken = definition.stated(operands, op)
        return ShardingRule(indices, shapes, layout(result_type), {}, tuple(map(layout, taken)))
    if not any(type.axes for type in operands):  # fast path
        return ShardingRule(indices, shapes, ((),) * len(indices.result), {})
    kept = {label: dim.size for label, dim in zip(indices.result, op.result.type.dims, strict=True) if label is not None}
    claimed: dict[str, Axes] = {}
    reduced: dict[str, Axes] = {}
    used: set[str] = set()

    def claim(into: dict[str, Axes], label: str, axes: Axes) -> None:
        outermost = tuple(takewhile(lambda axis: axis not in used, axes))
        free = some_of(axes, outermost.__contains__)
        if free and label not in into:
            into[label] = free
            used.update(free)

    labelled = [list(zip(labels, type.dims, strict=True)) for labels, type in zip(indices.operands, operands, strict=True)]
    walked = [*((label, Dim(size)) for label, size in kept.items()), *chain.from_iterable(labelled)]

    def fits_all(label: str, dim: Dim) -> bool:
        return all(_splits_alike(indices, label, dim, other, mesh) for at, other in walked if at == label)

    pairs = [[(label, dim) for label, dim in dims if label and dim.axes and fits_all(label, dim)] for dims in labelled]
    for dims in reversed(pairs) if definition.last_is_first else pairs:
        for label, dim in dims:
            if label in kept:
                claim(claimed, label, _shared(indices, label, dim.axes, mesh))
    for dims in pairs:
        for label, dim in dims:
            if label not in kept and definition.partial and _is_shared(indices, label, dim.axes, mesh):
                claim(reduced, label, dim.axes)
    result = tuple(claimed.get(label, ()) if label else () for label in indices.result)
    is_losing = definition.carried and not op.result.stream and sum(map(len, result)) < len(operands[0].axes)
    if definition.carried and is_losing and (carried := definition.carried(operands[0], op, mesh)) is not None:
        return ShardingRule(indices, shapes, carried, {}, (layout(operands[0]),))
    return ShardingRule(indices, shapes, result, reduced)


def _shared(indices: IndexMap, label: str, axes: Axes, mesh: Mesh) -> Axes:
    """Longest prefix of `axes` that can split the dims of a label."""
    prefixes = (some_of(axes, axes[:end].__contains__) for end in range(len(axes), 0, -1))
    return next((prefix for prefix in prefixes if _is_shared(indices, label, prefix, mesh)), ())


def _is_shared(indices: IndexMap, label: str, axes: Axes, mesh: Mesh) -> bool:
    """True if `axes` can split the dims of a label. Zigzag axes cannot, if the label is in `unwalked` or `blocks`. A label in `blocks`
    needs one rank per block."""
    blocks, ranks = dict(indices.blocks), mesh.size_of(axes)
    is_contiguous = label in indices.unwalked or label in blocks
    return not (is_contiguous and isinstance(axes, Zigzag)) and blocks.get(label, ranks) == ranks


def _splits_alike(indices: IndexMap, label: str | None, dim: Dim, other: Dim, mesh: Mesh) -> bool:
    """True if the axes of `dim` can also split `other` of the same label: the sizes are equal, or the axes split both dims evenly.

    A dim in `blocks` may have any size, because a rank has one block. In zigzag, a symbolic `other` must be a multiple of `dim`."""
    if label in dict(indices.blocks) or dim.size == other.size:
        return True
    if isinstance(dim.axes, Zigzag) and not other.size.is_int:
        times = other.size.divided_by(dim.size)
        return times is not None and times.divisor == 1
    return divides(dim.axes, dim, mesh) and divides(dim.axes, other, mesh)


def partial_of(op: Op, operands: Sequence[TensorType], rule: ShardingRule) -> Partial | None:
    """Reduction that the result still needs, over axes of reduced dims and of partial operands. Raises ProgramError if the op needs reduced
    operands, or if one reduction does not suffice."""
    passed = {type.partial for type in operands if type.partial}
    if not passed:
        return Partial(OPS[op.kind].partial, rule.partial_axes) if rule.partial_axes else None
    (partial, *others), axes = passed, (*rule.partial_axes, *(axis for labels in rule.result for axis in labels))
    if others or not is_linear(op, operands) or partial.op != "sum" or set(axes) & set(partial.axes):
        terms = " and ".join(str(type) for type in operands if type.partial)
        raise ProgramError(f"{op.kind}: it needs the reduced values of {terms}; reshard the partial operand first", op.location)
    return replace(partial, axes=(*partial.axes, *rule.partial_axes))  # the own reduction of a linear op is a sum


def is_linear(op: Op, operands: Sequence[TensorType]) -> bool:
    """True if the op can be applied to the terms of partial operands before the terms are added. An `astype` must not round the terms."""
    partial = [type.partial is not None for type in operands]
    if OPS[op.kind].is_cast:
        before, after = operands[0].dtype, op.result.type.dtype
        return before.kind == after.kind == "float" and (before == after or before.itemsize < after.itemsize)
    return {"first": partial[0] and not any(partial[1:]), "factors": sum(partial) == 1, "terms": all(partial)}.get(
        OPS[op.kind].linear, False
    )


def partial_axes(type: TensorType) -> Axes:
    return type.partial.axes if type.partial else ()


def divides(axes: Axes, dim: Dim, mesh: Mesh) -> bool:
    """True if `axes` split the dim evenly, or if its size is symbolic."""
    return not dim.size.is_int or int(dim.size) % pieces(axes, mesh) == 0
