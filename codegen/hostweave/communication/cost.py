"""Cost of communication: alone, overlapped with other ops, and in a chunk loop.

The cost of a chunk loop is simulated. Its matmuls run one after another, and so do its communications. Each starts as soon as its operands
are ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Protocol

from hostweave.types.machine import Machine

BESIDE_COPIES = 1.05  # slowdown of matmuls while copy engines share the memory bandwidth
BESIDE_KERNELS = 1.7  # slowdown of matmuls while communication kernels occupy multiprocessors
KERNELS_BESIDE = {2: 1.15, 4: 1.7, 8: 3.7}  # number of ranks -> slowdown of communication kernels while matmuls run
# seconds to switch between computation and a collective kernel on one stream: its blocks start, and it waits for the last rank
TURN = 3.5e-6
LOOP = 12e-6  # seconds for the forks, signals and joins of a loop
CHUNK = 1.5e-6  # seconds for the events of an iteration


def communication(machine: Machine, kind: str, ranks: int, size: float, hosts: int = 1) -> float:
    """Seconds of a collective that runs alone. `size` is the larger of a rank's bytes before and after it. An all-reduce takes twice the
    time of a reduce-scatter.

    If there are several hosts, each has equally many of the ranks, and the network works concurrently with the links inside each host.
    """
    if hosts == 1:
        link = machine.link("collective", ranks)
        once = link.seconds(size * (ranks - 1) / ranks)
        return 2 * once - link.seconds(0) if kind == "all_reduce" else once
    assert machine.network
    inside = max(ranks // hosts, 1)  # number of ranks on one host
    of_host = machine.link("collective", inside).seconds(size * (ranks - 1) / ranks) if inside > 1 else 0.0
    crossing = size * (ranks - inside) / ranks  # bytes from other hosts; if all ranks of a host need a block, it crosses the network once
    crossing /= 1 if kind == "all_to_all" else inside
    once = max(of_host, machine.network.seconds(crossing, messages=ceil(log2(hosts))))
    return 2 * once if kind == "all_reduce" else once


def kernels_beside(ranks: int) -> float:
    """Slowdown of communication kernels while matmuls run."""
    return next(slower for most, slower in KERNELS_BESIDE.items() if ranks <= most or most == max(KERNELS_BESIDE))


# --- outside of loops -------------------------------------------------------------------------------------------------


def by_collective(machine: Machine, kind: str, ranks: int, size: float, is_beside: bool) -> float:
    """Seconds of a collective of `size` bytes. If `is_beside`, it overlaps with other ops, and the result is the number of seconds that it
    delays them, because its kernels occupy multiprocessors."""
    alone = communication(machine, kind, ranks, size)
    return alone * kernels_beside(ranks) * (1 - 1 / BESIDE_KERNELS) if is_beside else alone


def by_copies(machine: Machine, kind: str, by: str, ranks: int, size: float, is_beside: bool) -> float:
    """Seconds of the same communication with copy engines. If `is_beside`, it overlaps with other ops, and the result is the number of
    seconds that it delays them, because they share the memory bandwidth."""
    # The kernel that sums the copied terms of a reduction.
    added = machine.launch + (ranks + 1) * size / ranks / machine.memory if kind == "reduce_scatter" else 0.0
    copied = (ranks - 1) * machine.link(by, ranks).seconds(size / ranks)
    return (copied * (BESIDE_COPIES - 1) if is_beside else copied) + LOOP + added


# --- chunk loops ------------------------------------------------------------------------------------------------------


class Computed(Protocol):
    """A matmul or attention on one rank."""

    def seconds(self, machine: Machine) -> float: ...

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> Computed: ...


@dataclass(frozen=True)
class Overlap:
    """A reshard, and the matmuls or the attention with which it can overlap: a gather and its consumers, or a matmul and its reduction.

    `size` is the number of bytes of the gathered or partial tensor on one rank. `rows` is True if the chunked dim is a row dim of the
    results.
    """

    kind: str  # all_gather, reduce_scatter or all_reduce
    ranks: int
    size: float
    products: tuple[Computed, ...]
    rows: bool = True
    computed: bool = False  # the program computed the gathered operand, so it can be in memory that peers read
    beside: float = 0.0  # seconds of other ops that overlap with the communication if there is no loop
    goes_on: bool = False  # the kernel that consumes the result also sums the terms that peers put
    around: tuple[float, float] = 0.0, 0.0  # seconds of kernels that pack and join blocks: without a loop, and in a loop

    def outside(self, machine: Machine, by: str = "") -> float:
        """Seconds without a loop. The communication is a collective, or copies if `by` is "put" or "get". It slows down the ops with which
        it overlaps."""
        if by:
            communicated, slower = by_copies(machine, self.kind, by, self.ranks, self.size, is_beside=False), BESIDE_COPIES - 1
        else:
            communicated, slower = TURN + communication(machine, self.kind, self.ranks, self.size), 1 - 1 / BESIDE_KERNELS
        hidden = min(communicated, self.beside)
        computed = self.around[0] + sum(p.seconds(machine) for p in self.products)
        return computed + communicated - hidden + hidden * slower

    def in_chunks(self, machine: Machine, chunks: int, own: int, transfer: float, slower: float, beside: float, added: float) -> float:
        """Seconds in a loop of `chunks` chunks. `own` of them need no transfer.

        Each of the others takes `transfer` seconds, times `slower` while matmuls run. Matmuls slow down by at most the factor `beside`.
        `added` is the number of seconds of the kernel that sums the received blocks.
        """
        others = chunks - own
        here, there = (sum(p.chunk(chunks, self.rows, is_own).seconds(machine) for p in self.products) for is_own in (True, False))
        both = min(1.0, others * transfer / (own * here + others * there))  # fraction of the time in which transfers and matmuls overlap
        longer = 1 + both * (beside - 1)
        here, multiply = here * longer + CHUNK, there * longer + CHUNK
        transfers = [transfer * slower] * others
        if self.kind == "all_gather":
            return LOOP + self.around[1] + _after_arrival(own * here, transfers, multiply)
        return LOOP + _before_departure(transfers, multiply, own * multiply) + added


def _after_arrival(here: float, transfers: Sequence[float], multiply: float) -> float:
    """Seconds to compute the rank's own chunks, and then each other chunk as soon as it has arrived. Chunks arrive one after another."""
    computed, arrived = here, 0.0
    for transfer in transfers:
        arrived += transfer
        computed = max(computed, arrived) + multiply
    return computed


def _before_departure(transfers: Sequence[float], multiply: float, here: float) -> float:
    """Seconds to compute each other chunk and send it as soon as it is computed, one after another. The rank's own chunks are computed
    last."""
    computed, departed = 0.0, 0.0
    for transfer in transfers:
        computed += multiply
        departed = max(departed, computed) + transfer
    return max(departed, computed + here)
