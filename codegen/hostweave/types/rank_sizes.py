"""Sizes by name, and the local sizes of one rank that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from hostweave.types.mesh import Mesh

Sizes = Mapping[str, int]


class RankSizes(dict[str, int]):
    """Sizes by symbol for one rank of a mesh, which local sizes are bound for."""

    def __init__(self, sizes: Sizes, mesh: Mesh, rank: int = 0):
        super().__init__(sizes)
        self.mesh, self.rank = mesh, rank


def local_range(size: int, ranks: int, rank_in_group: int) -> range:
    """The indices of a dim that one rank has: a block of ceil(size / ranks), of which the last ranks have less or nothing."""
    block = -(-size // ranks)
    return range(min(rank_in_group * block, size), min((rank_in_group + 1) * block, size))


def shares(shape: Sequence[int], dim: int | None, ranks: Sequence[int]) -> list[range]:
    """Which elements of a buffer that holds a block for each rank belong to each: of one dim what a rank holds, or as many each."""
    size = prod(shape) if dim is None else shape[dim]
    each = prod(shape) // size if size else 0
    own = (local_range(size, len(ranks), rank_in_group) for rank_in_group in range(len(ranks)))
    return [range(part.start * each, part.stop * each) for part in own]
