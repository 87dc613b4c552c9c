"""Mesh axes that split a dim in zigzag, so that ranks share evenly what grows along it, as the columns that a causal mask lets a row see.

The dim is cut in twice as many pieces as there are ranks. Of N ranks, rank r has pieces r and 2N - 1 - r, one behind the other: of 8 pieces
rank 0 has 0 and 7, rank 1 has 1 and 6. As in section 3.3.2 of "The Llama 3 Herd of Models" (arXiv 2407.21783).
"""

from collections.abc import Callable, Sequence
from typing import Any

from hostweave.types.mesh import Mesh, local_range

ZIGZAG = "zigzag"  # in texts of dims: `S@zigzag(cp)`


class Zigzag(tuple[str, ...]):
    """Axes of a dim, as a tuple of names, which other axes that split a dim are; never equal to one of these."""

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
    """Those of the axes; still in zigzag where these are all, or where the others are of one rank, so that `ranks_stay`."""
    kept = tuple(filter(keep, axes))
    return Zigzag(kept) if isinstance(axes, Zigzag) and kept and (ranks_stay or len(kept) == len(axes)) else kept


def pieces(axes: tuple[str, ...], mesh: Mesh) -> int:
    """Into how many pieces a dim must divide so that all ranks along the axes have as much of it."""
    ranks = mesh.size_of(axes)
    return 2 * ranks if isinstance(axes, Zigzag) and ranks > 1 else ranks


def order_of_pieces(ranks: int) -> tuple[int, ...]:
    """The pieces in the order of the ranks that have them."""
    return tuple(piece for rank in range(ranks) for piece in (rank, 2 * ranks - 1 - rank))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order that leads back."""
    return tuple(map(order.index, range(len(order))))


def runs(size: int, axes: tuple[str, ...], mesh: Mesh, rank: int) -> Sequence[range]:
    """The indices of a dim that a rank has, in the order in which it has them."""
    number, ranks = mesh.rank_in_group(rank, axes), mesh.size_of(axes)
    if pieces(axes, mesh) == ranks:
        return (local_range(size, ranks, number),)
    return tuple(local_range(size, 2 * ranks, piece) for piece in (number, 2 * ranks - 1 - number))


def indices(of_dims: Sequence[Sequence[range]]) -> tuple[Any, ...]:
    """What indexes an array there, where these are the runs of each of its dims: slices, and arrays where a dim has two."""
    if all(len(own) == 1 for own in of_dims):
        return tuple(slice(own[0].start, own[0].stop) for own in of_dims)
    import numpy as np

    def joined(own: Sequence[range]) -> Any:  # of ints, also where there are none
        return np.concatenate([np.arange(run.start, run.stop) for run in own])

    if sum(len(own) > 1 for own in of_dims) > 1:
        return np.ix_(*map(joined, of_dims))
    return tuple(joined(own) if len(own) > 1 else slice(own[0].start, own[0].stop) for own in of_dims)
