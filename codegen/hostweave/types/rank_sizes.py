"""Sizes by name, and the local sizes of one rank that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

from hostweave.types.mesh import Mesh

Sizes = Mapping[str, int]


class RankSizes(dict[str, int]):
    """Sizes by symbol for one rank of a mesh, which local sizes are bound for."""

    def __init__(self, sizes: Sizes, mesh: Mesh, rank: int = 0):
        super().__init__(sizes)
        self.mesh, self.rank = mesh, rank


def held_by(size: int, ranks: int, place: int) -> range:
    """The indices of a dim that the rank at `place` holds: a block of ceil(size / ranks), of which the last ranks have less or nothing."""
    block = -(-size // ranks)
    return range(min(place * block, size), min((place + 1) * block, size))
