"""Algorithms broadcast and reduce: in each iteration, the owner of a block broadcasts the block, or receives the reduction of the block."""

from hostweave.communication.algorithm import Algorithm, Lowering
from hostweave.communication.packing import branch, contiguous_source, packed_destination, temporary
from hostweave.communication.steps import LoopSteps, expr_of
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Expr
from hostweave.transports.transport import COLLECTIVES


class _Broadcast(Lowering):
    def owner(self, steps: LoopSteps) -> Expr:
        """Owner of the iteration's block, which is the same block on all ranks."""
        return steps.index // expr_of(steps.subchunks)

    def step(self, steps: LoopSteps) -> None:
        b = self.b
        for source, target in self.moves(steps):
            with packed_destination(b, target, steps) as landing:
                contiguous = contiguous_source(b, source, steps)
                b.emit(ir.Broadcast(contiguous, landing, steps.owned_by, b.channel(self.axes)))


class _Reduce(_Broadcast):
    def step(self, steps: LoopSteps) -> None:
        b, ((source, target),) = self.b, self.moves(steps)
        is_packed = not b.is_contiguous(target)
        arriving = temporary(b, target, steps) if is_packed else target
        b.emit(ir.Reduce(contiguous_source(b, source, steps), arriving, self.reduction.op, steps.owned_by, b.channel(self.axes)))
        if is_packed:
            branch(b, steps.owned_by.equals(self.rank), lambda: b.emit(ir.Copy(arriving, target)))


BROADCAST = Algorithm("broadcast", "all_gather", ((COLLECTIVES, _Broadcast),))
REDUCE = Algorithm("reduce", "reduce_scatter", ((COLLECTIVES, _Reduce),))
