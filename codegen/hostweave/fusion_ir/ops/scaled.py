"""Scaled matmul: the product of two matrices of 8-bit floats with scales, as in torch._scaled_mm."""

from typing import Any

from hostweave.fusion_ir.index_map import ONE, IndexMap, SymbolicShape
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import COMPOSED
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types
from hostweave.types.tensor import BufferType, Dim, TensorType, bf16, f16, f32

BLOCK = 128  # number of elements that share a scale, along a dim with block scales
TENSOR, ROW, BLOCKS = "tensor", "row", "block"
SCALINGS = (ROW, TENSOR, BLOCKS)  # elements that share a scale
RESULTS = (bf16, f16, f32)
# Reasons why cuBLASLt cannot compute a scaled matmul: the machine lacks support, both operands are f8e5m2, or the local K or N is no
# multiple of MULTIPLE.
WHY_MACHINE, WHY_DTYPES, WHY_SIZES = LACKING = ("machine", "dtypes", "sizes")
MULTIPLE = 16  # for 8-bit floats, cuBLASLt requires that K and N are multiples of MULTIPLE


def scaling(a: SymbolicShape, b: SymbolicShape, scale_a: SymbolicShape, scale_b: SymbolicShape) -> str:
    """Kind of scaling for matrices and scales of these shapes: one of SCALINGS, or "" if the shapes do not fit."""
    (m, k), (_, n) = a, b
    if scale_a == (m, ONE) and scale_b == (ONE, n):
        return ROW
    if scale_a == scale_b == (ONE, ONE):
        return TENSOR
    is_a = scale_a in ((m, k // BLOCK), (m // BLOCK, k // BLOCK))
    return BLOCKS if is_a and scale_b in ((k // BLOCK, n), (k // BLOCK, n // BLOCK)) else ""


def is_composed(op: Op) -> bool:
    """True for a scaled matmul that is composed of other ops, because cuBLASLt cannot compute the product."""
    return bool(op[COMPOSED])


def why_no_scaled_product(a: TensorType | BufferType, b: TensorType | BufferType, *scales: TensorType | BufferType) -> str:
    """Reason why a scaled matmul cannot have these operands, or ""."""
    for operand in (a, b):
        if operand.dtype.kind != "float" or operand.dtype.itemsize != 1:
            return f"{operand} is not a tensor of 8-bit floats; use hw.quantize on it, or hw.astype to hw.f8e4m3"
    if other := next((scale for scale in scales if scale.dtype != f32), None):
        return f"the scales {other} are not of f32; use hw.astype(scale, hw.f32)"
    if other := next((each for each in (a, b, *scales) if len(each.shape) != 2), None):
        return f"{other} has {len(other.shape)} dims, and exactly 2 are needed; use hw.reshape"
    if a.shape[1] != b.shape[0]:
        return f"inner dims differ: {a} x {b}; a is [M, K] and b [K, N]"
    if not scaling(a.shape, b.shape, scales[0].shape, scales[1].shape):
        wanted = "[1, 1] and [1, 1], [M, 1] and [1, N], or [M or M/128, K/128] and [K/128, N or N/128]"
        return f"scales {scales[0]} and {scales[1]} do not fit {a} and {b}; they must be {wanted}"
    return ""


def _scaled_matmul(types: Types, op: Op) -> TensorType:
    if why := why_no_scaled_product(*types):
        raise Mismatch(why)
    if op.result.type.dtype not in RESULTS:
        raise Mismatch(f"out_dtype={op.result.type.dtype} is none of {', '.join(map(str, RESULTS))}; use one of them")
    return TensorType(op.result.type.dtype, (Dim(types[0].shape[0]), Dim(types[1].shape[1])))


def _indices(types: Types, op: Op) -> IndexMap:
    """Index map (m, k), (k, n) -> (m, n). Dims with block scales are in `outer`, but a dim of a single block has no label. The 1 in
    scales [M, 1] and [1, N] has no label, even if K is 1."""
    kind, operands = scaling(*(type.shape for type in types)), (("m", "k"), ("k", "n"))
    dims = [
        (label, of, have)
        for labels, type, scale in zip(operands, types[:2], types[2:], strict=True)
        for label, of, have in zip(labels, type.shape, scale.shape, strict=True)
    ]
    cut = {label for label, of, have in dims if kind == BLOCKS and have != of}
    single = {label for label, of, have in dims if label in cut and have == ONE}
    equal = [have == of and (label, have) != ("k", ONE) for label, of, have in dims]
    scales = [label if kind != TENSOR and (is_equal or label in cut) else None for is_equal, (label, *_) in zip(equal, dims, strict=True)]

    def joined(*labels: str | None) -> tuple[str | None, ...]:
        return tuple(None if label in single else label for label in labels)

    return IndexMap(
        (*(joined(*of) for of in operands), joined(*scales[:2]), joined(*scales[2:])), joined("m", "n"), frozenset(cut - single)
    )


def scaled(x: Any, scale: Any) -> Any:
    """Multiplies x [R, C] by scale [r, c]. Each element of the scale covers R/r x C/c elements of x."""
    (rows, columns), (r, c) = x.shape, scale.shape
    blocks = x.reshape(r, rows // max(r, 1), c, columns // max(c, 1)) * scale.reshape(r, 1, c, 1)
    return blocks.reshape(rows, columns)


def multiplied(np: Any, a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    """NumPy reference. The operands are already converted to a wide dtype."""
    return np.matmul(scaled(a, scale_a), scaled(b, scale_b))


OPS = {
    "scaled_matmul": OpDef(
        4,
        _scaled_matmul,
        _indices,
        lambda np, a, b, scale_a, scale_b, composed="": multiplied(np, a, b, scale_a, scale_b),
        (COMPOSED,),
        partial="sum",
        last_is_first=True,
        is_product=True,
    )
}
