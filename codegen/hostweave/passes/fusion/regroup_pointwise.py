"""Computes pointwise ops in the shape before or after a reshape. The ops then fuse with kernels of that shape. Here, a matmul computes %x:

    %h: bf16[S*B, N] = add(%x, %bias)                   %h: bf16[S*B, N] = add(%x, %bias)
    %h_3d: bf16[S, B, N] = reshape(%h)                  %g_regrouped: bf16[S*B, N] = tanh(%h)
    %g: bf16[S, B, N] = tanh(%h_3d)           becomes   %y: bf16[S*B, E] = matmul(%g_regrouped, %w)
    %g_2d: bf16[S*B, N] = reshape(%g)
    %y: bf16[S*B, E] = matmul(%g_2d, %w)

A kernel has one index space, so it cannot contain a reshape that merges or splits dims. Ops of one shape that use each other's results move
together, as a group. A group does not move if another kernel reads values of the group, or computes operands of the group, in the old
shape. The pass skips sharded values, values of chunk loops, and ops that could be the epilogue of a matmul.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.index_map import ONE, SymbolicShape, groups
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.rewriting import consumers, eliminate_dead_code, is_pointwise
from hostweave.options import Options
from hostweave.types.tensor import Dim


def regroup_pointwise(fusion: Fusion, options: Options) -> Fusion:
    while moving := [*filter(None, map(_Groups(fusion).moved, fusion.ops))]:
        moved = _Moving(fusion, moving).rewritten()
        fusion = replace(moved, body=eliminate_dead_code(moved.ops, fusion.outputs))
    return fusion


@dataclass(frozen=True)
class _Group:
    """Names of pointwise ops of one shape, and the new shape of these ops."""

    names: set[str]
    have: SymbolicShape
    want: SymbolicShape
    regrouped: dict[str, str] = field(default_factory=dict)  # value -> the value in the new shape


class _Groups:
    def __init__(self, fusion: Fusion):
        self.fusion, self.made, self.uses, self.types = fusion, fusion.made, consumers(fusion), fusion.types
        self.numbers = {op.result.name: number for number, op in enumerate(fusion.ops)}
        self.seen: set[str] = set()
        self.changed: set[str] = set()  # ops of groups that move, and the views between these groups and their neighbours

    def moved(self, op: Op) -> _Group | None:
        """Group of an op, with the group's new shape. None if the op is not pointwise, or the group does not move now or was examined
        before."""
        if op.result.name in self.seen or not is_pointwise(op):
            return None
        have = op.result.type.shape
        names = self.connected({op.result.name}, lambda other: is_pointwise(other) and other.result.type.shape == have)
        around = self.connected(names, lambda other: OPS[other.kind].is_view)  # with the views between the group and its neighbours
        self.seen |= names
        for shape in dict.fromkeys(self.shapes_beside(names, have)):
            group = _Group(names, have, shape)
            is_merge = any(len(left) != 1 or len(right) != 1 for left, right in groups(have, shape))
            is_merge = is_merge and shape[:1] not in ((), (ONE,))
            if is_merge and self.may_move(group) and self.changed.isdisjoint(around):
                self.changed |= around
                return group
        return None

    def shapes_beside(self, names: set[str], have: SymbolicShape) -> Iterator[SymbolicShape]:
        """Shapes of kernels that compute operands of a group before a reshape, or read values of the group after a reshape."""
        reshapes = {op.result.name for name in names for op in self.beside(name) if op.kind == "reshape"}
        for result in sorted(reshapes, key=self.numbers.__getitem__):
            (source,) = self.made[result].tensors
            made = self.made.get(source)
            if source not in names and self.types[result].shape == have and made and _is_kernel(made):
                yield self.types[source].shape
            elif source in names and self.is_read(result):
                yield self.types[result].shape

    def connected(self, names: set[str], fits: Callable[[Op], bool]) -> set[str]:
        """Adds all ops for which `fits` is true, and that are connected to `names` by operands and results of such ops."""
        found, waiting = set(names), [*names]
        while waiting:
            new = {op.result.name for op in self.beside(waiting.pop()) if fits(op)} - found
            found |= new
            waiting += new
        return found

    def beside(self, name: str) -> list[Op]:
        operands = (self.made[operand] for operand in self.made[name].tensors if operand in self.made)
        return [*operands, *filter(None, self.uses[name])]

    def is_read(self, name: str) -> bool:
        return any(_is_kernel(user) or (OPS[user.kind].is_view and self.is_read(user.result.name)) for user in self.uses[name] if user)

    def may_move(self, group: _Group) -> bool:
        for name in {operand for member in group.names for operand in self.made[member].tensors} - group.names:
            op, shape = self.made.get(name), self.types[name].shape
            new = _regrouped(shape, group)
            if new is None:
                return False
            is_given = new == shape or bool(op and op.kind == "reshape" and self.types[op.tensors[0]].shape == new)
            while op and OPS[op.kind].is_view:
                op = self.made.get(op.tensors[0])
            if not is_given and (self.types[name].axes or (op and (_is_kernel(op) or self.has_epilogue(op, group)))):
                return False
        for user in (user for name in group.names for user in self.uses[name] if user and user.result.name not in group.names):
            is_reshape = user.kind == "reshape" and user.result.type.shape == group.want and user.result.name not in self.fusion.outputs
            if not is_reshape and (_is_kernel(user) or (OPS[user.kind].is_view and self.is_read(user.result.name))):
                return False
        return True

    def has_epilogue(self, op: Op, group: _Group) -> bool:
        """True if `op` is a matmul, and an op of the group may be its epilogue."""
        readers = (user for user in self.uses[op.result.name] if user and user.result.name in group.names)
        return OPS[op.kind].is_product and not all(OPS[user.kind].is_cast for user in readers)


class _Moving(OpRewriter):
    """Gives the ops of groups their new shapes. Adds reshapes of operands and results where needed."""

    def __init__(self, fusion: Fusion, groups: Iterable[_Group]):
        super().__init__(fusion)
        self.made, self.group_of = fusion.made, {name: group for group in groups for name in group.names}
        self.dropped: dict[str, str] = {}  # reshape after a group -> value that consumers read instead

    def add(self, op: Op) -> None:
        name = op.result.name
        source = self.group_of.get(op.tensors[0]) if op.kind == "reshape" else None
        if source and op.result.type.shape == source.want:
            self.dropped[name] = source.regrouped[name] = source.regrouped[op.tensors[0]]
        elif group := self.group_of.get(name):
            operands = {operand: self.operand(operand, group) for operand in op.tensors}
            group.regrouped[name] = new = self.free_name(f"{name}_regrouped")
            type = replace(op.result.type, dims=tuple(map(Dim, group.want)))
            self.emit(replace(op.renamed(operands), result=replace(op.result, name=new, type=type)))
            self.emit(replace(op, kind="reshape", operands=(new,), attributes=()))
        else:
            self.emit(op.renamed(self.dropped))

    def operand(self, name: str, group: _Group) -> str:
        if name not in group.regrouped:
            op, new = self.made.get(name), _regrouped(self.types[name].shape, group)
            assert new is not None
            if new == self.types[name].shape:
                group.regrouped[name] = name
            elif op and op.kind == "reshape" and self.types[op.tensors[0]].shape == new:
                group.regrouped[name] = op.tensors[0]
            else:
                group.regrouped[name] = self.reshaped(name, 0, len(self.types[name].shape), new, of=name)
        return group.regrouped[name]


def _is_kernel(op: Op) -> bool:
    entry = OPS[op.kind]
    return bool(entry.cpp or entry.combine or entry.fiber or entry.parts) and not entry.is_view


def _regrouped(shape: SymbolicShape, group: _Group) -> SymbolicShape | None:
    """Shape that an operand needs after its group has moved. None if the operand is broadcast along only some of the dims that merge."""
    wide = (ONE,) * (len(group.have) - len(shape)) + shape
    new = [ONE] * len(group.want)
    for left, right in groups(group.have, group.want):
        if all(wide[i] == group.have[i] for i in left):
            for j in right:
                new[j] = group.want[j]
        elif any(wide[i] != ONE for i in left):
            return None
    while len(new) > len(shape) and new[0] == ONE:
        new.pop(0)
    return tuple(new)
