"""C++ for meshes: membership of a rank, coordinates, and local sizes."""

from math import prod

from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import launched
from hostweave.host_ir.expr import Symbol, leaves
from hostweave.host_ir.size_requirements import dims_and_trips
from hostweave.types.mesh import Mesh
from hostweave.types.size import CeilDiv, FirstIndex, LocalSize, Share

RANK = "rank_.index()"


def membership(mesh: Mesh, world: int, rank: str = RANK) -> str:
    """C++ condition that a rank is in a mesh."""
    first, end = min(mesh.all_ranks), max(mesh.all_ranks) + 1
    if end - first != mesh.size:
        return f"{_index_in(mesh, rank)} >= 0"
    if end == first + 1:
        return f"{rank} == {first}"
    bounds = [f"{rank} >= {first}"] * (first > 0) + [f"{rank} < {end}"] * (end < world)
    return " && ".join(bounds) or "true"


def coordinate(mesh: Mesh, axis: str, rank: str = RANK) -> str:
    """C++ of a rank's coordinate along an axis. The rank must be in the mesh."""
    at, own = [name for name, _ in mesh.axes].index(axis), index(mesh, rank)
    inner = prod(size for _, size in mesh.axes[at + 1 :])
    further = (f" / {inner}" if inner > 1 else "") + (f" % {mesh.axes[at][1]}" if at else "")
    return (f"({own})" if further and " - " in own else own) + further


def rank_in_group(mesh: Mesh, axes: tuple[str, ...], rank: str = RANK) -> str:
    """C++ of a rank's index in the process group of the given axes."""
    if axes == tuple(name for name, _ in mesh.axes):
        return index(mesh, rank)
    text = ""
    for axis in axes:
        own = coordinate(mesh, axis, rank)
        outer = f"({text})" if " + " in text else text
        text = f"{outer} * {mesh.axis_size(axis)} + {own}" if text else own
    return text or "0"


def index(mesh: Mesh, rank: str = RANK) -> str:
    if not mesh.is_run:
        return _index_in(mesh, rank)
    first = mesh.all_ranks[0]
    return f"{rank} - {first}" if first else rank


def _index_in(mesh: Mesh, rank: str) -> str:
    return f"hw::index_in({{{', '.join(map(str, mesh.all_ranks))}}}, {rank})"


@ir.analysis
def shares_of(program: ir.HostProgram) -> tuple[Share, ...]:
    """All sizes `ceil(M/8)`, `local(M, x)` and `first(M, x)` of a program."""
    atoms = [atom for size in dims_and_trips(program) for atom in size.atoms]
    named = (leaf for i in tree.walk(program.body) for expr in tree.expressions(i) for leaf in leaves(expr))
    atoms += [leaf.size for leaf in named if isinstance(leaf, Symbol)]
    atoms += [atom for i in tree.walk(program.body) for cut in i.packed for atom in cut.size.atoms]
    kernels = launched(program.kernels, program.body)
    atoms += [atom for kernel in kernels for size in kernel.sizes for atom in size.atoms]
    return tuple(atom for atom in dict.fromkeys(atoms) if isinstance(atom, Share))


def share_name(share: Share) -> str:
    """C++ name of a local size or first index: `M_block_8`, `M_x`, `M_first_x` or `M_x_of_ranks_2_3` for a size M, and `block_8_of_10` or
    `x_of_10` for the constant size 10."""
    on = ("of", share.mesh.label) if isinstance(share, LocalSize) and share.mesh else ()
    first = ("first",) if isinstance(share, FirstIndex) else ()
    along = f"block_{share.ranks}" if isinstance(share, CeilDiv) else "_".join((*first, *share.axes, *on))
    return f"{along}_of_{share.size}" if share.size.is_int else f"{share.size}_{along}"
