"""Algorithm put: a rank puts its blocks to peers, or gets the blocks of peers, by copy engines. Signals synchronise the ranks.

All puts, gets, signals and waits of a rank are on one stream, in the same order as on its peers. Otherwise ranks could deadlock, because a
CUDA graph may execute its branches one after another. In a graph, a peer may signal a rank again only after the rank has waited for the
previous signal. A rank therefore waits for a peer's chunk before the rank puts its next chunk.

Before a loop of puts, each rank signals that its memory for incoming chunks is free. Before a loop of gets, each rank signals that its
shard is ready. Each reader signals after it has read the shard.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hostweave.communication.algorithm import LOCAL_FIRST, LOCAL_LAST, Algorithm, Lowering
from hostweave.communication.cost import MATMUL_SLOWDOWN_BY_COPIES, Overlap
from hostweave.communication.dataflow import LoopIteration, chunk_shape
from hostweave.communication.packing import branch, contiguous_source, split_terms
from hostweave.communication.signals import SIGNAL, Signals
from hostweave.fusion_ir.ir import Op
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const, Expr, Var, opposite
from hostweave.transports.transport import SIGNALS
from hostweave.types.machine import Machine
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

PEER_COPIES = "peer_copies"  # stream of all puts, gets, signals and waits of a rank


class _Loop(Lowering, Signals):
    needs_count = True

    def __init__(self, *known: Any):
        Lowering.__init__(self, *known)
        Signals.__init__(self, self.b, self.axes)
        self.own = replace(self.loop, owner=self.rank)

    def on(self, stream: str) -> AbstractContextManager[None]:
        return self.b.inside(partial(ir.OnStream, stream, Const(0)))

    def chunk_shape(self, name: str) -> tuple[Size, ...]:
        return chunk_shape(self.own, self.flow.mesh, self.flow.values[name], self.op.result.walked.dim)


@dataclass(frozen=True)
class GatheredMemory:
    op: Op
    landing: str  # memory that receives the chunks of peers
    is_in_place: bool  # False if chunks must be copied from `landing` to the value
    shard: str | None  # memory of this rank's shard, if peers can get chunks from the memory


class PutGather(_Loop):
    """All-gather. A rank copies its own shard. The shards of peers arrive one after another.

    If the shards of all gathered values are in windows, peers get the chunks, and one signal covers all values. Otherwise each rank puts
    its shards to the peers, and each put has its own signal.
    """

    def begin(self) -> None:
        b = self.b
        self.all = [self.arriving(op) for op in self.ops]
        self.shard = self.all[0].shard if all(one.shard for one in self.all) else None
        self.arrived = self.b.new_events("arrived", int(self.loop.count))
        b.emit(ir.Fork(PEER_COPIES))
        with self.on(PEER_COPIES):
            if self.shard:
                self.signal(self.shard, "ready")
            else:
                self.signal(self.all[0].landing, "free")
                self.wait(self.all[0].landing, "free")

    def arriving(self, op: Op) -> GatheredMemory:
        b, value, dim = self.b, op.result, op.result.walked.dim
        self.values.take_chunks(op, self.own)
        memory = self.values.by_iteration.get(value.name) or self.values.buffer_of(value.name)
        is_contiguous = value.name in self.values.by_iteration or all(size == Size() for size in b.types[memory].shape[:dim])
        shard = self.shard_in_window(op)
        if is_contiguous and b.is_in_window(memory):
            return GatheredMemory(op, memory, True, shard)
        shape = (self.loop.count, *self.chunk_shape(value.name))
        return GatheredMemory(op, b.allocate(f"{value.name}_landing", BufferType(value.type.dtype, shape)), False, shard)

    def shard_in_window(self, op: Op) -> str | None:
        """Memory of this rank's shard if the memory is in a window and the chunks of the shard are contiguous. Otherwise None."""
        b, dim, whole = self.b, op.result.walked.dim, self.values.buffer_of(op.tensors[0])
        memory = b.memory_of(whole)  # Peers access whole memory only, because a part could have another offset on a peer.
        is_contiguous = b.is_contiguous(whole) and all(size == Size() for size in b.types[whole].shape[:dim])
        is_whole = b.is_contiguous(whole) and self.subchunks == 1 and self.loop.rows is None  # A chunk is the whole shard.
        return memory if b.is_in_window(memory) and (is_contiguous or is_whole) else None

    def put(self, one: GatheredMemory, iteration: LoopIteration) -> None:
        """Emits a put of a chunk of this rank's shard to the rank that uses the chunk in this iteration."""
        own = replace(iteration, owner=self.rank, suffix="own")
        peer = (self.rank - iteration.distance) % self.size
        self.b.emit(ir.Put(self.source(one, own), self.landed(one, own), peer, SIGNAL, self.channel))

    def source(self, one: GatheredMemory, own: LoopIteration) -> str:
        return contiguous_source(self.b, self.values.operand(one.op, 0, own), None)

    def sender(self, iteration: LoopIteration) -> Expr:
        return iteration.owned_by

    def landed(self, one: GatheredMemory, iteration: LoopIteration) -> str:
        if one.is_in_place:
            return self.values.destination(one.op, iteration)
        return self.b.select(one.landing, 0, iteration.block, f"{one.landing}_{iteration.index.name}")

    def before_iteration(self, iteration: LoopIteration) -> None:
        b = self.b

        def arrive() -> None:
            with self.on(PEER_COPIES):
                if self.shard:
                    self.read(self.shard, iteration)
                else:
                    for one in self.all:
                        landed = self.landed(one, iteration)
                        self.put(one, iteration)
                        self.wait_for(self.sender(iteration), landed, "written")
                b.emit(ir.Record(self.arrived, iteration.index))

        branch(b, opposite(iteration.is_own), arrive)

    def read(self, shard: str, iteration: LoopIteration) -> None:
        """Emits a get of a chunk of each value. Before the first chunk of a shard, emits a wait until the shard is ready. Keys that causal
        attention skips are not read."""
        wait = partial(self.wait_for, iteration.owned_by, shard, "ready")
        if self.subchunks == 1:
            wait()
        else:
            branch(self.b, iteration.subchunk.equals(0), wait)

        def get() -> None:
            for one in self.all:
                source, target = self.values.operand(one.op, 0, iteration), self.landed(one, iteration)
                self.b.emit(ir.Get(source, iteration.owned_by, target, self.channel))

        if all(one.is_in_place and self.flow.skips_later_blocks(one.op.result.name) for one in self.all):
            branch(self.b, iteration.owned_by.less(self.rank), get)
        else:
            get()

    def in_iteration(self, iteration: LoopIteration) -> None:
        b, moves = self.b, self.moves(iteration)

        def arrive() -> None:
            b.emit(ir.Wait(self.arrived, iteration.index))
            pairs = zip(self.all, moves, strict=True)
            self.copy([(self.landed(one, iteration), target) for one, (_, target) in pairs if not one.is_in_place])

        branch(b, iteration.is_own, lambda: self.copy(moves), arrive)

    def end(self) -> None:
        if self.shard:
            with self.on(PEER_COPIES):
                self.signal(self.shard, "read")
                self.wait(self.shard, "read")

    def after_join(self) -> None:
        self.b.emit(ir.Join(PEER_COPIES))


