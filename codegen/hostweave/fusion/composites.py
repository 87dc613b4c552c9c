"""Functions made of several ops when they are traced. What lies between their ops is f32 where the tensor is smaller."""

from __future__ import annotations

from math import sqrt

from hostweave.errors import Location, ProgramError
from hostweave.fusion import functions as hw
from hostweave.fusion.extent import Extent
from hostweave.fusion.functions import Axis
from hostweave.fusion.ir import Scalar
from hostweave.fusion.trace import Tensor, record
from hostweave.fusion.types import f32, u32

MAX_RANDOM_DIMS = 4  # words of a counter


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N]. Raises ProgramError."""
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


def softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    """exp(x), divided by its sum over a dim. A row of -inf alone gives NaN, as in torch."""
    wide = _wide(x)
    powers = hw.exp(wide - hw.max(wide, axis, keepdims=True))
    return hw.cast(powers / hw.sum(powers, axis, keepdims=True), x.dtype)


def log_softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    """The logarithm of softmax(x)."""
    wide = _wide(x)
    distance = wide - hw.max(wide, axis, keepdims=True)
    return hw.cast(distance - hw.log(hw.sum(hw.exp(distance), axis, keepdims=True)), x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axis: Axis = -1, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over a dim, times weight plus bias, which broadcast against x."""
    wide = _wide(x)
    distance = wide - hw.mean(wide, axis, keepdims=True)
    variance = hw.mean(distance * distance, axis, keepdims=True)
    return _scaled(distance * hw.rsqrt(variance + eps), weight, bias, x)


def rms_norm(x: Tensor, weight: Tensor | None = None, axis: Axis = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean of squares + eps) over a dim, times weight, which broadcasts against x."""
    wide = _wide(x)
    return _scaled(wide * hw.rsqrt(hw.mean(wide * wide, axis, keepdims=True) + eps), weight, None, x)


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    if weight is not None:
        normed = normed * hw.cast(weight, normed.dtype)
    if bias is not None:
        normed = normed + hw.cast(bias, normed.dtype)
    return hw.cast(normed, x.dtype)


def _wide(x: Tensor) -> Tensor:
    return hw.cast(x, f32) if x.dtype.kind == "float" and x.dtype.itemsize < f32.itemsize else x


# --- attention --------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query keyT scale + mask) value, for query [..., H, S, E], key [..., H, T, E], value [..., H, T, F]: [..., H, S, F].

    `attn_mask`, which broadcasts to [..., H, S, T], is a bool (true takes part) or is added. `is_causal` lets row i see
    columns up to i. `scale` is 1 / sqrt(E) by default. With `enable_gqa` key and value have fewer heads, each for as many
    neighbouring heads of the query. Raises ProgramError.
    """
    location = Location.of_caller()
    q, k, v = query.type.shape, key.type.shape, value.type.shape
    shapes = f"query {query.type}, key {key.type}, value {value.type}"
    if not len(q) == len(k) == len(v) >= 3 or q[-1] != k[-1] or k[:-1] != v[:-1] or q[:-3] != k[:-3]:
        raise ProgramError(f"attention: {shapes} are not [..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them", location)
    group = q[-3].divided_by(k[-3])
    if not enable_gqa and q[-3] != k[-3]:
        raise ProgramError(f"attention: {shapes} differ in their heads; use enable_gqa=True for groups of heads", location)
    if group is None or not group.is_int:
        raise ProgramError(f"attention: {shapes}: the heads of the key do not divide those of the query; use multiples as ints", location)
    if attn_mask is not None and is_causal:
        raise ProgramError("attention: attn_mask and is_causal are both given; put both into the mask", location)
    if scale is None and not q[-1].is_int:
        raise ProgramError(f"attention: {q[-1]}, the last dim of the query, is not known at compile time; pass scale=", location)
    factor = scale if scale is not None else 1 / sqrt(int(q[-1]))
    grouped = int(group) > 1
    if grouped:  # a dim of the group's heads, along which key and value are repeated
        query = hw.reshape(query, *map(str, (*q[:-3], k[-3], group, *q[-2:])))
        key, value = (hw.expand_dims(x, x.ndim - 2) for x in (key, value))
    order = (*range(key.ndim - 2), key.ndim - 1, key.ndim - 2)
    scores = _wide(hw.matmul(query, hw.transpose(key, order))) * factor
    if is_causal:
        rows, columns = hw.iota(query, query.ndim - 2), hw.iota(key, key.ndim - 2)
        scores = hw.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
    if attn_mask is not None:
        mask = _by_group(attn_mask, k[-3], group) if grouped else attn_mask
        scores = hw.where(mask, scores, float("-inf")) if mask.dtype.kind == "bool" else scores + hw.cast(mask, scores.dtype)
    result = hw.matmul(hw.cast(softmax(scores), query.dtype), value)
    return hw.reshape(result, *map(str, (*q[:-1], v[-1]))) if grouped else result


def _by_group(mask: Tensor, heads: Extent, group: Extent) -> Tensor:
    """A mask of [..., H, S, T], or one that broadcasts to it, beside scores of [..., heads, group, S, T]."""
    if mask.ndim < 3:
        return mask
    shape = mask.type.shape
    split = (Extent(), Extent()) if shape[-3] == Extent() else (heads, group)
    return hw.reshape(mask, *map(str, (*shape[:-3], *split, *shape[-2:])))


# --- random numbers ---------------------------------------------------------------------------------------------------


def uniform(x: Tensor, seed: Tensor | int, draw: Tensor | int = 0) -> Tensor:
    """f32 numbers from 0 to below 1, of the shape of x, which has up to four dims.

    A number depends on its place in the global tensor, on `seed` and on `draw`, which are u32: it is the same on every
    target and under every sharding. Raises ProgramError.
    """
    if x.ndim > MAX_RANDOM_DIMS:
        raise ProgramError(f"uniform: {x.type} has {x.ndim} dims, and {MAX_RANDOM_DIMS} are supported; reshape it", Location.of_caller())
    counter: list[Tensor | Scalar] = []
    for i in range(x.ndim):
        index = hw.iota(x, i, u32)
        counter.append(hw.expand_dims(index, tuple(j for j in range(x.ndim) if j != i)) if x.ndim > 1 else index)
    return record("philox", *counter, *(0 for _ in range(x.ndim, MAX_RANDOM_DIMS)), seed, draw)


def dropout(x: Tensor, p: float, seed: Tensor | int, draw: Tensor | int = 0) -> Tensor:
    """x / (1 - p) where a number of `uniform(x, seed, draw)` is at least p, else 0. Raises ProgramError."""
    if not 0 <= p < 1:
        raise ProgramError(f"dropout: p={p!r} is not a probability from 0 to below 1", Location.of_caller())
    return hw.where(uniform(x, seed, draw) >= p, x * (1 / (1 - p)), 0.0)
