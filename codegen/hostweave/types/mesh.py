"""Meshes of ranks with named axes, and the shard of a dim that each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import index
from typing import Any

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked, with_ints

MAX_RANKS = 2**16  # largest number of ranks in a mesh


@dataclass(frozen=True, init=False)
class Mesh:
    """The ranks of a program, with named axes: `hw.Mesh(dp=2, tp=4)` has 8 ranks. The last axis varies fastest. `hw.Mesh()` is a single
    device.

    Raises ProgramError for axes without names, for invalid names or sizes, and for more than 65536 ranks.

    Example: in `hw.Mesh(dp=2, tp=4)` rank 6 has the coordinates dp=1, tp=2. The process group of rank 6 along `tp` is ranks 4 to 7.
    """

    axes: tuple[tuple[str, int], ...]
    members: tuple[int, ...] | None  # None: all ranks of the program

    def __init__(self, axes: tuple[tuple[str, int], ...] = (), members: tuple[int, ...] | None = None, /, **sizes: int) -> None:
        if not isinstance(axes, tuple) or not all(isinstance(axis, tuple) and len(axis) == 2 for axis in axes):
            raise ProgramError.here(f"Mesh({axes!r}): the axes have no names; write hw.Mesh(x={_named_sizes(axes)})")
        object.__setattr__(self, "axes", with_ints((*axes, *sizes.items())))
        object.__setattr__(self, "members", members)
        if members is not None and (len(set(members)) < len(members) or any(rank < 0 for rank in members)):
            raise ProgramError.here(f"mesh of ranks {listed_ranks(members)}: name each rank once")
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
                raise ProgramError.here(f"mesh axis {name!r} is not a name; use ASCII letters, digits and _, and no digit first")
            if names.count(name) > 1:
                raise ProgramError.here(f"mesh axis {name} is given twice; name each axis differently")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ProgramError.here(f"mesh axis {name} has size {size!r}: it must be an int of at least 1")
        if self.size > MAX_RANKS:
            raise ProgramError.here(f"a mesh has at most {MAX_RANKS} ranks, not {' x '.join(str(s) for _, s in self.axes)}")

    @checked
    def ranks(self, ranks: Sequence[int], /, **axes: int) -> Mesh:
        """Mesh of some ranks of this mesh, in the given order.

        `axes` has names and sizes of the new axes. Without `axes`, a mesh of one axis keeps its axis. A mesh of several axes keeps the axes
        along which the ranks differ. The ranks must then form a block of this mesh, in row-major order.

        Raises ProgramError if the ranks are not distinct ranks of this mesh, or do not fit the axes.

        Example: `hw.Mesh(x=8).ranks([4, 5, 6, 7], dp=2, tp=2)`.
        """
        chosen = tuple(map(index, ranks))
        outside = [rank for rank in chosen if rank not in self.all_ranks]
        if outside:
            raise ProgramError.here(f"ranks: {self} has no rank {outside[0]}; its ranks: {listed_ranks(self.all_ranks)}")
        if not chosen or len(set(chosen)) < len(chosen):
            raise ProgramError.here(f"ranks: {list(chosen)}: name at least one rank, and each once")
        if axes:
            mesh = Mesh(tuple(axes.items()), chosen)
            if mesh.size != len(chosen):
                why = f"{len(chosen)} ranks do not form a mesh of {_axes_text(mesh.axes)}"
                raise ProgramError.here(f"ranks: {why}; give axes whose product is {len(chosen)}")
            return mesh
        if len(self.axes) == 1:
            return Mesh(((self.axes[0][0], len(chosen)),), chosen)
        found = [(name, sorted({self.coordinate(rank, name) for rank in chosen})) for name, _ in self.axes]
        block = [rank for rank in self.all_ranks if all(self.coordinate(rank, name) in kept for name, kept in found)]
        if tuple(block) != chosen:
            why = f"{list(chosen)} is not a row-major block of {self}"
            raise ProgramError.here(f"ranks: {why}, so its axes cannot be inferred; name them: .ranks([...], x={len(chosen)})")
        return Mesh(tuple((name, len(kept)) for name, kept in found if len(kept) > 1), chosen)

    def with_sizes(self, sizes: int | Mapping[str, int]) -> Mesh:
        """The mesh with new sizes of the given axes. An int is the size of the only axis."""
        names = [name for name, _ in self.axes]
        if not isinstance(sizes, Mapping):
            if len(names) != 1:
                why = f"{self} has {len(names)} axes; give the size of each by name, as in ranks={dict(self.axes)}"
                raise ProgramError(f"ranks={sizes!r}: {why}")
            sizes = {names[0]: sizes}
        if unknown := [name for name in sizes if name not in names]:
            raise ProgramError(f"ranks: {self} has no axis {unknown[0]}; its axes: {', '.join(names) or 'none'}")
        return Mesh(tuple((name, sizes.get(name, size)) for name, size in self.axes))

    @cached_property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def all_ranks(self) -> Sequence[int]:
        """Ranks of the program in this mesh, in the order of their coordinates."""
        return range(self.size) if self.members is None else self.members

    @property
    def is_run(self) -> bool:
        """True if the numbers of the ranks are consecutive."""
        first = self.all_ranks[0]
        return tuple(self.all_ranks) == tuple(range(first, first + self.size))

    @property
    def label(self) -> str:
        """Label of a mesh of some ranks, valid in identifiers: `ranks_2_3`, `ranks_4_to_7`."""
        ranks = self.all_ranks
        if len(ranks) > 2 and self.is_run:
            return f"ranks_{ranks[0]}_to_{ranks[-1]}"
        return "_".join(["ranks", *map(str, ranks)]) if len(ranks) <= 4 else f"ranks_{ranks[0]}_and_others"

    def axis_size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def size_of(self, axes: tuple[str, ...]) -> int:
        return prod(map(self.axis_size, axes))

    def coordinate(self, rank: int, axis: str) -> int:
        """Coordinate of a rank of the program along `axis`."""
        return self.all_ranks.index(rank) // self._strides[axis] % self.axis_size(axis)

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Distance in `all_ranks` between neighbours along each axis."""
        return {name: prod(size for _, size in self.axes[i + 1 :]) for i, (name, _) in enumerate(self.axes)}

    def rank_in_group(self, rank: int, axes: tuple[str, ...]) -> int:
        """Index of a rank in its process group along `axes`."""
        number = 0
        for axis in axes:
            number = number * self.axis_size(axis) + self.coordinate(rank, axis)
        return number

    def process_group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """`rank` and the ranks that differ from `rank` only along `axes`, in row-major order of `axes` as given."""
        indices = [self.all_ranks.index(rank) - sum(self.coordinate(rank, axis) * self._strides[axis] for axis in axes)]
        for axis in axes:
            indices = [index + i * self._strides[axis] for index in indices for i in range(self.axis_size(axis))]
        return tuple(self.all_ranks[index] for index in indices)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        of = "" if self.members is None else f"of ranks {listed_ranks(self.members)}"
        return f"mesh({' '.join(filter(None, (_axes_text(self.axes), of)))})"


