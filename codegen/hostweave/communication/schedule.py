"""A schedule: how the chunks of one reshard travel in a loop. Each is an object in a file of its own; `schedules.py` lists them.

    %x_gathered: bf16[M, K] stream(M, 8, by_shard, p2p, local_first) = all_gather(%x, dim=0, axes=(x))

is the schedule p2p of all_gathers. It says which reshards it fits, what it costs, and has the `Lowering` that writes it: what stands before
the loop, in a step, and after the loop.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from hostweave.communication.cost import BESIDE_KERNELS, Overlap, kernels_beside
from hostweave.communication.packing import Reduction
from hostweave.communication.steps import Dataflow, Steps, rank_in_group
from hostweave.communication.values import Values
from hostweave.fusion_ir.ir import ROTATIONS, Op
from hostweave.fusion_ir.resharding import ReshardStep, step_of
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Expr, Var
from hostweave.transports.transport import Transport
from hostweave.types.machine import Machine

FIRST, LAST = ROTATIONS  # of a gather a rank's own shard, which is there; of a reduce-scatter it travels nowhere


@dataclass(frozen=True)
class Schedule:
    """One algorithm of a chunk loop, for reshards of one kind."""

    name: str  # that users give as `algorithm=`
    kind: str
    lowerings: tuple[tuple[frozenset[str], type[Lowering]], ...]  # what a channel must carry, and what then writes the loop
    rotation: str | None = None  # which block a rank takes first
    most_streams: int | None = None  # that iterations alternate between; None for as many as the options say
    tried: tuple[int, ...] = ()  # chunks of each shard that the cost model weighs
    chunking: ClassVar[str] = "by_shard"

    @property
    def needs(self) -> tuple[frozenset[str], ...]:
        """Sets of capabilities: a channel must carry all of one set."""
        return tuple(needs for needs, _ in self.lowerings)

    def fits(self, change: ReshardStep, transport: Transport, is_counted: bool, is_on_all_ranks: bool) -> bool:
        """True if it can do a reshard by a transport, in a loop with a known number of steps or not. Memory that ranks share is laid out
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

    def lowering(self, b: Builder) -> type[Lowering]:
        """Returns the object that lowers it on the preferred transport."""
        transport = b.carrying(*self.needs)
        return next(lowering for needs, lowering in self.lowerings if needs <= transport.carries)


class Lowering:
    """The reshard of one loop, as its schedule writes it. In a loop by shard `steps` of the loop have no owner yet."""

    matmul: ir.Matmul | None = None  # the one that makes `adds`, which the schedule emits

    def __init__(self, b: Builder, flow: Dataflow, values: Values, op: Op, steps: Steps, in_loop: Set[str], reduction: Reduction):
        """`in_loop` is what ops of the loop make."""
        self.b, self.flow, self.values, self.op = b, flow, values, op
        self.steps, self.in_loop, self.reduction = steps, in_loop, reduction
        self.mesh, self.axes = flow.mesh_of(op), step_of(op).axes
        self.rank, self.size = rank_in_group(self.mesh, self.axes), self.mesh.size_of(self.axes)
        self.subchunks = int(steps.subchunks) if steps.subchunks.is_int else 0

    @property
    def adds(self) -> str | None:
        """The value whose matmul this emits itself, which adds to a sum that has arrived."""
        return None

    def owner(self, steps: Steps) -> Expr:
        """Whose block a step by shard takes: rotated, so that at every step all ranks speak with different ones."""
        name, shift = ("q", 1) if self.op.kind == "reduce_scatter" else ("p", 0)
        rank = self.rank + shift if shift else self.rank
        return Var(self.b.let(name, (rank + steps.distance) % steps.shards))

    def begin(self) -> None:
        """Before the loop."""

    def before_step(self, steps: Steps) -> None:
        """In each iteration before what is on its stream."""

    def step(self, steps: Steps) -> None:
        """On the stream of an iteration, where the op stands."""
        raise NotImplementedError

    def after_step(self, steps: Steps) -> None:
        """In each iteration after what is on its stream."""

    def end(self) -> None:
        """After the loop."""

    def after_join(self) -> None:
        """After its streams have ended."""
