"""Verifier rules of communication instructions."""

from collections.abc import Callable
from math import prod
from typing import Any

from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import MESH_AXES, REDUCTION
from hostweave.host_ir import ir, tree
from hostweave.host_ir.rules.checker import Checker, Rule, Scope
from hostweave.host_ir.rules.computing import launch
from hostweave.transports.transport import REDUCTIONS
from hostweave.types.size import LocalSize, Size, product


def _communication(check: Callable[[Checker, Any, int], None]) -> Rule:
    def rule(c: Checker, i: Any, scope: Scope) -> None:
        buffers = tree.names(i, "read", "write")
        c.contiguous(*buffers)
        c.same_dtype(*buffers)
        check(c, i, _channel(c, i, scope).size)

    return rule


def _channel(c: Checker, i: ir.Communication, scope: Scope) -> ir.Channel:
    """Channel of a communication. For a collective, checks that all ranks of the channel execute the collective."""
    channel = c.channel(i)
    if i.posts == "collective":
        if scope.condition is not None:
            c.fail(f"a collective is not allowed under `if {scope.condition}`, which differs between ranks: use send and recv there")
        if scope.trips is not None:
            c.fail(f"a collective cannot be in a loop of {scope.trips} iterations, which differ between ranks: use send and recv there")
        if channel.mesh != c.mesh:
            c.fail(f"all ranks of the channel, {channel.mesh}, must execute a collective: use a channel on {c.mesh}")
    return channel


def _reduction_and_sizes(c: Checker, i: Any, size: int) -> None:
    if isinstance(i, ir.Reduction):
        if i.op not in REDUCTIONS:
            c.fail(f"unknown reduction {i.op!r}; use one of {', '.join(REDUCTIONS)}")
        transport, dtype = c.channel(i).transport, c.types[tree.names(i, "read")[0]].dtype.name
        if dtype in transport.reduced_as:
            c.fail(
                f"{transport.library} cannot reduce {dtype}: cast to {transport.reduced_as[dtype]} before the reduction and back after it"
            )
    if i.posts == "collective":
        large, small = (i.src, i.dst) if i.blocks == "src" else (i.dst, i.src)
        along = i.sent_along if i.blocks == "src" else i.received_along
        if along is None:
            c.counts(small, large, size if i.blocks else 1)
        else:
            _has_block(c, i, small, large, along)


def _has_block(c: Checker, i: ir.Communication, small: str, large: str, along: int) -> None:
    if c.known(product(c.types[small].shape)) != (own := _own_block(c, i, large, along)):
        c.fail(f"%{small} is {c.types[small]}, but this rank's block of %{large} along dim {along} has {own} elements: make them equal")


def _own_block(c: Checker, i: ir.Communication, name: str, along: int) -> Size:
    """Number of elements of this rank's block of a buffer whose dim `along` is split over the ranks."""
    shape, channel = c.types[name].shape, c.channel(i)
    if along >= len(shape):
        c.fail(f"%{name} is {c.types[name]}: it has no dim {along}")
    block = LocalSize(shape[along], channel.axes, None if channel.mesh == c.program.mesh else channel.mesh)
    return c.known(product(shape[:along] + shape[along + 1 :]) * Size(1, (block,)))


def _equal_sizes(c: Checker, i: ir.BroadcastToOthers | ir.CollectivePermute | ir.Put | ir.Get, size: int) -> None:
    """Checks that src and dst have equal sizes, even if src and dst are shards along different axes."""
    dst_elements, src_elements = (c.with_equal_shards(product(c.types[name].shape)) for name in (i.dst, i.src))
    if dst_elements != src_elements:
        c.counts(i.src, i.dst, 1)


def _all_to_all(c: Checker, i: ir.AllToAll, size: int) -> None:
    if i.sent_along is not None and i.received_along is not None:
        sent, received = _own_block(c, i, i.src, i.sent_along), _own_block(c, i, i.dst, i.received_along)
        if sent != received:
            c.fail(f"this rank sends itself {sent} elements of %{i.src}, but receives {received} in %{i.dst}")
        return
    if i.is_shared:
        c.fail("only one buffer has `along`: write it for both, or for none")
    c.counts(i.src, i.dst, 1)
    if not any(dim_size.divisor == 1 and dim_size.coefficient % size == 0 for dim_size in c.types[i.src].shape or (Size(),)):
        c.fail(f"%{i.src} is {c.types[i.src]}: {size} blocks cannot be proven equal; give it a dim of {size}, one block per rank")


def _collective_permute(c: Checker, i: ir.CollectivePermute, size: int) -> None:
    _equal_sizes(c, i, size)
    named = [source for source in i.sources if source is not None]
    if len(i.sources) != size or any(source >= size for source in named):
        c.fail(f"a process group of {size} needs {size} sources, each below {size} or none")
    if len(set(named)) < len(named):
        repeated = next(source for source in named if named.count(source) > 1)
        c.fail(f"rank {repeated} is named twice: each rank sends to at most one rank; use a broadcast")


