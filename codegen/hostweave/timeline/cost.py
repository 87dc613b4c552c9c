"""Predicts the time that each operation of a host program takes alone, and the engine that executes the operation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2, prod
from typing import Any

from hostweave.base.errors import ProgramError
from hostweave.check.operations import Access, Operation
from hostweave.communication.cost import CHUNK_SECONDS, LOOP_SECONDS, SWITCH_SECONDS, between, communication
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXIS
from hostweave.fusion_ir.ops.indexing import MAX_BLOCK_SORT
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const
from hostweave.host_ir.ir import Kernel
from hostweave.timeline.events import COMMUNICATION, COMPUTE, WAITING
from hostweave.transports.transport import DEFAULT
from hostweave.tune.cost import ATTENTION_PEAK, AttentionWork, Product, grouped_product, in_kernel
from hostweave.types.machine import Machine
from hostweave.types.mesh import Sizes

EVENT_SECONDS = CHUNK_SECONDS / 2  # seconds of a record, or of a wait for an event of another stream
FORK_SECONDS = LOOP_SECONDS / 4  # seconds of a fork or a join; a loop by puts has two of each
LAUNCH_OVERLAP = 1e-6  # seconds by which a launch overlaps with the previous kernel (programmatic dependent launch)
FIRST_ARRIVAL = 3e-6  # seconds until the last rank arrives at a communication at the start of a call
SORT_STAGE_SECONDS = 0.45e-6  # seconds per stage of the sorting network
RADIX_SECONDS, RADIX_SECONDS_PER_ELEMENT = 26e-6, 0.3e-9  # radix sort of a longer fiber: fixed seconds, and seconds per element
COUNT_SECONDS, COUNT_SECONDS_PER_ELEMENT = 3e-6, 0.2e-9  # order of a fiber by group: fixed seconds, and seconds per element
BY_KERNELS = 32  # slowdown of attention without tensor cores


@dataclass(frozen=True)
class Work:
    seconds: float
    engine: str = ""  # "multiprocessors" (a fraction `share` of them), "kernels" (that communicate), "copies", or ""
    share: float = 1.0
    sent: int = 0  # bytes to other ranks

    @property
    def kind(self) -> str:
        return {"multiprocessors": COMPUTE, "": WAITING}.get(self.engine, COMMUNICATION)


def work_of(operation: Operation, machine: Machine) -> Work:
    return tree.of_kind(_WORK, type(operation.instruction))(operation, machine)


def work_behind(operation: Operation, machine: Machine, before: str) -> Work:
    """Work of an operation on a stream. `before` is the last engine that the stream used, or ""."""
    work = work_of(operation, machine)
    is_ours = bool(tree.names(operation.instruction, "launch"))
    if is_ours and before:
        return replace(work, seconds=max(work.seconds - LAUNCH_OVERLAP, 0.0))
    turns = {work.engine, before} == {"multiprocessors", "kernels"} and not is_ours
    return replace(work, seconds=work.seconds + SWITCH_SECONDS) if turns else work


def with_kernel(work: Work, kernel: Kernel, sizes: Sizes, machine: Machine) -> Work:
    """Work of a launch, corrected for ops that take longer than one access of each operand. A sort waits between its stages and uses few
    multiprocessors. `take` reads one row of its operand per index. If the operand exceeds the cache, some repeated reads go to memory."""
    types = kernel.types

    def bytes_of(name: str) -> int:
        return prod([size.bind(sizes) for size in types[name].shape]) * types[name].dtype.itemsize

    reread_bytes, sorting = 0.0, 0.0
    for op in kernel.ops:
        if ordering := _ORDERINGS.get(op.kind):
            sorting += ordering(types[op.tensors[0]].shape[op[AXIS]].bind(sizes))
        elif OPS[op.kind].gathers:
            table = bytes_of(op.tensors[0])
            reread_bytes += max(0, bytes_of(op.result.name) - table) * max(0.0, 1 - machine.cache / max(table, 1))
    share = 1 / machine.multiprocessors if sorting > work.seconds else work.share
    return replace(work, seconds=work.seconds + reread_bytes / machine.memory + sorting, share=share)


def _sorting(length: int) -> float:
    if length > MAX_BLOCK_SORT:
        return RADIX_SECONDS + RADIX_SECONDS_PER_ELEMENT * length
    rounds = ceil(log2(max(length, 1)))
    return SORT_STAGE_SECONDS * rounds * (rounds + 1) / 2


# Seconds of ops that order the elements of a fiber, by the length of the fiber.
_ORDERINGS: dict[str, Callable[[int], float]] = {
    "argsort": _sorting,
    "group_order": lambda length: COUNT_SECONDS + COUNT_SECONDS_PER_ELEMENT * length,
}


def _bytes(access: Access) -> int:
    return access.region.layout.count * access.region.layout.dtype.itemsize


def _bytes_moved(operation: Operation) -> int:
    """Bytes that an operation reads and writes. An updated buffer counts twice."""
    return sum(_bytes(access) * (access.reads + access.writes) for access in operation.accesses)


def _kernel(operation: Operation, machine: Machine) -> Work:
    return Work(machine.launch + _bytes_moved(operation) / machine.memory, "multiprocessors")


def _matmul(operation: Operation, machine: Machine) -> Work:
    i = operation.instruction
    a, b, dst = (next(x.region.layout for x in operation.accesses if x.name == name) for name in (i.a, i.b, i.dst))  # type: ignore[attr-defined]
    is_one = prod(b.shape[:-2]) == 1  # If all batches share one matrix, their rows form one matmul.
    count, rows = (1, prod(dst.shape[:-1])) if is_one else (prod(dst.shape[:-2]), dst.shape[-2])
    product = Product(float(count), float(rows), float(a.shape[-1]), float(dst.shape[-1]), a.dtype, bool(i.precision))  # type: ignore[attr-defined]
    return Work(product.seconds(machine), "multiprocessors", product.share(machine))


def _grouped(operation: Operation, machine: Machine) -> Work:
    i: Any = operation.instruction
    x, other, groups = (next(a.region.layout for a in operation.accesses if a.name == name) for name in (i.x, i.other, i.starts))
    product = grouped_product(groups.shape[0], x.shape, other.shape, i.is_outer, x.dtype)
    return Work(product.seconds(machine), "multiprocessors", product.share(machine))


def _attention(operation: Operation, machine: Machine, products: float = 2.0) -> Work:
    i: Any = operation.instruction
    q, k, v = (next(x.region.layout for x in operation.accesses if x.name == name) for name in (i.q, i.k, i.v))
    rows, columns = q.shape[-2], min(k.shape[-2], i.window or k.shape[-2])
    is_causal = i.diagonal is not None and not i.window
    if is_causal and isinstance(i.diagonal, Const):  # Operations have constant diagonals.
        columns = max(0, min(columns, rows + i.diagonal.value))
    speed = ATTENTION_PEAK / (BY_KERNELS if q.dtype.itemsize > 2 else 1)
    width = float(q.shape[-1] + v.shape[-1])
    attention = AttentionWork(float(prod(q.shape[:-2])), float(rows), float(columns), width, is_causal, speed=speed, products=products)
    return Work(max(attention.seconds(machine), machine.launch + _bytes_moved(operation) / machine.memory), "multiprocessors")


def _collective(operation: Operation, machine: Machine) -> Work:
    ranks = len(operation.process_group)
    size = max((_bytes(access) for access in operation.accesses), default=0)
    if ranks < 2:
        return _kernel(operation, machine)
    is_reduced = isinstance(operation.instruction, ir.Reduction) and not operation.instruction.blocks
    kind = "all_reduce" if is_reduced else "all_to_all" if operation.instruction.grouped else ""
    seconds = communication(machine, kind, ranks, size, machine.hosts_of(operation.process_group))
    # A ring sends all blocks but one. An all-reduce does so twice.
    return Work(seconds, "kernels", sent=(1 + is_reduced) * size * (ranks - 1) // ranks)


def _rooted(operation: Operation, machine: Machine) -> Work:
    i: Any = operation.instruction
    size, ranks = max((_bytes(access) for access in operation.accesses), default=0), len(operation.process_group)
    is_root = operation.peer == operation.rank
    sends = is_root if i.sends_blocks or i.at_root == "src" else not is_root
    sent = size * (ranks - 1) // ranks if i.blocks and is_root else size
    return Work(communication(machine, "", ranks, size, machine.hosts_of(operation.process_group)), "kernels", sent=sent * sends)


def _permute(operation: Operation, machine: Machine) -> Work:
    size = max((_bytes(access) for access in operation.accesses), default=0)
    return Work(_seconds_between(operation, operation.process_group, size, machine), "kernels", sent=size)


def _seconds_between(operation: Operation, peers: Iterable[int | None], size: float, machine: Machine) -> float:
    """Seconds to move `size` bytes between two ranks, over the network if a peer is on another host."""
    return between(machine, size, machine.hosts_of({operation.rank, *(peer for peer in peers if peer is not None)}))


def _expect_one_host(operation: Operation, machine: Machine) -> None:
    """Raises ProgramError if an operation accesses the memory of a rank on another host."""
    if machine.hosts_of(ranks := operation.process_group) > 1:
        why = f"ranks {ranks[0]} and {ranks[-1]} are on different hosts, and cannot access each other's memory"
        raise ProgramError(f'predict: {why}; choose another algorithm, or transport="{DEFAULT}"', operation.instruction.location)


def _in_kernel(operation: Operation, machine: Machine) -> Work:
    """Work of a kernel that exchanges terms or blocks with the kernels of other ranks."""
    _expect_one_host(operation, machine)
    kind, ranks = operation.instruction.kind, len(operation.process_group)  # type: ignore[attr-defined]
    block = _bytes(operation.accesses[0]) // (ranks if OPS[kind].reduces_to_blocks else 1)
    seconds = machine.launch + in_kernel(kind, ranks, block) + _bytes_moved(operation) / machine.memory
    return Work(seconds, "kernels", sent=block * (ranks - 1))


def _group(operation: Operation, machine: Machine) -> Work:
    """Work of a group. Sends overlap with recvs, so the slower direction counts. Collectives run one after another."""
    sent, received, rest = 0, 0, 0.0
    for member in operation.members:
        if member.instruction.posts == "send":
            sent += _bytes_moved(member)
        elif member.instruction.posts == "recv":
            received += _bytes_moved(member)
        else:
            work = work_of(member, machine)
            rest, sent = rest + work.seconds, sent + work.sent
    pairs = _seconds_between(operation, (member.peer for member in operation.members), max(sent, received), machine)
    return Work(rest or pairs, "kernels", sent=sent)


def _pair(operation: Operation, machine: Machine) -> Work:
    size = _bytes_moved(operation)
    sent = size if operation.instruction.posts == "send" else 0
    return Work(_seconds_between(operation, (operation.peer,), size, machine), "kernels", sent=sent)


def _one_sided(operation: Operation, machine: Machine) -> Work:
    _expect_one_host(operation, machine)
    size, is_read = max(_bytes(access) for access in operation.accesses), operation.instruction.posts == "get"
    link = machine.link("get" if is_read else "put", len(operation.process_group))
    return Work(link.seconds(size), "copies", sent=0 if is_read else size)


_WORK: dict[type[tree.Instruction], Callable[[Operation, Machine], Work]] = {
    **dict.fromkeys((tree.Instruction, ir.OneSided), lambda operation, machine: Work(0.0)),  # Signals and waits send no data.
    ir.Compute: _kernel,
    ir.Matmul: _matmul,
    ir.Grouped: _grouped,
    ir.Attention: _attention,
    ir.AttentionBackward: partial(_attention, products=5.0),
    ir.Collective: _collective,
    **dict.fromkeys((ir.Broadcast, ir.BroadcastToOthers, ir.Reduce, ir.Gather, ir.Scatter), _rooted),
    ir.CollectivePermute: _permute,
    ir.LaunchExchange: _in_kernel,
    **dict.fromkeys((ir.Group, ir.Routed), _group),
    ir.PointToPoint: _pair,
    **dict.fromkeys((ir.Put, ir.Get), _one_sided),
    **dict.fromkeys((ir.Record, ir.Wait), lambda operation, machine: Work(EVENT_SECONDS)),
    # A fork or join takes time only on the streams that wait.
    **dict.fromkeys((ir.Fork, ir.Join), lambda operation, machine: Work(FORK_SECONDS if operation.waits else 0.0)),
}