class _PutScatter(_Loop):
    """Reduce-scatter. A rank puts its term of each block to the owner of the block. A kernel adds the received terms to the rank's own
    term."""

    def begin(self) -> None:
        b, result = self.b, self.op.result
        shape = (Size(self.size - 1), Size(self.subchunks), *self.chunk_shape(self.op.tensors[0]))
        self.landing = b.allocate(f"{result.name}_landing", BufferType(result.type.dtype, shape))
        self.computed = self.b.new_events("computed", (self.size - 1) * self.subchunks)
        b.emit(ir.Fork(PEER_COPIES))
        with self.on(PEER_COPIES):
            self.signal(self.landing, "free")
            self.wait(self.landing, "free")

    def in_iteration(self, iteration: LoopIteration) -> None:
        """Records an event after the computation of a term for another rank."""
        branch(self.b, opposite(iteration.is_own), lambda: self.b.emit(ir.Record(self.computed, iteration.index)))

    def after_iteration(self, iteration: LoopIteration) -> None:
        b = self.b

        def put() -> None:
            with self.on(PEER_COPIES):
                b.emit(ir.Wait(self.computed, iteration.index))
                if self.subchunks > 1:
                    sender = (self.rank - 1 - iteration.distance) % self.size
                    branch(b, opposite(iteration.subchunk.equals(0)), lambda: self.wait_for(sender, self.landing, "written"))
                source = contiguous_source(b, self.values.operand(self.op, 0, iteration), None)
                target = b.select(self.landing, 0, iteration.distance, f"{self.landing}_by_distance")
                target = b.select(target, 0, iteration.subchunk, f"{self.landing}_{iteration.index.name}")
                b.emit(ir.Put(source, target, iteration.owned_by, SIGNAL, self.channel))

        branch(b, opposite(iteration.is_own), put)

    def end(self) -> None:
        with self.on(PEER_COPIES):
            self.wait(self.landing, "written")

    def after_join(self) -> None:
        self.b.emit(ir.Join(PEER_COPIES))
        if all(size == Size() for size in self.op.result.type.shape[: self.op.result.walked.dim]):  # All chunks together are contiguous.
            rows = self.loop.rows and self.own.rows_in(self.loop.rows)
            self.add(replace(self.own, index=Var("own"), count=Size(self.size), rows=rows))  # No emitted expression has the index `own`.
        else:
            with self.b.loop(Size(self.subchunks)) as index:
                self.add(replace(self.own, index=index))

    def add(self, iteration: LoopIteration) -> None:
        b, ((own, target),) = self.b, self.moves(iteration)
        shape = (Size(self.size - 1), *b.types[own].shape)
        if iteration.subchunks == Size():
            landed = b.reshape(self.landing, shape, f"{self.landing}_shards")
        else:
            landed = b.select(self.landing, 1, iteration.subchunk, f"{self.landing}_{iteration.index.name}")
        self.reduction.emit((own, *split_terms(b, landed, self.landing)), target)


class _Put(Algorithm):
    def seconds(self, overlap: Overlap, machine: Machine, chunks: int) -> float:
        ranks, shard = overlap.ranks, overlap.size / overlap.ranks / machine.memory
        transfer = machine.link("get" if overlap.computed else "put", ranks).seconds(overlap.size / chunks)
        added = (ranks - 1) * shard if overlap.consumer_sums else machine.launch + (ranks + 1) * shard
        return overlap.in_chunks(machine, chunks, chunks // ranks, transfer, 1.0, MATMUL_SLOWDOWN_BY_COPIES, added)


# A gather uses up to two streams: the end of a matmul overlaps with the start of the next matmul. A scatter uses one stream, because
# concurrent matmuls would delay the first transfer.
GATHER = _Put("put", "all_gather", ((SIGNALS, PutGather),), LOCAL_FIRST, max_streams=2, chunks_to_try=(1, 2, 4))
SCATTER = _Put("put", "reduce_scatter", ((SIGNALS, _PutScatter),), LOCAL_LAST, max_streams=1, chunks_to_try=(1, 2, 4))
