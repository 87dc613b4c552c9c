"""Lowers a reshard to a move between meshes, a collective, or the steps of an algorithm in a chunk loop."""

from collections.abc import Sequence

from hostweave.communication.algorithm import Lowering
from hostweave.communication.algorithms import find_algorithm
from hostweave.communication.collective import CollectiveLowering, gather_apart
from hostweave.communication.dataflow import Dataflow, LoopIteration
from hostweave.communication.packing import TermReduction
from hostweave.communication.transfers import Transfers
from hostweave.fusion_ir.ir import ChunkLoop, Op
from hostweave.fusion_ir.resharding import step_of
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.passes.lower.buffers import Buffers
from hostweave.passes.lower.kernels import Kernels


class Reshards:
    def __init__(self, flow: Dataflow, buffers: Buffers, kernels: Kernels, b: Builder):
        self.flow, self.buffers, self.kernels, self.b = flow, buffers, kernels, b
        self.transfers = Transfers(b, flow, buffers)
        self.lowerings: dict[str, Lowering] = {}  # result of a reshard in a chunk loop -> its lowering

    def begin_loop(self, loop: ChunkLoop, iteration: LoopIteration) -> Lowering | None:
        """Creates the lowerings of the reshards in a loop. Returns the first lowering, or None if the loop has no communication."""
        made, all = {op.result.name for op in loop.ops}, [op for op in loop.ops if op.result.walked.algorithm]
        for ops in [all] if loop.by_block else [[op] for op in all]:
            algorithm = find_algorithm(ops[0].kind, ops[0].result.walked.algorithm or "")
            make = algorithm.lowering(self.b.carrying(*algorithm.needs))
            lowering = make(self.b, self.flow, self.buffers, ops, iteration, made, self.reduction(ops[0]))
            self.lowerings |= dict.fromkeys((op.result.name for op in ops), lowering)
        return self.lowerings[all[0].result.name] if all else None

    def reshard(self, op: Op, iteration: LoopIteration | None) -> None:
        if iteration:
            if (lowering := self.lowerings[op.result.name]).op == op:  # One step communicates for all ops of the lowering.
                lowering.in_iteration(iteration)
        elif op.kind == "reduce":
            self.transfers.reduce(op, self.reduction(op))
        elif op.kind == "transfer":
            self.transfers.move(op)
        elif op.result.name in self.buffers.placement.by_shards:
            gather_apart(self.b, self.flow, self.buffers, op)
        else:
            CollectiveLowering(self.b, self.flow, self.buffers, op, self.reduction(op)).run(None)

    def reduction(self, op: Op) -> TermReduction:
        word = step_of(op).reduction

        def emit(terms: Sequence[str], dst: str) -> None:
            first, *others = terms
            adding, summing = self.kernels.adding, self.kernels.summing
            kernel = adding(terms, dst, op, word) if others else summing(word, first, dst, op)
            self.b.emit(ir.Launch(kernel, tuple(terms), (dst,)))

        return TermReduction(word, emit)
