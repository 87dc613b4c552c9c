"""Products of matrices, attention, convolutions of patches."""

import math
from typing import Any

import hostweave as hw
from hostweave.torch.aten.table import Number, Result, aten, refuse


@aten("linear.default")
def _linear(result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None = None) -> hw.Tensor:
    if x.ndim == 1:
        return hw.squeeze(_linear(result, hw.expand_dims(x, 0), weight, bias), 0)
    return hw.linear(x, weight, bias)


@aten("mm.default", "bmm.default", "matmul.default")
def _matmul(result: Result, a: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
    if a.ndim == 1 or b.ndim == 1:
        rows = hw.expand_dims(a, 0) if a.ndim == 1 else a
        columns = hw.expand_dims(b, 1) if b.ndim == 1 else b
        gone = tuple(dim for dim, one in ((-2, a.ndim == 1), (-1, b.ndim == 1)) if one)
        product = hw.matmul(rows, columns)
        return hw.squeeze(product, tuple(dim % product.ndim for dim in gone))
    return hw.matmul(a, b)


@aten("addmm.default", "baddbmm.default")
def _addmm(result: Result, bias: hw.Tensor, a: hw.Tensor, b: hw.Tensor, beta: Number = 1, alpha: Number = 1) -> hw.Tensor:
    product = hw.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@aten("scaled_dot_product_attention.default")
def _attention(
    result: Result, q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, mask: Any = None, p: float = 0.0, is_causal: bool = False, **named: Any
) -> hw.Tensor:
    if p:
        raise refuse(f"attention with dropout_p={p} is not supported; call module.eval()")
    return hw.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **named)


@aten("convolution.default", "conv2d.default")
def _convolution(result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None, *rest: Any) -> hw.Tensor:
    """Of patches: a kernel as large as its stride is a matmul of the patches."""
    y = hw.matmul(patches(x, weight, *rest), hw.reshape(weight, int(weight.shape[0]), -1).T)
    y = y if bias is None else y + bias
    return hw.reshape(hw.permute_dims(y, (0, 2, 1)), *result.shape)


def patches(x: hw.Tensor, weight: hw.Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, *rest: Any) -> hw.Tensor:
    """What a convolution multiplies with its weight: [batch, patches, channels * elements of the kernel]."""
    kernel, count = [int(size) for size in weight.shape[2:]], weight.ndim - 2
    stride, padding, dilation = ([v] * count if isinstance(v, int) else (list(v) * count)[:count] for v in (stride, padding, dilation))
    transposed, groups = (bool(rest[0]), rest[2]) if len(rest) > 2 else (False, rest[0] if rest else 1)
    sizes = x.shape[2:]
    fits = all(isinstance(size, int) and size % k == 0 for size, k in zip(sizes, kernel, strict=True))
    if stride != kernel or any(padding) or any(d != 1 for d in dilation) or transposed or groups != 1 or not fits:
        raise refuse(
            f"a convolution of kernel {kernel}, stride {stride}, padding {padding}, groups {groups} is not supported; only one whose "
            "kernel is as large as its stride, as patches of an image are"
        )
    batch, channels = x.shape[:2]
    across = [int(size) // k for size, k in zip(sizes, kernel, strict=True)]
    split = hw.reshape(x, batch, channels, *(part for pair in zip(across, kernel, strict=True) for part in pair))
    apart = hw.permute_dims(split, (0, *range(2, 2 + 2 * count, 2), 1, *range(3, 3 + 2 * count, 2)))
    return hw.reshape(apart, batch, math.prod(across), int(channels) * math.prod(kernel))
