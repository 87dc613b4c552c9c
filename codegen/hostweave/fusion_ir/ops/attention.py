"""Scaled dot-product attention: its result, and the logarithm of the sums that divide its rows.

Two ops of the same queries, keys and attributes are one instruction. Whole rows of scores are never in memory.

With `blocks` the keys are cut into so many, the last of which may be short or empty, and there is a result for each: its dim is the first
one, which is sharded as the keys are. Lengths are those of the blocks then. A row that sees none of a block has zeros there, and -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hostweave.fusion_ir.index_map import IndexMap, Labels, numbered
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import CAUSAL, KEY_BLOCKS, SCALE, WINDOW
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, same_dtype
from hostweave.types.size import Size
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
    blocks = _blocks(op)
    for lengths in types[count:]:
        if why := why_no_lengths(q, lengths, blocks):
            raise Mismatch(why)
        if op[CAUSAL] and blocks:
            raise Mismatch("blocks of keys that have lengths have no causal mask; leave one of them out")
    return TensorType(f32, tuple(Dim(size) for size in (*blocks, *q.shape[:-1])))


def _blocks(op: Op) -> tuple[Size, ...]:
    """The dim of the blocks, where there are any."""
    count = op[KEY_BLOCKS] if KEY_BLOCKS in OPS[op.kind].attributes else 0
    if count < 0:
        raise Mismatch(f"blocks={count} is not how many the keys are cut into; leave it out, or write 1 or more")
    return (Size(count),) if count else ()


def why_no_lengths(query: TensorType, lengths: TensorType, blocks: tuple[Size, ...] = ()) -> str:
    """Why these do not say how many keys each of a batch has, or ""."""
    wanted = TensorType(i32, tuple(Dim(size) for size in (*blocks, *query.shape[:-3])))
    is_so = (lengths.dtype, lengths.shape) == (i32, wanted.shape)
    return "" if is_so else f"lengths of {lengths} are not {wanted}, the number of valid keys of each of the batch; cast or reshape them"


def _map(types: Types, op: Op) -> IndexMap:
    """Batch, heads and rows of the queries are free, and the last dim of the values; a rank has all keys, or one of the blocks of them.

    A head of the keys is that of several heads of the queries. No loop walks the dims: rows have the place of a mask, and heads groups.
    """
    block: Labels = ("t",) if _blocks(op) else ()
    of_keys = block[0] if block else None
    batch = numbered(types[0].shape[:-3], "b")
    rows: Labels = (*batch, "h", "s")
    q: Labels = (*rows, None)
    k, v, lengths = (*batch, "h", of_keys, None), (*batch, "h", of_keys, "f"), (*block, *batch)
    operands, result = ((q, k, v, lengths), (*block, *rows, "f")) if op.kind == "attention" else ((q, k, lengths), (*block, *rows))
    return IndexMap(operands[: len(types)], result, frozenset(filter(None, result)))


def attended(np: Any, operands: tuple[Any, ...], scale: float, diagonal: int | None, window: int, from_end: bool) -> tuple[Any, Any]:
    """The result and the log-sum-exps, by the matrix of scores: row i sees columns up to i + diagonal, of a window the last ones.

    Columns end at their length, where there are lengths, and `from_end` the diagonal counts from there. A row that sees none has zeros.
    """
    q, k, v, *lengths = operands
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if x.shape[-3] else x for x in (k, v))
    scores = _masked(np, np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(scale), diagonal, window, from_end, lengths)
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    sums = np.maximum(np.sum(powers, axis=-1, keepdims=True), 1)  # the largest is exp(0)
    return np.matmul(powers / sums, v), (np.log(sums) + largest)[..., 0]


def _masked(np: Any, scores: Any, diagonal: int | None, window: int, from_end: bool, lengths: Sequence[Any]) -> Any:
    columns = np.arange(scores.shape[-1])
    ends = lengths[0][..., None, None, None] if lengths else len(columns)
    hidden = columns >= ends
    if diagonal is not None:
        distance = np.arange(scores.shape[-2])[:, None] + diagonal + (ends if from_end else 0) - columns
        hidden = hidden | (distance < 0) | ((distance >= window) if window else False)
    return np.where(hidden, -np.inf, scores)


def _numpy(compute: Callable[..., tuple[Any, ...]], index: int) -> Callable[..., Any]:
    """One of the results that a function of operands and masks gives."""

    def numpy(np: Any, *operands: Any, scale: float, causal: str = "", window: int = 0, blocks: int = 0) -> Any:
        diagonal = None if not causal else 0 if causal == TOP_LEFT else -operands[0].shape[-2]
        if not blocks:
            return compute(np, operands, scale, diagonal, window, causal == BOTTOM_RIGHT)[index]
        q, k, v, *lengths = operands
        columns = k.shape[-2]
        step, last = -(-columns // blocks), None if diagonal is None else diagonal + (columns if causal == BOTTOM_RIGHT else 0)
        results = []
        for block in range(blocks):
            keys, values = (x[..., block * step : (block + 1) * step, :] for x in (k, v))
            own = None if last is None else last - block * step
            results.append(compute(np, (q, keys, values, *(n[block] for n in lengths)), scale, own, window, False)[index])
        return np.stack(results)

    return numpy


def differentiated(np: Any, operands: tuple[Any, ...], scale: float, diagonal: int | None, window: int, from_end: bool) -> tuple[Any, ...]:
    """The gradients of queries, keys and values, from that of the result, by the matrix of scores."""
    q, k, v, _, given, lse, *lengths = operands
    group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
    keys, values = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scores = _masked(np, np.matmul(q, np.swapaxes(keys, -1, -2)) * q.dtype.type(scale), diagonal, window, from_end, lengths)
    weights = np.where(np.isneginf(scores), 0, np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None]))
    sums = np.sum(operands[3] * given, axis=-1, keepdims=True)
    changes = weights * (np.matmul(given, np.swapaxes(values, -1, -2)) - sums) * q.dtype.type(scale)

    def by_group(x: Any) -> Any:
        return np.sum(x.reshape(*x.shape[:-3], k.shape[-3], group, *x.shape[-2:]), axis=-3)

    turned, given_back = np.swapaxes(changes, -1, -2), np.swapaxes(weights, -1, -2)
    return np.matmul(changes, keys), by_group(np.matmul(turned, q)), by_group(np.matmul(given_back, given))


def _of_gradients(types: Types, op: Op) -> TensorType:
    if not 6 <= len(types) <= 7:
        raise Mismatch(f"takes 6 operands, and lengths where not all keys are valid, not {len(types)}")
    operands, (output, given, lse) = (*types[:3], *types[6:]), types[3:6]
    result, rows = _attention(operands, op), _rows((*types[:2], *types[6:]), op, 2)
    for type, wanted in ((output, result), (given, result), (lse, rows)):
        if (type.dtype, type.shape) != (wanted.dtype, wanted.shape):
            raise Mismatch(f"{type} is not {wanted}, what attention gives, or its gradient")
    of = types[GRADIENTS.index(op.kind)]
    return TensorType(of.dtype, tuple(Dim(size) for size in of.shape))


def _map_of_gradients(types: Types, op: Op) -> IndexMap:
    """As of attention; keys and values get sums over rows, and over the heads of a group, which a rank has all."""
    batch = numbered(types[0].shape[:-3], "b")
    rows, columns = (*batch, "h", "s"), (*batch, "h", None, None)
    of_rows: Labels = (*rows, None)
    operands = (of_rows, columns, columns, of_rows, of_rows, rows, batch)[: len(types)]
    return IndexMap(operands, of_rows if op.kind == GRADIENTS[0] else columns, frozenset(rows))


MAX_HEAD = 256  # elements of a head


def why_composed(query: TensorType, value: TensorType) -> str:
    """Why attention on these is of several ops, with the scores in memory: what there is no kernel for. Nothing where it is one."""
    if query.dtype.name not in DTYPES:
        return f"there is no kernel for {query.dtype}, only for {', '.join(DTYPES)}"
    if not 3 <= len(query.dims) <= 4:
        return "it has more leading dims than one"
    heads = query.shape[-1], value.shape[-1]
    step = 1 if query.dtype == f32 else 8  # cuDNN has f16 and bf16, and reads 16 bytes at once
    if not all(size.is_int and int(size) % step == 0 and int(size) <= MAX_HEAD for size in heads):
        multiples = f" that are multiples of {step}" if step > 1 else ""
        return f"heads of {' and '.join(map(str, dict.fromkeys(heads)))} elements are no ints{multiples}, up to {MAX_HEAD}"
    return ""


_WHOLE = "attended to"
_ATTRIBUTES = (SCALE, CAUSAL, WINDOW)
_IN_BLOCKS = (*_ATTRIBUTES, KEY_BLOCKS)
GRADIENTS = ("attention_query_gradient", "attention_key_gradient", "attention_value_gradient")


def _log_sum_exps(np: Any, q: Any, k: Any, *lengths: Any, **how: Any) -> Any:
    return _numpy(attended, 1)(np, q, k, k, *lengths, **how)


OPS["attention"] = OpDef(None, _attention, _map, _numpy(attended, 0), _IN_BLOCKS, whole=_WHOLE)
OPS["attention_lse"] = OpDef(None, _log_sum_exp, _map, _log_sum_exps, _IN_BLOCKS, whole=_WHOLE)
_ROWS, _HEAD = (0, -2), (2, -1)  # an element of the result by its gradient, and these over rows
for _index, _adds_up in enumerate(((_HEAD,), (_HEAD, _ROWS), (_ROWS,))):
    OPS[GRADIENTS[_index]] = OpDef(
        None,
        _of_gradients,
        _map_of_gradients,
        _numpy(differentiated, _index),
        _ATTRIBUTES,
        whole=_WHOLE,
        partial="sum" if _index else "",
        adds_up=_adds_up,
    )
