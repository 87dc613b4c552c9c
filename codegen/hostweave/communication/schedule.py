"""A schedule: how the chunks of one reshard travel in a loop. Each is an object in a file of its own; `schedules.py` lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hostweave.communication.cost import BESIDE_KERNELS, Overlap, kernels_beside
from hostweave.fusion_ir.resharding import ReshardStep
from hostweave.transports.transport import Transport
from hostweave.types.machine import Machine

FIRST, LAST = "local_first", "local_last"
# Of a gather a rank's own shard comes first, which is there; of a reduce-scatter it comes last, for it travels nowhere.
ROTATION_OF = {"all_gather": FIRST, "reduce_scatter": LAST}


@dataclass(frozen=True)
class Schedule:
    """What a loop does by one algorithm, for reshards of one kind."""

    name: str  # that users give as `algorithm=`
    kind: str
    needs: tuple[frozenset[str], ...]  # what a channel must carry, any one of these
    rotation: str | None = None  # which block a rank takes first
    most_streams: int | None = None  # that iterations alternate between; None for as many as the options say
    tried: tuple[int, ...] = ()  # chunks of each shard that the cost model weighs
    chunking: ClassVar[str] = "by_shard"

    def fits(self, change: ReshardStep, transport: Transport, is_counted: bool, is_on_all_ranks: bool) -> bool:
        """Whether it can do a reshard by a transport, in a loop with a known number of steps or not. Memory that ranks share is laid out
        alike on all of them, so that none may have a mesh of its own."""
        return not transport.shares_memory or (is_on_all_ranks and is_counted and change.reduction in ("", "sum"))

    def chunks(self, ranks: int) -> tuple[int, ...]:
        """The numbers of chunks that the cost model weighs."""
        return tuple(count * ranks for count in self.tried)

    def seconds(self, overlap: Overlap, machine: Machine, chunks: int) -> float:
        """Time of the loop by the cost model: kernels send a chunk to one rank after another."""
        transfer = machine.link("collective", 2).seconds(overlap.size / chunks)
        shard = overlap.size / overlap.ranks / machine.memory
        added = machine.launch + (overlap.ranks + 1) * shard
        own, slower = chunks // overlap.ranks, kernels_beside(overlap.ranks)
        return overlap.in_chunks(machine, chunks, own, transfer, slower, BESIDE_KERNELS, added)
