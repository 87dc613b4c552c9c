"""Algorithms across shards: in an iteration, one collective or one move to another mesh covers a slice of every rank's shard."""

from hostweave.communication.algorithm import Algorithm, Lowering
from hostweave.communication.collective import CollectiveLowering
from hostweave.communication.cost import MATMUL_SLOWDOWN_BY_KERNELS, Overlap, communication, communication_slowdown
from hostweave.communication.dataflow import LoopIteration
from hostweave.communication.transfers import send_and_receive
from hostweave.transports.transport import COLLECTIVES, MESSAGES, SIGNALS
from hostweave.types.machine import Machine


class _Slice(Lowering):
    def in_iteration(self, iteration: LoopIteration) -> None:
        CollectiveLowering(self.b, self.flow, self.values, self.op, self.reduction).run(iteration)


class _Move(Lowering):
    def in_iteration(self, iteration: LoopIteration) -> None:
        op, source, target = self.op, self.values.operand, self.values.destination
        send_and_receive(self.b, self.flow, op, lambda: source(op, 0, iteration), lambda: target(op, iteration), iteration)


class _Slices(Algorithm):
    chunking = "across_shards"

    def chunks(self, ranks: int) -> tuple[int, ...]:
        return self.chunks_to_try

    def seconds(self, overlap: Overlap, machine: Machine, chunks: int) -> float:
        transfer = communication(machine, self.kind, overlap.ranks, overlap.size / chunks, overlap.hosts)
        return overlap.in_chunks(machine, chunks, 0, transfer, communication_slowdown(overlap.ranks), MATMUL_SLOWDOWN_BY_KERNELS, 0.0)


_BY = ((COLLECTIVES, _Slice), (SIGNALS, _Slice))
ALGORITHMS = (
    *(_Slices(kind, kind, _BY) for kind in ("all_gather", "reduce_scatter", "all_to_all")),
    _Slices("all_reduce", "all_reduce", _BY, chunks_to_try=(2, 4)),
    _Slices("collective_permute", "permute_shards", _BY),
    _Slices("transfer", "transfer", ((MESSAGES, _Move),)),
)
