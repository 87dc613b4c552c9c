"""Sizes by name, and the local sizes of one rank that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from hostweave.types.size import block_of, part_of

if TYPE_CHECKING:
    pass
from hostweave.types.mesh import Mesh, _listed

Sizes = Mapping[str, int]


class RankSizes(dict[str, int]):
    """Sizes by name, and what follows from them for one rank of a mesh: `ceil(M/8)` and `part(M, x)`."""

    def __init__(self, sizes: Sizes, mesh: Mesh, rank: int = 0):
        super().__init__(sizes)
        self.mesh, self.rank = mesh, rank

    def __missing__(self, name: str) -> int:
        if shared := block_of(name):
            size, ranks = shared
            return -(-size.bind(self) // ranks)
        if held := part_of(name):
            size, axes, _ = held
            mesh = mesh_of_part(name, self.mesh)
            place = mesh.rank_in_group(self.rank, axes) if self.rank in mesh.all_ranks else 0  # others never have it
            return len(held_by(size.bind(self), mesh.size_of(axes), place))
        raise KeyError(name)


@cache
def mesh_of_part(name: str, program: Mesh) -> Mesh:
    """The mesh whose axes a name such as `part(M, x)` speaks of."""
    found = part_of(name)
    assert found is not None
    if not found[2]:
        return program
    members = found[2].removesuffix(")").partition("ranks ")[2]
    first, dots, end = members.partition("..")
    ranks = tuple(range(int(first), int(end)) if dots else map(int, members.split(", ")) if members else ())
    if found[2].startswith("ranks"):
        return Mesh(((found[1][0], len(ranks)),), ranks)
    return Mesh(tuple((axis, int(size)) for axis, size in re.findall(r"(\w+)=(\d+)", found[2])), ranks or None)


def _name_of(mesh: Mesh) -> str:
    """The text of a mesh beside the name of its axis, if it has but one."""
    return str(mesh) if len(mesh.axes) > 1 or mesh.members is None else f"ranks {_listed(mesh.members)}"


def held_by(size: int, ranks: int, place: int) -> range:
    """The indices of a dim that the rank at `place` holds: a block of ceil(size / ranks), of which the last ranks have less or nothing."""
    block = -(-size // ranks)
    return range(min(place * block, size), min((place + 1) * block, size))
