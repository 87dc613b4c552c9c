"""Schedules across shards: every step does one collective, or one move to another mesh, of a slice of each rank's shard."""

from hostweave.communication.cost import BESIDE_KERNELS, Overlap, communication, kernels_beside
from hostweave.communication.schedule import Schedule
from hostweave.fusion_ir.resharding import ReshardStep
from hostweave.transports.transport import COLLECTIVES, MESSAGES, SIGNALS, Transport
from hostweave.types.machine import Machine


class _Slices(Schedule):
    chunking = "across_shards"

    def fits(self, change: ReshardStep, transport: Transport, is_counted: bool, is_on_all_ranks: bool) -> bool:
        return not transport.shares_memory or is_on_all_ranks

    def chunks(self, ranks: int) -> tuple[int, ...]:
        return self.tried

    def seconds(self, overlap: Overlap, machine: Machine, chunks: int) -> float:
        transfer = communication(machine, self.kind, overlap.ranks, overlap.size / chunks)
        return overlap.in_chunks(machine, chunks, 0, transfer, kernels_beside(overlap.ranks), BESIDE_KERNELS, 0.0)


SCHEDULES = (
    *(_Slices(kind, kind, (COLLECTIVES, SIGNALS)) for kind in ("all_gather", "reduce_scatter", "all_to_all")),
    _Slices("all_reduce", "all_reduce", (COLLECTIVES, SIGNALS), tried=(2, 4)),
    _Slices("collective_permute", "permute_shards", (COLLECTIVES, SIGNALS)),
    _Slices("transfer", "transfer", (MESSAGES,)),
)
