"""Runs communication outside of chunk loops on a separate stream, concurrently with independent ops.

    %y: bf16[M, N] = matmul(%x, %v)
    %w_gathered: bf16[N, K] = all_gather(%w, dim=0, axes=(x))
    %z: bf16[M, K] = matmul(%y, %w_gathered)

becomes

    %w_gathered: bf16[N, K] async = all_gather(%w, dim=0, axes=(x))
    %y: bf16[M, N] = matmul(%x, %v)
    %z: bf16[M, K] = matmul(%y, %w_gathered)
"""

from collections import Counter
from dataclasses import replace

from hostweave.base.unchanged import replaced
from hostweave.communication.algorithms import transport_of
from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, TO_OTHER_MESHES, communicates
from hostweave.fusion_ir.ops.calls import is_gathered_by_call, times_called
from hostweave.fusion_ir.resharding import step_of
from hostweave.fusion_ir.rewriting import consumers, in_order, map_functions
from hostweave.options import Options
from hostweave.tune import overlaps
from hostweave.tune.cost import in_kernel, most_terms, seconds
from hostweave.types.size import product
from hostweave.types.tensor import BufferType


def overlap_communication(fusion: Fusion, options: Options) -> Fusion:
    """Hoists communications just far enough to hide their time. Marks a communication `async` if this saves time.

    A kernel that exchanges small blocks itself is faster than a collective, but must not overlap with communication (see
    `reduce_in_kernels`). With peer access and transport "auto", a program without chunk loops does not change in two cases. Either each
    communication that would overlap is an all-reduce that a kernel can do itself, or such kernels save more time than overlap.
    """
    overlapped = map_functions(fusion, lambda body: _overlapped(body, options))
    ops = [(op, body) for body in (*overlapped.functions, overlapped) for op in body.ops if communicates(op)]
    overlapping = ((op, body) for op, body in ops if op.result.is_async or op.result.stream)
    beside = [OPS[op.kind].reduces_to_all and _may_be_in_kernel(op, body, options) for op, body in overlapping]
    overlaps_already = any(op.result.stream or op.result.is_async for op in filter(communicates, fusion.all_ops))
    may_be_in_kernels = options.transport == "auto" and not options.figures.no_peers and not overlaps_already
    if beside and may_be_in_kernels and (all(beside) or _saves_more_in_kernels(overlapped, options)):
        return fusion
    return overlapped


def _saves_more_in_kernels(fusion: Fusion, options: Options) -> bool:
    """True if small collectives in kernels save more time than async communications hide, at the stated sizes and over all calls."""
    calls, saved, hidden = Counter({fusion.name: 1}), 0.0, 0.0
    for body in (fusion, *reversed(fusion.functions)):  # Callers come before callees.
        times = seconds(body, options.sizes, options.figures, options.tf32)
        for op in body.ops:
            if op.callee:
                calls[op.callee.name] += times_called(op, {**options.sizes, **fusion.depths}) * calls[body.name]
            elif communicates(op) and _may_be_in_kernel(op, body, options):
                size = product(_block(op, body).shape)
                if options.sizes.keys() >= set(size.symbols):
                    sent = size.bind(options.sizes) * op.result.type.dtype.itemsize
                    alone = in_kernel(op.kind, body.mesh.size_of(step_of(op).axes), sent)
                    if op.result.is_async and not OPS[op.kind].reduces_to_all:
                        hidden += calls[body.name] * alone
                    else:
                        saved += calls[body.name] * (times[op.result.name] - alone)
            elif op.result.is_async:
                hidden += calls[body.name] * times[op.result.name]
    return saved > hidden


def _block(op: Op, body: Fusion) -> BufferType:
    """Type of the block that a rank sends to every other rank."""
    whole = op.result.type if OPS[op.kind].reduces_to_blocks else body.types[op.tensors[0]]
    return whole.local(body.mesh)


def _may_be_in_kernel(op: Op, body: Fusion, options: Options) -> bool:
    """True if a kernel may do a collective: a sum or gather of small or unknown size, outside of chunk loops, on the program's mesh."""
    if op.kind not in overlaps.KINDS or op.result.type.mesh or op.result.stream or (step := step_of(op)).reduction not in ("sum", ""):
        return False
    block = _block(op, body)
    most, size = most_terms(options.figures, op.kind, body.mesh.size_of(step.axes), block), product(block.shape)
    return most > 0 and (not options.sizes.keys() >= set(size.symbols) or size.bind(options.sizes) <= most)


