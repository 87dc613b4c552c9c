"""Moves between meshes: each side in the bodies of its own mesh, or both in one group if a rank may be on both.

Where ranks may share a dim unevenly, blocks end where a shard of either mesh does.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import prod

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.attributes import BLOCKS
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Rank
from hostweave.passes.lower import communication
from hostweave.passes.lower.exchanges import Exchange
from hostweave.passes.lower.steps import Dataflow, Steps
from hostweave.types.blocks import Cut, Cuts, Route, Transfer, shared_dims
from hostweave.types.mesh import Mesh
from hostweave.types.size import LocalSize, Size, product

COPIES = "copies"  # the mesh axis of a rank that sends and those that get the same from it

Buffer = Callable[[], str]  # names what is sent or received, in the body of its mesh


def to_other_ranks(b: Builder, flow: Dataflow, op: Op, src: Buffer, dst: Buffer, steps: Steps | None) -> None:
    source, target = flow.types[op.tensors[0]], op.result.type
    apart = set(source.mesh_in(flow.mesh).all_ranks).isdisjoint(target.mesh_in(flow.mesh).all_ranks)
    blocks = op[BLOCKS]
    if steps is None and blocks.is_cheaper_to_broadcast:  # in a loop, the ranks of the one mesh would wait for turns of the other's
        _broadcast(b, source.mesh, target.mesh, blocks, src, dst)
        return
    to_send, to_receive = _cuts(flow, op)
    distance = blocks.distance(source.mesh_in(flow.mesh).size) if apart else None
    with b.on(source.mesh):
        sent = communication.blocks_to_send(b, src(), blocks, to_send, steps)
        if apart:
            b.emit(communication.send(b, sent, blocks, to_send, distance))
    with b.on(target.mesh), communication.blocks_to_receive(b, dst, blocks, to_receive, steps) as landing:
        recv = communication.recv(b, landing, blocks, to_receive, distance)
        if apart:
            b.emit(recv)
        else:
            with b.on(None):
                communication.group(b, communication.send(b, sent, blocks, to_send, distance), recv)


def by_reading(b: Builder, flow: Dataflow, op: Op, src: Buffer, dst: Buffer, number: int) -> Callable[[], None]:
    """The same on a one-sided channel: what a rank sends lies in a window, from where others read it. Gives what has ranks wait for that.

    A rank tells those that read, which tell it, by a signal each of a `number` that no other move has which is not waited for.
    """
    source, target, blocks = flow.types[op.tensors[0]], op.result.type, op[BLOCKS]
    if any(_cuts(flow, op)):
        why = f"transport one_sided: {len(source.mesh_in(flow.mesh).all_ranks)} ranks and {len(target.mesh_in(flow.mesh).all_ranks)}"
        remedy = 'shard a dim alike on both meshes, write its size as an int that divides, or use transport="auto"'
        raise ProgramError(f"{op.kind}: {why} share a dim of {source} in blocks that may differ in size; {remedy}", op.location)
    world = tuple(name for name, _ in flow.mesh.axes)
    with b.on(None):
        ranks = Exchange(b, world)
    first, last = ({(route.sender, route.receiver): route for route in order}.values() for order in (blocks.moved[::-1], blocks.moved))

    def block(name: str, count: int, number: int) -> str:
        size = product(b.types[name].shape) // count
        return name if count == 1 else b.select(b.reshape(name, (Size(count), size), f"{name}_blocks"), 0, Const(number), f"{name}_block")

    def each(mesh: Mesh | None, emit: Callable[[Route], None], rank_of: Callable[[Route], int], chosen: Iterable[Route]) -> None:
        """Has each rank do its part of the routes, in their order."""
        for route in chosen:
            with b.on(mesh), b.inside(partial(ir.If, Rank().equals(rank_of(route)))):
                emit(route)

    def take(route: Route) -> None:
        sent, landed = block(packed, prod(blocks.sent), route.sent), block(landing, prod(blocks.received), route.received)
        if route.sender == route.receiver:
            ranks.copy(sent, landed)
            return
        if route in first:  # of those between two ranks, which signal once
            ranks.wait_for(Const(route.sender), sent, number)
        b.emit(ir.Get(sent, Const(route.sender), landed, ranks.channel))
        if route in last:
            ranks.signal_to(Const(route.sender), sent, number)

    with b.on(source.mesh):
        packed = ranks.in_window(communication.blocks_to_send(b, src(), blocks, None, None))
    each(source.mesh, lambda route: ranks.signal_to(Const(route.receiver), packed, number), lambda route: route.sender, last)
    with b.on(target.mesh), communication.blocks_to_receive(b, dst, blocks, None, None) as landing:
        each(target.mesh, take, lambda route: route.receiver, blocks.routes)
    return lambda: each(source.mesh, lambda route: ranks.wait_for(Const(route.receiver), packed, number), lambda route: route.sender, last)


def _cuts(flow: Dataflow, op: Op) -> tuple[Cuts, Cuts] | tuple[None, None]:
    """How what a rank holds of either side is cut; None into equal blocks."""
    source, target = flow.values[op.tensors[0]], op.result
    dims = shared_dims(source.type, target.type, flow.mesh)
    if not any(dim.is_uneven(flow.uneven) for dim in dims):
        return None, None

    def cuts(value: Value, counts: tuple[int, ...]) -> Cuts:
        parts = [
            Size(1, (LocalSize(own.size, own.axes, value.type.mesh),)) if dim.is_uneven(flow.uneven) and count > 1 and own.axes else held
            for dim, own, held, count in zip(dims, value.type.dims, flow.local(value).shape, counts, strict=True)
        ]
        return tuple(map(Cut, counts, parts))

    return cuts(source, op[BLOCKS].sent), cuts(target, op[BLOCKS].received)


def _broadcast(b: Builder, source: Mesh | None, target: Mesh | None, blocks: Transfer, src: Buffer, dst: Buffer) -> None:
    """Each rank that sends and those that receive from it are a process group; no rank is in two of them."""
    with b.on(source):
        full = src()
        sent, shape = communication.blocks_to_send(b, full, blocks, None, None), b.types[full].shape
    with b.on(target), communication.blocks_to_receive(b, dst, blocks, None, None) as landing:
        wanted = b.types[dst()].shape
        for sender, receivers in blocks.receivers.items():
            group = Mesh(((COPIES, 1 + len(receivers)),), (sender, *receivers))
            with b.on(group):
                b.emit(ir.BroadcastToOthers(sent, landing, Const(0), b.channel((COPIES,))))
        if there := tuple(route.receiver for route in blocks.routes if route.sender == route.receiver):
            with b.on(Mesh(((COPIES, len(there)),), there)):
                kept, copied = b.reshape(sent, shape, f"{sent}_kept"), b.reshape(landing, wanted, f"{landing}_copied")
                b.emit(ir.Copy(b.first(kept, wanted, f"{sent}_part"), copied))  # by the name that it has on the other mesh