def _barrier(c: Checker, i: ir.Barrier, size: int) -> None:
    buffer = c.types[i.token]
    if product(buffer.shape) != Size() or buffer.dtype.name in c.channel(i).transport.reduced_as:
        c.fail(f"%{i.token} is {buffer}: a barrier needs one number, such as i32[1]")


def _routed(c: Checker, i: ir.Routed, size: int) -> None:
    channel, ranks = c.channel(i), c.program.mesh
    if (channel.mesh, channel.axes) != (ranks, tuple(name for name, _ in ranks.axes)):
        c.fail(f"routes name ranks of the program: use a channel along all axes of {ranks}, in their order")
    if i.packed:
        c.cuts(i.packed, *tree.names(i, "read", "write"))
    count = i.count if isinstance(i.count, int) else prod(cut.blocks for cut in i.count)
    if not i.count or count < 1:
        c.fail("a buffer has at least one block: cut it into 1 or more")
    sends = i.posts == "send"
    for route in i.routes:
        if outside := [rank for rank in (route.sender, route.receiver) if rank >= size]:
            c.fail(f"{route}: {c.program.mesh} has no rank {outside[0]}: name only its ranks")
        if (route.sent if sends else route.received) >= count:
            c.fail(f"{route}: there are {count} blocks, from 0 to {count - 1}")


def _one_sided(c: Checker, i: Any, size: int) -> None:
    """Checks that peers access only memory in windows, that src and dst fit, and that signal and state exist."""
    for name in tree.names(i, "remote_read", "remote_write"):
        if outside := next((root for root in c.roots.all_of(name) if root not in c.windows), None):
            c.fail(f"%{outside} is not in a window, so peers cannot reach it: use allocate_window, or write `in window` after a parameter")
    moved = tree.names(i, "read", "write") if i.posts != "wait_signal" else ()
    if len(moved) == 2:
        if i.received_along is not None:
            _has_block(c, i, i.src, i.dst, i.received_along)
        else:
            _equal_sizes(c, i, size)
    if isinstance(i, ir.Signalled) and i.signal >= ir.SIGNAL_COUNTERS:
        c.fail(f"signal {i.signal}: the largest signal number is {ir.SIGNAL_COUNTERS - 1}")
    if isinstance(i, ir.Signalled) and i.state not in ir.SIGNAL_STATES:
        c.fail(f"a signal cannot say that a buffer is {i.state!r}: write one of {', '.join(ir.SIGNAL_STATES)}")


def _launch_exchange(c: Checker, i: ir.LaunchExchange, scope: Scope) -> None:
    """Checks that the kernel begins with a collective of its first input, and that kernels support this collective on this channel."""
    launch(c, i, scope)
    channel = _channel(c, i, scope)
    term, input, (first, *others) = i.srcs[0], c.kernels[i.kernel].inputs[0], c.kernels[i.kernel].ops
    name, kind, dtype = input.name, i.kind, c.types[term].dtype
    if first.kind != kind or first.tensors != (name,) or any(name in op.tensors for op in others):
        c.fail(f"@{i.kernel} must begin with the {kind} of %{name}, and no other op may read %{name}: reorder the ops, or use launch")
    if set(first[MESH_AXES].names) != set(channel.axes) or channel.size > ir.EXCHANGE_RANKS:
        along = ", ".join(first[MESH_AXES].names)
        c.fail(f"the {kind} of @{i.kernel} is along {along}: use a channel along these axes, of at most {ir.EXCHANGE_RANKS} ranks")
    if OPS[kind].reduces and (first[REDUCTION] != "sum" or dtype.name not in ir.EXCHANGED):
        c.fail(f"@{i.kernel} has a {first[REDUCTION]} of {dtype}, but kernels only sum {', '.join(ir.EXCHANGED)}: use {kind}")
    c.contiguous(term)
    sent, got = (c.known(product(shape)) for shape in (c.types[term].shape, input.type.shape))
    blocks = {"all_gather": (channel.size, 1), "reduce_scatter": (1, channel.size), "all_reduce": (1, 1)}[kind]
    if dtype != input.type.dtype or sent * blocks[0] != got * blocks[1]:
        c.fail(f"%{term} is {c.types[term]}, but the {kind} of @{i.kernel} gives {input.type}: give a rank equal blocks of the same dtype")


RULES: dict[type[tree.Instruction], Rule] = {
    ir.OneSided: _communication(_one_sided),
    ir.Communication: _communication(_reduction_and_sizes),
    ir.BroadcastToOthers: _communication(_equal_sizes),
    ir.AllToAll: _communication(_all_to_all),
    ir.CollectivePermute: _communication(_collective_permute),
    ir.Barrier: _communication(_barrier),
    ir.Routed: _communication(_routed),
    ir.LaunchExchange: _launch_exchange,
}
