"""Verifier rules of communications."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from hostweave.host_ir import ir
from hostweave.host_ir.rules.checker import Checker, Rule, Scope
from hostweave.types.size import Size, product

REDUCTIONS = ("sum", "prod", "min", "max", "avg")
NOT_REDUCED = {"bool": "u8", "f8e4m3": "f32", "f8e5m2": "f32"}  # NCCL has no sums of these; the dtype that carries them


def _communication(check: Callable[[Checker, Any, int], None]) -> Rule:
    def rule(c: Checker, i: Any, scope: Scope) -> None:
        buffers = ir.names(i, "read", "write")
        c.contiguous(*buffers)
        c.same_dtype(*buffers)
        if isinstance(i, ir.Collective):
            if scope.condition is not None:
                c.fail(f"a collective cannot stand under `if {scope.condition}`, which differs between ranks: only send and recv can")
            if scope.steps is not None:
                c.fail(f"a collective cannot stand in a loop of {scope.steps} steps, which differ between ranks: only send and recv can")
            if i.axes == ir.ALL_RANKS:
                c.fail("only send and recv, of blocks or of all, can be on *: name the axes of the mesh")
        check(c, i, c.group_size(i.axes))

    return rule


def _all_gather(c: Checker, i: ir.AllGather, size: int) -> None:
    _blocks_of(c, i, i.src, i.dst, i.received_along, size)


def _all_reduce(c: Checker, i: ir.AllReduce, size: int) -> None:
    _reduction(c, i)
    c.counts(i.src, i.dst, 1)


def _reduce_scatter(c: Checker, i: ir.ReduceScatter, size: int) -> None:
    _reduction(c, i)
    _blocks_of(c, i, i.dst, i.src, i.sent_along, size)


def _blocks_of(c: Checker, i: ir.Collective, block: str, blocks: str, along: int | None, size: int) -> None:
    """A buffer that holds the blocks of all ranks, and one that holds this rank's."""
    if along is None:
        c.counts(block, blocks, size)
        return
    whole, rest = _shared(c, blocks, along)
    own = c.known(rest * c.local_size(whole, i.axes))
    if c.known(product(c.types[block].shape)) != own:
        c.fail(f"%{block} is {c.types[block]}, and this rank's block of %{blocks} along dim {along} has {own} elements")


def _shared(c: Checker, name: str, along: int) -> tuple[Size, Size]:
    """The extent of a dim of which each rank has a share, and the elements of one index of it."""
    shape = c.types[name].shape
    if along >= len(shape):
        c.fail(f"%{name} is {c.types[name]}: it has no dim {along}")
    return shape[along], product(shape[:along] + shape[along + 1 :])


def _broadcast(c: Checker, i: ir.Broadcast, size: int) -> None:
    c.expr(i.root)
    c.counts(i.src, i.dst, 1)


def _broadcast_to_others(c: Checker, i: ir.BroadcastToOthers, size: int) -> None:
    c.expr(i.root)
    _as_much(c, i.src, i.dst)


def _as_much(c: Checker, src: str, dst: str) -> None:
    """Parts of one dim, shared by as many ranks of two meshes or axes, may be equal: that is seen when sizes are known."""
    have, want = (c.alike(product(c.types[name].shape)) for name in (dst, src))
    if have != want:
        c.counts(src, dst, 1)


def _reduce(c: Checker, i: ir.Reduce, size: int) -> None:
    _reduction(c, i)
    c.expr(i.root)
    c.counts(i.src, i.dst, 1)


def _gather(c: Checker, i: ir.Gather, size: int) -> None:
    c.expr(i.root)
    c.counts(i.src, i.dst, size)


def _scatter(c: Checker, i: ir.Scatter, size: int) -> None:
    c.expr(i.root)
    c.counts(i.dst, i.src, size)


