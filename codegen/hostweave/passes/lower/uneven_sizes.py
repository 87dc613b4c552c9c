"""Sizes that need not be multiples of the number of ranks. The last ranks may then have smaller or empty blocks."""

from collections.abc import Iterator, Mapping

from hostweave.base.errors import ProgramError
from hostweave.communication.transfers import needs_equal_blocks
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS, TO_OTHER_MESHES, index_map, operand_types
from hostweave.fusion_ir.ops.attributes import AXIS
from hostweave.transports.transport import Transport
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, TensorType
from hostweave.types.zigzag import Zigzag

# In these ops, a rank's shard of one dim corresponds to its shard of another dim only if both dims are split evenly.
OF_OUTER_DIMS = {"reshape": "a reshape that splits or merges it", "scaled_matmul": "a scaled matmul whose scales are of blocks"}
Even = tuple[Dim, Mesh, str]  # a dim that must divide evenly over a mesh, and the reason


def uneven_sizes(fusion: Fusion, transport: Transport) -> tuple[str, ...]:
    """Sizes that need not divide evenly among ranks, in order of appearance. Raises ProgramError if an int divides unevenly, and an op
    needs an even split."""
    sharded: dict[str, None] = {}
    even: set[str] = set()
    for body in (*fusion.functions, fusion):  # A size has the same value in all bodies.
        types = body.types
        dims = [dim for type in types.values() for dim in type.dims if dim.axes]
        sharded |= dict.fromkeys(name for dim in dims if dim.size.factor for name in dim.size.symbols)
        even.update(name for dim in dims if not dim.size.factor or isinstance(dim.axes, Zigzag) for name in dim.size.symbols)
        for op in body.ops:
            for dim, mesh, why in _even(op, types, body, transport):
                ranks = mesh.size_of(dim.axes)
                if dim.size.is_uneven(ranks, ()):
                    reason = f"{ranks} ranks cannot split dim {dim} evenly, but {why} needs an even split"
                    raise ProgramError(f"{op.kind}: {reason}; pad it to {-(-int(dim.size) // ranks) * ranks}", op.location)
                even.update(dim.size.symbols)
    return tuple(name for name in sharded if name not in even)


def _even(op: Op, types: Mapping[str, TensorType], fusion: Fusion, transport: Transport) -> Iterator[Even]:
    if op.kind in TO_OTHER_MESHES:
        why = "a stream" if op.result.stream else "a reduction to another mesh" if OPS[op.kind].reduces else ""
        if not why and needs_equal_blocks(types[op.tensors[0]], op.result.type, fusion.mesh, transport):
            why = "a move between meshes by gets"
        for type in (types[op.tensors[0]], op.result.type) if why else ():
            yield from ((dim, type.mesh_in(fusion.mesh), why) for dim in type.dims if dim.axes)
        return
    mesh = op.result.type.mesh_in(fusion.mesh)
    if op.user_kernel and op.result.type.mesh:  # The types of the kernel name no mesh.
        for type in (*operand_types(op, types), op.result.type):
            yield from ((dim, mesh, "a kernel on a mesh of some of the ranks") for dim in type.dims if dim.axes)
    yield from ((dim, mesh, why) for dim, why in _even_on_one_mesh(op, types))


def _even_on_one_mesh(op: Op, types: Mapping[str, TensorType]) -> Iterator[tuple[Dim, str]]:
    operands = operand_types(op, types)
    involved = (*operands, op.result.type)
    if op.result.stream:
        yield op.result.type.dims[op.result.stream.dim], "a stream"
    if op.result.transport:  # The compiler chose the transport for sizes that divide evenly.
        yield from ((dim, "the transport that the compiler chose") for type in involved for dim in type.dims if dim.axes)
    if op.kind in RESHARD_STEPS:
        before, after = (type.dims for type in involved)
        for old, new in zip(before, after, strict=True):
            is_partial = old.axes and new.axes and op.kind != "permute_shards"
            if old.axes != new.axes and (is_partial or op.result.stream):
                for dim in (old, new):
                    yield dim, "a stream" if op.result.stream else "a reshard over some of the axes"
    elif op.kind == "collective_permute":
        yield op.result.type.dims[op[AXIS]], "a collective permute of its blocks"
    elif op.kind in OF_OUTER_DIMS:
        indices = index_map(op, operands)
        for labels, type in zip((*indices.operands, indices.result), involved, strict=True):
            for label, dim in zip(labels, type.dims, strict=True):
                if label in indices.outer:
                    yield dim, OF_OUTER_DIMS[op.kind]
