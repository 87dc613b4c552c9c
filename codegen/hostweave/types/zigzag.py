"""Zigzag sharding balances work that grows along a dim, such as attention with a causal mask.

The dim is cut into two pieces per rank. Rank r of N holds pieces r and 2N - 1 - r, in this order. With 4 ranks, rank 0 holds pieces 0 and
7, and rank 1 holds pieces 1 and 6. Source: section 3.3.2 of "The Llama 3 Herd of Models" (arXiv 2407.21783).
"""

from collections.abc import Callable, Sequence
from typing import Any

from hostweave.types.mesh import Mesh, local_range

ZIGZAG = "zigzag"  # keyword in `S@zigzag(cp)`


class Zigzag(tuple[str, ...]):
    """Axes that split a dim in zigzag. Never equal to a plain tuple of axes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Zigzag) and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((ZIGZAG, *self))

    def __str__(self) -> str:
        return f"{ZIGZAG}({','.join(self)})"


def some_of(axes: tuple[str, ...], keep: Callable[[str], bool], ranks_stay: bool = False) -> tuple[str, ...]:
    """Filters axes. A Zigzag stays a Zigzag if all axes are kept, or if some are kept and `ranks_stay` states that the rest have size 1."""
    kept = tuple(filter(keep, axes))
    return Zigzag(kept) if isinstance(axes, Zigzag) and kept and (ranks_stay or len(kept) == len(axes)) else kept


def pieces(axes: tuple[str, ...], mesh: Mesh) -> int:
    """Number of pieces of a dim: two per rank in zigzag over several ranks, otherwise one per rank. All shards have equal sizes if the
    number of pieces divides the size."""
    ranks = mesh.size_of(axes)
    return 2 * ranks if isinstance(axes, Zigzag) and ranks > 1 else ranks


def order_of_pieces(ranks: int) -> tuple[int, ...]:
    """Numbers of the pieces: first the pieces of rank 0, then the pieces of rank 1, and so on."""
    return tuple(piece for rank in range(ranks) for piece in (rank, 2 * ranks - 1 - rank))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


def runs(size: int, axes: tuple[str, ...], mesh: Mesh, rank: int) -> Sequence[range]:
    """Index ranges of a dim that a rank holds, in local order."""
    number, ranks = mesh.rank_in_group(rank, axes), mesh.size_of(axes)
    if pieces(axes, mesh) == ranks:
        return (local_range(size, ranks, number),)
    return tuple(local_range(size, 2 * ranks, piece) for piece in (number, 2 * ranks - 1 - number))


def indices(of_dims: Sequence[Sequence[range]]) -> tuple[Any, ...]:
    """NumPy index for the ranges of each dim: a slice for one range, an array for two. If several dims have two ranges, all have arrays."""
    if all(len(own) == 1 for own in of_dims):
        return tuple(slice(own[0].start, own[0].stop) for own in of_dims)
    import numpy as np

    def joined(own: Sequence[range]) -> Any:  # an int array even if all ranges are empty
        return np.concatenate([np.arange(run.start, run.stop) for run in own])

    if sum(len(own) > 1 for own in of_dims) > 1:
        return np.ix_(*map(joined, of_dims))
    return tuple(joined(own) if len(own) > 1 else slice(own[0].start, own[0].stop) for own in of_dims)
