"""Reductions, and the matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hostweave.base.signatures import named
from hostweave.fusion_ir.frontend.recording import Axis, ReductionOp, dims_of, record
from hostweave.fusion_ir.index_map import ONE, IndexMap, Labels, aligned, numbered
from hostweave.fusion_ir.ir import Attribute, Op
from hostweave.fusion_ir.ops.attributes import AXES, CONTRACTED, COUNT, KEEPDIMS
from hostweave.fusion_ir.ops.definition import Combine, Infer, Mismatch, OpDef, Types, broadcast, checked_axes, require, same_dtype
from hostweave.types.size import Size, product
from hostweave.types.tensor import FLOATS, INTS, NUMBERS, Dim, DType, TensorType, f32, i64

if TYPE_CHECKING:
    from hostweave.fusion_ir.frontend.trace import Tensor

OPS: dict[str, OpDef] = {}

_ADD = Combine("sum", "hw::Add", ("0", "0", "0"), "+", identity=True)
_MULTIPLY = Combine("product", "hw::Multiply", ("1", "1", "1"), "*", identity=True)
_MAXIMUM = Combine("largest", "hw::Maximum", ("-INFINITY", "INT64_MIN", "0"))
_MINIMUM = Combine("smallest", "hw::Minimum", ("INFINITY", "INT64_MAX", "UINT64_MAX"))
_BITWISE_KINDS = (*INTS, "bool")  # kinds of dtypes of bitwise reductions
_AND = Combine("common", "hw::And", ("", "-1", "UINT64_MAX"), "&", identity=True)
_OR = Combine("any", "hw::Or", ("", "0", "0"), "|", identity=True)
_XOR = Combine("parity", "hw::Xor", ("", "0", "0"), "^", identity=True)
_FIRST_MAXIMUM = Combine("best", "hw::FirstMaximum", ("-INFINITY", "INT64_MIN", "0"))


def _infer(kinds: tuple[str, ...]) -> Infer:
    def infer(types: Types, op: Op) -> TensorType:
        (x,) = types
        require(x, kinds)
        axes = checked_axes(op[AXES], len(x.dims))
        combine = OPS[op.kind].combine
        if combine and not combine.identity and Size(0) in [x.shape[axis] for axis in axes]:
            raise Mismatch(f"{x} has no elements along axis={axes}, so it has no {op.kind}; reduce a dim with elements")
        dims = tuple(Dim(ONE if i in axes else size) for i, size in enumerate(x.shape) if op[KEEPDIMS] or i not in axes)
        return TensorType(x.dtype, dims)

    return infer


def _argmax(types: Types, op: Op) -> TensorType:
    if len(op[AXES]) != 1:
        raise Mismatch(f"axis={op[AXES]} names {len(op[AXES])} dims; reshape them to one first")
    return TensorType(i64, _infer(NUMBERS)(types, op).dims)


def _define(kind: str, infer: Infer, combine: Combine, numpy: Callable[..., Any], *attributes: Attribute[Any], **facts: Any) -> None:
    def indices(types: Types, op: Op) -> IndexMap:
        labels = numbered(types[0].shape)
        kept: Labels = tuple(None if i in op[AXES] else label for i, label in enumerate(labels))
        return IndexMap((labels,), kept if op[KEEPDIMS] else tuple(label for label in kept if label))

    OPS[kind] = OpDef(1, infer, indices, numpy, (AXES, KEEPDIMS, *attributes), combine=combine, whole="reduced", **facts)


def _reduction(
    kind: str,
    doc: str,
    combine: Combine,
    partial: str,
    numpy: Callable[..., Any],
    *attributes: Attribute[Any],
    kinds: tuple[str, ...] = NUMBERS,
) -> ReductionOp:
    """Defines a reduction and its public function. `partial` is the reduction that combines the results of ranks."""
    _define(
        kind, _infer(kinds), combine, numpy, *attributes, partial=partial, linear="first" if combine.sign == "+" else "", is_public=True
    )

    def function(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor:
        return record(kind, x, axis=dims_of(x, axis, kind), keepdims=keepdims)

    dtype = "f32" if kinds != _BITWISE_KINDS else "i32"
    doc = (
        f"{doc}\n\nReduces over `axis`: an int, the name of a dim, or a tuple of these, by default all dims. With `keepdims`\n"
        f"the reduced dims are kept, with one element. The dtype is that of x. If a reduced dim is sharded, each rank reduces its shard,\n"
        f"and a collective combines the results. Raises ProgramError if the op is not defined for the dtype of x, and for dims that x\n"
        f"does not have.\n\n"
        f"Example: `x: {dtype}[M, N]` gives `{dtype}[M]` by `hw.{kind}(x, axis=-1)`."
    )
    return named(function, kind, doc)


def _of_bits(word: str, doc: str, combine: Combine) -> ReductionOp:
    def computed(np: Any, x: Any, **a: Any) -> Any:
        return getattr(np, f"bitwise_{word}").reduce(x, **a)

    return _reduction(f"reduce_{word}", doc, combine, word, computed, kinds=_BITWISE_KINDS)


def _bound(np: Any, x: Any, sign: int) -> Any:
    """Result of max (`sign` = -1) or min (`sign` = 1) over no elements. A rank may hold no elements of a sharded dim."""
    if x.dtype.kind == "b":
        return sign > 0
    if x.dtype.kind in "iu":
        return np.iinfo(x.dtype).max if sign > 0 else np.iinfo(x.dtype).min
    return sign * np.inf


def _mean(np: Any, x: Any, axis: tuple[int, ...], keepdims: bool = False, count: int = 0) -> Any:
    return np.sum(x, axis=axis, keepdims=keepdims) / count if count else np.mean(x, axis=axis, keepdims=keepdims)


def as_term(op: Op, x: TensorType) -> Op:
    """Makes a mean divide by the global number of elements, so that the results of ranks are terms of a sum. Other ops do not change."""
    if op.kind not in OPS or COUNT not in OPS[op.kind].attributes or op[COUNT] != Size(0):
        return op
    return replace(op, attributes=(*op.attributes, (COUNT.name, product(tuple(x.shape[axis] for axis in op[AXES])))))


def is_one_element(op: Op, x: Sequence[Size]) -> bool:
    """True if the op is a reduction that keeps the values of an operand of shape `x`, because all reduced dims have one element."""
    combine = OPS[op.kind].combine
    is_scaled = combine is not None and combine.is_mean and op[COUNT] != Size(0)
    return combine is not None and not OPS[op.kind].locates and not is_scaled and all(x[axis] == Size() for axis in op[AXES])


sum = _reduction("sum", "The sum.", _ADD, "sum", lambda np, x, **a: np.sum(x, dtype=x.dtype, **a))
prod = _reduction("prod", "The product.", _MULTIPLY, "prod", lambda np, x, **a: np.prod(x, dtype=x.dtype, **a))
max = _reduction(
    "max", "The largest element.", _MAXIMUM, "max", lambda np, x, **a: np.max(x, initial=_bound(np, x, -1), **a), kinds=(*NUMBERS, "bool")
)
min = _reduction(
    "min", "The smallest element.", _MINIMUM, "min", lambda np, x, **a: np.min(x, initial=_bound(np, x, 1), **a), kinds=(*NUMBERS, "bool")
)
mean = _reduction("mean", "The arithmetic mean, of floats.", replace(_ADD, is_mean=True), "sum", _mean, COUNT, kinds=FLOATS)
_define("argmax", _argmax, _FIRST_MAXIMUM, lambda np, x, axis, keepdims=False: np.argmax(x, axis=axis[0], keepdims=keepdims), locates=True)

reduce_and = _of_bits("and", "The bitwise and of ints or bools.", _AND)
reduce_or = _of_bits("or", "The bitwise or of ints or bools.", _OR)
reduce_xor = _of_bits("xor", "The bitwise exclusive or of ints or bools.", _XOR)


def _matmul(types: Types, op: Op) -> TensorType:
    a, b = types
    if why := why_no_product(same_dtype(types)):
        raise Mismatch(f"{why}; use hw.astype on both")
    count = op[CONTRACTED]
    for operand in types:
        if not 1 <= count < len(operand.dims):
            needed = f"{operand} has {len(operand.dims)} dims, at least {count + 1} are needed"
            raise Mismatch(f"{needed}; use x[None] or x[:, None]")
    if a.shape[-count:] != b.shape[-1 - count : -1]:
        raise Mismatch(f"inner dims differ: {a} x {b}; {_transposed(a, b)}")
    batches = [TensorType(t.dtype, t.dims[: -1 - count]) for t in types]
    try:
        batch = broadcast(batches) if any(t.dims for t in batches) else ()
    except Mismatch:
        raise Mismatch(f"batch dims do not broadcast: {a} x {b}") from None
    dtype = op.result.type.dtype if widens(a.dtype, op.result.type.dtype) else a.dtype
    return TensorType(dtype, (*batch, Dim(a.shape[-1 - count]), Dim(b.shape[-1])))


def _transposed(a: TensorType, b: TensorType) -> str:
    if a.shape[-1] == b.shape[-1]:
        return "transpose the second one: " + ("hw.matmul(a, b.T)" if len(b.dims) == 2 else "hw.permute_dims(b, axes)")
    if a.shape[-2] == b.shape[-2]:
        return "transpose the first one: " + ("hw.matmul(a.T, b)" if len(a.dims) == 2 else "hw.permute_dims(a, axes)")
    return "the last dim of the first must equal the second-to-last dim of the second: transpose or reshape one of them"


def why_no_product(dtype: DType) -> str:
    """Reason why matmul does not support this dtype, or ""."""
    if dtype.kind in INTS or (dtype.kind == "float" and dtype.itemsize > 1):
        return ""
    return f"a product of {dtype} by {dtype} is not supported; the supported dtypes are f16, bf16, f32, f64 and ints"


def widens(operands: DType, result: DType) -> bool:
    """True if the matmul multiplies 16-bit floats, and returns the f32 sums unrounded."""
    return result == f32 and operands.name in ("f16", "bf16")


def _contracted(types: Types, op: Op) -> IndexMap:
    """Index map of a matmul: batch dims are aligned from the right, then (m, k), (k, n) -> (m, n). k stands for all contracted dims."""
    batch, count = op.result.type.shape[:-2], op[CONTRACTED]
    labels, inner = numbered(batch, "b"), numbered(types[0].shape[-count:], "k")
    a, b = (aligned(type.shape[: -1 - count], batch, labels) for type in types)
    return IndexMap(((*a, "m", *inner), (*b, *inner, "n")), (*labels, "m", "n"))


def _numpy_matmul(np: Any, a: Any, b: Any, contracted: int = 1) -> Any:
    k = math.prod(a.shape[-contracted:])
    return np.matmul(a.reshape(*a.shape[:-contracted], k), b.reshape(*b.shape[: -1 - contracted], k, b.shape[-1]))


OPS["matmul"] = OpDef(2, _matmul, _contracted, _numpy_matmul, (CONTRACTED,), partial="sum", last_is_first=True, is_product=True)
