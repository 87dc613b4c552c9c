"""ATen ops of derivatives, layer norm, losses and writes at indices, and ops of Hostweave that replace ATen ops."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hostweave as hw
from hostweave.fusion_ir.frontend.composites import MAX_RANDOM_DIMS
from hostweave.fusion_ir.frontend.recording import record
from hostweave.torch.aten.shapes import beside, first, indexed, numbered
from hostweave.torch.aten.table import TABLE, Result, aten, cast, full, refuse, resharded, wide
from hostweave.torch.plan import axes_of
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, TensorType

TABLE["threshold_backward.default"] = lambda result, dy, x, threshold: hw.where(x <= threshold, 0, dy)


@aten("hostweave.dropout.default")
def _dropout(result: Result, x: hw.Tensor, seed: hw.Tensor, p: float) -> hw.Tensor:
    return _as_drawn(x, lambda flat: hw.dropout(flat, p, seed))


def _as_drawn(x: hw.Tensor, draw: Callable[[hw.Tensor], hw.Tensor]) -> hw.Tensor:
    """Returns `draw(x)`. Merges the dims after the third if x has more dims than the random generator supports."""
    if x.ndim <= MAX_RANDOM_DIMS:
        return draw(x)
    return hw.reshape(draw(hw.reshape(x, *x.shape[:3], -1)), *x.shape)


@aten("hostweave.random.default")
def _random(
    result: Result, seed: hw.Tensor, like: hw.Tensor | None, size: Any, dtype: torch.dtype, kind: str, low: int, high: int
) -> hw.Tensor:
    """Random numbers with the shape of the result: "uniform" in [0, 1), "normal", or "integers" from `low` to below `high`."""

    def draw(x: hw.Tensor) -> hw.Tensor:
        if kind == "integers":
            if high - low > 2**24:
                raise refuse(f"integers from {low} to {high} have more than 2^24 values, but a draw has 24 bits; combine two draws")
            return cast(hw.astype(hw.floor(hw.uniform(x, seed) * (high - low)), hw.i64) + low, dtype)
        first, second = hw.uniform(x, seed), hw.uniform(x, seed, 1)
        if kind == "normal":  # Box and Muller, 1958
            if dtype == torch.float64:
                first, second = cast(first, dtype), cast(second, dtype)
            return cast(hw.sqrt(-2 * hw.log(1 - first)) * hw.cos(2 * math.pi * second), dtype)
        if dtype == torch.float64:
            return cast(first, dtype) + cast(second, dtype) * 2.0**-24
        bits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype)  # with more bits, the largest number would round to 1
        return cast(hw.floor(first * 2.0**bits) * 2.0**-bits if bits else first, dtype)

    return _as_drawn(full(Result((torch.float32,), result.shapes, seed), 0) if like is None else like, draw)


# --- norms ------------------------------------------------------------------------------------------------------------


def _last_dims(x: hw.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(shape), x.ndim))


@aten("native_layer_norm.default")
def _layer_norm(result: Result, x: hw.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[hw.Tensor, ...]:
    dims, x = _last_dims(x, shape), wide(x, result)
    mean = hw.mean(x, dims, keepdims=True)
    rstd = hw.rsqrt(hw.var(x, dims, 0, True) + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * wide(weight, result)
    y = y if bias is None else y + wide(bias, result)
    return cast(y, result.dtype), cast(mean, result.dtypes[1]), cast(rstd, result.dtypes[2])


@aten("native_layer_norm_backward.default")
def _layer_norm_backward(
    result: Result, dy: hw.Tensor, x: hw.Tensor, shape: Any, mean: hw.Tensor, rstd: hw.Tensor, weight: Any, bias: Any, mask: Sequence[bool]
) -> tuple[hw.Tensor | None, ...]:
    dims, others = _last_dims(x, shape), tuple(range(x.ndim - len(shape)))
    dtype = x.dtype
    dy, x, mean, rstd = (wide(one, result) for one in (dy, x, mean, rstd))
    normed = (x - mean) * rstd
    slope = dy if weight is None else dy * wide(weight, result)
    dx = (slope - hw.mean(slope, dims, keepdims=True) - normed * hw.mean(slope * normed, dims, keepdims=True)) * rstd
    return (
        hw.astype(dx, dtype) if mask[0] else None,
        hw.astype(hw.sum(dy * normed, others), weight.dtype) if mask[1] else None,
        hw.astype(hw.sum(dy, others), bias.dtype) if mask[2] else None,
    )


# --- indices, losses --------------------------------------------------------------------------------------------------


@aten("embedding_dense_backward.default")
def _embedding(result: Result, dy: hw.Tensor, indices: hw.Tensor, rows: int, padding: int = -1, by_count: bool = False) -> hw.Tensor:
    if by_count:
        raise refuse("an embedding with scale_grad_by_freq=True is not supported; leave it False")
    if padding >= 0:
        dy = hw.where(hw.expand_dims(indices == padding, -1), 0, dy)
    width = dy.shape[-1]
    flat = hw.reshape(indices, -1) if indices.ndim != 1 else indices
    dy = hw.reshape(dy, -1, width) if dy.ndim != 2 else dy
    numbers = record("iota", target=TensorType(hw.i64, (Dim.of(result.shape[0]),)), beside=dy)
    return record("scatter_sum", record("index", hw.expand_dims(flat, -1), numbers), dy, numbers, axis=0)


@aten("index_put.default", "_unsafe_index_put.default", "index_put_.default")
def _index_put(result: Result, x: hw.Tensor, indices: Sequence[hw.Tensor | None], values: hw.Tensor, accumulate: bool = False) -> hw.Tensor:
    values, given = cast(values, result.dtype), [index for index in indices if index is not None]
    if len(given) == 1 and given[0].dtype == hw.bool_ and product(values.type.shape) == Size():
        return _put_where(x, indices, given[0], hw.reshape(values) if values.ndim else values, accumulate)
    whole, number, dim, order = numbered(x, indices, "aten.index_put")
    before, behind, many = whole.type.shape[:dim], whole.type.shape[dim + 1 :], product(number.type.shape)
    shape = (*before, *number.type.shape, *behind)
    spread = values if values.type.shape == shape else hw.broadcast_to(values, shape)
    source = hw.reshape(spread, *before, many, *behind) if number.ndim != 1 else spread
    if not accumulate and many == Size():  # one slice, written in place if x is donated
        begin = record("index", number, hw.iota(whole, dim, hw.i64))
        made = hw.dynamic_update_slice(whole, source, [begin if i == dim else 0 for i in range(whole.ndim)])
    else:
        index = hw.reshape(number, *(many if i == dim else 1 for i in range(whole.ndim)))
        made = (_added if accumulate else hw.scatter)(whole, dim, index, source)
    if len(given) == 1:
        return made
    turned = hw.reshape(made, *(x.shape[i] for i in order))
    return turned if order == sorted(order) else hw.permute_dims(turned, tuple(order.index(i) for i in range(x.ndim)))


def _added(x: hw.Tensor, dim: int, index: hw.Tensor, source: hw.Tensor) -> hw.Tensor:
    """Adds the source to x at the indices. A sum of bools is true if any term is."""
    if x.dtype != hw.bool_:
        return hw.scatter_add(x, dim, index, source)
    return hw.scatter_add(hw.astype(x, hw.i64), dim, index, hw.astype(source, hw.i64)) != 0


def _put_where(x: hw.Tensor, indices: Sequence[Any], mask: hw.Tensor, value: hw.Tensor, accumulate: bool) -> hw.Tensor:
    """Sets the elements at which the mask is true to one value or, with `accumulate`, adds the value."""
    before = next(dim for dim, index in enumerate(indices) if index is not None)
    after = x.ndim - before - mask.ndim
    mask = hw.expand_dims(mask, tuple(mask.ndim + i for i in range(after))) if after else mask
    return hw.where(mask, value if not accumulate else x | value if x.dtype == hw.bool_ else x + value, x)


TABLE |= {
    "scatter_add.default": lambda result, x, dim, index, source: _scattered(_added, x, dim, index, source),
    "scatter.src": lambda result, x, dim, index, source: _scattered(hw.scatter, x, dim, index, source),
    "scatter.value": lambda result, x, dim, index, value: _scattered(
        hw.scatter, x, dim, index, full(Result((result.dtype,), (index.shape,), x), value)
    ),
}


def _scattered(function: Callable[..., hw.Tensor], x: hw.Tensor, dim: int, index: hw.Tensor, source: hw.Tensor) -> hw.Tensor:
    """Scatters into x. The index may be smaller than x in dims other than `dim`. The rest of x does not change."""
    made = function(beside(x, index, dim), dim, index, first(source, index.shape))
    for other, size in enumerate(x.shape):
        if str(made.shape[other]) != str(size):
            around = first(x, [*x.shape[: other + 1], *made.shape[other + 1 :]])
            made = _between(around, made, other, 0, int(made.shape[other]))
    return made


@aten("nll_loss_forward.default")
def _nll(result: Result, logp: hw.Tensor, target: hw.Tensor, weight: Any, reduction: int, ignore: int) -> tuple[hw.Tensor, hw.Tensor]:
    counted = _counted(logp, target, weight, ignore)
    at_target = hw.squeeze(hw.take_along_axis(logp, hw.expand_dims(hw.where(counted, target, 0), -1), -1), -1)
    losses = hw.where(counted, -wide(at_target, result), 0.0)
    count = hw.sum(hw.astype(counted, losses.dtype))
    loss = losses if reduction == 0 else hw.sum(losses) / count if reduction == 1 else hw.sum(losses)
    return cast(loss, result.dtype), cast(count, result.dtypes[1])


@aten("nll_loss_backward.default")
def _nll_backward(
    result: Result, dy: hw.Tensor, logp: hw.Tensor, target: hw.Tensor, weight: Any, reduction: int, ignore: int, count: hw.Tensor
) -> hw.Tensor:
    counted = _counted(logp, target, weight, ignore)
    each = -dy / count if reduction == 1 else -dy
    of_row = hw.where(counted, each, 0.0)
    is_target = hw.expand_dims(target, -1) == hw.iota(logp, -1, target.dtype)
    return cast(hw.where(is_target, hw.expand_dims(of_row, -1), 0.0), result.dtype)


def _counted(logp: hw.Tensor, target: hw.Tensor, weight: Any, ignore: int) -> hw.Tensor:
    if weight is not None or logp.ndim != 2:
        raise refuse("nll_loss is supported only for [rows, classes] without weights; use cross_entropy instead")
    return target != ignore


# --- products ---------------------------------------------------------------------------------------------------------


TABLE["hostweave.linear.default"] = lambda result, x, weight, bias=None: hw.linear(x, weight, bias)
TABLE["hostweave.matmul_of_rows.default"] = lambda result, a, b: hw.tensordot(a, b, (rows := tuple(range(a.ndim - 1)), rows))
TABLE["hostweave.attention.default"] = lambda result, q, k, v, bias, causal, scale, gqa: hw.attention(
    q, k, v, "top_left" if causal else None, None, scale, gqa, bias=bias
)


@aten("hostweave.matmul.default")
def _matmul(result: Result, a: hw.Tensor, b: hw.Tensor, turned_a: bool, turned_b: bool) -> hw.Tensor:
    return hw.matmul(hw.transpose(a, -2, -1) if turned_a else a, hw.transpose(b, -2, -1) if turned_b else b)


@aten("hostweave.attention_backward.default")
def _attention_backward(
    result: Result, dy: hw.Tensor, q: Any, k: Any, v: Any, y: Any, lse: Any, bias: Any, causal: bool, scale: float | None, gqa: bool
) -> tuple[hw.Tensor, ...]:
    return hw.attention_backward(q, k, v, y, dy, lse, "top_left" if causal else None, None, scale, gqa, bias=bias)


TABLE["hostweave.reshard.default"] = lambda result, x, layout: resharded(x, axes_of(layout))


@aten("hostweave.rotary.default")
def _rotary(result: Result, x: hw.Tensor, cos: hw.Tensor, sin: hw.Tensor, back: bool = False) -> hw.Tensor:
    """x * cos + rotate_half(x) * sin, at least in f32. With `back`, x is the gradient of the result, and the result that of the input."""
    halves = []
    for whole in (x, cos, sin):
        pairs = hw.reshape(whole, *whole.shape[:-1], 2, int(x.shape[-1]) // 2)
        halves.append([wide(indexed(pairs, -2, slice(i, i + 1)), result) for i in (0, 1)])
    (first, second), (c1, c2), (s1, s2) = halves
    both = (first * c1 + second * s2, second * c2 - first * s1) if back else (first * c1 - second * s1, second * c2 + first * s2)
    return hw.reshape(cast(hw.concat(both, x.ndim - 1), result.dtype), *x.shape)


@aten("slice_scatter.default")
def _slice_scatter(
    result: Result, x: hw.Tensor, source: hw.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> hw.Tensor:
    dim, size = dim % x.ndim, x.shape[dim]
    if not isinstance(size, int):
        raise refuse(f"a write to a slice of a dim of {size} is not supported; use a fixed size")
    begin, count = min(max(0, (start or 0) + size * ((start or 0) < 0)), size), int(source.shape[dim])
    if step == 1:
        return _between(x, source, dim, begin, count)
    position = hw.iota(x, dim) - begin
    seen = (position % step == 0) & (position >= 0) & (position < count * step)
    own = hw.take(source, hw.clip(position // step, 0, count - 1), dim)
    return hw.where(hw.expand_dims(seen, tuple(range(1, x.ndim - dim))) if dim < x.ndim - 1 else seen, own, x)


@aten("select_scatter.default")
def _select_scatter(result: Result, x: hw.Tensor, source: hw.Tensor, dim: int, index: int) -> hw.Tensor:
    dim, size = dim % x.ndim, x.shape[dim]
    if not isinstance(size, int):
        raise refuse(f"a write to an element of a dim of {size} is not supported; use a fixed size")
    return _between(x, hw.expand_dims(source, dim), dim, index % size, 1)


def _between(x: hw.Tensor, source: hw.Tensor, dim: int, begin: int, length: int) -> hw.Tensor:
    size = int(x.shape[dim])
    before = [indexed(x, dim, slice(0, begin))] if begin else []
    after = [indexed(x, dim, slice(begin + length, size))] if begin + length < size else []
    return hw.concat([*before, source, *after], dim) if before or after else source
