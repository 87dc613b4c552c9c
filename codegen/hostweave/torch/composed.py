"""Decomposition rules: ATen ops written in terms of other ATen ops.

In training, torch differentiates the decomposed graph. Ops in `linalg.DERIVED` and `special.DERIVED` are decomposed after differentiation.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hostweave.base.errors import ProgramError
from hostweave.torch import windows
from hostweave.torch.distributions import DISTRIBUTIONS
from hostweave.torch.linalg import LINALG
from hostweave.torch.special import SPECIAL
from hostweave.torch.strides import as_laid_out, as_strided, as_strided_scatter

aten = torch.ops.aten


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore: int = -100,
    smoothing: float = 0.0,
) -> Any:
    """torch's cross entropy for logits [classes], [rows, classes] or [rows, classes, sizes...]. Returns NotImplemented, which keeps the op,
    for [rows, classes] with class indices, without weights and label smoothing."""
    if weight is None and not smoothing and logits.ndim == 2 and not target.is_floating_point():
        return NotImplemented
    dim = min(1, logits.ndim - 1)
    classes = logits.shape[dim]
    logp = F.log_softmax(logits, dim)
    weighted = logp if weight is None else logp * weight.view(-1, *[1] * (logits.ndim - 1 - dim))
    if target.is_floating_point():  # probabilities
        losses = -(weighted * (target * (1 - smoothing) + smoothing / classes)).sum(dim)
        return losses if not reduction else losses.sum() / (logits.numel() // classes if reduction == 1 else 1)
    counted = target != ignore
    number = torch.where(counted, target, 0)
    losses = -(1 - smoothing) * weighted.gather(dim, number.unsqueeze(dim)).squeeze(dim)
    losses = losses - smoothing / classes * weighted.sum(dim) if smoothing else losses
    losses = torch.where(counted, losses, 0)
    if reduction != 1:
        return losses.sum() if reduction else losses
    share = counted.to(losses.dtype) if weight is None else torch.where(counted, weight[number], 0)
    return losses.sum() / share.sum()


def copy(x: torch.Tensor, source: torch.Tensor, *_: bool) -> torch.Tensor:
    value = source.to(x.dtype)
    return value if value.shape == x.shape else value.expand(x.shape)


# --- views ------------------------------------------------------------------------------------------------------------


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Slices the flattened matrix with a step of one row and one element."""
    y = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = y.shape[-2:]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    begin = max(offset, 0) - min(offset, 0) * columns
    flat = y.flatten(-2)
    return aten.slice(flat, flat.ndim - 1, begin, begin + (length - 1) * (columns + 1) + 1, columns + 1)


def diagonal_scatter(x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if not source.shape[-1]:
        return x
    y = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(size, device=x.device) for size in y.shape[-2:])
    of_row = source.index_select(-1, (rows + min(offset, 0)).clamp(0, source.shape[-1] - 1)).unsqueeze(-1)
    return torch.where(columns - rows[:, None] == offset, of_row, y).movedim((-2, -1), (dim1, dim2))


def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if not x.ndim:
        return x.reshape(1)[:size]
    dim = dim % x.ndim
    count = (x.shape[dim] - size) // step + 1
    positions = (torch.arange(count, device=x.device) * step)[:, None] + torch.arange(size, device=x.device)
    return x.index_select(dim, positions.flatten()).unflatten(dim, (count, size)).movedim(dim + 1, -1)


# --- along a dim ------------------------------------------------------------------------------------------------------


