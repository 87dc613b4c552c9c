"""Algorithms broadcast and reduce: in each iteration, the owner of a block broadcasts the block, or receives the reduction of the block."""

from hostweave.communication.algorithm import Algorithm, Lowering
from hostweave.communication.dataflow import LoopIteration, expr_of
from hostweave.communication.packing import branch, contiguous_source, packed_destination, temporary
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Expr
from hostweave.transports.transport import COLLECTIVES


class _Broadcast(Lowering):
    def owner(self, iteration: LoopIteration) -> Expr:
        """Owner of the iteration's block, which is the same block on all ranks."""
        return iteration.index // expr_of(iteration.subchunks)

    def is_own(self, iteration: LoopIteration) -> Expr:
        return self.owner(iteration).equals(self.rank)

    def in_iteration(self, iteration: LoopIteration) -> None:
        b = self.b
        for source, target in self.moves(iteration):
            with packed_destination(b, target, iteration) as landing:
                contiguous = contiguous_source(b, source, iteration)
                b.emit(ir.Broadcast(contiguous, landing, iteration.owned_by, b.channel(self.axes)))


class _Reduce(_Broadcast):
    def in_iteration(self, iteration: LoopIteration) -> None:
        b, ((source, target),) = self.b, self.moves(iteration)
        is_packed = not b.is_contiguous(target)
        arriving = temporary(b, target, iteration) if is_packed else target
        b.emit(ir.Reduce(contiguous_source(b, source, iteration), arriving, self.reduction.op, iteration.owned_by, b.channel(self.axes)))
        if is_packed:
            branch(b, iteration.is_own, lambda: b.emit(ir.Copy(arriving, target)))


BROADCAST = Algorithm("broadcast", "all_gather", ((COLLECTIVES, _Broadcast),))
REDUCE = Algorithm("reduce", "reduce_scatter", ((COLLECTIVES, _Reduce),))
