"""Which communication a reshard is, and between which buffers: complete values, or chunks in a loop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.resharding import ReshardStep, step_of
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr, Var
from hostweave.passes.lower import communication
from hostweave.passes.lower.buffers import Buffers
from hostweave.passes.lower.exchanges import NUMBERS, Exchange, Reduce, Signals
from hostweave.passes.lower.kernels import Kernels
from hostweave.passes.lower.puts import Gather, Ring, Scatter
from hostweave.passes.lower.steps import Dataflow, Loop, Steps, algorithm_of, chunk, dim_of_chunk, expr_of, rank_in_group
from hostweave.passes.lower.transfers import by_reading, to_other_ranks
from hostweave.transports.transport import DEFAULT, find_transport
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim


def owner(b: Builder, flow: Dataflow, loop: Loop, steps: Steps) -> Expr:
    """Whose block a step by block takes: rotated, so that at every step all ranks speak with different ones."""
    op = loop.communication
    assert op is not None
    by = op.result.walked.algorithm
    if by in ("broadcast", "reduce"):
        return steps.index // expr_of(steps.subchunks)
    rank = rank_in_group(flow.mesh_of(op), step_of(op).axes)
    if op.kind == "reduce_scatter":
        return Var(b.let("q", (rank - 1 - steps.distance if by == "ring" else rank + 1 + steps.distance) % steps.shards))
    return Var(b.let("p", (rank - steps.distance if by == "ring" else rank + steps.distance) % steps.shards))


def ring_term(flow: Dataflow, loop: Loop) -> str | None:
    """The matmul, seen through views, whose result a ring of sums in this loop adds up; None where there is no such ring."""
    op = loop.communication
    if op is None or op.kind != "reduce_scatter" or op.result.stream is None or op.result.stream.algorithm != "ring":
        return None
    name = op.tensors[0]
    while loop.makes(name):
        producer = flow.producer[name]
        if producer.kind == "matmul":
            return name
        if not flow.is_view(producer):
            break
        name = producer.tensors[0]
    raise ProgramError("reshard: algorithm='ring' sums the results of a matmul in its loop; use algorithm='p2p' for other ops", op.location)


class Reshards:
    def __init__(self, flow: Dataflow, buffers: Buffers, kernels: Kernels, b: Builder):
        self.flow, self.buffers, self.kernels, self.b = flow, buffers, kernels, b
        self.term: ir.Matmul | None = None  # of a ring of sums: adds this rank's term after the sum so far has arrived
        self.puts: Gather | Scatter | None = None  # of the present loop, where its communication is one-sided
        self.after_loop: list[Callable[[], None]] = []
        self.unread: list[Callable[[], None]] = []  # by which ranks wait until others have read what they were sent

    def begin_loop(self, loop: Loop, steps: Steps) -> None:
        """What goes before a loop of puts. Where a process group has one rank nothing is put."""
        op, by = loop.communication, algorithm_of(loop)
        if op is None or steps.shards == 1 or not (by == "put" or (by == "ring" and self.b.transport.shares_memory)):
            return
        known = self.b, step_of(op).axes, self.flow, self.buffers, op, steps
        if op.kind == "all_gather":
            self.puts = Ring(*known) if by == "ring" else Gather(*known)
        elif by == "put":
            self.puts = Scatter(*known, self.kernels)
        else:  # the one before adds to this rank's sums, and waits for the signal that it may write them
            ranks, sums = Signals(self.b, step_of(op).axes), self.buffers.buffer_of(op.tensors[0])
            ranks.signal_to((ranks.rank - 1) % ranks.size, sums)
            ranks.wait_for((ranks.rank + 1) % ranks.size, sums)
        if self.puts:
            self.puts.begin()

    def reshard(self, op: Op, steps: Steps | None) -> None:
        change = step_of(op)
        if change.kind == "reduce":  # to the one rank of the mesh that the result is on
            source, dst = self.flow.types[op.tensors[0]], self.buffers.destination(op, steps)
            with self.b.on(source.mesh):
                src = communication.contiguous_source(self.b, self.buffers.operand(op, 0, steps), steps)
                if self.b.transport.shares_memory:
                    here, root = (lambda: self.b.on(op.result.type.mesh)), change.root or 0
                    Exchange(self.b, change.axes).reduce(src, dst, root, here, self._reducing(op, change))
                else:
                    self.b.emit(ir.Reduce(src, dst, change.reduction, Const(change.root or 0), self.b.channel(change.axes)))
        elif change.kind == "transfer":
            operand, destination = (lambda: self.buffers.operand(op, 0, steps)), (lambda: self.buffers.destination(op, steps))
            if self.b.transport.shares_memory:
                if len(self.unread) == NUMBERS - 1:
                    self.wait_for_readers()
                self.unread.append(by_reading(self.b, self.flow, op, operand, destination, 1 + len(self.unread)))
            else:
                to_other_ranks(self.b, self.flow, op, operand, destination, steps)
        elif op.result.name in self.buffers.placement.by_shards:
            self._apart(op, change)
        elif steps is None or steps.owner is None:
            self._at_once(op, change, steps)
        else:
            self._by_block(op, change, steps)

    def end_of_loop(self) -> None:
        """What is left to do when all steps are through."""
        for action in self.after_loop:
            action()
        self.after_loop.clear()
        if self.puts:
            self.puts.after_join()
            self.puts = None

    def wait_for_readers(self) -> None:
        """Ranks wait for those that they have sent something to, as late as can be: these may need something else of them before."""
        for wait in self.unread:
            wait()
        self.unread.clear()

    # --- on one mesh ---

    def _shards(self, op: Op, change: ReshardStep, steps: Steps | None) -> communication.Shards:
        return communication.Shards(self.flow.mesh_of(op), change.axes, self._dim_of_chunk(change.dim, op, steps))

    def _dim_of_chunk(self, dim: int | None, op: Op, steps: Steps | None) -> int | None:
        return None if dim is None else dim_of_chunk(dim, op, self.flow.values[op.tensors[0]], steps)

    def _at_once(self, op: Op, change: ReshardStep, steps: Steps | None) -> None:
        """One collective, in a loop one a step."""
        src, dst = self.buffers.operand(op, 0, steps), self.buffers.destination(op, steps)
        shards = replace(self._shards(op, change, steps), is_uneven=self._is_uneven(op))
        if change.kind == "all_to_all" and shards.is_uneven and self.b.transport.shares_memory:
            shape = self._padded_shape(op)
            with self._padded(op, src, dst, shape) as padded:
                self._collective(op, change, *padded, replace(shards, is_uneven=False), steps)
        else:
            self._collective(op, change, src, dst, shards, steps)

    def _apart(self, op: Op, change: ReshardStep) -> None:
        """One gather of what lies one shard after another, of which this rank's own is used where it was."""
        b, shards = self.b, communication.Shards(self.flow.mesh_of(op), change.axes, 0)
        src = communication.contiguous_source(b, self.buffers.operand(op, 0, None), None)
        type = BufferType(op.result.type.dtype, (Size(shards.size), *b.types[src].shape))
        landing = self.buffers.by_step[op.result.name] = b.allocate(op.result.name, type)
        communication.all_gather(b, src, landing, shards, None, wants_own=False)

    def take_shard(self, op: Op, steps: Steps, arrived: Callable[[], None]) -> str:
        """The shard that a step takes of what lies so: this rank's own, else one of those that have `arrived`."""
        source = self.buffers.operand(op, 0, None)
        shard = self.buffers.chunk(op.result.name, step_of(op).dim or 0, steps)
        own = steps.owned_by.equals(rank_in_group(self.flow.mesh_of(op), step_of(op).axes))
        communication.branch(self.b, own, lambda: self.b.emit(ir.Copy(source, shard)), arrived)
        return shard

    def _padded_shape(self, op: Op) -> tuple[Size, ...]:
        """A global shape that ranks share evenly."""
        mesh, uneven = self.flow.mesh_of(op), self.flow.uneven
        pairs = zip(self.flow.types[op.tensors[0]].dims, op.result.type.dims, strict=True)
        dims = [(old.size, mesh.size_of(old.axes or new.axes)) for old, new in pairs]
        return tuple(size.ceil_div(ranks) * ranks if size.is_uneven(ranks, uneven) else size for size, ranks in dims)

    @contextmanager
    def _padded(self, op: Op, src: str, dst: str, shape: tuple[Size, ...]) -> Iterator[tuple[str, str]]:
        """Memory that is alike on all ranks, as windows are, for what is not: each block has the size of the largest one."""
        b, mesh = self.b, self.flow.mesh_of(op)

        def padded(name: str, dims: tuple[Dim, ...]) -> tuple[str, str]:
            """Memory for it, and the part in which it lies there."""
            sizes = tuple(size // mesh.size_of(dim.axes) for size, dim in zip(shape, dims, strict=True))
            made = b.allocate_here(f"{name}_padded", BufferType(b.types[name].dtype, sizes))
            return made, b.first(made, b.types[name].shape, f"{name}_part")

        (sent, given), (landing, wanted) = padded(src, self.flow.types[op.tensors[0]].dims), padded(dst, op.result.type.dims)
        if given != sent:
            b.emit(ir.Fill(sent, 0.0))
        b.emit(ir.Copy(src, given))
        yield sent, landing
        b.emit(ir.Copy(wanted, dst))

    def _collective(self, op: Op, change: ReshardStep, src: str, dst: str, shards: communication.Shards, steps: Steps | None) -> None:
        match change.kind:
            case "all_reduce" if change.reduction not in find_transport(DEFAULT).reduces:
                terms = communication.gathered(self.b, src, f"{op.tensors[0]}_terms", shards, steps)
                self._reducing(op, change)((terms,), dst)
            case "all_reduce":
                communication.all_reduce(self.b, src, dst, change.reduction, shards, steps, self._reducing(op, change))
            case "reduce_scatter":
                communication.reduce_scatter(self.b, src, dst, change.reduction, shards, steps, self._reducing(op, change))
            case "all_to_all":
                cut = replace(shards, dim=self._dim_of_chunk(change.to, op, steps))
                communication.all_to_all(self.b, src, dst, cut, shards, steps)
            case "permute_shards":
                assert change.sources is not None
                communication.collective_permute(self.b, src, dst, change.sources, change.axes, steps)
            case "all_gather":
                communication.all_gather(self.b, src, dst, shards, steps)

    def _reducing(self, op: Op, change: ReshardStep) -> Reduce:
        """Emits the reduction of terms that ranks make themselves."""

        def reduce(terms: Sequence[str], dst: str) -> None:
            first, *others = terms
            adding, summing = self.kernels.adding, self.kernels.summing
            kernel = adding(terms, dst, op, change.reduction) if others else summing(change.reduction, first, dst, op)
            self.b.emit(ir.Launch(kernel, tuple(terms), (dst,)))

        return reduce

    def _is_uneven(self, op: Op) -> bool:
        """Whether ranks may hold different shares of a dim that the op changes."""
        dims = zip(self.flow.types[op.tensors[0]].dims, op.result.type.dims, strict=True)
        mesh, changed = self.flow.mesh_of(op), ((old, old.axes or new.axes) for old, new in dims if old.axes != new.axes)
        return any(old.size.is_uneven(mesh.size_of(axes), self.flow.uneven) for old, axes in changed)

    # --- block by block ---

    def _by_block(self, op: Op, change: ReshardStep, steps: Steps) -> None:
        by = op.result.walked.algorithm
        if self.puts:
            self.puts.in_step(steps)
            return
        if change.kind == "reduce_scatter" and by in ("ring", "p2p", "put"):
            (self._scatter_ring if by == "ring" else self._scatter_p2p)(op, change, steps)
            return
        b, shards = self.b, self._shards(op, change, steps)
        source, target = self.buffers.operand(op, 0, steps), self.buffers.destination(op, steps)
        match change.kind, by:
            case "reduce_scatter", _:
                communication.scatter_reduce(b, source, target, change.reduction, shards, steps)
            case _, "ring":  # what the rank before has sent, or this rank has, goes on to the next one
                event = self._arrivals(steps, op)
                arrived = ir.Wait(event, steps.index - expr_of(steps.subchunks))
                communication.branch(b, steps.distance.equals(0), lambda: b.emit(ir.Copy(source, target)), lambda: b.emit(arrived))
                communication.pass_on(b, target, lambda: self._next_chunk(op, op.result.name, steps), shards, steps, event)
            case _, "broadcast":
                with communication.packed_destination(b, target, steps) as landing:
                    contiguous = communication.contiguous_source(b, source, steps)
                    b.emit(ir.Broadcast(contiguous, landing, steps.owned_by, b.channel(change.axes)))
            case _:  # the owner of the block sends it
                receiver = (shards.rank - steps.distance) % shards.size
                communication.swap(b, source, receiver, target, steps.owned_by, shards, steps)

    def _scatter_ring(self, op: Op, change: ReshardStep, steps: Steps) -> None:
        """The sum of a block grows as it passes from rank to rank, and ends in the memory of its owner's own term, from where it is taken
        after the loop."""
        b, name, term, matmul = self.b, op.tensors[0], self.buffers.operand(op, 0, steps), self.term
        assert matmul is not None
        shards, event = communication.Shards(self.flow.mesh_of(op), change.axes, change.dim), self._arrivals(steps, op)

        def add() -> None:
            b.emit(ir.Wait(event, steps.index - expr_of(steps.subchunks)))
            b.emit(replace(matmul, accumulate=(matmul.dst,)))

        communication.branch(b, steps.distance.equals(0), lambda: b.emit(matmul), add)
        communication.pass_on(b, term, lambda: self._next_chunk(op, name, steps), shards, steps, event)

        def take_own() -> None:
            own = b.chunk(self.buffers.buffer_of(name), op.result.walked.dim, shards.rank, Size(shards.size), f"{name}_own")
            b.emit(ir.Copy(own, self.buffers.buffer_of(op.result.name)))

        self.after_loop.append(take_own)

    def _scatter_p2p(self, op: Op, change: ReshardStep, steps: Steps) -> None:
        """Each rank sends its term of a block to the owner, where terms land side by side, one a rank, and are summed after the loop."""
        b, value = self.b, op.result
        source, local = self.buffers.operand(op, 0, steps), self.flow.local(value)
        shards = communication.Shards(self.flow.mesh_of(op), change.axes, change.dim)
        landing = b.allocate(f"{value.name}_landing", BufferType(local.dtype, (Size(shards.size), *local.shape)))
        sender = Var(b.let("sender", (shards.rank - 1 - steps.distance) % shards.size))
        terms = b.select(landing, 0, sender, f"{landing}_{steps.index.name}")
        term = chunk(b, steps, terms, value, value.walked.dim, suffix="landing")
        communication.swap(b, source, steps.owned_by, term, sender, shards, steps)

        def sum_terms() -> None:
            target = self.buffers.buffer_of(value.name)
            b.emit(ir.Launch(self.kernels.summing(change.reduction, landing, target, op), (landing,), (target,)))

        self.after_loop.append(sum_terms)

    def _next_chunk(self, op: Op, name: str, steps: Steps) -> str:
        """The chunk that a ring's neighbour sends in this iteration."""
        value, buffers = self.flow.values[name], self.buffers
        dim = value.walked.dim
        if name in buffers.by_step and name == op.result.name:  # where shards lie one behind the other
            return buffers.chunk(name, dim, steps.next_hop)
        if name in buffers.by_step or not self.b.is_contiguous(buffers.chunk(name, dim, steps)):
            raise ProgramError(
                f"{op.kind}: a ring passes contiguous blocks on, so it streams the outermost dim; use algorithm='p2p'", op.location
            )
        return chunk(self.b, steps.next_hop, buffers.buffer_of(name), value, dim, suffix="next")

    def _arrivals(self, steps: Steps, op: Op) -> str:
        """Events of a ring, one a step."""
        if not steps.count.is_int:
            raise ProgramError(f"{op.kind}: a ring needs a number of steps that is known at compile time: give chunks=", op.location)
        return self.b.new_events("arrived", int(steps.count))
