"""Algorithm ring: each rank receives a block from the previous rank, and then sends the block to the next rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hostweave.base.errors import ProgramError
from hostweave.communication import put
from hostweave.communication.algorithm import LOCAL_FIRST, LOCAL_LAST, Algorithm, Lowering
from hostweave.communication.dataflow import LoopIteration, chunk, expr_of
from hostweave.communication.packing import branch, group
from hostweave.communication.signals import SIGNAL, Signals
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.scaled import is_composed
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Expr, Var
from hostweave.transports.transport import MESSAGES, SIGNALS


class _Ring(Lowering):
    def owner(self, iteration: LoopIteration) -> Expr:
        name, shift = ("q", 1) if OPS[self.op.kind].reduces_to_blocks else ("p", 0)
        return Var(self.b.let(name, (self.rank - shift - iteration.distance) % iteration.shards))


class _ForwardingRing(_Ring):
    """Ring in which a rank forwards a chunk from the buffer that received it."""

    def forward(self, chunks: Sequence[tuple[str, str]], iteration: LoopIteration, event: str) -> None:
        """Emits a send of chunks to the next rank, a receive of later chunks from the previous rank, and a record of `event`. A branch
        skips these instructions in iterations of the last shard."""

        def exchange() -> None:
            self.exchange([(src, self.next_chunk(name, iteration)) for src, name in chunks])
            self.b.emit(ir.Record(event, iteration.index))

        branch(self.b, iteration.precedes_last_shard, exchange)

    def exchange(self, chunks: Sequence[tuple[str, str]]) -> None:
        """Emits, for each pair, a send of the first buffer to the next rank, and a receive into the second buffer."""
        channel, before, behind = self.b.channel(self.axes, MESSAGES), (self.rank - 1) % self.size, (self.rank + 1) % self.size
        group(self.b, *(i for src, dst in chunks for i in (ir.Recv(dst, before, channel), ir.Send(src, behind, channel))))

    def next_chunk(self, name: str, iteration: LoopIteration) -> str:
        """Buffer for the chunk from the previous rank. Raises ProgramError if chunks are not contiguous."""
        value, values = self.flow.values[name], self.values
        dim = value.walked.dim
        if name in values.by_iteration and name != self.adds:  # The buffer in `by_iteration` has contiguous chunks.
            return values.chunk(name, dim, iteration.next_hop)
        if name in values.by_iteration or not self.b.is_contiguous(values.chunk(name, dim, iteration)):
            raise ProgramError(
                f"{self.op.kind}: a ring needs contiguous blocks, so it must stream the outermost dim; use algorithm='p2p'",
                self.op.location,
            )
        return chunk(self.b, iteration.next_hop, values.buffer_of(name), value, dim)

    def arrivals(self, iteration: LoopIteration, first: Callable[[], None], arrived: Callable[[], None]) -> str:
        """Emits `first` for the first shard. For other shards, emits a wait until the chunk has arrived, then `arrived`. Returns the pool
        of events for the arrival of chunks, one per iteration."""
        if not iteration.count.is_int:
            why = "a ring needs a number of iterations that is known at compile time: give chunks="
            raise ProgramError(f"{self.op.kind}: {why}", self.op.location)
        event = self.b.new_events("arrived", int(iteration.count - iteration.subchunks))

        def wait() -> None:
            self.b.emit(ir.Wait(event, iteration.index - expr_of(iteration.subchunks)))
            arrived()

        branch(self.b, iteration.distance.equals(0), first, wait)
        return event


class _RingGather(_ForwardingRing):
    """All-gather: a rank sends its own block to the next rank. Then the rank sends each block that arrives from the previous rank, except
    the last block."""

    def in_iteration(self, iteration: LoopIteration) -> None:
        moves = self.moves(iteration)
        event = self.arrivals(iteration, lambda: self.copy(moves), lambda: None)
        self.forward([(target, op.result.name) for (_, target), op in zip(moves, self.ops, strict=True)], iteration, event)


class _RingReduceScatter(_ForwardingRing):
    """Reduce-scatter: the partial sum of a block travels around the ring, and each rank adds its term. The matmul of the block's owner adds
    the last term, and writes the result."""

    @property
    def adds(self) -> str:
        """Name of the result of the matmul that computes the terms. The terms may be views of this result. Raises ProgramError if the loop
        has no matmul of floats that computes the terms."""
        name = self.op.tensors[0]
        while name in self.in_loop:
            producer = self.flow.made[name]
            if OPS[producer.kind].is_product and producer.result.type.dtype.kind == "float" and not is_composed(producer):
                return name
            if not self.flow.is_view(producer) or OPS[producer.kind].cuts:
                break
            name = producer.tensors[0]
        why = "algorithm='ring' can only reduce the result of a matmul of floats in the same loop; use algorithm='p2p' for other ops"
        raise ProgramError(f"reshard: {why}", self.op.location)

    def in_iteration(self, iteration: LoopIteration) -> None:
        term, multiply = self.values.operand(self.op, 0, iteration), self.multiply
        assert multiply is not None

        def add() -> None:
            branch(
                self.b,
                iteration.precedes_last_shard,
                partial(multiply, True, None),
                lambda: multiply(True, self.values.destination(self.op, iteration)),
            )

        event = self.arrivals(iteration, partial(multiply, False, None), add)
        self.forward([(term, self.op.tensors[0])], iteration, event)


class _RingReduceScatterByPuts(_RingReduceScatter):
    """Reduce-scatter by puts. A rank signals that its memory is free. The previous rank then puts partial sums into this memory."""

    needs_count = True

    def begin(self) -> None:
        peers, sums = Signals(self.b, self.axes), self.values.buffer_of(self.op.tensors[0])
        peers.signal_to((self.rank - 1) % self.size, sums, "free")
        peers.wait_for((self.rank + 1) % self.size, sums, "free")

    def exchange(self, chunks: Sequence[tuple[str, str]]) -> None:
        """Emits a put of the chunk to the same buffer on the next rank, and a wait for the chunk from the previous rank."""
        ((src, arriving),), channel = chunks, self.b.channel(self.axes, SIGNALS)
        self.b.emit(ir.Put(src, src, (self.rank + 1) % self.size, SIGNAL, channel))
        self.b.emit(ir.WaitSignal(SIGNAL, (self.rank - 1) % self.size, arriving, "written", channel))


class _RingGatherByPuts(_Ring, put.PutGather):
    """All-gather by puts. A rank puts its own shard to the next rank. Then the rank puts each chunk from the previous rank, except chunks
    of the last shard."""

    def shard_in_window(self, op: Op) -> str | None:
        """None, because peers never get from this rank."""
        return None

    def signal(self, buffer: str, state: str) -> None:
        self.signal_to((self.rank - 1) % self.size, buffer, state)

    def wait(self, buffer: str, state: str) -> None:
        self.wait_for((self.rank + 1) % self.size, buffer, state)

    def sender(self, iteration: LoopIteration) -> Expr:
        return (self.rank - 1) % self.size

    def put(self, one: put.GatheredMemory, iteration: LoopIteration) -> None:
        """Emits a put to the next rank, of the chunk that arrived one shard earlier, or of this rank's own chunk."""
        before = replace(iteration, owner=(iteration.owned_by + 1) % self.size)
        target = self.landed(one, before)

        def put(source: str) -> None:
            self.b.emit(ir.Put(source, target, (self.rank + 1) % self.size, SIGNAL, self.channel))

        branch(self.b, iteration.index.less(2 * self.subchunks), lambda: put(self.source(one, before)), lambda: put(target))


GATHER = Algorithm("ring", "all_gather", ((MESSAGES, _RingGather), (SIGNALS, _RingGatherByPuts)), LOCAL_FIRST)
SCATTER = Algorithm("ring", "reduce_scatter", ((MESSAGES, _RingReduceScatter), (SIGNALS, _RingReduceScatterByPuts)), LOCAL_LAST)