def _axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)


def listed_ranks(ranks: Sequence[int]) -> str:
    """Text of ranks, such as `0, 2, 5`. More than two consecutive ranks are written as a range: `0..4` for ranks 0 to 3."""
    first = ranks[0]
    in_a_row = len(ranks) > 2 and tuple(ranks) == tuple(range(first, first + len(ranks)))
    return f"{first}..{first + len(ranks)}" if in_a_row else ", ".join(map(str, ranks))


def _named_sizes(sizes: Any) -> str:
    """Sizes of axes after `x=`, for a remedy: `2, y=4` for (2, 4)."""
    given = [size for size in (sizes if isinstance(sizes, Sequence) else (sizes,)) if isinstance(size, int)]
    return ", ".join([str(given[0]), *(f"{name}={size}" for name, size in zip("yzuvw", given[1:], strict=False))]) if given else "8"


# --- shards of dims ---------------------------------------------------------------------------------------------------


Sizes = Mapping[str, int]


class RankSizes(dict[str, int]):
    """Values of symbols, and the rank on which sizes such as `local(M, x)` depend."""

    def __init__(self, sizes: Sizes, mesh: Mesh, rank: int = 0):
        super().__init__(sizes)
        self.mesh, self.rank = mesh, rank


def local_range(size: int, ranks: int, rank_in_group: int) -> range:
    """Indices of a dim that a rank holds: ceil(size / ranks) indices, or fewer or none on the last ranks."""
    block = -(-size // ranks)
    return range(min(rank_in_group * block, size), min((rank_in_group + 1) * block, size))


def share(shape: Sequence[int], dim: int | None, ranks: int, rank_in_group: int) -> range:
    """Range of a rank's elements in a buffer that has the shards of dim `dim` one after another. If `dim` is None, all elements are split
    like one dim."""
    size = prod(shape) if dim is None else shape[dim]
    each = prod(shape) // size if size else 0
    own = local_range(size, ranks, rank_in_group)
    return range(own.start * each, own.stop * each)
