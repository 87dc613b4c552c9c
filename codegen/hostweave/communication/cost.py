"""How long communication takes on a machine: alone, beside other ops, and in the chunk loop of ops that need it or make it.

A chunk loop is played through: its matmuls follow one another, and so do its communications, each as soon as what it needs is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Protocol

from hostweave.types.machine import Machine

BESIDE_COPIES = 1.05  # a matmul takes as many times longer while copy engines use the memory, too
BESIDE_KERNELS = 1.7  # and while kernels that communicate hold multiprocessors
KERNELS_BESIDE = {2: 1.15, 4: 1.7, 8: 3.7}  # these take longer as well, by the number of ranks
LOOP = 12e-6  # seconds of the forks, signals and joins of a loop
CHUNK = 1.5e-6  # and of the events of an iteration


def communication(machine: Machine, kind: str, ranks: int, size: float, hosts: int = 1) -> float:
    """A collective alone, of a tensor of which a rank has so many bytes before or after it. An all-reduce takes two.

    Among hosts, with as many of the ranks on each, the network and the links of each host work at the same time.
    """
    if hosts == 1:
        link = machine.link("collective", ranks)
        once = link.seconds(size * (ranks - 1) / ranks)
        return 2 * once - link.seconds(0) if kind == "all_reduce" else once
    assert machine.network
    inside = max(ranks // hosts, 1)  # of one host
    of_host = machine.link("collective", inside).seconds(size * (ranks - 1) / ranks) if inside > 1 else 0.0
    crossing = size * (ranks - inside) / ranks  # what a rank gets from other hosts; blocks that all of a host want are taken once
    crossing /= 1 if kind == "all_to_all" else inside
    once = max(of_host, machine.network.seconds(crossing, messages=ceil(log2(hosts))))
    return 2 * once if kind == "all_reduce" else once


def kernels_beside(ranks: int) -> float:
    """How many times longer kernels that communicate take while matmuls run."""
    return next(slower for most, slower in KERNELS_BESIDE.items() if ranks <= most or most == max(KERNELS_BESIDE))


# --- outside of loops -------------------------------------------------------------------------------------------------


def by_collective(machine: Machine, kind: str, ranks: int, size: float, is_beside: bool) -> float:
    """Time of a collective of so many bytes; beside other ops the time that it adds to them, since its kernels hold multiprocessors."""
    alone = communication(machine, kind, ranks, size)
    return alone * kernels_beside(ranks) * (1 - 1 / BESIDE_KERNELS) if is_beside else alone


def by_copies(machine: Machine, kind: str, by: str, ranks: int, size: float, is_beside: bool) -> float:
    """The same of copy engines, which put or get it; beside other ops they need the memory alone."""
    # The kernel that adds up the terms of a reduction, which were copied.
    added = machine.launch + (ranks + 1) * size / ranks / machine.memory if kind == "reduce_scatter" else 0.0
    copied = (ranks - 1) * machine.link(by, ranks).seconds(size / ranks)
    return (copied * (BESIDE_COPIES - 1) if is_beside else copied) + LOOP + added


# --- chunk loops ------------------------------------------------------------------------------------------------------


class Computed(Protocol):
    """A matmul or an attention of one rank."""

    def seconds(self, machine: Machine) -> float: ...

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> Computed: ...


@dataclass(frozen=True)
class Overlap:
    """A gather and the matmuls or the attention of what it makes, or a matmul and the reduction of what that makes, over a dim of both.

    `size` is that of the gathered or partial tensor on one rank, in bytes. `rows` says whether the dim is one of rows of the results.
    """

    kind: str  # all_gather, reduce_scatter or all_reduce
    ranks: int
    size: float
    products: tuple[Computed, ...]
    rows: bool = True
    computed: bool = False  # what is gathered lies in memory of the program, so that peers can read it
    beside: float = 0.0  # seconds of other ops that a communication outside of a loop runs beside
    goes_on: bool = False  # whether the kernel that takes what is reduced, which reads it anyway, adds up what was put here
    around: tuple[float, float] = 0.0, 0.0  # seconds of kernels that lay out and join, in sequence and around the chunks

    def outside(self, machine: Machine, by: str = "") -> float:
        """Outside of a loop: by a collective, or `by` copies, that is "put" or "get". Either slows down what it runs beside."""
        if by:
            communicated, slower = by_copies(machine, self.kind, by, self.ranks, self.size, is_beside=False), BESIDE_COPIES - 1
        else:
            communicated, slower = communication(machine, self.kind, self.ranks, self.size), 1 - 1 / BESIDE_KERNELS
        hidden = min(communicated, self.beside)
        computed = self.around[0] + sum(p.seconds(machine) for p in self.products)
        return computed + communicated - hidden + hidden * slower

    def in_chunks(self, machine: Machine, chunks: int, own: int, transfer: float, slower: float, beside: float, added: float) -> float:
        """In so many chunks, of which `own` travel nowhere, and the others take a `transfer` each, so many times `slower` beside matmuls,
        which take so many times longer `beside` it. A kernel that is `added` sums what has landed."""
        others = chunks - own
        here, there = (sum(p.chunk(chunks, self.rows, is_own).seconds(machine) for p in self.products) for is_own in (True, False))
        both = min(1.0, others * transfer / (own * here + others * there))  # for how much of the time both run
        longer = 1 + both * (beside - 1)
        here, multiply = here * longer + CHUNK, there * longer + CHUNK
        transfers = [transfer * slower] * others
        if self.kind == "all_gather":
            return LOOP + self.around[1] + _after_arrival(own * here, transfers, multiply)
        return LOOP + _before_departure(transfers, multiply, own * multiply) + added


def _after_arrival(here: float, transfers: Sequence[float], multiply: float) -> float:
    """Seconds of the own chunks, then of each other chunk once it has arrived. Chunks arrive one after another."""
    computed, arrived = here, 0.0
    for transfer in transfers:
        arrived += transfer
        computed = max(computed, arrived) + multiply
    return computed


def _before_departure(transfers: Sequence[float], multiply: float, here: float) -> float:
    """Each chunk leaves once it is computed, one after the other; what is computed here comes last."""
    computed, departed = 0.0, 0.0
    for transfer in transfers:
        computed += multiply
        departed = max(departed, computed) + transfer
    return max(departed, computed + here)
