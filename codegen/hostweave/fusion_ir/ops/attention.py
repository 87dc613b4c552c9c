"""Scaled dot-product attention: its result, and the logarithm of the sums that divide its rows.

Two ops of the same queries, keys and attributes are one instruction. Whole rows of scores are never in memory.
"""

from __future__ import annotations

from typing import Any

from hostweave.fusion_ir.index_map import IndexMap, Labels, numbered
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import CAUSAL, SCALE, WINDOW
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, same_dtype
from hostweave.types.tensor import Dim, TensorType, f32, i32

OPS: dict[str, OpDef] = {}

TOP_LEFT, BOTTOM_RIGHT = "top_left", "bottom_right"  # corners of the scores at which the diagonal of a causal mask begins, or ends
DTYPES = ("f16", "bf16", "f32")


def _attention(types: Types, op: Op) -> TensorType:
    result = _rows(types, op, 3)
    _, k, v = types[:3]
    if v.shape[:-1] != k.shape[:-1]:
        raise Mismatch(f"keys {k} and values {v} differ in more than their last dim; give each key a value")
    return TensorType(v.dtype, (*result.dims, Dim(v.shape[-1])))


def _log_sum_exp(types: Types, op: Op) -> TensorType:
    return _rows(types, op, 2)


def _rows(types: Types, op: Op, count: int) -> TensorType:
    """A value for each row of the queries, of so many operands and maybe the lengths."""
    if not count <= len(types) <= count + 1:
        raise Mismatch(f"takes {count} operands, and lengths where not all keys are valid, not {len(types)}")
    q, k = types[:2]
    dtype = same_dtype(types[:count])
    if dtype.name not in DTYPES:
        raise Mismatch(f"not defined for {dtype}; use hw.astype to {', '.join(DTYPES)}")
    if not 3 <= len(q.dims) == len(k.dims) <= 4 or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise Mismatch(f"queries {q} and keys {k} are not [..., H, S, E] and [..., H, T, E] with one leading dim at most; reshape them")
    group = q.shape[-3].divided_by(k.shape[-3])
    if group is None or not group.is_int:
        raise Mismatch(f"the {k.shape[-3]} heads of keys {k} do not divide the {q.shape[-3]} of queries {q}; repeat them")
    if op[CAUSAL] not in ("", TOP_LEFT, BOTTOM_RIGHT):
        raise Mismatch(f"causal={op[CAUSAL]} is neither {TOP_LEFT} nor {BOTTOM_RIGHT}")
    if op[WINDOW] < 0 or (op[WINDOW] and not op[CAUSAL]):
        raise Mismatch(f"window={op[WINDOW]} is a number of columns, of a causal mask; give it one, or leave the window out")
    for lengths in types[count:]:
        if why := why_no_lengths(q, lengths):
            raise Mismatch(why)
    return TensorType(f32, tuple(Dim(size) for size in q.shape[:-1]))


def why_no_lengths(query: TensorType, lengths: TensorType) -> str:
    """Why these do not say how many keys each of a batch has, or ""."""
    wanted = TensorType(i32, tuple(Dim(size) for size in query.shape[:-3]))
    is_so = (lengths.dtype, lengths.shape) == (i32, wanted.shape)
    return "" if is_so else f"lengths of {lengths} are not {wanted}, the number of valid keys of each of the batch; cast or reshape them"


def _map(types: Types, op: Op) -> IndexMap:
    """Batch, heads and rows of the queries are free, and the last dim of the values; a rank has all keys.

    A head of the keys is that of several heads of the queries. No loop walks the dims: rows have the place of a mask, and heads groups.
    """
    batch = numbered(types[0].shape[:-3], "b")
    rows = (*batch, "h", "s")
    q: Labels = (*rows, None)
    k, v = (*batch, "h", None, None), (*batch, "h", None, "f")
    if op.kind == "attention":
        return IndexMap((q, k, v, batch)[: len(types)], (*rows, "f"), frozenset((*rows, "f")))
    return IndexMap((q, k, batch)[: len(types)], rows, frozenset(rows))


def attended(np: Any, operands: tuple[Any, ...], scale: float, diagonal: int | None, window: int, from_end: bool) -> tuple[Any, Any]:
    """The result and the log-sum-exps, by the matrix of scores: row i sees columns up to i + diagonal, of a window the last ones.

    Columns end at their length, where there are lengths, and `from_end` the diagonal counts from there. A row that sees none has zeros.
    """
    q, k, v, *lengths = operands
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if x.shape[-3] else x for x in (k, v))
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(scale)
    columns = np.arange(scores.shape[-1])
    ends = lengths[0][..., None, None, None] if lengths else len(columns)
    hidden = columns >= ends
    if diagonal is not None:
        distance = np.arange(scores.shape[-2])[:, None] + diagonal + (ends if from_end else 0) - columns
        hidden = hidden | (distance < 0) | ((distance >= window) if window else False)
    scores = np.where(hidden, -np.inf, scores)
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    sums = np.maximum(np.sum(powers, axis=-1, keepdims=True), 1)  # the largest is exp(0)
    return np.matmul(powers / sums, v), (np.log(sums) + largest)[..., 0]


def _numpy(np: Any, q: Any, *rest: Any, scale: float, causal: str = "", window: int = 0) -> tuple[Any, Any]:
    diagonal = None if not causal else 0 if causal == TOP_LEFT else -q.shape[-2]
    return attended(np, (q, *rest), scale, diagonal, window, causal == BOTTOM_RIGHT)


MAX_HEAD = 256  # elements of a head, which are a multiple of 8


def why_composed(query: TensorType, value: TensorType) -> str:
    """Why attention on these is of several ops, with the scores in memory: what cuDNN has no kernel for. Nothing where it is one."""
    if query.dtype.name not in ("f16", "bf16"):
        return f"cuDNN has no attention of {query.dtype}, only of f16 and bf16"
    if not 3 <= len(query.dims) <= 4:
        return "it has more leading dims than one"
    heads = query.shape[-1], value.shape[-1]
    if not all(size.is_int and int(size) % 8 == 0 and int(size) <= MAX_HEAD for size in heads):
        return f"heads of {' and '.join(map(str, dict.fromkeys(heads)))} elements are no ints that are multiples of 8, up to {MAX_HEAD}"
    return ""


_WHOLE = "attended to"
_ATTRIBUTES = (SCALE, CAUSAL, WINDOW)
OPS["attention"] = OpDef(None, _attention, _map, lambda np, *x, **how: _numpy(np, *x, **how)[0], _ATTRIBUTES, whole=_WHOLE)
OPS["attention_lse"] = OpDef(
    None, _log_sum_exp, _map, lambda np, q, k, *x, **how: _numpy(np, q, k, k, *x, **how)[1], _ATTRIBUTES, whole=_WHOLE
)
