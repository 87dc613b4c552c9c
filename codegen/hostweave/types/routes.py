"""Moves between meshes: which rank sends which block of a tensor to which rank."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import lcm, prod

from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType


@dataclass(frozen=True)
class Route:
    """Block `sent` of what rank `sender` holds becomes block `received` of what rank `receiver` holds."""

    sender: int
    sent: int
    receiver: int
    received: int

    def __str__(self) -> str:
        return f"{self.sender}[{self.sent}] -> {self.receiver}[{self.received}]"


@dataclass(frozen=True)
class Transfer:
    """How a tensor gets from one mesh to another, each block to every rank that is to hold it, once.

    Senders cut each dim of what they hold into `sent` blocks, receivers into `received` ones, in row-major order. A block that
    a rank holds already it gets from itself, any other one from one of those that hold it: these take the receivers in turn.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    blocks: int  # of the whole tensor
    senders: int  # ranks that could send
    routes: tuple[Route, ...]

    @property
    def moved(self) -> tuple[Route, ...]:
        """The blocks that another rank has to send."""
        return tuple(route for route in self.routes if route.sender != route.receiver)

    @property
    def receivers(self) -> dict[int, tuple[int, ...]]:
        """The ranks that receive from each one that sends."""
        found: dict[int, tuple[int, ...]] = {}
        for route in self.moved:
            found[route.sender] = (*found.get(route.sender, ()), route.receiver)
        return found

    @property
    def is_cheaper_to_broadcast(self) -> bool:
        """Whether a rank would send all that it has to several others: in a broadcast they hand it on, so that it leaves the rank once."""
        is_whole = set(self.sent) | set(self.received) <= {1}
        return is_whole and any(len(receivers) > 1 for receivers in self.receivers.values())

    @property
    def share(self) -> Fraction:
        """How much of the tensor travels from rank to rank, in multiples of the tensor."""
        return Fraction(len(self.moved), self.blocks)


@lru_cache(maxsize=4096)
def transfer(source: TensorType, target: TensorType, program: Mesh) -> Transfer:
    """The blocks of a tensor that is not partial, from the layout and mesh of `source` to those of `target`."""
    old, new = source.mesh_in(program), target.mesh_in(program)
    have, want = ([mesh.size_of(dim.axes) for dim in type.dims] for mesh, type in ((old, source), (new, target)))
    both = [lcm(p, q) for p, q in zip(have, want, strict=True)]
    sent, received = ([blocks // ranks for blocks, ranks in zip(both, shared, strict=True)] for shared in (have, want))
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in old.all_ranks:
        holders.setdefault(_place(source, old, rank), []).append(rank)
    routes: list[Route] = []
    copies: dict[tuple[int, ...], int] = {}  # of a place in the new layout, so far
    for rank in new.all_ranks:
        place = _place(target, new, rank)
        turn = copies[place] = copies.get(place, -1) + 1
        for cut in product(*map(range, received)):
            block = [at * cuts + i for at, cuts, i in zip(place, received, cut, strict=True)]  # of so many as `both` says
            holding = holders[tuple(i // cuts for i, cuts in zip(block, sent, strict=True))]
            sender = rank if rank in holding else holding[turn % len(holding)]
            routes.append(
                Route(sender, _number([i % cuts for i, cuts in zip(block, sent, strict=True)], sent), rank, _number(cut, received))
            )
    return Transfer(tuple(sent), tuple(received), prod(both), old.size, tuple(routes))


def _place(type: TensorType, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Which block of each dim a rank holds."""
    return tuple(mesh.rank_in_group(rank, dim.axes) for dim in type.dims)


def _number(cut: tuple[int, ...] | list[int], cuts: tuple[int, ...] | list[int]) -> int:
    """The number of a block in row-major order."""
    number = 0
    for i, count in zip(cut, cuts, strict=True):
        number = number * count + i
    return number
