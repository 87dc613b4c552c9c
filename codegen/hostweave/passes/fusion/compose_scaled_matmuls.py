"""Marks scaled matmuls that cuBLASLt does not support on this machine. Lowering replaces a marked op by casts, a matmul and
multiplications.

    %y: bf16[M, N] = scaled_matmul(%a, %b, %s, %t)      # a: f8e5m2[M, K], b: f8e5m2[K, N]

becomes

    %y: bf16[M, N] = scaled_matmul(%a, %b, %s, %t, composed=dtypes)
"""

from dataclasses import replace

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.ops.attributes import COMPOSED
from hostweave.fusion_ir.ops.scaled import MULTIPLE, WHY_DTYPES, WHY_MACHINE, WHY_SIZES, scaling
from hostweave.options import Options
from hostweave.types.machine import Machine
from hostweave.types.mesh import Mesh
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import TensorType, f8e5m2


def compose_scaled_matmuls(fusion: Fusion, options: Options) -> Fusion:
    def marked(op: Op) -> Op:
        if COMPOSED not in OPS[op.kind].attributes:
            return op
        why = _why_composed(op, operand_types(op, fusion.types), fusion.mesh, options.figures)
        return replace(op, attributes=((COMPOSED.name, why),)) if why else op

    return replaced(fusion, body=tuple(map(marked, fusion.ops)))


def _why_composed(op: Op, types: tuple[TensorType, ...], mesh: Mesh, machine: Machine) -> str:
    a, b = types[:2]
    if a.dtype == b.dtype == f8e5m2:
        return WHY_DTYPES
    if scaling(*(type.shape for type in types)) in dict(machine.no_scales):
        return WHY_MACHINE
    (inner, columns), stream = b.local_shape(mesh), op.result.stream
    chunks = stream.chunks or 1 if stream and stream.dim == 1 else 1
    return WHY_SIZES if any(_divides_not(size, MULTIPLE * by) for size, by in ((inner, 1), (columns, chunks))) else ""


def _divides_not(size: Size, multiple: int) -> bool:
    share = size.factor
    return int(size) % multiple > 0 if size.is_int else isinstance(share, LocalSize) and share.size.is_int
