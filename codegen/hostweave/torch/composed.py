"""ATen ops written with others, of which each is one here: torch takes the composed ones apart, and their derivatives with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """The product of the weight and of the patches that it sees: x [batch, channels, sizes...], weight [out, channels / groups, kernel...].

    A kernel as large as its stride sees each element once; of others, what they see is copied. A kernel that sees one channel is a sum.
    """
    kernel, outs = list(weight.shape[2:]), weight.shape[0]
    if transposed:
        return NotImplemented
    if 1 < groups < x.shape[1]:
        parts = zip(x.chunk(groups, 1), weight.chunk(groups), bias.chunk(groups) if bias is not None else [None] * groups, strict=True)
        made = [convolution(*part, stride, padding, dilation, transposed, output_padding, 1) for part in parts]
        return torch.cat(made, 1)
    count = len(kernel)
    stride, padding, dilation = ([*of] * (count if len(of) == 1 else 1) for of in (stride, padding, dilation))
    if any(padding):
        x = F.pad(x, [width for of in reversed(padding) for width in (of, of)])
    sizes = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]

    def seen(at: tuple[int, ...]) -> torch.Tensor:
        """What one element of the kernel is multiplied with: [batch, channels, *sizes]."""
        y = x
        for dim, (i, n, s, d) in enumerate(zip(at, sizes, stride, dilation, strict=True), 2):
            y = aten.slice(y, dim, i * d, i * d + s * (n - 1) + 1, s)
        return y

    places = list(product(*map(range, kernel)))
    if groups > 1:
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.repeat_interleave(outs // groups, 1) if outs > groups else x
        per_channel = weight.to(wide).flatten(2)
        y = sum(seen(at).to(wide) * per_channel[:, :, i].view(-1, *[1] * count) for i, at in enumerate(places))
        return (y if bias is None else y + bias.to(wide).view(-1, *[1] * count)).to(x.dtype)  # type: ignore[union-attr]
    if stride == kernel and all(size % k == 0 for size, k in zip(x.shape[2:], kernel, strict=True)) and set(dilation) == {1}:
        apart = x.reshape(*x.shape[:2], *(part for pair in zip(sizes, kernel, strict=True) for part in pair))
        patches = apart.permute(0, *range(2, 2 + 2 * count, 2), 1, *range(3, 3 + 2 * count, 2)).flatten(1, count).flatten(2)
    else:
        patches = torch.stack(list(map(seen, places)), 2).flatten(3).flatten(1, 2).transpose(1, 2)
    out: torch.Tensor = F.linear(patches, weight.flatten(1), bias).transpose(1, 2)
    return out.reshape(*out.shape[:2], *sizes)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore: int = -100,
    smoothing: float = 0.0,
) -> Any:
    """torch's loss of logits [rows, classes], or [rows, classes, sizes...]. Of rows alone, without weights, it is one op here."""
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
    """What `copy_` leaves in x."""
    return source.to(x.dtype).expand(x.shape)


COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.copy.default: copy,
}
