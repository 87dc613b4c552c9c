"""Communication outside of chunk loops runs beside ops that do not need its result, on a stream of its own.

    %y: bf16[M, N] = matmul(%x, %v)
    %w_gathered: bf16[N, K] = all_gather(%w, dim=0, axes=(x))
    %z: bf16[M, K] = matmul(%y, %w_gathered)

becomes

    %w_gathered: bf16[N, K] async = all_gather(%w, dim=0, axes=(x))
    %y: bf16[M, N] = matmul(%x, %v)
    %z: bf16[M, K] = matmul(%y, %w_gathered)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hostweave.communication.schedules import transport_of
from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, TO_OTHER_MESHES, communicates
from hostweave.fusion_ir.resharding import step_of
from hostweave.fusion_ir.rewriting import map_functions
from hostweave.options import Options
from hostweave.tune.cost import most_terms, seconds
from hostweave.tune.overlaps import ENOUGH, choice_of, hidden_beside, reaches_memory, ways_outside_loops
from hostweave.types.size import product

PRODUCTS = ("matmul", "attention", "attention_backward")


def overlap_communication(fusion: Fusion, options: Options) -> Fusion:
    """After it each communication of a program and of its functions stands as early as hides it, and is `async` where that pays.

    Where nothing but sums that kernels may add up would run beside the rest, none does: a kernel that waits for other ranks stands no
    communication beside it (`reduce_in_kernels`), and takes less time than a collective takes to begin.
    """
    overlapped = map_functions(fusion, lambda body: _overlapped(body, options))
    ops = [(op, body) for body in (*overlapped.functions, overlapped) for op in body.ops if communicates(op)]
    beside = [_is_small_sum(op, body, options) for op, body in ops if op.result.is_async or op.result.stream]
    is_in_kernels = beside and all(beside) and options.transport == "auto" and not options.figures.no_peers
    return fusion if is_in_kernels else overlapped


def _is_small_sum(op: Op, body: Fusion, options: Options) -> bool:
    """Whether it is of few enough bytes for a kernel at the sizes that are stated, or may be where they are not."""
    step = step_of(op)
    if op.kind != "all_reduce" or step.reduction != "sum" or op.result.stream:
        return False
    term = body.values()[op.tensors[0]].type.local(body.mesh)
    most, size = most_terms(options.figures, body.mesh.size_of(step.axes), term), product(term.shape)
    return most > 0 and (not options.sizes.keys() >= set(size.symbols) or size.bind(options.sizes) <= most)


def _overlapped(fusion: Fusion, options: Options) -> Fusion:
    """One body, at the typical sizes. A gather or a reduce-scatter next to other ops is done by copies, as on transport `peer`, if its
    sizes are stated and that costs these ops less. Then others are, too, if that takes less time. A choice says so.

    A communication goes up past what takes as long as it does itself, and no further: what it receives takes memory from there on. Past
    another one it does not go, so that all keep their order. Before that products that are only returned are moved behind it.
    """
    candidates = list(filter(_may_be_async, fusion.ops))
    if options.overlap == "off" or not candidates:
        return fusion
    times = seconds(fusion, options.sizes, options.figures, options.tf32)
    ops = _filled(fusion.ops, times)
    transfers = _Transfers(fusion, options)
    alone: list[Op] = []
    for op in candidates:
        place = ops.index(op)
        earlier, hidden = hidden_beside(ops, place, times)
        if hidden >= ENOUGH:
            del ops[place]
            ops.insert(earlier, transfers.taken(replace(op, result=replace(op.result, is_async=True)), is_beside=True))
        else:
            alone.append(op)
    if transfers.choices:  # the program has windows, or could have some
        for op in alone:
            ops[ops.index(op)] = transfers.taken(op, is_beside=False)
    return replace(fusion, ops=tuple(ops), choices=(*fusion.choices, *transfers.choices))


class _Transfers:
    """How gathers and reduce-scatters of a body are done, and the choices that say so."""

    def __init__(self, fusion: Fusion, options: Options):
        self.fusion, self.options = fusion, options
        self.chosen = {choice.value for choice in fusion.choices}
        self.reaches = reaches_memory(fusion, options)
        self.choices: list[Choice] = []

    def taken(self, op: Op, is_beside: bool) -> Op:
        """A communication, by copy engines where these cost less; that is on a stream of its own, also where nothing runs beside it."""
        options = self.options
        possible = ways_outside_loops(op, self.fusion, options, is_beside, self.reaches)
        if len(possible) < 2 or op.result.name in self.chosen:
            return op
        self.choices.append(choice := choice_of(op, self.fusion, possible, options.ways))
        if not choice.taken.chunks:
            return op
        transport = transport_of(choice.taken, options)
        is_usual = transport == options.transports[0]
        return replace(op, result=replace(op.result, is_async=True, transport="" if is_usual else transport.name))


def _filled(ops: Sequence[Op], times: dict[str, float]) -> list[Op]:
    """The ops, with products that nothing large needs, as those of gradients of weights, moved down to where the rest waits for a
    communication: past two of them at most, since they hold what they multiply.
    """
    needed: set[str] = set()  # by something large: a gradient of weights is not
    for op in reversed(ops):
        if communicates(op) or op.callee or op.result.stream or op.kind in PRODUCTS or op.result.name in needed:
            needed.update(op.tensors)
    order, late, moved, aged = list[Op](), list[Op](), set[str](), 0  # of those that are late, how many have passed a communication
    clock = link = 0.0  # when what was computed and communicated so far has ended
    ends: dict[str, float] = {}  # of results of communications

    def take() -> float:
        order.append(late.pop(0))
        return clock + times[order[-1].result.name]

    for op in ops:
        name, is_view = op.result.name, OPS[op.kind].is_view
        is_free = op.kind == "matmul" and name not in needed and not op.result.stream and ends
        if is_free or not moved.isdisjoint(op.tensors):
            late.append(op)
            moved.add(name)
            continue
        ready = max((ends.get(source, 0.0) for source in op.tensors), default=0.0)
        if communicates(op):
            ends[name] = link = max(clock, link, ready) + times[name]
            order.append(op)
            for _ in range(aged if name in needed else 0):
                clock = take()
            aged = len(late) if name in needed else aged
            continue
        while late and ready - clock >= ENOUGH and not is_view:
            clock, aged = take(), max(0, aged - 1)
        if is_view:
            ends[name] = ready
        else:
            clock = max(clock, ready) + times[name]
        order.append(op)
    return [*order, *late]


def _may_be_async(op: Op) -> bool:
    """Not on a mesh of some of the ranks: the others would wait for an event that they do not record."""
    is_collective = op.kind not in TO_OTHER_MESHES and communicates(op) and not op.callee
    return is_collective and op.result.stream is None and op.result.type.mesh is None
