"""Attention and its backward pass: one call where there are kernels for it, else composed."""

from math import sqrt
from typing import TYPE_CHECKING, Any

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked, public_names
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.composites import (
    _broadcasts,
    _called,
    _cast,
    _check_probability,
    _dropped,
    _indices,
    _wide,
    _worded,
)
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ops.attention import (
    BOTTOM_RIGHT,
    GRADIENTS,
    TOP_LEFT,
    why_composed,
    why_no_bias,
    why_no_lengths,
    why_no_offsets,
)
from hostweave.types.size import Size
from hostweave.types.tensor import bool_, f32, i32

LEAST = -1e30  # of a row's largest score that is not -inf


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
    """softmax(query keyT * scale + mask) value, for query [..., H, S, E], key [..., H, T, E], value [..., H, T, F]: [..., H, S, F].

    The signature is PyTorch's (Vaswani et al., "Attention is all you need", 2017). All have one dtype; scores and softmax are f32
    for narrower dtypes. `attn_mask` broadcasts to [..., H, S, T]: a bool (true takes part), or a float that is added; a row without
    any column gives zeros. With `is_causal` row i attends to columns up to i. `scale` is 1 / sqrt(E) by default. With `enable_gqa`
    key and value have fewer heads, each for a group of consecutive heads of the query (Ainslie et al., "GQA", 2023). `dropout_p` is
    the probability with which weights are dropped as in `dropout`, by `seed` and `draw`, with the same numbers whether heads are grouped
    or not.
    `lengths` are of a cache that is not full, as in `attention`: i32, how many keys of each of the batch take part. With them the rows
    are the last of the sequence: with `is_causal` row i attends to the keys up to lengths - S + i.
    Where `attention` is one call, so is this, without dropout, and with a mask that is bool or of the dtype of the query; else the whole
    matrix of scores is in memory.
    Sharded heads, `H@tp`, need no communication; sharded keys, `T@cp`, stay where they are, as in `attention`. Raises ProgramError.

    Example: `hw.scaled_dot_product_attention(q, k, v, is_causal=True)` of three `bf16[B, H@tp, S, 128]` is `bf16[B, H@tp, S, 128]`; a
    token against a cache of `bf16[B, H@tp, T, 128]` is `hw.scaled_dot_product_attention(q, k, v, lengths=n)` with `n: i32[B]`.
    """
    group = _check_attention(query, key, value, enable_gqa)
    if attn_mask is not None and is_causal:
        raise ProgramError.here("attention: attn_mask and is_causal are both given; put both into the mask")
    if attn_mask is not None:
        _check_mask(attn_mask, (*query.type.shape[:-1], key.type.shape[-2]))
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
        if group > 1:  # numbered as without groups, as in [..., heads * group, S, T]
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
    """What `scaled_dot_product_attention` gives, and the log-sum-exp of each row of scores: f32 [..., H, S].

    `causal` is None, "top_left" (row i attends to columns up to i) or "bottom_right" (the last row attends to all columns, as rows that
    come after a cache of keys do); with a `window` a row attends to the last so many of its columns only. A row must have a column.
    `lengths`, i32 [B] for [B, H, S, E] and a scalar for [H, S, E], says how many keys of each of the batch are valid, at least one: the
    columns end there, and so does the last row's diagonal at the bottom right, so that row i has the position lengths - S + i. A row
    that comes before all keys then gives zeros, and -inf.
    `bias`, of the query's dtype, is added to the scaled scores: [..., H, S, T], whose dims before the last one may be 1 or missing.
    Where it is -inf a row does not see the column; a row that sees none gives zeros, and -inf.
    `offsets`, i32 [B, N + 1] for [B, H, S, E] and [N + 1] for [H, S, E], are of N sequences that are packed one after the other: where each
    begins, and where the last one ends. They do not decrease, and sequences may be empty. As many keys as queries are packed alike, and a
    row sees those of its own sequence, under the masks. What is before and behind all sequences gives zeros, and -inf.
    One call, without the matrix of scores in memory, for f32, f16 and bf16, query [B, H, S, E] or [H, S, E], and E and F that are ints
    of at most 256, of f16 and bf16 multiples of 8; the elements of a row lie side by side, other dims as they like. Else it is composed
    of matmuls and a softmax, and f32 inside. Rows of the query may be sharded, `S@cp`: keys and values are gathered, or come a rank's at a
    time, beside the attention to those that are there. With rows in zigzag, `S@zigzag(cp)`, all ranks have as much to do under a causal
    mask (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2); there are as many keys as rows then, and no lengths or bias
    beside that mask. Where rows are not sharded, keys may be, `T@cp`: each rank attends to its own, and the results are joined by their
    log-sum-exps, in f32. Only for a window, and with lengths and a causal mask on several rows, are keys gathered then. Of packed
    sequences a rank has all rows and keys.
    Raises ProgramError.

    Example: `y, lse = hw.attention(q, k, v, "bottom_right")` of `bf16[B, H@tp, 1, 64]` and two `bf16[B, H@tp, T, 64]`.
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
    return result, _worded("lse", hw.reshape(hw.astype(lse, f32), *map(str, query.type.shape[:-1])))


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
    """The gradients of query, key and value, and of a bias where there is one, from that of the output: of their types. What else it takes
    is as in `attention`.

    `output` and `lse` are what `attention` gave for the same operands. One call, without the matrix of scores in memory, where
    `attention` is one; else it is composed of matmuls. Keys that are not valid have zeros. With rows that are sharded, `S@cp`, the
    gradients of key and value are partial sums. That of a bias is summed over the dims that the bias has once or not at all, and a partial
    sum where these are sharded; what nobody uses of the four is not computed. Raises ProgramError.

    Example: `dq, dk, dv = hw.attention_backward(q, k, v, y, dy, lse, "top_left")` after `y, lse = hw.attention(q, k, v, "top_left")`;
    with `bias=b` it is `dq, dk, dv, db`.
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
            raise ProgramError.here(f"attention_backward: {name} is {x.type}, not {wanted}; pass what attention gave, or its gradient")
    masks, words = _check_masks(query, key, lengths, bias, offsets)
    factor = _scale_of(query, scale)
    if not why_composed(query.type, value.type):
        operands = query, key, value, output, output_gradient, lse, *masks
        kinds = GRADIENTS if bias is not None else GRADIENTS[:3]
        found = [record(kind, *operands, scale=factor, causal=causal, window=window, **words) for kind in kinds]
    else:
        scores = _scores(query, key, group, factor, bias)
        seen = _seen(scores, causal, window, lengths, offsets)
        lse = _cast(lse, scores.dtype)
        if bias is not None:  # which may hide all columns of a row
            lse = hw.maximum(lse, LEAST)
        sums = hw.sum(_wide(output) * _wide(output_gradient), -1, keepdims=True)
        q, given, lse, sums = (_by_heads(x, key, group) for x in (query, output_gradient, hw.expand_dims(lse, lse.ndim), sums))
        k, v = (hw.expand_dims(x, x.ndim - 2) if group > 1 else x for x in (key, value))
        distance = scores - lse
        weights = hw.exp(distance if seen is None else hw.where(seen, distance, float("-inf")))
        of_scores = weights * (_wide(hw.matmul(given, _turned(v))) - sums)
        changes = _cast(of_scores * factor, query.dtype)
        weights = _cast(weights, query.dtype)
        v, k, q = hw.matmul(_turned(weights), given), hw.matmul(_turned(changes), q), hw.matmul(changes, k)
        if group > 1:
            k, v, q = hw.sum(k, -3), hw.sum(v, -3), hw.reshape(q, *map(str, query.type.shape))
        found = [q, k, v, *([] if bias is None else [_cast(_of_bias(of_scores, query, key, bias), bias.dtype)])]
    return tuple(_worded(kind.removeprefix("attention_"), gradient) for kind, gradient in zip(GRADIENTS, found, strict=False))


