"""Pooling over windows of images, in terms of other ATen ops."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def each(given: Any, count: int) -> list[int]:
    """One number per dim, from a list or a single number. An empty list stays empty."""
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * count if len(numbers) == 1 else numbers


def seen(x: Any, at: Sequence[int], sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """Element at position `at` of each window. `sizes` are the numbers of windows along the last dims."""
    for dim, (i, n, s, d) in enumerate(zip(at, sizes, stride, dilation, strict=True), x.ndim - len(sizes)):
        x = aten.slice(x, dim, i * d, i * d + s * (n - 1) + 1, s)
    return x


def _sizes(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, count: int) -> tuple[list[int], list[int]]:
    """Number of windows along each dim, and the padding after each dim."""
    sizes, behind = [], []
    for size, k, s, p, d in zip(x.shape[-count:], kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        n = (size + 2 * p - reach + (s - 1 if ceil else 0)) // s + 1
        n -= ceil and (n - 1) * s >= size + p  # the last window would begin after the image
        sizes.append(n)
        behind.append(max(0, (n - 1) * s + reach - size - p))
    return sizes, behind


def _padded(x: Any, before: Sequence[int], behind: Sequence[int], value: float) -> Any:
    widths = [width for pair in zip(reversed(before), reversed(behind), strict=True) for width in pair]
    return F.pad(x, widths, value=value) if any(widths) else x


def _divided(total: Any, count: Any) -> Any:
    """Average, rounded towards 0 for ints."""
    return total / count if total.is_floating_point() else torch.div(total, count, rounding_mode="trunc")


def _average(
    count: int,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel, padding, ones = each(kernel, count), each(padding, count), [1] * count
    stride = each(stride, count) or kernel
    sizes, behind = _sizes(x, kernel, stride, padding, ones, ceil_mode, count)
    wide = _padded(x, padding, behind, 0)
    total: Any = sum(seen(wide, at, sizes, stride, ones) for at in product(*map(range, kernel)))
    if divisor_override:
        return _divided(total, divisor_override)
    for dim, (size, k, s, p, n) in enumerate(zip(x.shape[-count:], kernel, stride, padding, sizes, strict=True)):
        edge = p if count_include_pad else 0  # padding elements on either side that count
        counts = [min(begin + k, size + edge) - max(begin, -edge) for begin in range(-p, n * s - p, s)]
        if set(counts) == {counts[0]}:
            total = _divided(total, counts[0])
        else:
            positions = torch.arange(n, device=x.device) * s - p
            first = positions if count_include_pad else positions.clamp(0)
            lengths = (positions + k).clamp(max=size + edge) - first
            total = _divided(total, lengths.to(x.dtype).view(-1, *[1] * (count - 1 - dim)))
    return total


def _largest(
    count: int, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Any, Any]:
    kernel, padding, dilation = each(kernel, count), each(padding, count), each(dilation, count)
    stride = each(stride, count) or kernel
    sizes, behind = _sizes(x, kernel, stride, padding, dilation, ceil_mode, count)
    wide = _padded(x, padding, behind, -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)
    windows = [seen(wide, at, sizes, stride, dilation) for at in product(*map(range, kernel))]
    values, chosen = torch.stack(windows, -1).max(-1)
    number: Any = 0
    for dim, (size, k) in enumerate(zip(x.shape[-count:], kernel, strict=True)):
        own = chosen // math.prod(kernel[dim + 1 :]) % k
        begin = (torch.arange(sizes[dim], device=x.device) * stride[dim] - padding[dim]).view(-1, *[1] * (count - 1 - dim))
        position = begin + own * dilation[dim]
        # A window chooses padding only if all its elements are minimal. Then the window's first element in the image is used, as in
        # torch.
        number = number * size + (torch.where(position < 0, position % dilation[dim], position) if padding[dim] else position)
    return values, number


def _begins_and_ends(size: int, out: int, device: torch.device) -> tuple[Any, Any]:
    """Start and end of each window of adaptive pooling."""
    positions = torch.arange(out, device=device)
    return positions * size // out, ((positions + 1) * size + out - 1) // out


def _adaptive_average(count: int, x: Any, output: Any) -> Any:
    for dim, out in enumerate(each(output, count), x.ndim - count):
        size = x.shape[dim]
        if size % out == 0:
            x = x.unflatten(dim, (out, size // out)).mean(dim + 1)
        else:
            begin, end = _begins_and_ends(size, out, x.device)
            positions = begin[:, None] + torch.arange(size // out + 2, device=x.device)
            windows = x.index_select(dim, positions.clamp(max=size - 1).flatten()).unflatten(dim, positions.shape).movedim(dim + 1, -1)
            lengths = (end - begin).to(x.dtype).view(-1, *[1] * (x.ndim - 1 - dim))
            x = torch.where((positions < end[:, None]).view(out, *[1] * (x.ndim - 1 - dim), -1), windows, 0).sum(-1) / lengths
    return x


def _adaptive_largest(count: int, x: Any, output: Any) -> tuple[Any, Any]:
    output, images = each(output, count), x.shape[-count:]
    positions = []
    for dim, (size, out) in enumerate(zip(images, output, strict=True)):
        begin, end = _begins_and_ends(size, out, x.device)
        longest = max((i + 1) * size // out + ((i + 1) * size % out > 0) - i * size // out for i in range(out))
        # A shorter window repeats its last element.
        own = torch.minimum(begin[:, None] + torch.arange(longest, device=x.device), end[:, None] - 1)
        positions.append(own)
        x = x.index_select(x.ndim - count + dim, own.flatten())
    lead, longest_of = x.ndim - count, [position.shape[1] for position in positions]
    windows = x.reshape(*x.shape[:lead], *(n for pair in zip(output, longest_of, strict=True) for n in pair))
    turned = windows.permute(*range(lead), *range(lead, lead + 2 * count, 2), *range(lead + 1, lead + 2 * count, 2)).flatten(lead + count)
    values, chosen = turned.max(-1)
    number: Any = 0
    for dim, (size, longest) in enumerate(zip(images, longest_of, strict=True)):
        own = chosen // math.prod(longest_of[dim + 1 :]) % longest
        table = positions[dim].view(output[dim], *[1] * (count - 1 - dim), longest).expand(*own.shape[lead + dim :], longest)
        number = number * size + table.expand(*own.shape, longest).gather(-1, own.unsqueeze(-1)).squeeze(-1)
    return values, number


POOLING: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, f"avg_pool{n}d").default: partial(_average, n) for n in (1, 2, 3)},
    **{getattr(aten, f"max_pool{n}d_with_indices").default: partial(_largest, n) for n in (2, 3)},
    **{getattr(aten, f"_adaptive_avg_pool{n}d").default: partial(_adaptive_average, n) for n in (2, 3)},
    **{getattr(aten, f"adaptive_max_pool{n}d").default: partial(_adaptive_largest, n) for n in (2, 3)},
}
