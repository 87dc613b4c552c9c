"""Predicted time of communication: alone, overlapped with other ops, and in a chunk loop.

The model of a chunk loop has two queues, one of matmuls and one of communications. An item starts when its operands are ready and the
previous item of its queue has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Protocol

from hostweave.fusion_ir.ops import OPS
from hostweave.types.machine import Machine

MATMUL_SLOWDOWN_BY_COPIES = 1.05  # slowdown of matmuls while copy engines use the memory
MATMUL_SLOWDOWN_BY_KERNELS = 1.7  # slowdown of matmuls while communication kernels occupy multiprocessors
COMMUNICATION_SLOWDOWN = {2: 1.15, 4: 1.7, 8: 3.7}  # number of ranks -> slowdown of communication kernels while matmuls run
# Seconds from the end of a computation until a collective on the same stream has started on all ranks.
SWITCH_SECONDS = 3.5e-6
LOOP_SECONDS = 12e-6  # forks, signals and joins of a loop, or of copies by copy engines
CHUNK_SECONDS = 1.5e-6  # events of an iteration


def communication(machine: Machine, kind: str, ranks: int, size: float, hosts: int = 1) -> float:
    """Seconds of a collective that runs alone. `size` is the number of a rank's bytes before or after the collective, whichever is larger.
    Each of `hosts` hosts has the same number of ranks. The network works at the same time as the links inside each host."""
    if hosts == 1:
        link = machine.link("collective", ranks)
        one_pass = link.seconds(size * (ranks - 1) / ranks)
        return 2 * one_pass - link.seconds(0) if kind == "all_reduce" else one_pass
    assert machine.network
    inside = max(ranks // hosts, 1)  # ranks on one host
    of_host = machine.link("collective", inside).seconds(size * (ranks - 1) / ranks) if inside > 1 else 0.0
    # Bytes per GPU from other hosts. A block that all ranks of a host need crosses the network once.
    bytes_crossing = size * (ranks - inside) / ranks / (1 if kind == "all_to_all" else inside)
    one_pass = max(of_host, machine.network.seconds(bytes_crossing, messages=ceil(log2(hosts))))
    return 2 * one_pass if kind == "all_reduce" else one_pass


def between(machine: Machine, size: float, hosts: int = 1) -> float:
    """Seconds to send `size` bytes from a rank to another one, over the network if there are several `hosts`."""
    seconds = machine.link("collective", 2).seconds(size)
    return max(seconds, machine.network.seconds(size)) if machine.network and hosts > 1 else seconds


def communication_slowdown(ranks: int) -> float:
    """Slowdown for `ranks` ranks, or for the next larger number in the table. Beyond the table, slowdown for the largest number."""
    return next(slower for most, slower in COMMUNICATION_SLOWDOWN.items() if ranks <= most or most == max(COMMUNICATION_SLOWDOWN))


# --- outside of loops -------------------------------------------------------------------------------------------------


def by_collective(machine: Machine, kind: str, ranks: int, size: float, overlaps: bool, hosts: int = 1) -> float:
    """Seconds of a collective of `size` bytes. With `overlaps`, only the seconds by which the collective delays concurrent ops, because its
    kernels occupy multiprocessors."""
    alone = communication(machine, kind, ranks, size, hosts)
    return alone * communication_slowdown(ranks) * (1 - 1 / MATMUL_SLOWDOWN_BY_KERNELS) if overlaps else alone


def by_copies(machine: Machine, kind: str, by: str, ranks: int, size: float, overlaps: bool) -> float:
    """Seconds of a gather or reduce-scatter of `size` bytes by copy engines. With `overlaps`, the copies count only as a delay of
    concurrent ops."""
    # A kernel sums the copied terms.
    added = machine.launch + (ranks + 1) * size / ranks / machine.memory if OPS[kind].reduces_to_blocks else 0.0
    copied = (ranks - 1) * machine.link(by, ranks).seconds(size / ranks)
    return (copied * (MATMUL_SLOWDOWN_BY_COPIES - 1) if overlaps else copied) + LOOP_SECONDS + added


# --- chunk loops ------------------------------------------------------------------------------------------------------


class Computed(Protocol):
    def seconds(self, machine: Machine) -> float: ...

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> Computed: ...


@dataclass(frozen=True)
class Overlap:
    """A gather and its consumers, or a matmul and its reduction. `size` is the number of bytes of the gathered or partial tensor on one
    rank. If `rows`, the chunks are rows of the results, otherwise columns."""

    kind: str  # all_gather, reduce_scatter or all_reduce
    ranks: int
    size: float
    products: tuple[Computed, ...]
    rows: bool = True
    computed: bool = False  # True if the program computes the gathered operand, so peers can read it in place
    overlapped: float = 0.0  # seconds of other ops that can overlap with the communication if there is no loop
    consumer_sums: bool = False  # True if the consumer's kernel sums the terms
    extra_seconds: tuple[float, float] = 0.0, 0.0  # seconds of kernels that pack and join blocks: (without a loop, in a loop)
    hosts: int = 1

    def outside(self, machine: Machine, by: str = "") -> float:
        """Seconds without a loop. The delay of overlapped ops is included. `by` is "put" or "get" for copies, and "" for a collective."""
        if by:
            communicated = by_copies(machine, self.kind, by, self.ranks, self.size, overlaps=False)
            slower = MATMUL_SLOWDOWN_BY_COPIES - 1
        else:
            communicated = SWITCH_SECONDS + communication(machine, self.kind, self.ranks, self.size, self.hosts)
            slower = 1 - 1 / MATMUL_SLOWDOWN_BY_KERNELS
        hidden = min(communicated, self.overlapped)
        computed = self.extra_seconds[0] + sum(p.seconds(machine) for p in self.products)
        return computed + communicated - hidden + hidden * slower

    def in_chunks(
        self, machine: Machine, chunks: int, own: int, transfer: float, slower: float, matmul_slowdown: float, added: float
    ) -> float:
        """Seconds in a loop of `chunks` chunks. `own` chunks are not transferred. The transfer of a chunk takes `transfer` seconds alone,
        and `slower` times as long in the loop. Matmuls that overlap with transfers take `matmul_slowdown` times as long. The sum of the
        received blocks takes `added` seconds."""
        others = chunks - own
        own_chunk, other_chunk = (
            sum(p.chunk(chunks, self.rows, is_own).seconds(machine) for p in self.products) for is_own in (True, False)
        )
        # Fraction of the matmuls' time in which transfers run. Matmuls without elements take no time.
        computed = own * own_chunk + others * other_chunk
        overlap_share = min(1.0, others * transfer / computed) if computed else 1.0
        slowdown = 1 + overlap_share * (matmul_slowdown - 1)
        own_chunk, multiply = own_chunk * slowdown + CHUNK_SECONDS, other_chunk * slowdown + CHUNK_SECONDS
        transfer *= slower
        # Each chunk of another rank is in both queues, one queue after the other. The slower queue determines the time.
        passed = max(transfer + others * multiply, others * transfer + multiply) if others else 0.0
        if not OPS[self.kind].reduces:
            return LOOP_SECONDS + self.extra_seconds[1] + max(passed, own * own_chunk + others * multiply)
        return LOOP_SECONDS + max(passed, chunks * multiply) + added
