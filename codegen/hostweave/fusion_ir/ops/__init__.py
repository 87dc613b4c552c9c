"""The table of ops of the fusion IR, and look-ups in it."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.index_map import IndexMap
from hostweave.fusion_ir.ir import Op, Scalar
from hostweave.fusion_ir.ops import attention, calls, grouped, indexing, pointwise, reductions, resharding, scaled, shapes
from hostweave.fusion_ir.ops.attributes import INDEX
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DType, TensorType

OPS: dict[str, OpDef] = {
    **pointwise.OPS,
    **reductions.OPS,
    **scaled.OPS,
    **grouped.OPS,
    **attention.OPS,
    **shapes.OPS,
    **indexing.OPS,
    **calls.OPS,
    **resharding.OPS,
}

RESHARD_STEPS = tuple(kind for kind, op in OPS.items() if op.is_reshard_step)
RESHARDS = ("reshard", *RESHARD_STEPS)
TO_OTHER_MESHES = tuple(kind for kind, op in OPS.items() if op.to_other_mesh)

called_function: ContextVar[str] = ContextVar("called_function", default="")  # function of the user's call, for error messages


def operand_types(op: Op, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Types of all operands. A number has no dims, and the dtype of the last tensor operand. Raises ProgramError if all operands are
    numbers, or if the dtype cannot represent a number."""
    tensors = [types[name] for name in op.tensors]
    if not op.operands and OPS[op.kind].arity == 0:
        return ()
    if not tensors:
        raise ProgramError(f"{op.kind}: no operand is a tensor; compute with Python numbers instead", op.location)
    dtype = tensors[-1].dtype
    result = []
    for operand in op.operands:
        if not isinstance(operand, str) and not fits(operand, dtype):
            raise ProgramError(
                f"{called_function.get() or op.kind}: {operand!r} is not a value of {tensors[-1]}; use hw.astype or another number",
                op.location,
            )
        result.append(types[operand] if isinstance(operand, str) else TensorType(dtype, ()))
    return tuple(result)


def fits(number: Scalar, dtype: DType) -> bool:
    """True if the dtype can represent a Python number. Float dtypes represent all floats, and ints with a magnitude below 2^1023,
    rounded."""
    if isinstance(number, bool) or dtype.kind == "bool":
        return isinstance(number, bool) and dtype.kind == "bool"
    if dtype.kind == "float":
        return isinstance(number, float) or abs(number) < 1 << 1023
    bits = 8 * dtype.itemsize - (dtype.kind == "int")
    return isinstance(number, int) and (-(1 << bits) if dtype.kind == "int" else 0) <= number < 1 << bits


def infer_type(op: Op, operands: Types) -> TensorType:
    """Type of the result without sharding. Raises ProgramError if the operands are invalid."""
    try:
        derived, mesh = OPS[op.kind].infer(operands, op), _common_mesh(op, operands)
    except Mismatch as mismatch:
        raise ProgramError(f"{called_function.get() or op.kind}: {mismatch}", op.location) from None
    return derived if derived.mesh is mesh else replace(derived, mesh=mesh)


def _common_mesh(op: Op, operands: Types) -> Mesh | None:
    """Mesh of a result: stated for calls, `reshard`, moves and ops without tensors, otherwise the mesh of the operands."""
    if op.callee and op.kind == "output":
        return calls.result_type(op, op[INDEX]).mesh
    if op.callee:
        for value, given in zip(op.callee.inputs, operands, strict=False):  # a repeat may have more operands
            if given.mesh != value.type.mesh:
                where = f"{given} on the program's mesh" if given.mesh is None else str(given)
                why = f"@{op.callee.name} takes {value.type} as {value.name}, not {where}"
                raise Mismatch(f"{why}; move it with hw.reshard(t, ..., mesh=...)")
        return op.callee.output_types[0].mesh
    if op.kind == "reshard" or OPS[op.kind].to_other_mesh or not op.tensors:
        return op.result.type.mesh
    tensors = [type for operand, type in zip(op.operands, operands, strict=True) if isinstance(operand, str)]
    for other in tensors[1:]:
        if other.mesh != tensors[0].mesh:
            first, second = (f"{type} on the program's mesh" if type.mesh is None else str(type) for type in (tensors[0], other))
            raise Mismatch(f"operands on different meshes: {first} and {second}; move one with hw.reshard(t, ..., mesh=...)")
    return tensors[0].mesh


def communicates(op: Op) -> bool:
    """True if an op, or a function that it calls, moves data between ranks."""
    if op.callee:
        return any(map(communicates, op.callee.all_ops))
    return op.kind in RESHARD_STEPS and not OPS[op.kind].is_view


def index_map(op: Op, operands: Types) -> IndexMap:
    return OPS[op.kind].map(operands, op)


def needs_whole(op: Op, operands: Types, dim: int) -> str:
    """Reason, such as "joined", why a chunk loop cannot iterate over a dim of the result, or ""."""
    indices = index_map(op, operands)
    is_walked = indices.result[dim] is not None and indices.result[dim] not in indices.outer and not indices.unwalked
    return "" if is_walked else OPS[op.kind].whole
