"""Moves between meshes: which rank sends which block of a tensor to which rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import lcm, prod

from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, TensorType


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
    `if_uneven` is for ranks that share dims unevenly, so that the blocks of two meshes are no parts of one another.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    routes: tuple[Route, ...]
    if_uneven: Transfer | None = None  # what arrives whole then, for a rank to keep its part

    def __str__(self) -> str:
        routes = f"[{self.sent} to {self.received}: {', '.join(map(str, self.routes))}]"
        return f"{routes} or {self.if_uneven}" if self.if_uneven else routes

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

    def distance(self, senders: int) -> int | None:
        """How many ranks further each block goes, where all go as far and each of so many senders has one."""
        far = {route.receiver - route.sender for route in self.routes}
        one_each = set(self.sent) | set(self.received) <= {1} and len({route.sender for route in self.routes}) == senders
        return far.pop() if len(far) == 1 and one_each else None

    def share(self, shards: int) -> Fraction:
        """How much of a tensor of so many shards travels from rank to rank, in multiples of the tensor."""
        return Fraction(len(self.moved), shards * prod(self.sent))

    def leads(self, source: TensorType, target: TensorType, program: Mesh) -> bool:
        """Whether every rank of the target's mesh gets every block that it is to hold, once and from a rank that has it."""
        arriving = _if_uneven(source, target, program)
        if not len(self.sent) == len(self.received) == len(source.dims) or (self.if_uneven is None) != (arriving == target):
            return False
        have, want = (_Blocks(type, type.mesh_in(program), cuts) for type, cuts in ((source, self.sent), (target, self.received)))
        got = {(route.receiver, route.received) for route in self.routes}
        return (
            have.counts == want.counts
            and len(got) == len(self.routes) == want.mesh.size * prod(self.received)
            and all(
                have.has(route.sender, route.sent)
                and want.has(route.receiver, route.received)
                and have.block(route.sender, route.sent) == want.block(route.receiver, route.received)
                for route in self.routes
            )
            and (self.if_uneven is None or self.if_uneven.leads(source, arriving, program))
        )


@dataclass(frozen=True)
class _Blocks:
    """The blocks into which each dim of what a rank holds is cut."""

    type: TensorType
    mesh: Mesh
    cuts: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """Of each dim of the global tensor."""
        return [self.mesh.size_of(dim.axes) * cuts for dim, cuts in zip(self.type.dims, self.cuts, strict=True)]

    def has(self, rank: int, number: int) -> bool:
        return rank in self.mesh.all_ranks and number < prod(self.cuts)

    def block(self, rank: int, number: int) -> tuple[int, ...]:
        """Which block of each dim of the global tensor the rank's `number`-th one is, in row-major order."""
        found: list[int] = []
        for place, cuts in zip(reversed(_place(self.type, self.mesh, rank)), reversed(self.cuts), strict=True):
            found.append(place * cuts + number % cuts)
            number //= cuts
        return tuple(reversed(found))


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
    arriving = _if_uneven(source, target, program)
    if_uneven = transfer(source, arriving, program) if arriving != target else None
    return Transfer(tuple(sent), tuple(received), tuple(routes), if_uneven)


def _if_uneven(source: TensorType, target: TensorType, program: Mesh) -> TensorType:
    """What arrives where ranks share dims unevenly: all of a dim that both meshes split into different numbers of blocks."""
    dims = list(target.dims)
    for i, (dim, wanted) in enumerate(zip(source.dims, target.dims, strict=True)):
        have, want = source.mesh_in(program).size_of(dim.axes), target.mesh_in(program).size_of(wanted.axes)
        if 1 < have != want > 1 and dim.extent.is_uneven(lcm(have, want), dim.extent.symbols):
            dims[i] = Dim(dim.extent)
    return replace(target, dims=tuple(dims))


def _place(type: TensorType, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Which block of each dim a rank holds."""
    return tuple(mesh.rank_in_group(rank, dim.axes) for dim in type.dims)


def _number(cut: tuple[int, ...] | list[int], cuts: tuple[int, ...] | list[int]) -> int:
    """The number of a block in row-major order."""
    number = 0
    for i, count in zip(cut, cuts, strict=True):
        number = number * count + i
    return number