def _scanned(dim: int, values: Sequence[torch.Tensor], joined: Callable[..., Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Inclusive scan. Each step doubles the number of combined elements (Hillis and Steele, 1986)."""
    if not values[0].ndim:
        return values
    size, by = values[0].shape[dim], 1
    while by < size:
        before = [value.narrow(dim, 0, size - by) for value in values]
        made = joined(before, [value.narrow(dim, by, size - by) for value in values])
        values = [torch.cat((value.narrow(dim, 0, by), one), dim) for value, one in zip(values, made, strict=True)]
        by *= 2
    return values


class _OfElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ProgramError for all ops except pointwise ops on tensors of `ndim` dims or no dims."""

    def __init__(self, ndim: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self._ndim = ndim

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if torch.Tag.pointwise not in op.tags or any(one.ndim not in (0, self._ndim) for one in given):
            raise ProgramError.here(f"associative_scan: its function calls {op}, but only pointwise ops are supported; use no other ops")
        return op(*args, **(kwargs or {}))


def associative_scan(combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
    """torch's associative_scan. A dynamic size must have a maximum."""
    leaves, spec = pytree.tree_flatten(xs)
    dim_count = leaves[0].ndim
    dim = dim % dim_count
    leaves = [x.flip(dim) for x in leaves] if reverse else leaves
    size = leaves[0].shape[dim]
    largest = size if isinstance(size, int) else size.node.shape_env.bound_sympy(size.node.expr).upper
    if not float(largest) < 2**31:
        raise ProgramError.here("associative_scan: the dim has no largest size; state it: torch.export.Dim(name, max=...)")
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        tried = pytree.tree_unflatten([torch.ones((2,) * dim_count, dtype=x.dtype) for x in leaves], spec)
        with _OfElements(dim_count):
            combine_fn(tried, tried)
    position, by = torch.arange(size, device=leaves[0].device), 1
    while by < largest:
        before = [F.pad(x, (*[0] * (2 * (x.ndim - 1 - dim)), by, 0)).narrow(dim, 0, size) for x in leaves]
        made = pytree.tree_leaves(combine_fn(pytree.tree_unflatten(before, spec), pytree.tree_unflatten(leaves, spec)))
        is_joined = (position >= by).view(-1, *[1] * (dim_count - 1 - dim))
        leaves = [torch.where(is_joined, one, x) for one, x in zip(made, leaves, strict=True)]
        by *= 2
    return pytree.tree_unflatten([x.flip(dim) for x in leaves] if reverse else leaves, spec)


def rwkv_attention(
    of_token: Callable[..., Any], decay: Any, first: Any, key: Any, value: Any, state: Any = None, return_state: bool = False
) -> Any:
    """Computes `rwkv_linear_attention` of transformers as a scan over tokens, or by `of_token` for a single token.

    A state is (n, d, m): n * exp(m) is the sum of weighted values, and d * exp(m) the sum of weights. m is the largest exponent. m gets no
    gradient, because m cancels in the result.
    """
    if key.shape[1] == 1:
        return of_token(decay, first, key, value, state, return_state)
    zeros = torch.zeros_like(key[:, 0], dtype=torch.float32)
    n, d, m = (one[:, None] for one in state or (zeros, zeros, zeros - 1e38))
    logs = torch.cat((m, key.float()), 1)
    most = logs.detach()
    weight, decays = torch.exp(logs - most), -torch.exp(decay).expand(logs.shape)
    sums = torch.cat((n, value.float()), 1) * weight, torch.cat((d, torch.ones_like(value, dtype=torch.float32)), 1) * weight

    def joined(a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
        top = torch.maximum(a[3] + b[4], b[3])
        before, now = torch.exp(a[3] + b[2] - top), torch.exp(b[3] - top)
        return before * a[0] + now * b[0], before * a[1] + now * b[1], a[2] + b[2], top, a[4] + b[4]

    n, d, _, m, _ = associative_scan(joined, (*sums, decays, most, decays.detach()), 1)
    own = key.float() + first
    top = torch.maximum(m[:, :-1], own).detach()
    before, now = torch.exp(m[:, :-1] - top), torch.exp(own - top)
    made = (before * n[:, :-1] + now * value) / (before * d[:, :-1] + now)
    return made.to(key.dtype), [one[:, -1] for one in (n, d, m)] if return_state or state is not None else None


def cumprod(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    wide = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    return _scanned(dim, [wide], lambda before, now: [before[0] * now[0]])[0]


def _cumulative(is_later: Callable[[Any, Any], Any], x: torch.Tensor, dim: int) -> Any:
    def joined(before: Any, now: Any) -> Any:
        later = is_later(now[0], before[0]) | torch.isnan(now[0])
        return [torch.where(later, b, a) for a, b in zip(before, now, strict=True)]

    positions = torch.arange(x.shape[dim] if x.ndim else 1, device=x.device).view(-1, *[1] * (x.ndim - 1 - dim % max(x.ndim, 1)))
    return tuple(_scanned(dim, [x, positions.expand(x.shape) if x.ndim else positions.reshape(())], joined))


def _chosen(values: torch.Tensor, order: torch.Tensor, position: Any, dim: int, keepdim: bool) -> Any:
    index = position if isinstance(position, torch.Tensor) else torch.full_like(order.narrow(dim, 0, 1), position)
    found = values.gather(dim, index), order.gather(dim, index)
    return found if keepdim else tuple(one.squeeze(dim) for one in found)


def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    return _chosen(*torch.sort(x, dim=dim, stable=True), k - 1, dim, keepdim) if x.ndim else (x, torch.zeros_like(x, dtype=torch.int64))


def _median(skips_nan: bool, x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """Returns the lower median and the index of the median. A NaN makes the median NaN, unless `skips_nan`."""
    if not x.ndim:
        return x, torch.zeros_like(x, dtype=torch.int64)
    counted = (~torch.isnan(x)).sum(dim, keepdim=True)
    position = (counted - 1).clamp(0) // 2
    if not skips_nan:
        position = torch.where(counted < x.shape[dim], counted, position)
    return _chosen(*torch.sort(x, dim=dim, stable=True), position, dim, keepdim)


def _median_of_all(skips_nan: bool, x: torch.Tensor) -> Any:
    return _median(skips_nan, x.reshape(-1), 0)[0] if x.numel() else x.new_full((), math.nan)


def searchsorted(
    sorted_: torch.Tensor, values: Any, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    """For each value, counts the elements of the sorted row that are less or, with `right`, not greater. For NaN, all elements count."""
    sorted_ = sorted_ if sorter is None else sorted_.gather(-1, sorter)
    if not isinstance(values, torch.Tensor):
        values = torch.full((), values, dtype=sorted_.dtype if sorted_.is_floating_point() else None, device=sorted_.device)
    rows, found = sorted_.unsqueeze(-2) if sorted_.ndim > 1 else sorted_, values.unsqueeze(-1)
    behind = (rows > found) if right or side == "right" else (rows >= found)
    return (~behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    if not x.numel():
        return x.new_zeros(bins)
    flat = x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    low, high = (flat.amin(), flat.amax()) if min == max else (flat.new_full((), min), flat.new_full((), max))
    low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    position = ((flat - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    position = torch.where((flat >= low) & (flat <= high), position, -1)
    return (position == torch.arange(bins, device=x.device).unsqueeze(-1)).sum(-1).to(x.dtype)


# --- writes at indices ------------------------------------------------------------------------------------------------


def _into(x: torch.Tensor, source: torch.Tensor, dim: int = 0) -> Any:
    """Replaces the first elements of x along each dim by `source`, and returns the result."""
    if x.shape[dim:] == source.shape[dim:] or dim == x.ndim:
        return source
    inner = _into(x.narrow(dim, 0, source.shape[dim]), source, dim + 1)
    return inner if x.shape[dim] == source.shape[dim] else x.slice_scatter(inner, dim, 0, source.shape[dim])


def scatter_reduce(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool = True) -> Any:
    """torch's scatter_reduce. Compares every position of x along `dim` with every index."""
    if not x.ndim:
        one = (t.reshape(1) for t in (x, index, source))
        return scatter_reduce(next(one), 0, next(one), next(one), reduce, include_self).reshape(())
    if not index.numel():
        return x
    dim = dim % x.ndim
    own = x[tuple(slice(None) if i == dim else slice(size) for i, size in enumerate(index.shape))]
    source = source[tuple(map(slice, index.shape))]
    if x.dtype == torch.bool:  # torch reduces bools as integers
        wide = scatter_reduce(x.to(torch.int64), dim, index, source.to(torch.int64), reduce, include_self)
        return wide != 0
    own, index, source = (t.movedim(dim, -1) for t in (own, index, source))
    sent = index.unsqueeze(-2) == torch.arange(x.shape[dim], device=x.device).unsqueeze(-1)
    least, most = (-math.inf, math.inf) if x.is_floating_point() else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    neutral = {"sum": 0, "mean": 0, "prod": 1, "amax": least, "amin": most}[reduce]
    terms = torch.where(sent, source.unsqueeze(-2), neutral)
    if include_self:
        terms = torch.cat((terms, own.unsqueeze(-1)), -1)
    count = sent.sum(-1)
    made = getattr(terms, "sum" if reduce == "mean" else reduce)(-1)
    if reduce == "mean":
        many = (count + int(include_self)).clamp(1)
        made = made / many if x.is_floating_point() else torch.div(made, many, rounding_mode="floor")
    made = made.to(x.dtype) if include_self else torch.where(count > 0, made.to(x.dtype), own)
    return _into(x, made.movedim(-1, dim))


def index_reduce(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool = True) -> Any:
    if not x.ndim:
        return scatter_reduce(x, 0, index.reshape(()), source.reshape(()), reduce, include_self)
    dim = dim % x.ndim
    spread = index.view(-1, *[1] * (x.ndim - 1 - dim)).expand(source.shape)
    return scatter_reduce(x, dim, spread, source, reduce, include_self)


def masked_scatter(x: Any, mask: Any, source: torch.Tensor) -> Any:
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    if not source.numel():  # the mask is false everywhere
        return x
    number = (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1)[number].view(x.shape), x)


def put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> Any:
    return x.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate).view(x.shape)


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Computes the sum, mean or maximum of the rows of each bag. `offsets` has the start of each bag in `indices`. With
    `include_last_offset`, the last offset is not read: the last bag extends to the end of `indices`, as in torch's GPU kernels."""
    if scale_grad_by_freq or sparse or (mode == 2 and not indices.shape[0]):
        return NotImplemented
    begins = offsets[:-1] if include_last_offset else offsets
    bag_of = searchsorted(begins, torch.arange(indices.shape[0], device=indices.device), right=True) - 1
    counted = indices != padding_idx if padding_idx >= 0 else torch.ones_like(indices, dtype=torch.bool)
    inside = (bag_of == torch.arange(begins.shape[0], device=indices.device)[:, None]) & counted
    rows = weight[indices]
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    sizes = inside.sum(1)
    chosen = inside[:, :, None]
    if mode == 2:
        bags, positions = torch.where(chosen, rows, -math.inf).max(1)
        made, number = torch.where(sizes[:, None] > 0, bags, 0), indices[positions]
    else:
        made, number = torch.where(chosen, rows, 0).sum(1), sizes
        made = made / sizes.clamp(1)[:, None].to(made.dtype) if mode == 1 else made
    return made.to(weight.dtype), bag_of, sizes, number


# --- sums and distances -----------------------------------------------------------------------------------------------


def addbmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1) -> Any:
    product = alpha * torch.bmm(a, b).sum(0, dtype=x.dtype)
    return beta * x + product if beta else product.expand(x.shape)


def _norm(x: torch.Tensor, p: float) -> Any:
    return torch.linalg.vector_norm(x, p, -1) if x.numel() else x.sum(-1)


def pdist(x: torch.Tensor, p: float = 2) -> Any:
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)  # torch.export rejects torch.tensor(list) in rules
    return _norm(x[first] - x[second], p)


def trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    of_a: Sequence[int],
    of_b: Sequence[int],
    of_c: Sequence[int],
    over: Sequence[int],
    *_: int,
) -> Any:
    for dims, position in ((of_a, 0), (of_b, 1), (of_c, 2)):
        for dim in sorted(dims):
            a, b, c = (one.unsqueeze(dim) if number == position else one for number, one in enumerate((a, b, c)))
    return (a * b * c).sum(list(over), dtype=a.dtype)


def angle(x: torch.Tensor) -> Any:
    if x.is_complex():
        return NotImplemented
    wide = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return torch.where(wide < 0, math.pi, torch.where(torch.isnan(wide), wide, 0.0))


def frexp(x: torch.Tensor) -> Any:
    """Returns the mantissa, with a magnitude from 0.5 to below 1, and the exponent. For 0, infinities and NaNs, the mantissa is x and the
    exponent is 0.

    Subnormal numbers are first multiplied by 2^64. The exponent from log2 may be wrong by 1; the mantissa is then out of range, and both
    are corrected.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    is_subnormal = wide.abs() < torch.finfo(wide.dtype).tiny
    wide = torch.where(is_subnormal, wide * 2.0**64, wide)
    exponent = torch.floor(torch.log2(wide.abs().clamp(min=torch.finfo(wide.dtype).tiny))).to(torch.int32) + 1
    half = exponent // 2  # 2^-exponent may underflow, so x is multiplied in two steps
    mantissa = wide * torch.pow(2.0, (-half).to(wide.dtype)) * torch.pow(2.0, (half - exponent).to(wide.dtype))
    up, down = mantissa.abs() >= 1, mantissa.abs() < 0.5
    mantissa = torch.where(up, mantissa / 2, torch.where(down, mantissa * 2, mantissa))
    exponent = exponent + up.to(torch.int32) - down.to(torch.int32) - 64 * is_subnormal.to(torch.int32)
    odd = (wide == 0) | ~torch.isfinite(wide)
    return torch.where(odd, wide, mantissa).to(x.dtype), torch.where(odd, 0, exponent)


# ops that the rules of torch decompose
_BY_TORCH = "_weight_norm_interface replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d addmv permute_copy narrow_copy"

_VIEWS: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.diagonal.default: diagonal,
    aten.unfold.default: unfold,
}
_VALUES: dict[Any, Callable[..., Any]] = {
    **{op: decomposition_table[op] for op in (getattr(aten, name).default for name in _BY_TORCH.split())},
    **windows.POOLING,
    **DISTRIBUTIONS,
    **SPECIAL,
    **LINALG,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.copy.default: copy,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.unbind_copy.int: lambda x, dim=0: x.unbind(dim),
    aten.frexp.Tensor: frexp,
    aten.cumprod.default: cumprod,
    aten.logcumsumexp.default: lambda x, dim: _scanned(dim, [x], lambda before, now: [torch.logaddexp(before[0], now[0])])[0],
    aten.cummax.default: partial(_cumulative, torch.ge),
    aten.cummin.default: partial(_cumulative, torch.le),
    aten.kthvalue.default: kthvalue,
    aten.median.dim: partial(_median, False),
    aten.nanmedian.dim: partial(_median, True),
    aten.median.default: partial(_median_of_all, False),
    aten.nanmedian.default: partial(_median_of_all, True),
    **dict.fromkeys((aten.bucketize.Tensor, aten.bucketize.Scalar), lambda values, edges, **how: searchsorted(edges, values, **how)),
    **dict.fromkeys((aten.searchsorted.Tensor, aten.searchsorted.Scalar), searchsorted),
    aten.histc.default: histc,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_reduce.default: index_reduce,
    aten.masked_scatter.default: masked_scatter,
    aten.put.default: put,
    **dict.fromkeys((aten._embedding_bag.default, aten._embedding_bag_forward_only.default), embedding_bag),
    aten.addbmm.default: addbmm,
    aten._cdist_forward.default: lambda a, b, p, mode=None: _norm(a.unsqueeze(-2) - b.unsqueeze(-3), p),
    aten._pdist_forward.default: pdist,
    aten.dist.default: lambda a, b, p=2: torch.linalg.vector_norm(a - b, p),
    aten._trilinear.default: trilinear,
    aten.angle.default: angle,
}
COMPOSED = _VIEWS | {op: as_laid_out(op, rule) for op, rule in _VALUES.items()}
