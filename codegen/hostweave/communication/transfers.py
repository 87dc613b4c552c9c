"""Moves between meshes, and reductions to a mesh. The ranks of the source mesh send, and the ranks of the target mesh receive.

If a rank is in both meshes, the sends and receives of a move are in one group. Outside of loops, a rank may broadcast its local tensor to
several ranks instead. If the transport lacks send and recv, the receivers get the blocks from windows of the senders.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod

from hostweave.communication.dataflow import Dataflow, LoopIteration, Values
from hostweave.communication.library_collectives import collectives_on
from hostweave.communication.one_sided_collectives import OneSidedCollectives
from hostweave.communication.packing import TermReduction, contiguous_source, copied, group, packed_destination, packed_source, temporary
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.attributes import BLOCKS
from hostweave.fusion_ir.resharding import step_of
from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr, Rank
from hostweave.transports.transport import MESSAGES, SIGNALS, Transport
from hostweave.types.blocks import Cut, Cuts, Route, Transfer, is_in_order, shared_dims
from hostweave.types.mesh import Mesh
from hostweave.types.size import LocalSize, Size, product
from hostweave.types.tensor import TensorType

BROADCAST_AXIS = "copies"  # name of the mesh axis along which a sender broadcasts

MakesBuffer = Callable[[], str]  # returns the buffer to send or to receive into; called in the `on` body of the buffer's mesh


class Transfers:
    """Emits moves and reductions between meshes. Senders wait for their readers later, see `wait_for_readers`."""

    def __init__(self, b: Builder, flow: Dataflow, values: Values):
        self.b, self.flow, self.values = b, flow, values
        self.pending_waits: list[Callable[[], None]] = []  # functions that emit waits of senders for their readers

    def move(self, op: Op) -> None:
        operand, destination = (lambda: self.values.operand(op, 0, None)), (lambda: self.values.destination(op, None))
        if self.b.carrying(MESSAGES, SIGNALS).carries >= MESSAGES:
            send_and_receive(self.b, self.flow, op, operand, destination, None)
            return
        if len(self.pending_waits) == ir.SIGNAL_COUNTERS - 1:
            self.wait_for_readers()
        self.pending_waits.append(_by_reading(self.b, self.flow, op, operand, destination, 1 + len(self.pending_waits)))

    def reduce(self, op: Op, reduction: TermReduction) -> None:
        """Emits a reduction to one rank of each process group. These ranks form the mesh of the result."""
        b, change, dst = self.b, step_of(op), self.values.destination(op, None)
        with b.on(self.flow.types[op.tensors[0]].mesh):
            src = contiguous_source(b, self.values.operand(op, 0, None), None)
            collectives_on(b, change.axes).reduce(src, dst, reduction, change.root or 0, lambda: b.on(op.result.type.mesh))

    def wait_for_readers(self) -> None:
        """Emits the waits of senders for their readers. Waits come late, because a reader may first need other data from a sender. The
        waits come at the end of the body, before a call of a function with moves to other meshes, or when no signal counter is free."""
        for wait in self.pending_waits:
            wait()
        self.pending_waits.clear()


def needs_equal_blocks(source: TensorType, target: TensorType, mesh: Mesh, transport: Transport) -> bool:
    """True if a move between two meshes needs equal blocks on this transport, but blocks may differ in size."""
    return not transport.carries >= MESSAGES and any(dim.is_uneven(dim.size.symbols) for dim in shared_dims(source, target, mesh))


def send_and_receive(b: Builder, flow: Dataflow, op: Op, src: MakesBuffer, dst: MakesBuffer, iteration: LoopIteration | None) -> None:
    source, target = flow.types[op.tensors[0]], op.result.type
    apart = set(source.mesh_in(flow.mesh).all_ranks).isdisjoint(target.mesh_in(flow.mesh).all_ranks)
    blocks = op[BLOCKS]
    if iteration is None and blocks.is_cheaper_to_broadcast:  # In a loop, broadcasts would serialise the ranks of the two meshes.
        _broadcast(b, source.mesh, target.mesh, blocks, src, dst)
        return
    to_send, to_receive = _cuts(flow, op)
    distance = blocks.distance(source.mesh_in(flow.mesh).size) if apart else None
    with b.on(source.mesh):
        sent = _blocks_to_send(b, src(), blocks, to_send, iteration)
        if apart:
            b.emit(_send(b, sent, blocks, to_send, distance))
    with b.on(target.mesh), _blocks_to_receive(b, dst, blocks, to_receive, iteration) as landing:
        recv = _recv(b, landing, blocks, to_receive, distance)
        if apart:
            b.emit(recv)
        else:
            with b.on(None):
                group(b, _send(b, sent, blocks, to_send, distance), recv)


def _by_reading(b: Builder, flow: Dataflow, op: Op, src: MakesBuffer, dst: MakesBuffer, number: int) -> Callable[[], None]:
    """Emits a move in which receivers get from a window of the sender. Returns a function that emits the sender's waits for its readers.

    A sender signals that its window is ready, and each receiver signals after its reads. `number` is the signal counter. No other move may
    use this counter before the waits of the returned function.
    """
    source, target, blocks = flow.types[op.tensors[0]], op.result.type, op[BLOCKS]
    world = tuple(name for name, _ in flow.mesh.axes)
    with b.on(None):
        ranks = OneSidedCollectives(b, world)
    first, last = ({(route.sender, route.receiver): route for route in order}.values() for order in (blocks.moved[::-1], blocks.moved))

    def block(name: str, count: int, number: int) -> str:
        size = product(b.types[name].shape) // count
        return name if count == 1 else b.select(b.reshape(name, (Size(count), size), f"{name}_blocks"), 0, Const(number), f"{name}_block")

    def each(mesh: Mesh | None, emit: Callable[[Route], None], rank_of: Callable[[Route], int], chosen: Iterable[Route]) -> None:
        """Emits instructions for each route, on the rank that `rank_of` returns."""
        for route in chosen:
            with b.on(mesh), b.inside(partial(ir.If, Rank().equals(rank_of(route)))):
                emit(route)

    def wait_and_get(route: Route) -> None:
        sent, landed = block(packed, prod(blocks.sent), route.sent), block(landing, prod(blocks.received), route.received)
        if route.sender == route.receiver:
            same_dims = prod(blocks.sent) == prod(blocks.received) == 1
            (ranks.copy_locally if same_dims else ranks.copy)(sent, landed)
            return
        if route in first:  # A sender and a receiver signal each other once for all routes between them.
            ranks.wait_for(Const(route.sender), sent, "ready", number)
        b.emit(ir.Get(sent, Const(route.sender), landed, ranks.channel))
        if route in last:
            ranks.signal_to(Const(route.sender), sent, "read", number)

    with b.on(source.mesh):
        packed = ranks.in_window(_blocks_to_send(b, src(), blocks, None, None))
    each(source.mesh, lambda route: ranks.signal_to(Const(route.receiver), packed, "ready", number), lambda route: route.sender, last)
    with b.on(target.mesh), _blocks_to_receive(b, dst, blocks, None, None) as landing:
        each(target.mesh, wait_and_get, lambda route: route.receiver, blocks.routes)

    wait = partial(ranks.wait_for, buffer=packed, state="read", number=number)
    return lambda: each(source.mesh, lambda route: wait(Const(route.receiver)), lambda route: route.sender, last)


def _cuts(flow: Dataflow, op: Op) -> tuple[Cuts, Cuts] | tuple[None, None]:
    """Cuts of the local tensors on the two meshes. A pair of None if all blocks are equal."""
    source, target = flow.values[op.tensors[0]], op.result
    dims = shared_dims(source.type, target.type, flow.mesh)
    if not any(dim.is_uneven(flow.uneven) for dim in dims):
        return None, None

    def cuts(value: Value, counts: tuple[int, ...]) -> Cuts:
        sizes = [
            Size(1, (LocalSize(own.size, own.axes, value.type.mesh),)) if dim.is_uneven(flow.uneven) and count > 1 and own.axes else held
            for dim, own, held, count in zip(dims, value.type.dims, flow.local(value).shape, counts, strict=True)
        ]
        return tuple(map(Cut, counts, sizes))

    return cuts(source, op[BLOCKS].sent), cuts(target, op[BLOCKS].received)


def _broadcast(b: Builder, source: Mesh | None, target: Mesh | None, blocks: Transfer, src: MakesBuffer, dst: MakesBuffer) -> None:
    with b.on(source):
        full = src()
        sent, shape = _blocks_to_send(b, full, blocks, None, None), b.types[full].shape
    with b.on(target), _blocks_to_receive(b, dst, blocks, None, None) as landing:
        wanted = b.types[dst()].shape
        for sender, receivers in blocks.receivers.items():
            group = Mesh(((BROADCAST_AXIS, 1 + len(receivers)),), (sender, *receivers))
            with b.on(group):
                b.emit(ir.BroadcastToOthers(sent, landing, Const(0), b.channel((BROADCAST_AXIS,))))
        if staying_ranks := tuple(route.receiver for route in blocks.routes if route.sender == route.receiver):
            with b.on(Mesh(((BROADCAST_AXIS, len(staying_ranks)),), staying_ranks)):
                kept, copied = b.reshape(sent, shape, f"{sent}_kept"), b.reshape(landing, wanted, f"{landing}_copied")
                b.emit(ir.Copy(b.first(kept, wanted, f"{sent}_part"), copied))


def _blocks_to_send(b: Builder, src: str, blocks: Transfer, cuts: Cuts | None, iteration: LoopIteration | None) -> str:
    """Contiguous memory with the blocks of `src` in order."""
    in_order = contiguous_source(b, src if cuts else _cut(b, src, blocks.sent), iteration)
    in_order = b.memory_of(packed_source(b, in_order, cuts, iteration) if cuts else in_order)
    # Outside of loops, sends and recvs may be posted outside of the `on` body, where the views of the body are not visible.
    return in_order if iteration is not None or b.is_memory(in_order) else copied(b, in_order, None)


@contextmanager
def _blocks_to_receive(b: Builder, dst: MakesBuffer, blocks: Transfer, cuts: Cuts | None, iteration: LoopIteration | None) -> Iterator[str]:
    """Yields contiguous memory for the blocks of `dst()` in order. On exit, copies the blocks to `dst()` if needed."""
    by_block = dst() if cuts else _cut(b, dst(), blocks.received)
    if b.is_contiguous(by_block) and (cuts is None or is_in_order(cuts)):
        yield b.memory_of(by_block)
        return
    landing = temporary(b, by_block, iteration)
    yield landing
    if cuts is None:
        b.emit(ir.Copy(landing, _cut(b, dst(), blocks.received)))  # The `on` body with the first view may have ended.
        return
    with packed_destination(b, dst(), iteration) as target:
        b.emit(ir.Unpack(landing, target, cuts))


def _cut(b: Builder, whole: str, cuts: tuple[int, ...]) -> str:
    """View of `whole` as blocks, indexed by the first dims. `whole` itself if there is one block."""
    if set(cuts) <= {1}:
        return whole
    shape: list[Size] = []
    outer: list[int] = []
    inner: list[int] = []
    for size, blocks in zip(b.types[whole].shape, cuts, strict=True):
        if blocks > 1:
            outer.append(len(shape))
            shape.append(Size(blocks))
        inner.append(len(shape))
        shape.append(size // blocks)
    return b.permute(b.reshape(whole, tuple(shape), f"{whole}_blocks"), (*outer, *inner), f"{whole}_by_block")


def _send(b: Builder, src: str, blocks: Transfer, cuts: Cuts | None, distance: int | None) -> tree.Instruction:
    """One instruction with all sends of this rank. With `distance`, the only receiver is the rank that is `distance` ranks ahead."""
    if distance is not None:
        return ir.Send(src, _neighbor(distance), b.channel_of_all)
    return ir.SendBlocks(cuts or prod(blocks.sent), blocks.routes, b.channel_of_all, src)


def _recv(b: Builder, dst: str, blocks: Transfer, cuts: Cuts | None, distance: int | None) -> tree.Instruction:
    if distance is not None:
        return ir.Recv(dst, _neighbor(-distance), b.channel_of_all)
    return ir.RecvBlocks(cuts or prod(blocks.received), blocks.routes, b.channel_of_all, dst)


def _neighbor(distance: int) -> Expr:
    return Rank() + distance if distance >= 0 else Rank() - -distance