def _all_to_all(c: Checker, i: ir.AllToAll, size: int) -> None:
    if i.sent_along is not None and i.received_along is not None:
        (cut, of_src), (joined, of_dst) = _shared(c, i.src, i.sent_along), _shared(c, i.dst, i.received_along)
        sent, received = c.known(of_src * c.local_size(cut, i.axes)), c.known(of_dst * c.local_size(joined, i.axes))
        if sent != received:
            c.fail(f"of %{i.src} this rank sends itself {sent} elements, and {received} are to arrive in %{i.dst}")
        return
    if i.sent_along is not None or i.received_along is not None:
        c.fail("either both buffers have a dim that the ranks share, or none: write the other one's, too")
    c.counts(i.src, i.dst, 1)
    if not any(extent.divisor == 1 and extent.coefficient % size == 0 for extent in c.types[i.src].shape or (Size(),)):
        c.fail(f"%{i.src} is {c.types[i.src]}: {size} ranks cannot be seen to share it evenly; give it a dim of {size}, a block a rank")


def _collective_permute(c: Checker, i: ir.CollectivePermute, size: int) -> None:
    _as_much(c, i.src, i.dst)
    named = [source for source in i.sources if source is not None]
    if len(i.sources) != size or any(source >= size for source in named):
        c.fail(f"a process group of {size} needs {size} sources, each a place below {size} or none")
    if len(set(named)) < len(named):
        twice = next(source for source in named if named.count(source) > 1)
        c.fail(f"place {twice} is named twice: a rank sends to one other; use a broadcast")


def _barrier(c: Checker, i: ir.Barrier, size: int) -> None:
    buffer = c.types[i.token]
    if product(buffer.shape) != Size() or buffer.dtype.name in NOT_REDUCED:
        c.fail(f"%{i.token} is {buffer}: a barrier needs one number, such as i32[1]")


def _reduction(c: Checker, i: ir.AllReduce | ir.ReduceScatter | ir.Reduce) -> None:
    if i.op not in REDUCTIONS:
        c.fail(f"unknown reduction {i.op!r}; one of {', '.join(REDUCTIONS)}")
    dtype = c.types[i.src].dtype.name
    if dtype in NOT_REDUCED:
        c.fail(f"NCCL cannot reduce {dtype}: cast to {NOT_REDUCED[dtype]} before it and back after it")


def _point_to_point(c: Checker, i: ir.Send | ir.Recv, size: int) -> None:
    c.expr(i.peer)


def _blocks(c: Checker, i: ir.SendBlocks | ir.RecvBlocks, size: int) -> None:
    if i.axes != ir.ALL_RANKS:
        c.fail("routes name ranks of the program: write on *")
    sends, count = isinstance(i, ir.SendBlocks), i.count
    if not isinstance(count, int):
        c.cuts(count, i.src if isinstance(i, ir.SendBlocks) else i.dst)
        count = prod(cut.blocks for cut in count)
    if count < 1:
        c.fail("a buffer has at least one block: cut it into 1 or more")
    for route in i.routes:
        if outside := [rank for rank in (route.sender, route.receiver) if rank >= size]:
            c.fail(f"{route}: {c.program.mesh} has no rank {outside[0]}: name ranks of it")
        if (route.sent if sends else route.received) >= count:
            c.fail(f"{route}: there are {count} blocks, the last one {count - 1}")


RULES: dict[type[ir.Instruction], Rule] = {
    ir.AllGather: _communication(_all_gather),
    ir.AllReduce: _communication(_all_reduce),
    ir.ReduceScatter: _communication(_reduce_scatter),
    ir.Broadcast: _communication(_broadcast),
    ir.BroadcastToOthers: _communication(_broadcast_to_others),
    ir.Reduce: _communication(_reduce),
    ir.Gather: _communication(_gather),
    ir.Scatter: _communication(_scatter),
    ir.AllToAll: _communication(_all_to_all),
    ir.CollectivePermute: _communication(_collective_permute),
    ir.Barrier: _communication(_barrier),
    ir.Send: _communication(_point_to_point),
    ir.Recv: _communication(_point_to_point),
    ir.SendBlocks: _communication(_blocks),
    ir.RecvBlocks: _communication(_blocks),
}
