"""C++ for local sizes."""

from __future__ import annotations

from dataclasses import dataclass

from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.meshes import rank_in_group
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Symbol, leaves
from hostweave.host_ir.size_requirements import dims_and_trips
from hostweave.types.size import CeilDiv, LocalSize, Share


@dataclass(frozen=True)
class Local:
    """An integer that a function names: the greatest local size of a size that ranks share, this rank's local size, or a coordinate."""

    name: str
    value: str


def parts_of(program: ir.HostProgram) -> tuple[Share, ...]:
    """The sizes `ceil(M/8)` and `local(M, x)` of a program, in order of appearance."""
    atoms = [atom for size in dims_and_trips(program) for atom in size.atoms]
    named = (leaf for i in tree.walk(program.body) for expr in tree.expressions(i) for leaf in leaves(expr))
    atoms += [leaf.size for leaf in named if isinstance(leaf, Symbol)]
    atoms += [atom for i in tree.walk(program.body) for cut in i.packed for atom in cut.size.atoms]
    return tuple(atom for atom in dict.fromkeys(atoms) if isinstance(atom, Share))


def part_name(part: Share) -> str:
    """`M_block_8`, `M_x` and `M_x_of_ranks_2_3`; of an int `block_8_of_10` and `x_of_10`."""
    on = ("of", part.mesh.label) if isinstance(part, LocalSize) and part.mesh else ()
    along = f"block_{part.ranks}" if isinstance(part, CeilDiv) else "_".join((*part.axes, *on))
    return f"{along}_of_{part.size}" if part.size.is_int else f"{part.size}_{along}"


def part_view(program: ir.HostProgram, integers: CppExprPrinter, part: Share) -> Local:
    """`hw::local_size(M, 8, rank_.index())`"""
    arguments = [integers.size(part.size), str(part.ranks_in(program.mesh))]
    if isinstance(part, LocalSize):
        arguments.append(rank_in_group(part.mesh_in(program.mesh), part.axes))
    return Local(integers.sizes[part], f"hw::{'ceil_div' if isinstance(part, CeilDiv) else 'local_size'}({', '.join(arguments)})")
