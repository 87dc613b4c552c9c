"""Meshes in C++: whether this rank is in one, and its coordinates. Ranks are row-major."""

from __future__ import annotations

from math import prod

from hostweave.types.mesh import Mesh

RANK = "rank_.index()"


def membership(mesh: Mesh, world: int, rank: str = RANK) -> str:
    """Whether a rank is in it."""
    first, end = min(mesh.all_ranks), max(mesh.all_ranks) + 1
    if end - first != mesh.size:
        return f"{_index_in(mesh, rank)} >= 0"
    if end == first + 1:
        return f"{rank} == {first}"
    bounds = [f"{rank} >= {first}"] * (first > 0) + [f"{rank} < {end}"] * (end < world)
    return " && ".join(bounds) or "true"


def coordinate(mesh: Mesh, axis: str, rank: str = RANK) -> str:
    """The coordinate along an axis of a rank that is in the mesh."""
    at = [name for name, _ in mesh.axes].index(axis)
    inner = prod(size for _, size in mesh.axes[at + 1 :])
    further = (f" / {inner}" if inner > 1 else "") + (f" % {mesh.axes[at][1]}" if at else "")
    return _factor(index(mesh, rank)) + further if further else index(mesh, rank)


def rank_in_group(mesh: Mesh, axes: tuple[str, ...], rank: str = RANK) -> str:
    """The number of a rank among the ranks that differ along these axes."""
    if axes == tuple(name for name, _ in mesh.axes):
        return index(mesh, rank)
    text = ""
    for axis in axes:
        own = coordinate(mesh, axis, rank)
        outer = f"({text})" if " + " in text else text
        text = f"{outer} * {mesh.axis_size(axis)} + {own}" if text else own
    return text or "0"


def index(mesh: Mesh, rank: str = RANK) -> str:
    """The number of a rank in the mesh."""
    if not mesh.is_run:
        return _index_in(mesh, rank)
    first = mesh.all_ranks[0]
    return f"{rank} - {first}" if first else rank


def _index_in(mesh: Mesh, rank: str) -> str:
    return f"hw::index_in({{{', '.join(map(str, mesh.all_ranks))}}}, {rank})"


def _factor(text: str) -> str:
    return f"({text})" if " - " in text else text
