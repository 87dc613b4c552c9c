"""Scaled dot-product attention, its log-sum-exps, and its gradients.

An `attention` and an `attention_lse` with the same queries, keys, masks and attributes become one instruction. Optional operands follow the
required operands:

- lengths, the number of valid keys per batch;
- a bias of the scores, if the attribute `bias` is set;
- the starts of packed sequences and the end of the last sequence, if the attribute `packed` is set. A row attends only to keys of its
  sequence.

The attribute `blocks` is a number of blocks into which the keys are cut. The result then has a first dim for the blocks, which is sharded
like the keys. The last blocks may be short or empty. Lengths also have a dim for the blocks, and count the valid keys of each block. A row
without keys in a block has result 0 and log-sum-exp -inf.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hostweave.fusion_ir.index_map import ONE, IndexMap, Labels, numbered
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import CAUSAL, HAS_BIAS, IS_PACKED, KEY_BLOCKS, PIECES, REVERSED, SCALE, WINDOW
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, same_dtype
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, DType, TensorType, f32, i32
from hostweave.types.zigzag import order_of_pieces

OPS: dict[str, OpDef] = {}
T = TypeVar("T")

LEAST_SCORE = -1e30  # lower bound of the number that is subtracted from scores, so that a row of -inf gives no NaN
# the diagonal of a causal mask begins at the first row and column, or ends at the last row and column
TOP_LEFT, BOTTOM_RIGHT = "top_left", "bottom_right"
ATTENTION_DTYPES = ("f16", "bf16", "f32")  # dtypes of queries, keys and values
GRADIENTS = ("attention_query_gradient", "attention_key_gradient", "attention_value_gradient", "attention_bias_gradient")
BIAS_GRADIENT = GRADIENTS[3]
COUNTS = {"attention": 3, "attention_lse": 2, **dict.fromkeys(GRADIENTS, 6)}  # required operands


def masks_of(op: Op, operands: Sequence[T]) -> dict[str, T]:
    """Maps each mask that the op has ("lengths", "bias" or "offsets") to its entry in `operands`."""
    rest, named = operands[COUNTS[op.kind] :], ["bias"] * op[HAS_BIAS] + ["offsets"] * op[IS_PACKED]
    return dict(zip(["lengths"] * (len(rest) > len(named)) + named, rest, strict=False))


def _attention(types: Types, op: Op) -> TensorType:
    rows = _rows(types, op)
    return TensorType(types[2].dtype, (*rows.dims, Dim(types[2].shape[-1])))


def _rows(types: Types, op: Op) -> TensorType:
    """Type of the log-sum-exps."""
    count, masks = COUNTS[op.kind], masks_of(op, types)
    if len(types) != count + len(masks) or len(masks) < op[HAS_BIAS] + op[IS_PACKED]:
        more = f"{' with a bias' * op[HAS_BIAS]}{' with offsets' * op[IS_PACKED]}"
        raise Mismatch(f"takes {count + op[HAS_BIAS] + op[IS_PACKED]} operands{more}, and optionally lengths, not {len(types)}")
    q, k = types[:2]
    dtype = same_dtype(types[: min(count, 3)])
    if dtype.name not in ATTENTION_DTYPES:
        raise Mismatch(f"not defined for {dtype}; use hw.astype to {', '.join(ATTENTION_DTYPES)}")
    if not 3 <= len(q.dims) == len(k.dims) <= 4 or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise Mismatch(f"queries {q} and keys {k} are not [..., H, S, E] and [..., G, T, E] with one leading dim at most; reshape them")
    if count > 2 and types[2].shape[:-1] != k.shape[:-1]:
        raise Mismatch(f"keys {k} and values {types[2]} differ in more than their last dim; give each key a value")
    group = q.shape[-3].divided_by(k.shape[-3])
    if group is None or not group.is_int:
        why = f"the {k.shape[-3]} heads of keys {k} do not divide the {q.shape[-3]} heads of queries {q}"
        raise Mismatch(f"{why}; repeat the heads of keys")
    if op[CAUSAL] not in ("", TOP_LEFT, BOTTOM_RIGHT):
        raise Mismatch(f"causal={op[CAUSAL]} is neither {TOP_LEFT} nor {BOTTOM_RIGHT}")
    if op[WINDOW] < 0 or (op[WINDOW] and not op[CAUSAL]):
        raise Mismatch(f"window={op[WINDOW]} needs a causal mask; state causal, or leave the window out")
    blocks = _blocks(op)
    if why := why_no_masks(q, k, masks, blocks):
        raise Mismatch(why)
    if blocks and "lengths" in masks and op[CAUSAL]:
        raise Mismatch("lengths and a causal mask exclude each other for blocks of keys; leave one of them out")
    return TensorType(f32, tuple(Dim(size) for size in (*blocks, *q.shape[:-1])))


def _blocks(op: Op) -> tuple[Size, ...]:
    count = op[KEY_BLOCKS] if KEY_BLOCKS in OPS[op.kind].attributes else 0
    if count < 0:
        raise Mismatch(f"blocks={count} is not a number of blocks of keys; write 1 or more, or leave it out")
    return (Size(count),) if count else ()


def why_no_masks(query: TensorType, key: TensorType, masks: Mapping[str, TensorType], blocks: tuple[Size, ...] = ()) -> str:
    """Reason why the tensors in `masks`, by name as in `masks_of`, are not valid masks, or ""."""
    is_apart = "offsets" not in masks or (len(masks) == 1 and not blocks)
    whys = (
        why_no_lengths(query, masks["lengths"], blocks) if "lengths" in masks else "",
        why_no_bias(query, key, masks["bias"]) if "bias" in masks else "",
        "" if is_apart else "packed sequences support no lengths, bias or blocks; leave one of them out",
        why_no_offsets(query, key, masks["offsets"]) if "offsets" in masks else "",
    )
    return next(filter(None, whys), "")


def why_no_lengths(query: TensorType, lengths: TensorType, blocks: tuple[Size, ...] = ()) -> str:
    """Reason why a tensor cannot be the number of valid keys of each batch, or ""."""
    wanted = TensorType(i32, tuple(Dim(size) for size in (*blocks, *query.shape[:-3])))
    is_so = (lengths.dtype, lengths.shape) == (i32, wanted.shape)
    return "" if is_so else f"lengths of {lengths} are not {wanted}, the number of valid keys per batch; cast or reshape them"


def why_no_bias(query: TensorType, key: TensorType, bias: TensorType) -> str:
    """Reason why a tensor cannot be added to the scores, or ""."""
    scores = (*query.shape[:-1], key.shape[-2])
    dims = bias.shape if len(bias.shape) > 1 else ()
    fits = dims and all(size in (ONE, wanted) for size, wanted in zip(dims[-2::-1], scores[-2::-1], strict=False))
    if bias.dtype == query.dtype and fits and len(dims) <= len(scores) and dims[-1] == scores[-1]:
        return ""
    wanted = f"{query.dtype}[{', '.join(map(str, scores))}]"
    return f"a bias of {bias} is not {wanted}, whose dims before the last one may be 1; cast it, and broadcast its last dim"


def why_no_offsets(query: TensorType, key: TensorType, offsets: TensorType) -> str:
    """Reason why a tensor cannot be the offsets of packed sequences, or ""."""
    if query.shape[-2] != key.shape[-2]:
        return f"packed sequences need as many queries as keys, but queries are {query} and keys {key}; pad them"
    if offsets.dtype == i32 and len(offsets.dims) == len(query.dims) - 2 and offsets.shape[:-1] == query.shape[:-3]:
        return ""
    wanted = f"i32[{', '.join(map(str, (*query.shape[:-3], 'N + 1')))}]"
    return f"offsets of {offsets} are not {wanted}, the starts of N sequences and the end of the last one; cast or reshape them"


def _map(types: Types, op: Op) -> IndexMap:
    """Index map. Ranks can split batch, heads, rows (unless packed), and the last dim of the values. Ranks can split keys only if the op
    has blocks. Loops can iterate only over blocks, because masks depend on the positions of rows, and query heads may share a key head."""
    block: Labels = ("t",) if _blocks(op) else ()
    of_keys = block[0] if block else None
    batch = numbered(types[0].shape[:-3], "b")
    rows: Labels = (*batch, "h", None if op[IS_PACKED] else "s")
    operands: tuple[Labels, ...] = ((*rows, None), (*batch, "h", of_keys, None), (*batch, "h", of_keys, "f"))
    result: Labels = (*block, *rows, *(("f",) if op.kind == "attention" else ()))
    operands = (*operands[: COUNTS[op.kind]], *_labels_of_masks(op, types, rows, of_keys, block))
    return IndexMap(
        operands, result, frozenset(filter(None, result)) - {*block}, tuple((label, op[KEY_BLOCKS]) for label in block if label)
    )


def _labels_of_masks(op: Op, types: Types, rows: Labels, of_keys: str | None, block: Labels = ()) -> Iterator[Labels]:
    for word, type in masks_of(op, types).items():
        if word == "bias":
            labels = (*rows, of_keys)[-len(type.dims) :]
            yield tuple(None if size == ONE else label for size, label in zip(type.shape, labels, strict=True))
        else:
            yield (*block, *rows[:-2], *((None,) if word == "offsets" else ()))


@dataclass(frozen=True)
class Masks:
    """Masks of the scores. Row i attends to columns up to i + diagonal, within its window, length and sequence. `from_end` adds the number
    of valid columns to the diagonal. If `reversed` is not 0, the rows are `reversed` blocks in reversed order."""

    diagonal: int | None = None
    window: int = 0
    from_end: bool = False
    lengths: Any = None
    bias: Any = None
    offsets: Any = None
    reversed: int = 0


def attended(np: Any, operands: tuple[Any, ...], scale: float, masks: Masks) -> tuple[Any, Any]:
    """NumPy reference: the result and the log-sum-exps, which are 0 and -inf for a row without columns."""
    q, k, v = operands
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if 0 < x.shape[-3] < q.shape[-3] else x for x in (k, v))
    scores = _masked(np, np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(scale), masks)
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    sums = np.maximum(np.sum(powers, axis=-1, keepdims=True), 1)  # a sum is at least exp(0), or 0 for a row without columns
    return np.matmul(powers / sums, v), (np.log(sums) + largest)[..., 0]


def _masked(np: Any, scores: Any, masks: Masks) -> Any:
    scores = scores if masks.bias is None else scores + masks.bias
    rows, columns = np.arange(scores.shape[-2])[:, None], np.arange(scores.shape[-1])
    if masks.reversed:
        rows = rows.reshape(masks.reversed, -1)[::-1].reshape(-1, 1)
    ends = len(columns) if masks.lengths is None else masks.lengths[..., None, None, None]
    hidden = columns >= ends
    if masks.diagonal is not None:
        distance = rows + masks.diagonal + (ends if masks.from_end else 0) - columns
        hidden = hidden | (distance < 0) | ((distance >= masks.window) if masks.window else False)
    if masks.offsets is not None:
        begun = np.sum(columns[:, None] >= masks.offsets[..., None, :], axis=-1)  # for each token, number of sequences that have begun
        in_one = (begun > 0) & (begun < masks.offsets.shape[-1])
        apart = (begun[..., :, None] != begun[..., None, :]) | ~in_one[..., None, :]
        hidden = hidden | apart[..., None, :, :]
    return np.where(hidden, -np.inf, scores)


def _numpy(compute: Callable[..., tuple[Any, ...]], kind: str, index: int) -> Callable[..., Any]:
    def numpy(np: Any, *operands: Any, scale: float, **how: Any) -> Any:
        count, causal, blocks, pieces = COUNTS[kind], how.get("causal"), how.get("blocks"), how.get("pieces")
        (q, k, *others), rest = operands[:count], list(operands[count:])
        bias, offsets = (rest.pop() if how.get(word) else None for word in ("bias", "packed"))  # at most one of them is given
        lengths = rest.pop() if rest else None
        if kind == "attention_lse":
            others = [k]  # placeholder for the values
        diagonal = None if not causal else 0 if causal == TOP_LEFT else -q.shape[-2]
        masks = Masks(diagonal, how.get("window", 0), causal == BOTTOM_RIGHT, lengths, bias, offsets, how.get("reversed", 0))
        if pieces:
            positions = np.arange(q.shape[-2]).reshape(pieces, -1)[[*order_of_pieces(pieces // 2)]].ravel()
            masks = Masks(bias=np.where(positions[:, None] >= positions, 0, -np.inf))
        if not blocks:
            return compute(np, (q, k, *others), scale, masks)[index]
        columns = k.shape[-2]
        size, end = -(-columns // blocks), columns if masks.from_end else 0
        results = []
        for block in range(blocks):
            of_block = slice(block * size, (block + 1) * size)
            own = replace(
                masks,
                diagonal=None if masks.diagonal is None else masks.diagonal + end - block * size,
                from_end=False,
                lengths=None if lengths is None else lengths[block],
                bias=masks.bias[..., of_block] if masks.bias is not None else None,
            )
            results.append(compute(np, (q, *(x[..., of_block, :] for x in (k, *others))), scale, own)[index])
        return np.stack(results)

    return numpy


def differentiated(np: Any, operands: tuple[Any, ...], scale: float, masks: Masks) -> tuple[Any, ...]:
    """NumPy reference of the gradients of queries, keys, values and, if given, the bias."""
    q, k, v, output, given, lse = operands
    group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
    keys, values = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scores = _masked(np, np.matmul(q, np.swapaxes(keys, -1, -2)) * q.dtype.type(scale), masks)
    weights = np.where(np.isneginf(scores), 0, np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None]))
    sums = np.sum(output * given, axis=-1, keepdims=True)
    of_scores = weights * (np.matmul(given, np.swapaxes(values, -1, -2)) - sums)
    changes = of_scores * q.dtype.type(scale)

    def by_group(x: Any) -> Any:
        return np.sum(x.reshape(*x.shape[:-3], k.shape[-3], group, *x.shape[-2:]), axis=-3)

    turned, given_back = np.swapaxes(changes, -1, -2), np.swapaxes(weights, -1, -2)
    of_bias = () if masks.bias is None else (_summed_like(np, of_scores, masks.bias.shape),)
    return np.matmul(changes, keys), by_group(np.matmul(turned, q)), by_group(np.matmul(given_back, given)), *of_bias


def _summed_like(np: Any, x: Any, shape: tuple[int, ...]) -> Any:
    x = np.sum(x, axis=tuple(range(x.ndim - len(shape))))
    return np.sum(x, axis=tuple(dim for dim, size in enumerate(shape) if size == 1), keepdims=True)


def _of_gradients(types: Types, op: Op) -> TensorType:
    rows, result = _rows(types, op), _attention(types, op)
    for type, wanted in zip(types[3:6], (result, result, rows), strict=True):
        if (type.dtype, type.shape) != (wanted.dtype, wanted.shape):
            raise Mismatch(f"{type} is not {wanted}, the type of attention's result and of its gradient")
    masks = masks_of(op, types)
    if op.kind == BIAS_GRADIENT and "bias" not in masks:
        raise Mismatch("is the gradient of a bias, but there is no bias; add a bias, and bias=true")
    of = masks["bias"] if op.kind == BIAS_GRADIENT else types[GRADIENTS.index(op.kind)]
    return TensorType(of.dtype, tuple(Dim(size) for size in of.shape))


def _map_of_gradients(types: Types, op: Op) -> IndexMap:
    """Index map of gradients. Gradients of keys and values are sums over rows. The gradient of a bias is a sum over its broadcast dims."""
    batch = numbered(types[0].shape[:-3], "b")
    rows: Labels = (*batch, "h", None if op[IS_PACKED] else "s")
    columns: Labels = (*batch, "h", None, None)
    of_rows: Labels = (*rows, None)
    masks = dict(zip(masks_of(op, types), _labels_of_masks(op, types, rows, None), strict=True))
    operands = (of_rows, columns, columns, of_rows, of_rows, rows, *masks.values())
    result = {GRADIENTS[0]: of_rows, BIAS_GRADIENT: masks.get("bias", ())}.get(op.kind, columns)
    return IndexMap(operands, result, frozenset(filter(None, rows)))


KERNEL_HEADS = (64, 128, 256)  # maximum head sizes of this package's kernels
MAX_HEAD = KERNEL_HEADS[-1]


def why_composed(query: TensorType, value: TensorType) -> str:
    """Reason why attention must be composed of several ops, or ""."""
    if query.dtype.name not in ATTENTION_DTYPES:
        return f"there is no kernel for {query.dtype}, only for {', '.join(ATTENTION_DTYPES)}"
    if not 3 <= len(query.dims) <= 4:
        return "it has more than one leading dim"
    heads = query.shape[-1], value.shape[-1]
    multiple = 1 if query.dtype == f32 else 8  # cuDNN, for f16 and bf16, reads 16 bytes at once
    if not all(size.is_int and int(size) % multiple == 0 and int(size) <= MAX_HEAD for size in heads):
        multiples = f" that are multiples of {multiple}" if multiple > 1 else ""
        return f"heads of {' and '.join(map(str, dict.fromkeys(heads)))} elements are not ints{multiples}, up to {MAX_HEAD}"
    return ""


def is_by_kernels(op: Op, query: TensorType, key: TensorType, value: TensorType) -> bool:
    """True if cuDNN does not support the op for some sizes, so that CUDA needs kernels of this package."""
    has_lengths, rows = "lengths" in masks_of(op, op.tensors), query.dims[-2]
    sees_all = not op[CAUSAL] or (op[CAUSAL] == BOTTOM_RIGHT and rows.size == ONE)
    at_top_left = not {*rows.axes, *key.dims[-2].axes} and (op[CAUSAL] == TOP_LEFT or (rows.size == key.shape[-2] and not has_lengths))
    beside_bias = op[HAS_BIAS] and (op[WINDOW] > 0 or not (sees_all or at_top_left))
    in_the_middle = has_lengths and not sees_all and bool(rows.axes)
    ends_before = (op[WINDOW] > 0 or op.kind in GRADIENTS) and op[CAUSAL] == TOP_LEFT and bool(rows.axes) and rows.size != key.shape[-2]
    # head sizes for which cuDNN supports packed sequences
    packs = query.shape[-1] == value.shape[-1] and (head := int(query.shape[-1])) % 16 == 0 and head >= 32
    # if keys have more than one head but fewer than queries, support of gradients depends on the memory layout
    packs = packs and (op.kind not in GRADIENTS or key.shape[-3] in (ONE, query.shape[-3]))
    is_in_bounds = not (beside_bias or in_the_middle or ends_before) and (packs or not op[IS_PACKED])
    return query.dtype == f32 or op.kind == BIAS_GRADIENT or not is_in_bounds


def kernels_for(dtype: DType, head: int) -> str:
    """Name of the kernel library for a dtype and a head size."""
    return f"{dtype}_{next(most for most in KERNEL_HEADS if head <= most)}"


_WHOLE = "attended to"
_ATTRIBUTES = (SCALE, CAUSAL, WINDOW, HAS_BIAS, IS_PACKED, REVERSED)
_IN_BLOCKS = (*_ATTRIBUTES, PIECES, KEY_BLOCKS)

_SCORES = ((0, -1),)
for _index, (_kind, _typed) in enumerate((("attention", _attention), ("attention_lse", _rows))):
    OPS[_kind] = OpDef(None, _typed, _map, _numpy(attended, _kind, _index), _IN_BLOCKS, scores_add_up=_SCORES, whole=_WHOLE)
_ROWS, _HEAD = (0, -2), (2, -1)  # (operand, dim) pairs over which gradients are sums: the rows, and the last dim of the values
for _index, _adds_up in enumerate(((_HEAD,), (_HEAD, _ROWS), (_ROWS,), (_HEAD,))):
    OPS[GRADIENTS[_index]] = OpDef(
        None,
        _of_gradients,
        _map_of_gradients,
        _numpy(differentiated, GRADIENTS[_index], _index),
        _ATTRIBUTES,
        whole=_WHOLE,
        partial="sum" if _index else "",
        adds_up=_adds_up,
    )
