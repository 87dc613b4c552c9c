"""Functions that are traced into several ops. Intermediates are f32 for narrower dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import sqrt
from typing import TYPE_CHECKING, ParamSpec

from hostweave.base.errors import Location, ProgramError
from hostweave.base.signatures import checked, public_names
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, dims_of, record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ops.attention import BOTTOM_RIGHT, TOP_LEFT, why_composed, why_no_lengths
from hostweave.types.size import Size
from hostweave.types.tensor import DType, f32, u32

_P = ParamSpec("_P")
MAX_RANDOM_DIMS = 4  # words of a counter
LEAST = -1e30  # of a row's largest score that is not -inf


def _called(word: str) -> Callable[[Callable[_P, Tensor]], Callable[_P, Tensor]]:
    """Names the function's result in the IRs and in generated code, where the user does not name it."""

    def decorated(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
        @wraps(function)
        def called(*args: _P.args, **options: _P.kwargs) -> Tensor:
            result = function(*args, **options)
            return result if any(result is given for given in (*args, *options.values())) else _worded(word, result)

        return called

    return decorated


def _worded(word: str, x: Tensor) -> Tensor:
    """x, which is called so and after what it is made of: `softmax_scores`."""
    x._word = word
    return x


@_called("linear")
@checked
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, as in torch.nn.functional: x [..., K] times the transpose of weight [N, K], plus bias [N]: [..., N].

    All have one dtype. Raises ProgramError for other shapes.

    Example: `x: bf16[M, K]`, `weight: bf16[N@tp, K]` and `bias: bf16[N@tp]` give `bf16[M, N@tp]`.
    """
    location = Location.of_caller()
    if weight.ndim != 2 or x.ndim < 2:
        raise ProgramError(f"linear: {x.type} and a weight of {weight.type} are not [..., K] and [N, K]; reshape them", location)
    if x.type.shape[-1] != weight.type.shape[1]:
        raise ProgramError(f"linear: inner dims differ: {x.type} and a weight of {weight.type}; the weight is [N, K]", location)
    if bias is not None and bias.type.shape != weight.type.shape[:1]:
        raise ProgramError(f"linear: the bias is {bias.type}, and the weight {weight.type}; it has one element for each row", location)
    product = hw.matmul(x, weight.T)
    return product if bias is None else product + bias


# --- norms ------------------------------------------------------------------------------------------------------------


@_called("var")
@checked
def var(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, correction: int = 0, keepdims: bool = False) -> Tensor:
    """The variance, of floats: the mean of squared differences from the mean, over `axis` as in `mean`; f32 inside for narrower dtypes.

    `correction` is 0, the population variance. The mean of the differences is subtracted, which corrects for the rounding of the
    mean: the corrected two-pass algorithm (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983).
    Over sharded dims, along however many mesh axes, it takes two all-reduces.
    Raises ProgramError for another correction.

    Example: `x: f32[M, N]` gives `f32[M]` by `hw.var(x, axis=-1)`.
    """
    location = Location.of_caller()
    if correction != 0:
        raise ProgramError(f"var: correction={correction!r} is not supported; use 0 and scale the result", location)
    axes, wide = dims_of(x, axis, "var", location), _wide(x)
    distance = wide - hw.mean(wide, axes, keepdims=True)
    # By how much the mean was rounded, and the square, in one tensor: ranks reduce their terms of both at once.
    rest, square = hw.concat([hw.mean(term, axes, keepdims)[None] for term in (distance, distance * distance)])
    return _cast(hw.maximum(square - rest * rest, 0), x.dtype)


@_called("softmax")
@checked
def softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    """exp(x - max(x)) divided by its sum, over one dim; shape and dtype of x, a float. Computed in f32 for narrower dtypes.

    A row of -inf only gives NaN, as in PyTorch. A sharded dim needs two all-reduces.

    Example: `hw.softmax(scores, axis=-1)`.
    """
    axis, wide = dim_of(x, axis, "softmax", Location.of_caller()), _wide(x)
    powers = hw.exp(wide - hw.max(wide, axis, keepdims=True))
    return _cast(powers * hw.reciprocal(hw.sum(powers, axis, keepdims=True)), x.dtype)


@_called("log_softmax")
@checked
def log_softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    """The logarithm of softmax(x) over one dim, computed as x - max(x) - log(sum(exp(x - max(x)))); shape and dtype of x, a float.

    Example: `hw.log_softmax(logits, axis=-1)`.
    """
    axis, wide = dim_of(x, axis, "log_softmax", Location.of_caller()), _wide(x)
    distance = wide - hw.max(wide, axis, keepdims=True)
    return _cast(distance - hw.log(hw.sum(hw.exp(distance), axis, keepdims=True)), x.dtype)


@_called("layer_norm")
@checked
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axis: Axis = -1, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over one dim, times weight, plus bias; shape and dtype of x. Computed in f32 for narrower dtypes.

    `weight` and `bias` broadcast against x from the right, [E] for x [..., E] (Ba, Kiros and Hinton, "Layer normalization", 2016).
    Raises ProgramError for those that do not.

    Example: `hw.layer_norm(x, weight, bias)` of `bf16[M@tp, E]` and `bf16[E]` is `bf16[M@tp, E]`, one kernel.
    """
    axis, wide = _normed_dim("layer_norm", x, axis, weight, bias), _wide(x)
    distance = wide - hw.mean(wide, axis, keepdims=True)
    variance = hw.mean(distance * distance, axis, keepdims=True)
    return _scaled(distance * hw.rsqrt(variance + eps), weight, bias, x)


@_called("rms_norm")
@checked
def rms_norm(x: Tensor, weight: Tensor | None = None, axis: Axis = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x * x) + eps) over one dim, times weight; shape and dtype of x. Computed in f32 for narrower dtypes.

    `weight` broadcasts against x from the right, [E] for x [..., E] (Zhang and Sennrich, "Root mean square layer normalization", 2019).
    Raises ProgramError if it does not.

    Example: `hw.rms_norm(x, weight)` of `bf16[M@tp, E]` and `bf16[E]` is `bf16[M@tp, E]`, one kernel.
    """
    axis, wide = _normed_dim("rms_norm", x, axis, weight, None), _wide(x)
    return _scaled(wide * hw.rsqrt(hw.mean(wide * wide, axis, keepdims=True) + eps), weight, None, x)


def _normed_dim(kind: str, x: Tensor, axis: Axis, weight: Tensor | None, bias: Tensor | None) -> int:
    """The number of the dim. Raises ProgramError if weight or bias does not broadcast against x."""
    location = Location.of_caller()
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and not _broadcasts(other.type.shape, x.type.shape):
            raise ProgramError(f"{kind}: the {name} is {other.type}, and x {x.type}; it broadcasts against x, from the right", location)
    return dim_of(x, axis, kind, location)


def _broadcasts(shape: tuple[Size, ...], to: tuple[Size, ...]) -> bool:
    """Whether `shape` broadcasts to `to`, which is the shape of the result."""
    tail = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(have in (want, Size()) for have, want in zip(shape, tail, strict=True))


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    if weight is not None:
        normed = normed * _cast(weight, normed.dtype)
    if bias is not None:
        normed = normed + _cast(bias, normed.dtype)
    return _cast(normed, x.dtype)


def _wide(x: Tensor) -> Tensor:
    return hw.astype(x, f32) if x.dtype.kind == "float" and x.dtype.itemsize < f32.itemsize else x


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else hw.astype(x, dtype)


# --- attention --------------------------------------------------------------------------------------------------------


@_called("attention")
@checked
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
    for narrower dtypes. `attn_mask` broadcasts to [..., H, S, T]: a bool (true takes part), or a float that is added. With
    `is_causal` row i attends to columns up to i. `scale` is 1 / sqrt(E) by default. With `enable_gqa` key and value have fewer
    heads, each for a group of consecutive heads of the query (Ainslie et al., "GQA", 2023). `dropout_p` is the probability with
    which weights are dropped as in `dropout`, by `seed` and `draw`, with the same numbers whether heads are grouped or not.
    `lengths` are of a cache that is not full, as in `attention`: i32, how many keys of each of the batch take part. With them the rows
    are the last of the sequence: with `is_causal` row i attends to the keys up to lengths - S + i.
    Where `attention` is one call, so is this, without mask and dropout; else the whole matrix of scores is in memory.
    Sharded heads, `H@tp`, need no communication. Raises ProgramError.

    Example: `hw.scaled_dot_product_attention(q, k, v, is_causal=True)` of three `bf16[B, H@tp, S, 128]` is `bf16[B, H@tp, S, 128]`; a
    token against a cache of `bf16[B, H@tp, T, 128]` is `hw.scaled_dot_product_attention(q, k, v, lengths=n)` with `n: i32[B]`.
    """
    location = Location.of_caller()
    group = _check_attention(query, key, value, enable_gqa, location)
    if attn_mask is not None and is_causal:
        raise ProgramError("attention: attn_mask and is_causal are both given; put both into the mask", location)
    if attn_mask is not None:
        _check_mask(attn_mask, (*query.type.shape[:-1], key.type.shape[-2]), location)
    _check_probability("attention: dropout_p", dropout_p, location)
    if dropout_p and seed is None:
        raise ProgramError(f"attention: dropout_p={dropout_p!r} without a seed; pass seed=, an int or a u32 tensor without dims", location)
    ends = _check_lengths(query, lengths, location)
    factor, causal = _scale_of(query, scale, location), (BOTTOM_RIGHT if ends else TOP_LEFT) if is_causal else None
    if attn_mask is None and not dropout_p and not why_composed(query.type, value.type):
        return record("attention", query, key, value, *ends, scale=factor, causal=causal)
    scores = _scores(query, key, group, factor)
    seen = _seen(scores, causal, None, lengths)
    if attn_mask is not None:
        mask = _by_group(attn_mask, key.type.shape[-3], Size(group)) if group > 1 else attn_mask
        scores = hw.where(mask, scores, float("-inf")) if mask.dtype.kind == "bool" else scores + _cast(mask, scores.dtype)
    weights = _softmax_of(scores, seen, lengths)[0]
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
) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` gives, and the log-sum-exp of each row of scores: f32 [..., H, S].

    `causal` is None, "top_left" (row i attends to columns up to i) or "bottom_right" (the last row attends to all columns, as rows that
    come after a cache of keys do); with a `window` a row attends to the last so many of its columns only. A row must have a column.
    `lengths`, i32 [B] for [B, H, S, E] and a scalar for [H, S, E], says how many keys of each of the batch are valid, those before its
    padding: the columns end there, and so does the last row's diagonal at the bottom right, so that row i has the position
    lengths - S + i. A row that sees none of the keys gives zeros then, and -inf.
    One call, without the matrix of scores in memory, for f16 and bf16, query [B, H, S, E] or [H, S, E], and E and F that are ints,
    multiples of 8 and at most 256; the elements of a row lie side by side, other dims as they like. Else it is composed of matmuls and
    a softmax, and f32 inside. Rows of the query may be sharded, `S@cp`: keys and values are gathered. Raises ProgramError.

    Example: `y, lse = hw.attention(q, k, v, "bottom_right")` of `bf16[B, H@tp, 1, 64]` and two `bf16[B, H@tp, T, 64]`.
    """
    location = Location.of_caller()
    group = _check_attention(query, key, value, enable_gqa, location)
    if causal not in (None, TOP_LEFT, BOTTOM_RIGHT):
        raise ProgramError(f'attention: causal={causal!r} is none of None, "{TOP_LEFT}" and "{BOTTOM_RIGHT}"; write one of them', location)
    if window is not None and (causal is None or not isinstance(window, int) or window < 1):
        raise ProgramError(f"attention: window={window!r} is no number of columns before a diagonal; pass causal=, and 1 or more", location)
    ends = _check_lengths(query, lengths, location)
    factor = _scale_of(query, scale, location)
    if not why_composed(query.type, value.type):
        result = _worded("attention", record("attention", query, key, value, *ends, scale=factor, causal=causal, window=window))
        return result, _worded("lse", record("attention_lse", query, key, *ends, scale=factor, causal=causal, window=window))
    scores = _scores(query, key, group, factor)
    weights, lse = _softmax_of(scores, _seen(scores, causal, window, lengths), lengths)
    result = _worded("attention", _weighted(weights, query, value, group))
    return result, _worded("lse", hw.reshape(hw.astype(lse, f32), *map(str, query.type.shape[:-1])))


def _check_attention(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, location: Location) -> int:
    """How many heads of the query are a group. Raises ProgramError for shapes that do not go together."""
    q, k, v = query.type.shape, key.type.shape, value.type.shape
    shapes = f"query {query.type}, key {key.type}, value {value.type}"
    if not len(q) == len(k) == len(v) >= 3 or q[-1] != k[-1] or k[:-1] != v[:-1] or q[:-3] != k[:-3]:
        raise ProgramError(f"attention: {shapes} are not [..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them", location)
    group = q[-3].divided_by(k[-3])
    if not enable_gqa and q[-3] != k[-3]:
        raise ProgramError(f"attention: {shapes} differ in their heads; use enable_gqa=True for groups of heads", location)
    if group is None or not group.is_int:
        raise ProgramError(f"attention: {shapes}: the heads of the key do not divide those of the query; use multiples as ints", location)
    return int(group)


def _scale_of(query: Tensor, scale: float | None, location: Location) -> float:
    size = query.type.shape[-1]
    if scale is None and not size.is_int:
        raise ProgramError(f"attention: {size}, the last dim of the query, is not known at compile time; pass scale=", location)
    return float(scale) if scale is not None else 1 / sqrt(int(size))


def _scores(query: Tensor, key: Tensor, group: int, scale: float) -> Tensor:
    """[..., H, S, T], or [..., G, group, S, T] where heads are in groups; f32 for narrower dtypes."""
    if group > 1:  # a dim of the group's heads, along which the key is repeated
        shape = query.type.shape
        query = hw.reshape(query, *map(str, (*shape[:-3], key.type.shape[-3], group, *shape[-2:])))
        key = hw.expand_dims(key, key.ndim - 2)
    order = (*range(key.ndim - 2), key.ndim - 1, key.ndim - 2)
    return _wide(_worded("scores", hw.matmul(query, hw.permute_dims(key, order)))) * scale


def _seen(scores: Tensor, causal: str | None, window: int | None, lengths: Tensor | None) -> Tensor | None:
    """Which columns a row attends to, to be broadcast to the scores; None where all."""
    rows, columns = hw.iota(scores, -2)[:, None], hw.iota(scores, -1)[None, :]
    ends = None if lengths is None else hw.expand_dims(lengths, tuple(range(lengths.ndim, scores.ndim)))
    seen = None if ends is None else columns < ends
    if causal == BOTTOM_RIGHT:  # the last row is at the last column
        rows = rows + (_last(columns, -1) if ends is None else ends - 1) - _last(rows, -2)
    if causal:
        seen = rows >= columns if seen is None else seen & (rows >= columns)
    return seen & (rows < columns + window) if seen is not None and window else seen


def _last(indices: Tensor, dim: int) -> Tensor | int:
    size = indices.type.shape[dim]
    return int(size) - 1 if size.is_int else hw.max(indices, dim, keepdims=True)


def _softmax_of(scores: Tensor, seen: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of the columns that a row sees, and its log-sum-exp. Only with lengths can it see none: then they are zeros."""
    if seen is not None:
        scores = hw.where(seen, scores, float("-inf"))
    largest = hw.max(scores, -1, keepdims=True)
    shift = largest if lengths is None else hw.maximum(largest, LEAST)
    powers = hw.exp(scores - shift)
    sums = hw.sum(powers, -1, keepdims=True)
    if lengths is not None:
        sums = hw.maximum(sums, 1.0)  # the largest is exp(0)
    return powers * hw.reciprocal(sums), hw.log(sums) + largest


def _weighted(weights: Tensor, query: Tensor, value: Tensor, group: int) -> Tensor:
    """The sums of values by weights: [..., H, S, F]."""
    result = _worded("attention", hw.matmul(_cast(weights, query.dtype), hw.expand_dims(value, value.ndim - 2) if group > 1 else value))
    return hw.reshape(result, *map(str, (*query.type.shape[:-1], value.type.shape[-1]))) if group > 1 else result


def _check_lengths(query: Tensor, lengths: Tensor | None, location: Location) -> tuple[Tensor, ...]:
    """The operand that they are."""
    if lengths is None:
        return ()
    if why := why_no_lengths(query.type, lengths.type):
        raise ProgramError(f"attention: {why}", location)
    return (lengths,)


def _check_mask(mask: Tensor, scores: tuple[Size, ...], location: Location) -> None:
    if not _broadcasts(mask.type.shape, scores):
        wanted = ", ".join(map(str, scores))
        raise ProgramError(f"attention: a mask of {mask.type} does not broadcast to the scores, [{wanted}]; reshape it", location)
    if mask.dtype.kind not in ("bool", "float"):
        raise ProgramError(f"attention: a mask of {mask.type} is neither bool nor float; compare it, as in mask != 0", location)


def _by_group(mask: Tensor, heads: Size, group: Size) -> Tensor:
    """A mask that broadcasts to [..., H, S, T], reshaped to broadcast to [..., heads, group, S, T]."""
    if mask.ndim < 3:
        return mask
    shape = mask.type.shape
    split = (Size(), Size()) if shape[-3] == Size() else (heads, group)
    return hw.reshape(mask, *map(str, (*shape[:-3], *split, *shape[-2:])))


@_called("rotary")
@checked
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates pairs of elements of the last dim of x [..., S, E] by angles, given as `cos` and `sin`, which broadcast to [..., S, E/2].

    A pair is elements i and i + E/2, as in GPT-NeoX and Llama, or 2i and 2i + 1 with `interleaved` (Su et al., "RoFormer", 2021).
    The result has the shape and dtype of x; it is computed in f32 for narrower dtypes. Raises ProgramError for an odd E, or other tables.

    Example: `hw.rotary_embedding(q, cos, sin)` of `bf16[B, H@tp, S, 128]` and tables `f32[S, 64]`.
    """
    location = Location.of_caller()
    if x.ndim < 2 or (x.type.shape[-1].is_int and int(x.type.shape[-1]) % 2):
        raise ProgramError(f"rotary_embedding: {x.type} is not [..., S, E] with an even E; reshape or pad it", location)
    half = x.type.shape[-1] // 2
    for name, table in (("cos", cos), ("sin", sin)):
        shape = table.type.shape
        if shape[-1:] != (half,) or not _broadcasts(shape, (*x.type.shape[:-1], half)):
            raise ProgramError(f"rotary_embedding: {name} is {table.type}, and x {x.type}; it has an element a pair, [S, {half}]", location)
    of_pair = x.ndim if interleaved else x.ndim - 1  # the new dim, of the two elements of a pair
    split = (half, Size(2)) if interleaved else (Size(2), half)
    pairs = hw.reshape(x, *map(str, (*x.type.shape[:-1], *split)))
    before = [slice(None)] * of_pair
    first, second = (_wide(pairs[(*before, slice(i, i + 1))]) for i in (0, 1))
    is_first = hw.iota(pairs, of_pair) == 0
    c, s = (hw.expand_dims(_cast(table, first.dtype), -1 if interleaved else -2) for table in (cos, sin))
    turned = hw.where(is_first if interleaved else is_first[:, None], first * c - second * s, second * c + first * s)
    return hw.reshape(_worded("rotary", _cast(turned, x.dtype)), *map(str, x.type.shape))


# --- random numbers ---------------------------------------------------------------------------------------------------


@_called("uniform")
@checked
def uniform(x: Tensor, seed: Tensor | int, draw: Tensor | int = 0) -> Tensor:
    """Random f32 numbers, uniform in [0, 1), of the shape of x, which has up to four dims.

    A number depends only on its index in the global tensor and on `seed` and `draw`, which are u32: it is the same on every
    target and under every sharding. The generator is Philox4x32-10 with the index as its counter (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011). `seed` and `draw` are ints or u32 tensors without dims. Raises ProgramError.

    Example: `hw.uniform(x, seed=7)`; with an input `step: hw.u32[()]`, `hw.uniform(x, 7, step)` draws anew at each step.
    """
    return _drawn(x, _indices(x), seed, draw)


def _indices(x: Tensor) -> list[Tensor]:
    """The index of each element of x in every dim, each tensor to be broadcast."""
    others = [tuple(j for j in range(x.ndim) if j != i) for i in range(x.ndim)]
    return [hw.expand_dims(hw.iota(x, i, u32), rest) if rest else hw.iota(x, i, u32) for i, rest in enumerate(others)]


def _drawn(x: Tensor, counter: Sequence[Tensor], seed: Tensor | int, draw: Tensor | int) -> Tensor:
    if len(counter) > MAX_RANDOM_DIMS:
        why = f"{x.type} has {len(counter)} dims, and {MAX_RANDOM_DIMS} are supported"
        raise ProgramError(f"uniform: {why}; reshape it", Location.of_caller())
    return record("philox", *counter, *(0 for _ in range(len(counter), MAX_RANDOM_DIMS)), seed, draw)


def _dropped(x: Tensor, p: float, counter: Sequence[Tensor], seed: Tensor | int, draw: Tensor | int) -> Tensor:
    return hw.where(_drawn(x, counter, seed, draw) >= p, x * (1 / (1 - p)), 0.0)


@_called("dropout")
@checked
def dropout(x: Tensor, p: float, seed: Tensor | int, draw: Tensor | int = 0) -> Tensor:
    """x / (1 - p) where `uniform(x, seed, draw)` is at least p, else 0; shape and dtype of x. p is a probability, 0 <= p < 1.

    The backward pass calls it with the same seed and draw. Raises ProgramError (Srivastava et al., "Dropout", 2014).

    Example: `hw.dropout(x, 0.1, seed=7, draw=layer)`.
    """
    _check_probability("dropout: p", p, Location.of_caller())
    return _dropped(x, p, _indices(x), seed, draw)


def _check_probability(name: str, p: float, location: Location) -> None:
    if not 0 <= p < 1:
        raise ProgramError(f"{name}={p!r} is not a probability from 0 to below 1", location)


if not TYPE_CHECKING:
    __all__ = public_names(globals())
