"""Schedule put: copy engines write blocks to the memory of their readers, or read them from that of their owners."""

from hostweave.communication.cost import BESIDE_COPIES, Overlap
from hostweave.communication.schedule import FIRST, LAST, Schedule
from hostweave.transports.transport import SIGNALS
from hostweave.types.machine import Machine


class _Put(Schedule):
    def seconds(self, overlap: Overlap, machine: Machine, chunks: int) -> float:
        ranks, shard = overlap.ranks, overlap.size / overlap.ranks / machine.memory
        transfer = machine.link("get" if overlap.computed else "put", ranks).seconds(overlap.size / chunks)
        added = (ranks - 1) * shard if overlap.goes_on else machine.launch + (ranks + 1) * shard
        return overlap.in_chunks(machine, chunks, chunks // ranks, transfer, 1.0, BESIDE_COPIES, added)


# After a gather the end of a matmul and the beginning of the next share the device; what is scattered leaves as soon as it is multiplied,
# which is later for the first blocks where several are at once.
GATHER = _Put("put", "all_gather", (SIGNALS,), FIRST, most_streams=2, tried=(1, 2, 4))
SCATTER = _Put("put", "reduce_scatter", (SIGNALS,), LAST, most_streams=1, tried=(1, 2, 4))
