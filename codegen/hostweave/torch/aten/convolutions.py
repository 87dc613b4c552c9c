"""Convolutions and their derivatives, as matmuls with windows of images or, for groups of one channel, products and sums.

A `take` or a reshape reads all windows, so the number of ops does not depend on the kernel size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hostweave as hw
from hostweave.fusion_ir.frontend.recording import record
from hostweave.torch.aten.shapes import indexed, padded, size_along
from hostweave.torch.aten.table import TORCH_DTYPES, Result, aten, cast, wide
from hostweave.torch.windows import each
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, TensorType

SizePerDim = Sequence[int | str]


@dataclass(frozen=True)
class _Kernel:
    """A convolution with a kernel [out, channels / groups, sizes...] over padded images [batch, channels, sizes...]."""

    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    is_reversed: bool = False  # kernel positions are in reverse order, as in transposed convolutions

    def seen(self, x: hw.Tensor, outs: SizePerDim) -> hw.Tensor:
        """Input elements of each kernel position and output position: [batch, channels, positions, outs]."""
        batch, channels, *own = x.shape
        count = len(self.sizes)
        fits = all(isinstance(size, int) and k * n == size for k, n, size in zip(self.sizes, outs, own, strict=True))
        if not self.is_reversed and self.stride == self.sizes and set(self.dilation) == {1} and fits:
            apart = hw.reshape(x, batch, channels, *(size for pair in zip(outs, self.sizes, strict=True) for size in pair))
            turned = hw.permute_dims(apart, (0, 1, *range(3, 3 + 2 * count, 2), *range(2, 2 + 2 * count, 2)))
            return hw.reshape(turned, batch, channels, _count(self.sizes), _count(outs))
        flat = hw.reshape(x, batch, channels, 1, _count(own))
        if {*self.sizes, *self.stride} == {1}:
            return flat
        at = hw.expand_dims(self._numbers(x, self.sizes, self.dilation, self.is_reversed), 1) + self._numbers(x, outs, self.stride)
        return record("take", flat, hw.expand_dims(at, (0, 1)), hw.iota(flat, 3, hw.i64), axis=3)

    def _numbers(self, x: hw.Tensor, sizes: SizePerDim, strides: Sequence[int], is_reversed: bool = False) -> hw.Tensor:
        """Indices in a flattened image of the points of a grid: `sizes` points per dim, `strides` elements apart. Shape [points]."""
        total: Any = None
        for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            row: Any = record("iota", target=TensorType(hw.i64, (Dim.of(size),)), beside=x)
            row = (int(size) - 1 - row) * stride if is_reversed else row * stride
            for inner in range(dim + 3, x.ndim):
                row = row * size_along(x, inner, hw.i64)
            row = hw.reshape(row, *(size if i == dim else 1 for i in range(len(sizes))))
            total = row if total is None else total + row
        return hw.reshape(total, _count(sizes))

    def outputs(self, result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None, outs: SizePerDim) -> hw.Tensor:
        """Outputs [batch, out, outs...], by matmuls or, for groups of one channel, by products and sums."""
        seen, (out, channels) = self.seen(x, outs), weight.shape[:2]
        batch, taps = x.shape[0], _count(self.sizes)
        if self.groups > 1 and channels == 1:
            of_out = hw.reshape(weight, self.groups, int(out) // self.groups, taps, 1)
            y = hw.sum(wide(hw.expand_dims(seen, 2), result) * wide(of_out, result), 3)
        elif self.groups > 1:
            rows = hw.reshape(seen, batch, self.groups, int(channels) * taps, _count(outs))
            y = hw.matmul(hw.reshape(weight, self.groups, int(out) // self.groups, int(channels) * taps), rows)
        else:
            y = hw.matmul(hw.reshape(weight, out, int(channels) * taps), hw.reshape(seen, batch, int(channels) * taps, _count(outs)))
        y = hw.reshape(y, batch, out, *outs)
        made: hw.Tensor = y if bias is None else y + cast(hw.reshape(bias, -1, *(1 for _ in outs)), TORCH_DTYPES[y.dtype])
        return cast(made, result.dtype)

    def weights(self, result: Result, x: hw.Tensor, dy: hw.Tensor, shape: SizePerDim) -> hw.Tensor:
        """Gradient of the weight [out, channels / groups, sizes...]."""
        outs, taps = dy.shape[2:], _count(self.sizes)
        seen, (out, channels), batch = self.seen(x, outs), shape[:2], x.shape[0]
        if self.groups > 1 and channels == 1:
            of_out = hw.reshape(dy, batch, self.groups, int(out) // self.groups, 1, _count(outs))
            made = hw.sum(wide(hw.expand_dims(seen, 2), result) * wide(of_out, result), (0, 4))
        elif self.groups > 1:
            rows = hw.reshape(seen, batch, self.groups, int(channels) * taps, _count(outs))
            made = hw.einsum("bgop,bgqp->goq", hw.reshape(dy, batch, self.groups, int(out) // self.groups, _count(outs)), rows)
        else:
            rows = hw.reshape(seen, batch, int(channels) * taps, _count(outs))
            made = hw.einsum("bop,bqp->oq", hw.reshape(dy, batch, out, _count(outs)), rows)
        return cast(hw.reshape(made, *shape), result.dtype)


def _count(sizes: SizePerDim) -> Any:
    total = product(tuple(Size.of(str(size)) for size in sizes))
    return int(total) if total.is_int else str(total)


def _widened(result: Result, x: hw.Tensor, before: Sequence[int], behind: Sequence[int]) -> hw.Tensor:
    return padded(result, x, [width for pair in zip(reversed(before), reversed(behind), strict=True) for width in pair])


def _turned(
    result: Result, y: hw.Tensor, weight: hw.Tensor, kernel: _Kernel, padding: Sequence[int], more: Sequence[int]
) -> tuple[hw.Tensor, hw.Tensor, _Kernel]:
    """Images, weight and kernel of a convolution, with stride 1 and no padding, that equals a transposed convolution."""
    for dim, s in enumerate(kernel.stride, 2):  # zeros between the elements
        if s > 1:
            size = int(y.shape[dim])
            apart = hw.pad(hw.expand_dims(y, dim + 1), (*(0 for _ in range(2 * (y.ndim - 1 - dim))), 0, s - 1))
            y = hw.reshape(apart, *(size * s if i == dim else length for i, length in enumerate(y.shape)))
            y = indexed(y, dim, slice(0, size * s - s + 1))
    before = [d * (k - 1) - p for d, k, p in zip(kernel.dilation, kernel.sizes, padding, strict=True)]
    y = _widened(result, y, before, [width + extra for width, extra in zip(before, more, strict=True)])
    ins, channels = int(weight.shape[0]), int(weight.shape[1])
    apart = hw.reshape(weight, kernel.groups, ins // kernel.groups, channels, *kernel.sizes)
    swapped = hw.permute_dims(apart, (0, 2, 1, *range(3, apart.ndim)))
    swapped = hw.reshape(swapped, kernel.groups * channels, ins // kernel.groups, *kernel.sizes)
    return y, swapped, _Kernel(kernel.sizes, (1,) * len(kernel.sizes), kernel.dilation, kernel.groups, is_reversed=True)


def _geometry(
    weight: hw.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool, more: Any, groups: int
) -> tuple[_Kernel, Sequence[int], bool, Sequence[int]]:
    stride, padding, dilation, more = (tuple(each(sizes, weight.ndim - 2)) for sizes in (stride, padding, dilation, more))
    return _Kernel(tuple(map(int, weight.shape[2:])), stride, dilation, groups), padding, transposed, more


@aten("convolution.default")
def _convolution(result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None, *geometry: Any) -> hw.Tensor:
    kernel, padding, transposed, output_padding = _geometry(weight, *geometry)
    if transposed:
        x, weight, kernel = _turned(result, x, weight, kernel, padding, output_padding)
    else:
        x = _widened(result, x, padding, padding)
    return kernel.outputs(result, x, weight, bias, result.shape[2:])


@aten("convolution_backward.default")
def _convolution_backward(
    result: Result, dy: hw.Tensor, x: hw.Tensor, weight: hw.Tensor, bias_sizes: Any, *geometry: Any
) -> tuple[hw.Tensor | None, ...]:
    *geometry_of_forward, mask = geometry
    kernel, padding, transposed, _ = _geometry(weight, *geometry_of_forward)
    dx = dw = None
    if transposed:
        wide_dy = _widened(result, dy, padding, padding)
        dx = kernel.outputs(result, wide_dy, weight, None, x.shape[2:]) if mask[0] else None
        dw = kernel.weights(result, wide_dy, x, weight.shape) if mask[1] else None
    else:
        if mask[0]:
            dims = zip(dy.shape[2:], kernel.stride, padding, kernel.dilation, kernel.sizes, strict=True)
            reach = [(int(n) - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in dims]
            more = [int(size) - seen for size, seen in zip(x.shape[2:], reach, strict=True)]
            of_dy, turned, own = _turned(result, dy, weight, kernel, padding, more)
            dx = own.outputs(result, of_dy, turned, None, x.shape[2:])
        dw = kernel.weights(result, _widened(result, x, padding, padding), dy, weight.shape) if mask[1] else None
    db = cast(hw.sum(wide(dy, result), (0, *range(2, dy.ndim))), result.dtype) if mask[2] else None
    return dx, dw, db
