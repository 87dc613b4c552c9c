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
    Where shards may be uneven, blocks end where a shard of either side does, and any of them may be empty.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    blocks: int  # of the whole tensor
    senders: int  # ranks that could send
    routes: tuple[Route, ...]
    uneven: tuple[bool, ...]  # of each dim whether its blocks may differ in size

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


@dataclass(frozen=True)
class _Dim:
    """How a dim that `have` ranks share and `want` ranks are to share is cut."""

    have: int
    want: int
    is_uneven: bool

    @property
    def is_crossed(self) -> bool:
        """Whether each block of the one side may have a part of each block of the other."""
        return self.is_uneven and self.have > 1 and self.want > 1

    @property
    def blocks(self) -> int:
        return self.have * self.want if self.is_crossed else lcm(self.have, self.want)

    @property
    def sent(self) -> int:
        return self.blocks // self.have

    @property
    def received(self) -> int:
        return self.blocks // self.want

    def source(self, target: int, number: int) -> tuple[int, int]:
        """The place that has what `target` receives as this number, and the number that it has there."""
        if self.is_crossed:
            return number, target
        return divmod(target * self.received + number, self.sent)


@lru_cache(maxsize=4096)
def transfer(source: TensorType, target: TensorType, program: Mesh, uneven: tuple[str, ...] = ()) -> Transfer:
    """The blocks of a tensor that is not partial, from the layout and mesh of `source` to those of `target`.

    Without the `uneven` sizes, those that ranks may not share evenly, it is as if they did.
    """
    old, new = source.mesh_in(program), target.mesh_in(program)
    dims = []
    for dim, wanted in zip(source.dims, target.dims, strict=True):
        have, want = old.size_of(dim.axes), new.size_of(wanted.axes)
        dims.append(_Dim(have, want, have != want and dim.extent.is_uneven(lcm(have, want), uneven)))
    sent, received = [dim.sent for dim in dims], [dim.received for dim in dims]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in old.all_ranks:
        holders.setdefault(_place(source, old, rank), []).append(rank)
    routes: list[Route] = []
    copies: dict[tuple[int, ...], int] = {}  # of a place in the new layout, so far
    for rank in new.all_ranks:
        place = _place(target, new, rank)
        turn = copies[place] = copies.get(place, -1) + 1
        for cut in product(*map(range, received)):
            found = [dim.source(at, number) for dim, at, number in zip(dims, place, cut, strict=True)]
            holding = holders[tuple(at for at, _ in found)]
            sender = rank if rank in holding else holding[turn % len(holding)]
            routes.append(Route(sender, _number([number for _, number in found], sent), rank, _number(cut, received)))
    blocks = prod(dim.blocks for dim in dims)
    return Transfer(tuple(sent), tuple(received), blocks, old.size, tuple(routes), tuple(dim.is_uneven for dim in dims))


def _place(type: TensorType, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Which block of each dim a rank holds."""
    return tuple(mesh.rank_in_group(rank, dim.axes) for dim in type.dims)


def _number(cut: tuple[int, ...] | list[int], cuts: tuple[int, ...] | list[int]) -> int:
    """The number of a block in row-major order."""
    number = 0
    for i, count in zip(cut, cuts, strict=True):
        number = number * count + i
    return number
