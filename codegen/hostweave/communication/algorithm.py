"""Interface of the algorithms that move the chunks of reshards in a chunk loop. `algorithms.py` lists all algorithms. The following loop
uses the algorithm p2p for the all_gather:

    loop 8 chunks by_shard local_first {
      %x_gathered: bf16[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))

An algorithm states the reshards that it supports, and predicts the time of a loop. Its `Lowering` emits the instructions before, in and
after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from hostweave.communication.cost import MATMUL_SLOWDOWN_BY_KERNELS, Overlap, between, communication_slowdown
from hostweave.communication.dataflow import Dataflow, LoopIteration, Values, rank_in_group
from hostweave.communication.packing import TermReduction
from hostweave.fusion_ir.ir import ROTATIONS, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.resharding import ReshardStep, step_of
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Expr, Var, opposite
from hostweave.transports.transport import Transport
from hostweave.types.machine import Machine

# A gather begins with the rank's own shard, which is available at once. A reduce-scatter ends with the rank's own shard, to send other
# shards early.
LOCAL_FIRST, LOCAL_LAST = ROTATIONS


@dataclass(frozen=True)
class Algorithm:
    name: str  # the `algorithm` of `.stream`
    kind: str
    # pairs: the instructions that a transport must support, and the lowering that emits them
    lowerings: tuple[tuple[frozenset[str], type[Lowering]], ...]
    rotation: str | None = None  # see `ChunkLoop`
    max_streams: int | None = None  # maximum number of streams on which iterations run; None: `Options.streams`
    chunks_to_try: tuple[int, ...] = ()  # numbers of chunks that the cost model tries; in a loop by shard, per shard
    chunking: ClassVar[str] = "by_shard"

    @property
    def needs(self) -> tuple[frozenset[str], ...]:
        """Sets of instructions. The transport must support all instructions of at least one set."""
        return tuple(needs for needs, _ in self.lowerings)

    def fits(self, change: ReshardStep, transport: Transport, is_counted: bool, is_on_all_ranks: bool) -> bool:
        """True if the algorithm supports a reshard on a transport. `is_counted` is True if the number of iterations is known."""
        needs_count = self.lowering(transport).needs_count
        is_done = not needs_count or (is_counted and change.reduction in ("", "sum"))
        return is_done and transport.takes_shards(are_even=True, are_on_all_ranks=is_on_all_ranks)

    def chunks(self, ranks: int) -> tuple[int, ...]:
        """Total numbers of chunks that the cost model tries."""
        return tuple(count * ranks for count in self.chunks_to_try)

    def seconds(self, overlap: Overlap, machine: Machine, chunks: int) -> float:
        """Predicted seconds of the loop. By default, kernels send the chunks one after another, each to one rank."""
        transfer = between(machine, overlap.size / chunks, overlap.hosts)
        shard = overlap.size / overlap.ranks / machine.memory
        added = machine.launch + (overlap.ranks + 1) * shard
        own, slower = chunks // overlap.ranks, communication_slowdown(overlap.ranks)
        return overlap.in_chunks(machine, chunks, own, transfer, slower, MATMUL_SLOWDOWN_BY_KERNELS, added)

    def lowering(self, transport: Transport) -> type[Lowering]:
        return next(lowering for needs, lowering in self.lowerings if needs <= transport.carries)


class Lowering:
    """Emits the communication of one loop. `self.loop` describes any iteration, and an argument `iteration` one iteration. In a loop by
    shard, only an argument `iteration` has an `owner`."""

    needs_count: ClassVar[bool] = False  # True if the number of iterations must be known, and a reduction must be a sum
    # Emits the matmul whose result is `adds`. If the first argument is True, adds the contents of the matmul's own buffer. The second
    # argument is another buffer for the result, or None.
    multiply: Callable[[bool, str | None], None] | None = None

    def __init__(
        self, b: Builder, flow: Dataflow, values: Values, ops: Sequence[Op], loop: LoopIteration, made: Set[str], reduction: TermReduction
    ):
        """`ops` is one reshard, or several gathers that are sent together. `made` contains names of values that the loop computes."""
        self.b, self.flow, self.values, self.ops, self.op = b, flow, values, ops, ops[0]
        self.loop, self.in_loop, self.reduction = loop, made, reduction
        self.mesh, self.axes = flow.mesh_of(self.op), step_of(self.op).axes
        self.rank, self.size = rank_in_group(self.mesh, self.axes), self.mesh.size_of(self.axes)
        self.subchunks = int(loop.subchunks) if loop.subchunks.is_int else 0

    @property
    def adds(self) -> str | None:
        """Name of the matmul result that is added to the received sum, if the algorithm itself emits this matmul."""
        return None

    def owner(self, iteration: LoopIteration) -> Expr:
        """Owner of the block that this rank processes in an iteration of a loop by shard. The blocks of all ranks have different owners."""
        name, shift = ("q", 1) if OPS[self.op.kind].reduces_to_blocks else ("p", 0)
        return Var(self.b.let(name, (self.rank + shift + iteration.distance) % iteration.shards))

    def is_own(self, iteration: LoopIteration) -> Expr:
        """Condition that `owner` returns this rank. The rotation gives the condition, which is the same on all ranks."""
        return opposite(iteration.precedes_last_shard) if OPS[self.op.kind].reduces_to_blocks else iteration.distance.equals(0)

    def moves(self, iteration: LoopIteration) -> list[tuple[str, str]]:
        """Source and destination of each op in an iteration."""
        return [(self.values.operand(op, 0, iteration), self.values.destination(op, iteration)) for op in self.ops]

    def copy(self, moves: Sequence[tuple[str, str]]) -> None:
        for source, target in moves:
            self.b.emit(ir.Copy(source, target))

    def begin(self) -> None:
        """Emits instructions before the loop."""

    def before_iteration(self, iteration: LoopIteration) -> None:
        """Emits instructions in each iteration, before its stream block."""

    def in_iteration(self, iteration: LoopIteration) -> None:
        """Emits instructions in each iteration, in its stream block."""
        raise NotImplementedError

    def after_iteration(self, iteration: LoopIteration) -> None:
        """Emits instructions in each iteration, after its stream block."""

    def end(self) -> None:
        """Emits instructions after the loop."""

    def after_join(self) -> None:
        """Emits instructions after the join of the loop's streams."""
