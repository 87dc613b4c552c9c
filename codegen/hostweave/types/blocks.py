"""Blocks of local tensors, and routes of blocks between meshes. The last blocks of a dim may be short or empty."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product
from math import lcm, prod

from hostweave.types.mesh import Mesh, Sizes, local_range
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import TensorType


@dataclass(frozen=True)
class Cut:
    """A local dim of size `size`, cut into `blocks` blocks. Text: `4 of M`. If the size depends on the rank, blocks end at the ends of the
    shards that the global dim has on `blocks` ranks."""

    blocks: int
    size: Size

    @property
    def local(self) -> LocalSize | None:
        """The LocalSize if `size` depends on the rank, as `local(M, x)` does. None otherwise."""
        return self.size.factor if isinstance(self.size.factor, LocalSize) else None

    @property
    def global_size(self) -> Size:
        return self.local.size if self.local else self.size

    def starts(self, sizes: Sizes) -> list[int]:
        """Local start of each block, and the end of the last one."""
        local = self.local.indices(sizes) if self.local else range(self.size.bind(sizes))
        end = self.global_size.bind(sizes)
        first = [local_range(end, self.blocks, block).start for block in range(self.blocks)]
        return [min(max(start - local.start, 0), len(local)) for start in (*first, end)]

    def __str__(self) -> str:
        return f"{self.blocks} of {self.size}"


Cuts = tuple[Cut, ...]


def boxes(cuts: Cuts, sizes: Sizes) -> list[tuple[slice, ...]]:
    """Blocks of a tensor, each as one slice per dim, in row-major order."""
    return [tuple(slice(*ends) for ends in box) for box in product(*(pairwise(cut.starts(sizes)) for cut in cuts))]


def elements(box: Sequence[slice]) -> int:
    return prod(dim.stop - dim.start for dim in box)


def is_in_order(cuts: Cuts) -> bool:
    """True if the blocks are consecutive in memory: no dim is cut, except the first dim longer than 1."""
    longer = [cut for cut in cuts if cut.size != Size()]
    return all(cut.blocks == 1 for cut in longer[1:])


@dataclass(frozen=True)
class Route:
    """Block `sent` of rank `sender` becomes block `received` of rank `receiver`."""

    sender: int
    sent: int
    receiver: int
    received: int

    def __str__(self) -> str:
        return f"{self.sender}[{self.sent}] -> {self.receiver}[{self.received}]"


@dataclass(frozen=True)
class Transfer:
    """Routes of the blocks of a tensor from one mesh to another. A receiver gets each block of its local tensor exactly once.

    Senders cut dim i of their local tensor into `sent[i]` blocks, and receivers into `received[i]` blocks. Blocks are numbered in row-major
    order. A receiver that already has a block is also the sender of the block. Otherwise, the ranks that have the block take turns. If
    shards may be uneven, a block ends where a shard of the source or of the target ends, and may be empty.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    routes: tuple[Route, ...]

    def __str__(self) -> str:
        return f"[{self.sent} to {self.received}: {', '.join(map(str, self.routes))}]"

    @property
    def moved(self) -> tuple[Route, ...]:
        return tuple(route for route in self.routes if route.sender != route.receiver)

    @property
    def receivers(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for route in self.moved:
            found[route.sender] = (*found.get(route.sender, ()), route.receiver)
        return found

    @property
    def is_cheaper_to_broadcast(self) -> bool:
        """True if some rank sends its whole local tensor to several other ranks."""
        is_whole = set(self.sent) | set(self.received) <= {1}
        return is_whole and any(len(receivers) > 1 for receivers in self.receivers.values())

    def distance(self, senders: int) -> int | None:
        """Receiver minus sender, if all routes have the same difference and each of `senders` ranks sends one block. None otherwise."""
        far = {route.receiver - route.sender for route in self.routes}
        one_each = set(self.sent) | set(self.received) <= {1} and len({route.sender for route in self.routes}) == senders
        return far.pop() if len(far) == 1 and one_each else None

    def share(self, shards: int) -> Fraction:
        """Bytes that travel between ranks, as a fraction of the bytes of a tensor with `shards` shards."""
        return Fraction(len(self.moved), shards * prod(self.sent))

    def leads(self, source: TensorType, target: TensorType, program: Mesh) -> bool:
        """True if the transfer leads from `source` to `target`: each receiver gets each block once, from any rank that has the block."""
        old, wanted = source.mesh_in(program), transfer(source, target, program)
        held = {rank: _shard_position(source, old, rank) for rank in old.all_ranks}

        def received(by: Transfer) -> object:
            return by.sent, by.received, sorted((r.receiver, r.received, held.get(r.sender, (-1,)), r.sent) for r in by.routes)

        return received(self) == received(wanted)


@dataclass(frozen=True)
class SharedDim:
    """A dim that has `source_shards` shards before a transfer, and `target_shards` shards after the transfer."""

    size: Size
    source_shards: int
    target_shards: int

    def is_uneven(self, uneven: Container[str]) -> bool:
        """True if blocks may differ in size. `uneven` has the symbols whose sizes need not be multiples of the number of ranks."""
        return self.is_crossed or (self.source_shards != self.target_shards and self.size.is_uneven(self.ranks, uneven))

    @property
    def is_crossed(self) -> bool:
        """True if each source shard may overlap each target shard: both meshes split the dim, in different and possibly uneven ways."""
        return 1 < self.source_shards != self.target_shards > 1 and self.size.is_uneven(self.ranks, self.size.symbols)

    @property
    def ranks(self) -> int:
        """Smallest number of equal blocks such that each shard consists of whole blocks."""
        return lcm(self.source_shards, self.target_shards)

    @property
    def sent(self) -> int:
        return self.target_shards if self.is_crossed else self.ranks // self.source_shards

    @property
    def received(self) -> int:
        return self.source_shards if self.is_crossed else self.ranks // self.target_shards

    def source(self, target: int, number: int) -> tuple[int, int]:
        """Source shard that has block `number` of target shard `target`, and the index of the block there."""
        return (number, target) if self.is_crossed else divmod(target * self.received + number, self.sent)


def shared_dims(source: TensorType, target: TensorType, program: Mesh) -> tuple[SharedDim, ...]:
    old, new = source.mesh_in(program), target.mesh_in(program)
    dims = zip(source.dims, target.dims, strict=True)
    return tuple(SharedDim(dim.size, old.size_of(dim.axes), new.size_of(target_dim.axes)) for dim, target_dim in dims)


@lru_cache(maxsize=4096)
def transfer(source: TensorType, target: TensorType, program: Mesh) -> Transfer:
    """Routes from `source`, which must not be partial, to `target`."""
    old, new, dims = source.mesh_in(program), target.mesh_in(program), shared_dims(source, target, program)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in old.all_ranks:
        holders.setdefault(_shard_position(source, old, rank), []).append(rank)
    replica_of: dict[int, int] = {}  # rank -> index among the ranks with the same shard
    copies: dict[tuple[int, ...], int] = {}  # position in the new layout -> index of the last rank there
    for rank in new.all_ranks:
        position = _shard_position(target, new, rank)
        replica_of[rank] = copies[position] = copies.get(position, -1) + 1
    routes = []
    for (rank, received), (position, sent) in _block_sources(source, target, program).items():
        holding = holders[position]
        routes.append(Route(rank if rank in holding else holding[replica_of[rank] % len(holding)], sent, rank, received))
    return Transfer(tuple(dim.sent for dim in dims), tuple(dim.received for dim in dims), tuple(routes))


def _block_sources(source: TensorType, target: TensorType, program: Mesh) -> dict[tuple[int, int], tuple[tuple[int, ...], int]]:
    """Maps (receiver, block index) to (position of the source shard, block index there)."""
    new, dims, sources = target.mesh_in(program), shared_dims(source, target, program), {}
    for rank in new.all_ranks:
        position = _shard_position(target, new, rank)
        for received, cut in enumerate(product(*(range(dim.received) for dim in dims))):
            found = [dim.source(at, number) for dim, at, number in zip(dims, position, cut, strict=True)]
            sent = 0  # block index in row-major order
            for dim, (_, number) in zip(dims, found, strict=True):
                sent = sent * dim.sent + number
            sources[rank, received] = tuple(at for at, _ in found), sent
    return sources


def _shard_position(type: TensorType, mesh: Mesh, rank: int) -> tuple[int, ...]:
    return tuple(mesh.rank_in_group(rank, dim.axes) for dim in type.dims)