def _overlapped(fusion: Fusion, options: Options) -> Fusion:
    """Hoists communications of a body past just enough work to hide them.

    First moves matmuls down to points where a rank would wait, unless a large op needs the matmuls. A choice records how a gather or
    reduce-scatter of stated sizes is executed, for example by copy engines. If an overlapped communication of the body has a choice,
    communications that overlap with nothing have choices too.
    """
    candidates, users = list(filter(_may_be_async, fusion.ops)), consumers(fusion)
    ahead = {op.result.name for op in fusion.ops if is_gathered_by_call(op, users[op.result.name])}
    if options.overlap == "off" or not (candidates or ahead):
        return fusion
    times = seconds(fusion, options.sizes, options.figures, options.tf32)
    transfers = _Transfers(fusion, options)
    ops = [
        transfers.taken(op, is_beside=True, is_by_call=True) if op.result.name in ahead else op for op in overlaps.filled(fusion.ops, times)
    ]
    alone: list[Op] = []
    for op in candidates:
        index = ops.index(op)
        earlier, hidden = overlaps.hidden_beside(ops, index, times)
        if hidden >= overlaps.HIDDEN_SECONDS:
            del ops[index]
            ops.insert(earlier, transfers.taken(replace(op, result=replace(op.result, is_async=True)), is_beside=True))
        else:
            alone.append(op)
    are_chosen = bool(transfers.choices)
    for op in alone:
        if are_chosen or op.result.name in transfers.chosen:
            ops[ops.index(op)] = transfers.taken(op, is_beside=False)
    ops = _sums_last(ops, alone)
    return replaced(in_order(fusion, ops), choices=(*fusion.choices, *transfers.choices))


def _sums_last(ops: list[Op], alone: list[Op]) -> list[Op]:
    """In a body with matmuls or attention, moves to the end all-reduces that overlap with nothing, unless a large op needs them. All ops
    that depend on these all-reduces follow. The all-reduces can then be grouped."""
    needed, names = overlaps.needed_by_large(ops), {op.result.name for op in alone}
    sums, made, last = list[Op](), list[Op](), set[str]()  # the sums, the ops that depend on sums, and the names of all these ops
    rest = list[Op]()
    for op in ops:
        name = op.result.name
        if not last.isdisjoint(op.tensors):
            made.append(op)
        elif OPS[op.kind].reduces_to_all and name in names - needed:
            sums.append(op)
        else:
            rest.append(op)
            continue
        last.add(name)
    return [*rest, *sums, *made] if any(OPS[op.kind].multiplies for op in ops) else ops


class _Transfers:
    """Chooses collectives or copy engines for the gathers and reduce-scatters outside of a body's loops. Records the choices."""

    def __init__(self, fusion: Fusion, options: Options):
        self.fusion, self.options = fusion, options
        self.chosen = {choice.value: choice for choice in fusion.choices}
        self.reaches = overlaps.reaches_memory(fusion, options)
        self.choices: list[Choice] = []

    def taken(self, op: Op, is_beside: bool, is_by_call: bool = False) -> Op:
        """The communication with its chosen transport. Copy engines always use a separate stream."""
        options, choice = self.options, self.chosen.get(op.result.name)
        if choice is None:
            possible = overlaps.alternatives_outside_loops(op, self.fusion, options, is_beside, self.reaches, is_by_call)
            if len(possible) < 2:
                return op
            self.choices.append(choice := overlaps.choice_of(op, self.fusion, possible, options.choices))
        if not choice.chosen.chunks:
            return op
        transport = transport_of(choice.chosen, options)
        is_usual = transport == options.transports[0]
        return replace(op, result=replace(op.result, is_async=True, transport="" if is_usual else transport.name))


def _may_be_async(op: Op) -> bool:
    """True for collectives outside of chunk loops that are not asynchronous yet. False on a mesh of some ranks, because ranks outside of
    the mesh record no event."""
    is_collective = op.kind not in TO_OTHER_MESHES and communicates(op) and not op.callee
    return is_collective and not (op.result.is_async or op.result.stream or op.result.type.mesh)
