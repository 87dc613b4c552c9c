"""What follows from sizes: the blocks that ranks share, what each of them holds, and what must divide them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.meshes import label, place
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Size, leaves
from hostweave.host_ir.size_requirements import Walk, trip_counts, types_in
from hostweave.types.mesh import Mesh
from hostweave.types.rank_sizes import mesh_of_part
from hostweave.types.size import Extent, block_of, part_of


@dataclass(frozen=True)
class Local:
    """An integer that a function names: the block of a size that ranks share, what this rank holds of it, or a coordinate."""

    name: str
    value: str


def part_names(program: ir.HostProgram) -> tuple[str, ...]:
    """The extents `ceil(M/8)` and `part(M, x)` of a program, in order of appearance."""
    names = [name for extent in _extents(program, ir.walk) for name in extent.names]
    names += [leaf.name for i in ir.walk(program.body) if isinstance(i, ir.Slice) for leaf in leaves(i.start) if isinstance(leaf, Size)]
    return tuple(name for name in dict.fromkeys(names) if block_of(name) or part_of(name))


def whole(name: str) -> Extent:
    """The size of which `ceil(M/8)` or `part(M, x)` is a part."""
    found = block_of(name) or part_of(name)
    assert found is not None
    return found[0]


def part_name(name: str, program: Mesh) -> str:
    """`M_block_8`, `M_x` and `M_x_of_ranks_2_3`; of an int `block_8_of_10` and `x_of_10`."""
    size = whole(name)
    if block := block_of(name):
        along = f"block_{block[1]}"
    else:
        _, axes, mesh = part_of(name) or ((), (), "")
        along = "_".join((*axes, *(("of", label(mesh_of_part(name, program))) if mesh else ())))
    return f"{along}_of_{size}" if size.is_int else f"{size}_{along}"


def _part_value(mesh: Mesh, name: str, size: str) -> str:
    """`hw::local_size(M, 8, rank_.index())`"""
    if block := block_of(name):
        return f"hw::ceil_div({size}, {block[1]})"
    held, mesh = part_of(name), mesh_of_part(name, mesh)
    assert held is not None
    return f"hw::local_size({size}, {mesh.size_of(held[1])}, {place(mesh, held[1])})"


def part(program: ir.HostProgram, integers: CppExprPrinter, name: str) -> Local:
    return Local(integers.sizes[name], _part_value(program.mesh, name, integers.extent(whole(name))))


def multiples(program: ir.HostProgram) -> dict[str, int]:
    """What must divide each symbolic size for every dim and trip count of the program to be whole."""
    result: dict[str, int] = {}
    for extent in _extents(program, ir.walk_at_any_size):
        if len(extent.names) == 1:
            result[extent.names[0]] = lcm(result.get(extent.names[0], 1), extent.divisor)
    return result


def _extents(program: ir.HostProgram, walk: Walk) -> Iterator[Extent]:
    for type in types_in(program, walk):
        yield from type.shape
    yield from trip_counts(program, walk)
