"""Tensors cut into blocks, as they are sent to ranks that share their dims: the last blocks of a dim may be short, or empty."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from hostweave.types.mesh import Sizes, local_range
from hostweave.types.size import LocalSize, Size


@dataclass(frozen=True)
class Cut:
    """A dim of which a rank has `size`, cut where the shards of `blocks` ranks that share the global dim begin: `4 of M`."""

    blocks: int
    size: Size

    @property
    def local(self) -> LocalSize | None:
        """What the rank has, where that is a shard whose beginning in the global dim depends on the rank."""
        return self.size.factor if isinstance(self.size.factor, LocalSize) else None

    @property
    def global_size(self) -> Size:
        return self.local.size if self.local else self.size

    def starts(self, sizes: Sizes) -> list[int]:
        """Where each block begins in what the rank has, and where the last one ends."""
        local = self.local.indices(sizes) if self.local else range(self.size.bind(sizes))
        end = self.global_size.bind(sizes)
        first = [local_range(end, self.blocks, block).start for block in range(self.blocks)]
        return [min(max(start - local.start, 0), len(local)) for start in (*first, end)]

    def __str__(self) -> str:
        return f"{self.blocks} of {self.size}"


Cuts = tuple[Cut, ...]


def boxes(cuts: Cuts, sizes: Sizes) -> list[tuple[slice, ...]]:
    """The blocks of a tensor, in row-major order."""
    return [tuple(slice(*ends) for ends in box) for box in product(*(pairwise(cut.starts(sizes)) for cut in cuts))]


def elements(box: Sequence[slice]) -> int:
    return prod(dim.stop - dim.start for dim in box)


def is_in_order(cuts: Cuts) -> bool:
    """Whether the blocks one after another are the tensor as it lies in memory: no dim but the first that is longer than 1 is cut."""
    longer = [cut for cut in cuts if cut.size != Size()]
    return all(cut.blocks == 1 for cut in longer[1:])
