"""Attention and its backward pass, composed of other ops if no attention kernel can compute them."""

from math import sqrt
from typing import Any

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.composites import _called, _check_probability, _dropped, _indices, _wide, _worded
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.index_map import broadcasts
from hostweave.fusion_ir.ops.attention import BOTTOM_RIGHT, GRADIENTS, LEAST_SCORE, TOP_LEFT, why_composed, why_no_masks
from hostweave.types.size import Size
from hostweave.types.tensor import bool_, f32, i32


@_called("attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: Tensor | int | None = None,
    draw: Tensor | int = 0,
    lengths: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention: softmax(query keyT * scale + mask) value. The parameters up to `enable_gqa` are PyTorch's.

    The query is [..., H, S, E], the key [..., H, T, E] and the value [..., H, T, F]. The result is [..., H, S, F]. All four have the same
    dtype. If the dtype is narrower than f32, the softmax is computed in f32. Source: Vaswani et al., "Attention is all you need", 2017.

    - `attn_mask` broadcasts to [..., H, S, T]. A bool mask is true where a row attends to a column. A float mask is added to the scores. A
      row that attends to no column gives zeros.
    - `is_causal`: without `lengths`, row i attends to columns up to i.
    - `scale` is 1 / sqrt(E) by default.
    - `enable_gqa`: key and value may have fewer heads than the query. Consecutive query heads then share a key head (Ainslie et al., "GQA",
      2023).
    - `dropout_p` is the probability of dropping a weight; `seed` and `draw` are as in `dropout`.
    - `lengths`, i32, is the number of valid keys per batch element, for a cache that is not full. With `is_causal`, the queries are the
      last rows of the sequence: row i attends to keys up to lengths - S + i.

    Attention kernels compute the result if they support the operands (see `attention`), there is no dropout, and a float mask has the
    query's dtype. Otherwise the matrix of scores is materialised. Sharded heads, `H@tp`, need no communication. For sharded keys and rows,
    see `attention`.

    Raises ProgramError if arguments are invalid, do not fit, or exclude each other.

    Example: `hw.scaled_dot_product_attention(q, k, v, is_causal=True)` with three `bf16[B, H@tp, S, 128]` gives `bf16[B, H@tp, S, 128]`.
    For one token with a cache of `bf16[B, H@tp, T, 128]`, write `hw.scaled_dot_product_attention(q, k, v, lengths=n)` with `n: i32[B]`.
    """
    group = _check_attention(query, key, value, enable_gqa)
    if attn_mask is not None and is_causal:
        raise ProgramError.here("attention: attn_mask and is_causal are both given; put both into the mask")
    if attn_mask is not None:
        shape = (*query.type.shape[:-1], key.type.shape[-2])
        if not broadcasts(attn_mask.type.shape, shape):
            wanted = ", ".join(map(str, shape))
            raise ProgramError.here(f"attention: the mask {attn_mask.type} does not broadcast to the scores, [{wanted}]; reshape it")
        if attn_mask.dtype.kind not in ("bool", "float"):
            raise ProgramError.here(f"attention: the mask {attn_mask.type} is neither bool nor float; compare it: mask != 0")
    _check_probability("attention: dropout_p", dropout_p)
    if dropout_p and seed is None:
        raise ProgramError.here(f"attention: dropout_p={dropout_p!r} without a seed; pass seed=, an int or a u32 tensor without dims")
    ends, _ = _check_masks(query, key, lengths)
    factor, causal = _scale_of(query, scale), (BOTTOM_RIGHT if ends else TOP_LEFT) if is_causal else None
    if not dropout_p and not why_composed(query.type, value.type) and (attn_mask is None or attn_mask.dtype in (bool_, query.dtype)):
        bias = () if attn_mask is None else (_as_bias(attn_mask, query, key),)
        return record("attention", query, key, value, *ends, *bias, scale=factor, causal=causal, bias=bool(bias))
    scores = _scores(query, key, group, factor, attn_mask)
    weights = _softmax_of(scores, _seen(scores, causal, None, lengths), lengths is not None or attn_mask is not None)[0]
    if dropout_p and seed is not None:
        indices = _indices(weights)
        if group > 1:  # random numbers have the indices of [..., H, S, T], with all query heads
            indices[-4:] = [indices[-4] * group + indices[-3], *indices[-2:]]
        weights = _dropped(weights, dropout_p, indices, seed, draw)
    return _weighted(weights, query, value, group)


@checked
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: str | None = None,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each row of scores. The first result is as in `scaled_dot_product_attention`, the second result is
    f32 [..., H, S].

    - `causal` is None, "top_left" (row i attends to columns up to i) or "bottom_right" (the last row attends to all columns). Use
      "bottom_right" if the query rows follow a cache of keys.
    - `window`: a row attends only to the last `window` columns that `causal` allows.
    - `lengths` is the number of valid keys, at least one: i32 [B] for [B, H, S, E], and an i32 scalar for [H, S, E]. With "bottom_right",
      row i attends to keys up to lengths - S + i. If that index is negative, the row gives zeros, and a log-sum-exp of -inf.
    - `bias` is added to the scaled scores. The bias has the query's dtype and the shape [..., H, S, T]. Dims before the last dim may be 1,
      and dims before S may be missing. -inf hides a column. A row whose columns are all hidden gives zeros, and a log-sum-exp of -inf.
    - `offsets`, i32, are the starts of N packed sequences and the end of the last sequence: [B, N + 1] for [B, H, S, E], and [N + 1] for
      [H, S, E]. Offsets must not decrease; a sequence may be empty. Keys are packed like queries, and a row attends only to keys of its
      sequence. Rows outside of all sequences give zeros, and a log-sum-exp of -inf.

    If none of lengths, bias and offsets is given, each row must attend to at least one column.

    Attention kernels compute the result, without a matrix of scores in memory, under three conditions: the dtype is f32, f16 or bf16; the
    query is [B, H, S, E] or [H, S, E]; E and F are ints of at most 256, and multiples of 8 for 16-bit dtypes. Otherwise attention is
    composed of matmuls and a softmax. An operand is copied first if its rows are not contiguous, or if rows of 16-bit floats do not begin
    at multiples of 16 bytes.

    Sharded rows, `S@cp`: sharded keys and values are gathered before the computation, or block by block during the computation. Rows in
    zigzag, `S@zigzag(cp)`, give all ranks equal work under a causal mask without a window (Llama Team, "The Llama 3 Herd of Models", 2024,
    section 3.3.2). With a causal mask, zigzag needs as many keys as rows, and supports neither lengths nor a bias.

    Sharded keys, `T@cp`, with rows that are not sharded: each rank attends to its local keys, and the results are merged by their
    log-sum-exps in f32. Keys are gathered only for a window, in zigzag, for packed sequences, or for lengths with a causal mask, except
    "bottom_right" with one row. Sharded rows of packed sequences are gathered too.

    Raises ProgramError if arguments are invalid, do not fit, or exclude each other.

    Example: `y, lse = hw.attention(q, k, v, "bottom_right")` with `q: bf16[B, H@tp, 1, 64]`, and `k` and `v` of `bf16[B, H@tp, T, 64]`.
    """
    group = _check_attention(query, key, value, enable_gqa)
    _check_causal(causal, window)
    masks, words = _check_masks(query, key, lengths, bias, offsets)
    factor = _scale_of(query, scale)
    if not why_composed(query.type, value.type):
        how: dict[str, Any] = {"scale": factor, "causal": causal, "window": window, **words}
        result = _worded("attention", record("attention", query, key, value, *masks, **how))
        return result, _worded("lse", record("attention_lse", query, key, *masks, **how))
    scores = _scores(query, key, group, factor, bias)
    weights, lse = _softmax_of(scores, _seen(scores, causal, window, lengths, offsets), bool(masks))
    result = _worded("attention", _weighted(weights, query, value, group))
    return result, _worded("lse", hw.reshape(hw.astype(lse, f32), *query.type.shape[:-1]))


@checked
def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    output_gradient: Tensor,
    lse: Tensor,
    causal: str | None = None,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of `attention` for query, key, value and, if given, the bias. A gradient has the dtype and shape of its operand.

    `output` and `lse` are the results of `attention` for the same operands, and `output_gradient` is the gradient of `output`. All other
    arguments are as in `attention`. If attention kernels compute `attention`, attention kernels also compute the gradients. Otherwise the
    backward pass is composed of several ops.

    The gradients of invalid keys are zero. With sharded rows, `S@cp`, the gradients of key and value are partial sums. The bias gradient is
    summed over the dims along which the bias broadcasts. If such a dim is sharded, the bias gradient is a partial sum.

    Raises ProgramError if arguments are invalid, or do not fit.

    Example: `dq, dk, dv = hw.attention_backward(q, k, v, y, dy, lse, "top_left")` after `y, lse = hw.attention(q, k, v, "top_left")`. With
    `bias=b`, the function returns `dq, dk, dv, db`.
    """
    group = _check_attention(query, key, value, enable_gqa)
    _check_causal(causal, window)
    rows = query.type.shape[:-1]
    for name, x, dtype, shape in (
        ("output", output, query.dtype, (*rows, value.type.shape[-1])),
        ("output_gradient", output_gradient, query.dtype, (*rows, value.type.shape[-1])),
        ("lse", lse, f32, rows),
    ):
        if (x.dtype, x.type.shape) != (dtype, shape):
            wanted = f"{dtype}[{', '.join(map(str, shape))}]"
            raise ProgramError.here(f"attention_backward: {name} is {x.type}, not {wanted}; pass the result of attention, or its gradient")
    masks, words = _check_masks(query, key, lengths, bias, offsets)
    factor = _scale_of(query, scale)
    if not why_composed(query.type, value.type):
        operands = query, key, value, output, output_gradient, lse, *masks
        kinds = GRADIENTS if bias is not None else GRADIENTS[:3]
        found = [record(kind, *operands, scale=factor, causal=causal, window=window, **words) for kind in kinds]
    else:
        scores = _scores(query, key, group, factor, bias)
        seen = _seen(scores, causal, window, lengths, offsets)
        lse = hw.astype(lse, scores.dtype)
        if bias is not None:  # a bias may hide all columns of a row
            lse = hw.maximum(lse, LEAST_SCORE)
        sums = hw.sum(_wide(output) * _wide(output_gradient), -1, keepdims=True)
        q, given, lse, sums = (_by_heads(x, key, group) for x in (query, output_gradient, hw.expand_dims(lse, lse.ndim), sums))
        k, v = (hw.expand_dims(x, x.ndim - 2) if group > 1 else x for x in (key, value))
        distance = scores - lse
        weights = hw.exp(distance if seen is None else hw.where(seen, distance, float("-inf")))
        of_scores = weights * (_wide(hw.matmul(given, hw.transpose(v, -2, -1))) - sums)
        changes = hw.astype(of_scores * factor, query.dtype)
        weights = hw.astype(weights, query.dtype)
        v, k, q = hw.matmul(hw.transpose(weights, -2, -1), given), hw.matmul(hw.transpose(changes, -2, -1), q), hw.matmul(changes, k)
        if group > 1:
            k, v, q = hw.sum(k, -3), hw.sum(v, -3), hw.reshape(q, *query.type.shape)
        found = [q, k, v, *([] if bias is None else [hw.astype(_of_bias(of_scores, query, key, bias), bias.dtype)])]
    return tuple(_worded(kind.removeprefix("attention_"), gradient) for kind, gradient in zip(GRADIENTS, found, strict=False))


def _of_bias(of_scores: Tensor, query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    """Sums the gradient of the scores over the dims along which the bias broadcasts."""
    scores, dims = (*query.type.shape[:-1], key.type.shape[-2]), bias.type.shape
    x = hw.reshape(of_scores, *scores)
    leading = len(scores) - len(dims)
    once = [dim for dim, size in enumerate(scores) if dim < leading or (dims[dim - leading] == Size() and size != Size())]
    return hw.reshape(hw.sum(x, tuple(once)), *dims) if once else x


def _check_causal(causal: str | None, window: int | None) -> None:
    if causal not in (None, TOP_LEFT, BOTTOM_RIGHT):
        raise ProgramError.here(f'attention: causal={causal!r} is not one of None, "{TOP_LEFT}" and "{BOTTOM_RIGHT}"; write one of them')
    if window is not None and (causal is None or not isinstance(window, int) or window < 1):
        raise ProgramError.here(f"attention: window={window!r} must be an int of at least 1, together with causal=")


def _by_heads(x: Tensor, key: Tensor, group: int) -> Tensor:
    """Reshapes [..., H, S, E] to [..., G, group, S, E], where each of the G key heads serves `group` query heads."""
    if group == 1:
        return x
    shape = x.type.shape
    return hw.reshape(x, *shape[:-3], key.type.shape[-3], group, *shape[-2:])


def _check_attention(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """Checks the shapes, and returns the number of query heads per key head."""
    q, k, v = query.type.shape, key.type.shape, value.type.shape
    shapes = f"query {query.type}, key {key.type}, value {value.type}"
    if not len(q) == len(k) == len(v) >= 3 or q[-1] != k[-1] or k[:-1] != v[:-1] or q[:-3] != k[:-3]:
        raise ProgramError.here(f"attention: {shapes} are not [..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them")
    group = q[-3].divided_by(k[-3])
    if not enable_gqa and q[-3] != k[-3]:
        raise ProgramError.here(f"attention: {shapes} differ in their numbers of heads; use enable_gqa=True if query heads share key heads")
    if group is None or not group.is_int:
        raise ProgramError.here(f"attention: {shapes}: the query heads must be an int multiple of the key heads; reshape them")
    return int(group)


def _scale_of(query: Tensor, scale: float | None) -> float:
    size = query.type.shape[-1]
    if scale is None and not size.is_int:
        raise ProgramError.here(f"attention: {size}, the query's last dim, is unknown at compile time; pass scale=")
    return float(scale) if scale is not None else 1 / sqrt(int(size))


def _scores(query: Tensor, key: Tensor, group: int, scale: float, mask: Tensor | None) -> Tensor:
    """Masked scores, at least in f32: [..., H, S, T], or [..., G, group, S, T] if `group` query heads share each of G key heads."""
    query = _by_heads(query, key, group)
    of_groups = hw.expand_dims(key, key.ndim - 2) if group > 1 else key
    scores = _wide(_worded("scores", hw.matmul(query, hw.transpose(of_groups, -2, -1)))) * scale
    if mask is None:
        return scores
    mask = _by_group(mask, key.type.shape[-3], Size(group)) if group > 1 else mask
    return hw.where(mask, scores, float("-inf")) if mask.dtype == bool_ else scores + hw.astype(mask, scores.dtype)


def _seen(scores: Tensor, causal: str | None, window: int | None, lengths: Tensor | None, offsets: Tensor | None = None) -> Tensor | None:
    """Mask of the columns that each row attends to. None if each row attends to all columns."""
    rows, columns = hw.iota(scores, -2)[:, None], hw.iota(scores, -1)[None, :]
    ends = None if lengths is None else hw.expand_dims(lengths, tuple(range(lengths.ndim, scores.ndim)))
    seen = None if ends is None else columns < ends
    if causal == BOTTOM_RIGHT:  # the last row is at the last valid column
        rows = rows + (_last(columns, -1) if ends is None else ends - 1) - _last(rows, -2)
    if causal:
        seen = rows >= columns if seen is None else seen & (rows >= columns)
    seen = seen & (rows < columns + window) if seen is not None and window else seen
    if offsets is None:
        return seen
    own = _of_one_sequence(scores, offsets)
    return own if seen is None else seen & own


def _of_one_sequence(scores: Tensor, offsets: Tensor) -> Tensor:
    token, before = hw.iota(scores, -2)[:, None], hw.expand_dims(offsets, offsets.ndim - 1)
    begun = hw.sum(hw.astype(token >= before, i32), -1)  # number of offsets up to each token
    is_inside = (begun > 0) & (hw.iota(scores, -2) < hw.max(offsets, -1, keepdims=True))  # the last offset is the largest
    heads = tuple(range(offsets.ndim - 1, scores.ndim - 2))
    row, column, is_inside = (
        hw.expand_dims(x, (*heads, dim)) for x, dim in ((begun, scores.ndim - 1), (begun, scores.ndim - 2), (is_inside, scores.ndim - 1))
    )
    return (row == column) & is_inside


def _last(indices: Tensor, dim: int) -> Tensor | int:
    size = indices.type.shape[dim]
    return int(size) - 1 if size.is_int else hw.max(indices, dim, keepdims=True)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Bias that is equivalent to a mask, with one element per key in the last dim."""
    bias = hw.where(mask, hw.astype(mask, query.dtype) * 0.0, float("-inf")) if mask.dtype == bool_ else mask
    columns = key.type.shape[-2]
    if bias.ndim < 2 or bias.type.shape[-1] != columns:
        leading = bias.type.shape[:-1] if bias.ndim > 1 else (Size(),)
        bias = hw.broadcast_to(bias, *leading, columns)
    return bias


def _softmax_of(scores: Tensor, seen: Tensor | None, may_see_none: bool) -> tuple[Tensor, Tensor]:
    """Softmax weights over the columns of `seen`, and log-sum-exps. If `may_see_none`, a row without columns has zero weights."""
    if seen is not None:
        scores = hw.where(seen, scores, float("-inf"))
    largest = hw.max(scores, -1, keepdims=True)
    shift = hw.maximum(largest, LEAST_SCORE) if may_see_none else largest
    powers = hw.exp(scores - shift)
    sums = hw.sum(powers, -1, keepdims=True)
    if may_see_none:
        sums = hw.maximum(sums, 1.0)  # avoids division by 0 in rows without columns
    return powers * hw.reciprocal(sums), hw.log(sums) + largest


def _weighted(weights: Tensor, query: Tensor, value: Tensor, group: int) -> Tensor:
    result = _worded("attention", hw.matmul(hw.astype(weights, query.dtype), hw.expand_dims(value, value.ndim - 2) if group > 1 else value))
    return hw.reshape(result, *query.type.shape[:-1], value.type.shape[-1]) if group > 1 else result


def _check_masks(
    query: Tensor, key: Tensor, lengths: Tensor | None, bias: Tensor | None = None, offsets: Tensor | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Checks the masks. Returns the given masks, and the op's attributes `bias` and `packed`."""
    given = {word: mask for word, mask in (("lengths", lengths), ("bias", bias), ("offsets", offsets)) if mask is not None}
    if why := why_no_masks(query.type, key.type, {word: mask.type for word, mask in given.items()}):
        raise ProgramError.here(f"attention: {why}")
    return tuple(given.values()), {"bias": bias is not None, "packed": offsets is not None}


def _by_group(mask: Tensor, heads: Size, group: Size) -> Tensor:
    """Splits the dim of heads: a mask for [..., H, S, T] becomes a mask for [..., heads, group, S, T]."""
    if mask.ndim < 3:
        return mask
    shape = mask.type.shape
    split = (Size(), Size()) if shape[-3] == Size() else (heads, group)
    return hw.reshape(mask, *shape[:-3], *split, *shape[-2:])