def _of_bias(of_scores: Tensor, query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the scores, summed over what the bias has once or not at all."""
    scores, dims = (*query.type.shape[:-1], key.type.shape[-2]), bias.type.shape
    x = hw.reshape(of_scores, *map(str, scores))
    leading = len(scores) - len(dims)
    once = [dim for dim, size in enumerate(scores) if dim < leading or (dims[dim - leading] == Size() and size != Size())]
    return hw.reshape(hw.sum(x, tuple(once)), *map(str, dims)) if once else x


def _check_causal(causal: str | None, window: int | None) -> None:
    if causal not in (None, TOP_LEFT, BOTTOM_RIGHT):
        raise ProgramError.here(f'attention: causal={causal!r} is none of None, "{TOP_LEFT}" and "{BOTTOM_RIGHT}"; write one of them')
    if window is not None and (causal is None or not isinstance(window, int) or window < 1):
        raise ProgramError.here(f"attention: window={window!r} is no number of columns before a diagonal; pass causal=, and 1 or more")


def _turned(x: Tensor) -> Tensor:
    return hw.permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _by_heads(x: Tensor, key: Tensor, group: int) -> Tensor:
    """[..., H, S, E] as [..., G, group, S, E], where heads are in groups."""
    if group == 1:
        return x
    shape = x.type.shape
    return hw.reshape(x, *map(str, (*shape[:-3], key.type.shape[-3], group, *shape[-2:])))


def _check_attention(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """How many heads of the query are a group. Raises ProgramError for shapes that do not go together."""
    q, k, v = query.type.shape, key.type.shape, value.type.shape
    shapes = f"query {query.type}, key {key.type}, value {value.type}"
    if not len(q) == len(k) == len(v) >= 3 or q[-1] != k[-1] or k[:-1] != v[:-1] or q[:-3] != k[:-3]:
        raise ProgramError.here(f"attention: {shapes} are not [..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them")
    group = q[-3].divided_by(k[-3])
    if not enable_gqa and q[-3] != k[-3]:
        raise ProgramError.here(f"attention: {shapes} differ in their heads; use enable_gqa=True for groups of heads")
    if group is None or not group.is_int:
        raise ProgramError.here(f"attention: {shapes}: the heads of the key do not divide those of the query; use multiples as ints")
    return int(group)


def _scale_of(query: Tensor, scale: float | None) -> float:
    size = query.type.shape[-1]
    if scale is None and not size.is_int:
        raise ProgramError.here(f"attention: {size}, the last dim of the query, is not known at compile time; pass scale=")
    return float(scale) if scale is not None else 1 / sqrt(int(size))


def _scores(query: Tensor, key: Tensor, group: int, scale: float, mask: Tensor | None) -> Tensor:
    """[..., H, S, T], or [..., G, group, S, T] where heads are in groups; f32 for narrower dtypes.

    A mask is added, or -inf where it is false.
    """
    query = _by_heads(query, key, group)  # with a dim of the group's heads, along which the key is repeated
    of_groups = hw.expand_dims(key, key.ndim - 2) if group > 1 else key
    scores = _wide(_worded("scores", hw.matmul(query, _turned(of_groups)))) * scale
    if mask is None:
        return scores
    mask = _by_group(mask, key.type.shape[-3], Size(group)) if group > 1 else mask
    return hw.where(mask, scores, float("-inf")) if mask.dtype == bool_ else scores + _cast(mask, scores.dtype)


def _seen(scores: Tensor, causal: str | None, window: int | None, lengths: Tensor | None, offsets: Tensor | None = None) -> Tensor | None:
    """Which columns a row attends to, to be broadcast to the scores; None where all."""
    rows, columns = hw.iota(scores, -2)[:, None], hw.iota(scores, -1)[None, :]
    ends = None if lengths is None else hw.expand_dims(lengths, tuple(range(lengths.ndim, scores.ndim)))
    seen = None if ends is None else columns < ends
    if causal == BOTTOM_RIGHT:  # the last row is at the last column
        rows = rows + (_last(columns, -1) if ends is None else ends - 1) - _last(rows, -2)
    if causal:
        seen = rows >= columns if seen is None else seen & (rows >= columns)
    seen = seen & (rows < columns + window) if seen is not None and window else seen
    if offsets is None:
        return seen
    own = _of_one_sequence(scores, offsets)
    return own if seen is None else seen & own


def _of_one_sequence(scores: Tensor, offsets: Tensor) -> Tensor:
    """Whether row and column are of one of the sequences that are packed."""
    token, before = hw.iota(scores, -2)[:, None], hw.expand_dims(offsets, offsets.ndim - 1)
    begun = hw.sum(hw.astype(token >= before, i32), -1)  # of each token, how many sequences
    is_inside = (begun > 0) & (hw.iota(scores, -2) < hw.max(offsets, -1, keepdims=True))  # the last one is the largest
    heads = tuple(range(offsets.ndim - 1, scores.ndim - 2))
    row, column, is_inside = (
        hw.expand_dims(x, (*heads, dim)) for x, dim in ((begun, scores.ndim - 1), (begun, scores.ndim - 2), (is_inside, scores.ndim - 1))
    )
    return (row == column) & is_inside


def _last(indices: Tensor, dim: int) -> Tensor | int:
    size = indices.type.shape[dim]
    return int(size) - 1 if size.is_int else hw.max(indices, dim, keepdims=True)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as what is added to the scores: its last dim is that of the keys."""
    bias = hw.where(mask, hw.astype(mask, query.dtype) * 0.0, float("-inf")) if mask.dtype == bool_ else mask
    columns = key.type.shape[-2]
    if bias.ndim < 2 or bias.type.shape[-1] != columns:
        leading = bias.type.shape[:-1] if bias.ndim > 1 else (Size(),)
        bias = hw.broadcast_to(bias, *map(str, (*leading, columns)))
    return bias


def _softmax_of(scores: Tensor, seen: Tensor | None, may_see_none: bool) -> tuple[Tensor, Tensor]:
    """The weights of the columns that a row sees, and its log-sum-exp. Where a row sees none they are zeros."""
    if seen is not None:
        scores = hw.where(seen, scores, float("-inf"))
    largest = hw.max(scores, -1, keepdims=True)
    shift = hw.maximum(largest, LEAST) if may_see_none else largest
    powers = hw.exp(scores - shift)
    sums = hw.sum(powers, -1, keepdims=True)
    if may_see_none:
        sums = hw.maximum(sums, 1.0)  # the largest is exp(0)
    return powers * hw.reciprocal(sums), hw.log(sums) + largest


def _weighted(weights: Tensor, query: Tensor, value: Tensor, group: int) -> Tensor:
    """The sums of values by weights: [..., H, S, F]."""
    result = _worded("attention", hw.matmul(_cast(weights, query.dtype), hw.expand_dims(value, value.ndim - 2) if group > 1 else value))
    return hw.reshape(result, *map(str, (*query.type.shape[:-1], value.type.shape[-1]))) if group > 1 else result


def _check_masks(
    query: Tensor, key: Tensor, lengths: Tensor | None, bias: Tensor | None = None, offsets: Tensor | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The operands that mask the scores, and the attributes that say which they are."""
    given = [mask for mask in (lengths, bias, offsets) if mask is not None]
    apart = "offsets are given with lengths or a bias; packed sequences have neither, leave them out"
    whys = (
        why_no_lengths(query.type, lengths.type) if lengths is not None else "",
        why_no_bias(query.type, key.type, bias.type) if bias is not None else "",
        apart if offsets is not None and len(given) > 1 else "",
        why_no_offsets(query.type, key.type, offsets.type) if offsets is not None else "",
    )
    if why := next(filter(None, whys), ""):
        raise ProgramError.here(f"attention: {why}")
    return tuple(given), {"bias": bias is not None, "packed": offsets is not None}


def _check_mask(mask: Tensor, scores: tuple[Size, ...]) -> None:
    if not _broadcasts(mask.type.shape, scores):
        wanted = ", ".join(map(str, scores))
        raise ProgramError.here(f"attention: a mask of {mask.type} does not broadcast to the scores, [{wanted}]; reshape it")
    if mask.dtype.kind not in ("bool", "float"):
        raise ProgramError.here(f"attention: a mask of {mask.type} is neither bool nor float; compare it, as in mask != 0")


def _by_group(mask: Tensor, heads: Size, group: Size) -> Tensor:
    """A mask that broadcasts to [..., H, S, T], reshaped to broadcast to [..., heads, group, S, T]."""
    if mask.ndim < 3:
        return mask
    shape = mask.type.shape
    split = (Size(), Size()) if shape[-3] == Size() else (heads, group)
    return hw.reshape(mask, *map(str, (*shape[:-3], *split, *shape[-2:])))


if not TYPE_CHECKING:
    __all__ = public_names(globals())
