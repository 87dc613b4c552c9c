"""Moves a take of few elements before the pointwise op that computes the take's operand. The op then computes only the taken elements.

    %logp: f32[M, 1024] = subtract(%x, %lse)                 # lse: f32[M, 1]
    %y: f32[M, 1] = take(%logp, %index, %rows, axis=1)

becomes

    %x_taken: f32[M, 1] = take(%x, %index, %rows, axis=1)
    %y: f32[M, 1] = subtract(%x_taken, %lse)

The log-probabilities of a loss are then not written to memory. A take from a sharded value does not move. Such a take reads zeros for
indices of other ranks, and the pointwise op would change the zeros.
"""

from dataclasses import replace

from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.index_map import ONE
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops.attributes import AXIS
from hostweave.fusion_ir.rewriting import eliminate_dead_code, is_pointwise
from hostweave.options import Options

MIN_LENGTH_PER_INDEX = 16  # A take moves if the indexed dim has at least this many elements per index.


def take_first(fusion: Fusion, options: Options) -> Fusion:
    moved = _Taking(fusion).rewritten()
    if len(moved.ops) == len(fusion.ops):
        return fusion
    return take_first(replace(moved, body=eliminate_dead_code(moved.ops, fusion.outputs)), options)


class _Taking(OpRewriter):
    def add(self, op: Op) -> None:
        made = self.fusion.made.get(op.tensors[0]) if op.kind == "take" else None
        if made is None or not self.may_move(op, made):
            self.emit(op)
            return
        operands = tuple(self.taken(operand, op, made) if isinstance(operand, str) else operand for operand in made.operands)
        self.emit(replace(made, operands=operands, result=op.result, location=op.location))

    def may_move(self, op: Op, made: Op) -> bool:
        dims, axis = made.result.type.shape, op[AXIS]
        count, length = self.types[op.tensors[1]].shape[axis], dims[axis]
        is_few = count.is_int and length.is_int and MIN_LENGTH_PER_INDEX * int(count) <= int(length)
        is_plain = is_pointwise(made) and not (op.result.stream or op.result.type.axes or op.result.type.partial)
        return is_few and is_plain and all(self.dim_of(name, op, made) in (None, axis) for name in made.tensors)

    def dim_of(self, name: str, op: Op, made: Op) -> int | None:
        """Dim of the operand `name` that the take indexes. None if the operand lacks the dim, or has one element along the dim."""
        shape = self.types[name].shape
        dim = op[AXIS] - (len(made.result.type.shape) - len(shape))
        return None if dim < 0 or shape[dim] == ONE else dim

    def taken(self, name: str, op: Op, made: Op) -> str:
        """Emits a take from an operand of the pointwise op. Returns the result of this take, or the operand if the dim is broadcast."""
        if self.dim_of(name, op, made) is None:
            return name
        return self.make("take", name, *op.tensors[1:], how=op.attributes, word="taken", of=name)
