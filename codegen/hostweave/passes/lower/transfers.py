"""Moves between meshes: each side in the bodies of its own mesh, or both in one group if a rank may be on both.

Where ranks share a dim unevenly, what is sent and received is padded to whole blocks, of which all have as much. A dim that both
meshes split, into different numbers of blocks that do not divide, is received whole, and each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import BLOCKS
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr
from hostweave.passes.lower import communication
from hostweave.passes.lower.dataflow import Dataflow
from hostweave.passes.lower.steps import Steps, expr_of, rank_in_group, total
from hostweave.types.mesh import Mesh
from hostweave.types.routes import Transfer
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

COPIES = "copies"  # the mesh axis of a rank that sends and those that get the same from it

Buffer = Callable[[], str]  # names what is sent or received, in the body of its mesh


@dataclass(frozen=True)
class Sides:
    """The meshes that send and receive; None is all ranks of the program."""

    source: Mesh | None
    target: Mesh | None
    apart: bool  # they share no rank


def to_other_ranks(b: Builder, flow: Dataflow, op: Op, src: Buffer, dst: Buffer, steps: Steps | None) -> None:
    source, target = flow.types[op.tensors[0]], op.result.type
    apart = set(source.mesh_in(flow.mesh).all_ranks).isdisjoint(target.mesh_in(flow.mesh).all_ranks)
    sides, blocks = Sides(source.mesh, target.mesh, apart), op[BLOCKS]
    padded = _padded(flow, op)

    def even() -> None:
        _move(b, sides, blocks, src, dst, steps)

    def uneven() -> None:
        _on_copies(b, sides, padded, src, dst)

    if not padded.sent:
        even()
        return
    if padded.is_even is None:
        uneven()
        return
    hoists, b.hoists_views = b.hoists_views, False  # views of a mesh are made in the `on` bodies of the branch
    with b.on(None):
        communication.branch(b, padded.is_even, even, uneven)
    b.hoists_views = hoists


def _move(b: Builder, sides: Sides, blocks: Transfer, src: Buffer, dst: Buffer, steps: Steps | None) -> None:
    if steps is None and blocks.is_cheaper_to_broadcast:  # in a loop, the ranks of the one mesh would wait for turns of the other's
        _broadcast(b, sides, blocks, src, dst)
        return
    distance = blocks.distance(sides.source.size) if sides.apart and sides.source else None
    with b.on(sides.source):
        sent = communication.blocks_to_send(b, src(), blocks, steps)
        if sides.apart:
            b.emit(communication.send(b, sent, blocks, distance))
    with b.on(sides.target), communication.blocks_to_receive(b, dst, blocks, steps) as landing:
        if sides.apart:
            b.emit(communication.recv(b, landing, blocks, distance))
        else:
            with b.on(None):
                communication.group(b, communication.send(b, sent, blocks, distance), communication.recv(b, landing, blocks, distance))


def _broadcast(b: Builder, sides: Sides, blocks: Transfer, src: Buffer, dst: Buffer) -> None:
    """Each rank that sends and those that receive from it are a process group; no rank is in two of them."""
    with b.on(sides.source):
        held = src()
        sent, shape = communication.blocks_to_send(b, held, blocks, None), b.types[held].shape
    with b.on(sides.target), communication.blocks_to_receive(b, dst, blocks, None) as landing:
        wanted = b.types[dst()].shape
        for sender, receivers in blocks.receivers.items():
            group = Mesh(((COPIES, 1 + len(receivers)),), (sender, *receivers))
            with b.on(group):
                b.emit(ir.BroadcastToOthers(sent, landing, Const(0), b.channel((COPIES,))))
        if there := tuple(route.receiver for route in blocks.routes if route.sender == route.receiver):
            with b.on(Mesh(((COPIES, len(there)),), there)):
                kept, copied = b.reshape(sent, shape, f"{sent}_kept"), b.reshape(landing, wanted, f"{landing}_copied")
                for i, extent in enumerate(wanted):  # the same part, by the name that it has on the other mesh
                    kept = b.slice(kept, i, extent, Const(0), f"{sent}_part")
                b.emit(ir.Copy(kept, copied))


# --- shards that may be uneven ----------------------------------------------------------------------------------------


@dataclass
class _Padded:
    """Dims that ranks may share unevenly, with the extents at which every block is as large as the others, and where a rank's own begins.

    `is_even` is true where they share them evenly after all; None where they never do.
    """

    blocks: Transfer
    sent: dict[int, Size] = field(default_factory=dict)
    received: dict[int, Size] = field(default_factory=dict)
    own: dict[int, Expr] = field(default_factory=dict)
    is_even: Expr | None = None


def _padded(flow: Dataflow, op: Op) -> _Padded:
    source, target = flow.types[op.tensors[0]], op.result.type
    old, new = source.mesh_in(flow.mesh), target.mesh_in(flow.mesh)
    blocks, remainders = op[BLOCKS], list[Expr]()
    found = _Padded(blocks)
    is_never_even = False
    dims = [(dim.extent, old.size_of(dim.axes), new.size_of(to.axes)) for dim, to in zip(source.dims, target.dims, strict=True)]
    if blocks.if_uneven and any(1 < have != want > 1 and size.is_uneven(lcm(have, want), flow.uneven) for size, have, want in dims):
        found.blocks = blocks.if_uneven
    for i, (size, have, want) in enumerate(dims):
        ranks, is_split_anew = lcm(have, want), 1 < have != want > 1
        uneven = size.symbols if is_split_anew and found.blocks is blocks.if_uneven else flow.uneven  # of those all arrive whole, or none
        if have == want or not size.is_uneven(ranks, uneven):  # what goes to a rank is as much as it is to have
            continue
        if 1 in (have, want):
            each = size.ceil_div(ranks)
            found.sent[i], found.received[i], found.own[i] = each * want, each * have, Const(0)
        else:
            each = size.ceil_div(have)
            found.sent[i], found.received[i] = each, each * have
            found.own[i] = rank_in_group(new, target.dims[i].axes) * expr_of(size.ceil_div(want))
        is_never_even |= size.is_int
        if not size.is_int:
            remainders.append(expr_of(size) % ranks)
    found.is_even = None if is_never_even else total(remainders).equals(0)
    return found


def _on_copies(b: Builder, sides: Sides, padded: _Padded, src: Buffer, dst: Buffer) -> None:
    def sent() -> str:
        given = src()
        whole, part = _memory(b, given, padded.sent), b.types[given].shape
        b.emit(ir.Fill(whole, 0.0))
        view = whole
        for i in padded.sent:
            view = b.slice(view, i, part[i], Const(0), f"{given}_part")
        b.emit(ir.Copy(given, view))
        return whole

    received: list[str] = []

    def landing() -> str:
        if not received:
            received.append(_memory(b, dst(), padded.received))
        return received[0]

    _move(b, sides, padded.blocks, sent, landing, None)
    with b.on(sides.target):
        wanted = dst()
        view = received[0]
        for i in padded.received:
            view = b.slice(view, i, b.types[wanted].shape[i], padded.own[i], f"{wanted}_part")
        b.emit(ir.Copy(view, wanted))


def _memory(b: Builder, like: str, extents: dict[int, Size]) -> str:
    """Memory for the same with these dims longer."""
    type = b.types[like]
    shape = tuple(extents.get(i, extent) for i, extent in enumerate(type.shape))
    return b.allocate_here(f"{like}_padded", BufferType(type.dtype, shape))
