"""Algorithm p2p: in an iteration, a rank sends a block to one peer and receives a block from a peer, or only copies its own block."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from hostweave.communication.algorithm import LOCAL_FIRST, LOCAL_LAST, Algorithm, Lowering
from hostweave.communication.dataflow import LoopIteration, chunk
from hostweave.communication.packing import branch, contiguous_source, group, packed_destination
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Expr, Var
from hostweave.transports.transport import MESSAGES
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


class _SendReceive(Lowering):
    def send_receive(self, moves: Sequence[tuple[str, str]], receiver: Expr, sender: Expr, iteration: LoopIteration) -> None:
        """Emits a branch: copies if this rank owns the iteration's block, and otherwise one group of sends and receives."""
        b = self.b

        def exchange() -> None:
            with ExitStack() as landings:
                channel, posted = b.channel(self.axes, MESSAGES), []
                for src, dst in moves:
                    landing = landings.enter_context(packed_destination(b, dst, iteration))
                    posted += [ir.Recv(landing, sender, channel), ir.Send(contiguous_source(b, src, iteration), receiver, channel)]
                group(b, *posted)

        branch(b, iteration.is_own, lambda: self.copy(moves), exchange)


class _P2pGather(_SendReceive):
    """All-gather: the owner of a block sends the block to the rank that uses it in this iteration."""

    def in_iteration(self, iteration: LoopIteration) -> None:
        self.send_receive(self.moves(iteration), (self.rank - iteration.distance) % self.size, iteration.owned_by, iteration)


class _P2pScatter(_SendReceive):
    """Reduce-scatter: each rank sends its term of a block to the owner. The owner reduces all terms of its block after the loop."""

    def in_iteration(self, iteration: LoopIteration) -> None:
        b, value = self.b, self.op.result
        source, local = self.values.operand(self.op, 0, iteration), self.flow.local(value)
        dim = value.walked.dim
        landed = (*local.shape[:dim], iteration.rows_in(local.shape[dim]), *local.shape[dim + 1 :])
        self.landing = b.allocate(f"{value.name}_landing", BufferType(local.dtype, (Size(self.size), *landed)))
        sender = Var(b.let("sender", (self.rank - 1 - iteration.distance) % self.size))
        terms = b.select(self.landing, 0, sender, f"{self.landing}_{iteration.index.name}")
        term = chunk(b, replace(iteration, start=0, suffix="landing"), terms, value, dim)
        self.send_receive([(source, term)], iteration.owned_by, sender, iteration)

    def after_join(self) -> None:
        name, dim = self.op.result.name, self.op.result.walked.dim
        own = replace(self.loop, owner=self.rank)
        self.reduction.emit((self.landing,), own.covered(self.b, self.values.buffer_of(name), dim, f"{name}_part"))


GATHER = Algorithm("p2p", "all_gather", ((MESSAGES, _P2pGather),), LOCAL_FIRST, chunks_to_try=(1,))
SCATTER = Algorithm("p2p", "reduce_scatter", ((MESSAGES, _P2pScatter),), LOCAL_LAST, chunks_to_try=(1,))
