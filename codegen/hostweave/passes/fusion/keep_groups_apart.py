"""Avoids communication between two grouped matmuls with sharded experts: each rank keeps the rows of its experts.

    %h: f32[T, F] = grouped_matmul(%x, %w, %starts, %ends)     # w: [E@ep, K, F], on 2 ranks
    %a: f32[T, F] = silu(%h)
    %y: f32[T, N] = grouped_matmul(%a, %v, %starts, %ends)     # v: [E@ep, F, N]

becomes

    %h: f32[2, T, F] = grouped_matmul(%x, %w_apart, %starts_apart, %ends_apart)     # w_apart: [2@ep, E/2, K, F]
    %a: f32[2, T, F] = silu(%h)
    %y_apart: f32[2, T, N] = grouped_matmul(%a, %v_apart, %starts_apart, %ends_apart)
    %y: f32[T, N] = sum(%y_apart, axis=(0,))

The new first dim of %h and %a has one index per rank. In the second matmul, a rank reads only rows of its experts. The rank itself has
computed these rows in the first matmul. Only the final sum needs communication.
"""

from dataclasses import replace

from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.ir import Fusion, Op, attributes
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXIS, ORDER
from hostweave.fusion_ir.ops.definition import elementwise
from hostweave.fusion_ir.ops.grouped import MATMUL
from hostweave.fusion_ir.rewriting import consumers
from hostweave.options import Options
from hostweave.types.size import Size
from hostweave.types.tensor import Dim


def keep_groups_apart(fusion: Fusion, options: Options) -> Fusion:
    return _Apart(fusion).rewritten()


class _Apart(OpRewriter):
    def __init__(self, fusion: Fusion):
        super().__init__(fusion)
        self.made = fusion.made
        self.inputs = {value.name: value.type for value in fusion.inputs}
        self.uses = consumers(fusion)
        self.apart: dict[str, int] = {}  # value that gets a dim for ranks -> number of ranks
        self.last: set[str] = set()  # results of second matmuls
        self.known: dict[tuple[str, int], str] = {}  # (operand, ranks) -> result of `split`
        for op in fusion.ops:
            if op.kind == MATMUL and op.result.name not in self.apart and (ranks := self.ranks_of(op)) > 1:
                self.find(op, ranks)

    def ranks_of(self, op: Op) -> int:
        """Number of ranks that split the experts of a grouped matmul. 1 if the op cannot be rewritten."""
        name, type = op.tensors[1], self.fusion.types[op.tensors[1]]
        while name in self.made and self.made[name].kind in ("permute_dims", "astype", "copy"):
            if self.made[name].kind == "permute_dims" and self.made[name][ORDER][0] != 0:
                return 1
            name = self.made[name].tensors[0]
        axes = self.inputs[name].dims[0].axes if name in self.inputs else ()
        experts, ranks = type.shape[0], self.mesh.size_of(axes)
        is_plain = len(type.dims) == 3 and type.mesh is None and not op.result.stream
        return ranks if is_plain and experts.is_int and int(experts) % ranks == 0 else 1

    def find(self, first: Op, ranks: int) -> None:
        """Adds to `apart` the values between matmuls of the same groups, if all ops between these matmuls keep rows separate."""
        chain, last, left = {first.result.name}, set[str](), [first]
        while left:
            for user in self.uses[left.pop().result.name]:
                if user is None:
                    return
                name = user.result.name
                if user.kind == MATMUL and user.tensors[0] in chain and all(map(self.is_same, user.tensors[2:], first.tensors[2:])):
                    if self.ranks_of(user) != ranks or not chain.isdisjoint(user.tensors[1:]):
                        return
                    last.add(name)
                elif not self.keeps_rows(user, first):
                    return
                elif name not in chain:
                    chain.add(name)
                    left.append(user)
        if last:
            self.apart |= dict.fromkeys((*chain, *last), ranks)
            self.last |= last

    def is_same(self, a: str, b: str) -> bool:
        if a == b or a not in self.made or b not in self.made:
            return a == b
        one, other = self.made[a], self.made[b]
        alike = (one.kind, one.attributes, one.result.type) == (other.kind, other.attributes, other.result.type) and not one.callee
        return alike and len(one.tensors) == len(one.operands) == len(other.tensors) and all(map(self.is_same, one.tensors, other.tensors))

    def keeps_rows(self, user: Op, first: Op) -> bool:
        result = user.result
        if len(result.type.dims) != 2 or result.type.shape[0] != first.result.type.shape[0] or result.stream or result.pinned:
            return False
        return OPS[user.kind].map is elementwise or (user.kind == "slice" and user[AXIS] == 1)

    def add(self, op: Op) -> None:
        name = op.result.name
        if name not in self.apart:
            self.emit(op)
            return
        ranks = self.apart[name]
        operands = op.operands
        if op.kind == MATMUL:
            x, *others = op.tensors
            operands = (x, *(self.split(other, ranks) for other in others))
        if op.kind == "slice":
            op = op.with_attribute(AXIS, op[AXIS] + 1)
        type = replace(op.result.type, dims=(Dim(Size(ranks)), *op.result.type.dims))
        if name not in self.last:
            self.emit(replace(op, operands=operands, result=replace(op.result, type=type)))
            return
        apart = self.free_name(f"{name}_apart")
        self.emit(replace(op, operands=operands, result=replace(op.result, name=apart, type=type)))
        self.emit(Op("sum", (apart,), op.result, attributes(axis=(0,), keepdims=False), op.location))

    def split(self, name: str, ranks: int) -> str:
        """Reshapes the matrices or bounds of all experts from [E, ...] to [R, E/R, ...]."""
        if (name, ranks) not in self.known:
            experts = self.types[name].shape[0]
            self.known[name, ranks] = self.reshaped(name, 0, 1, (Size(ranks), experts // ranks), word="apart", of=name)
        return self.known[name, ranks]
