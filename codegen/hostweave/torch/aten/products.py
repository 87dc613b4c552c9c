"""Matmuls and attention."""

from typing import Any

import torch

import hostweave as hw
from hostweave.torch.aten.table import DTYPES, TABLE, Number, Result, aten, cast, refuse
from hostweave.types.size import Size, product
from hostweave.types.tensor import DType


@aten("linear.default")
def _linear(result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None = None) -> hw.Tensor:
    if x.ndim == 1:
        return hw.squeeze(_linear(result, hw.expand_dims(x, 0), weight, bias), 0)
    return hw.linear(x, weight, bias)


@aten("mm.default", "bmm.default", "matmul.default")
def _matmul(result: Result, a: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
    made = hw.matmul(hw.expand_dims(a, 0) if a.ndim == 1 else a, hw.expand_dims(b, 1) if b.ndim == 1 else b)
    gone = tuple(made.ndim - end for end, one in ((2, a), (1, b)) if one.ndim == 1)
    return hw.squeeze(made, gone) if gone else made


@aten("addmm.default", "baddbmm.default")
def _addmm(result: Result, bias: hw.Tensor, a: hw.Tensor, b: hw.Tensor, beta: Number = 1, alpha: Number = 1) -> hw.Tensor:
    made = hw.matmul(a, b)
    made = made if alpha == 1 else made * alpha
    return made if beta == 0 else made + (bias if beta == 1 else bias * beta)  # torch ignores the bias, even NaN, if beta is 0


@aten("_scaled_mm.default")
def _scaled_mm(
    result: Result,
    a: hw.Tensor,
    b: hw.Tensor,
    scale_a: hw.Tensor,
    scale_b: hw.Tensor,
    bias: hw.Tensor | None = None,
    scale_result: hw.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> hw.Tensor:
    """Sums are always in f32, also with `use_fast_accum`."""
    if scale_result is not None or DTYPES[result.dtype].itemsize == 1:
        raise refuse("_scaled_mm with a result of 8 bits is not supported; use out_dtype=torch.bfloat16, then quantise it")
    made = hw.scaled_matmul(a, b, scale_a, scale_b, out_dtype=DTYPES[result.dtype])
    return made if bias is None else made + cast(bias, result.dtype)


@aten("_grouped_mm.default")
def _grouped_mm(
    result: Result, a: hw.Tensor, b: hw.Tensor, offs: hw.Tensor | None = None, bias: hw.Tensor | None = None, out_dtype: Any = None
) -> hw.Tensor:
    if bias is not None or DTYPES[result.dtype] != a.dtype:
        raise refuse("grouped_mm with a bias, or a result of another dtype, is not supported; add the bias to the result, and cast it")
    if offs is None:
        return hw.matmul(a, b)
    if a.ndim == 3:  # b has groups of columns, so b.T has groups of rows
        return _grouped(b.T, hw.permute_dims(a, (0, 2, 1)), offs).T
    return _grouped(a, b, offs)


TABLE["transformers.grouped_mm_fallback.default"] = lambda result, x, weight, offs: _grouped(x, weight, offs)


@aten("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_fallback_backward(
    result: Result, x: hw.Tensor, weight: hw.Tensor, offs: hw.Tensor, dy: hw.Tensor
) -> tuple[hw.Tensor, hw.Tensor]:
    return _grouped(dy, hw.permute_dims(weight, (0, 2, 1)), offs), _grouped(x.T, dy, offs)


def _grouped(a: hw.Tensor, b: hw.Tensor, offs: hw.Tensor) -> hw.Tensor:
    return hw.grouped_matmul(a, b, cast(offs, torch.int32))


def _of_rows(x: hw.Tensor) -> hw.Tensor:
    """Merges all dims except the last one."""
    return x if x.ndim == 2 else hw.reshape(x, str(product(x.type.shape[:-1])), str(x.type.shape[-1]))


Quantised = tuple[hw.Tensor, hw.Tensor]  # (values, scales)


def _turned(scaled: Quantised) -> Quantised:
    return scaled[0].T, scaled[1].T


def _product(a: Quantised, b: Quantised, out: DType) -> hw.Tensor:
    """Product of a [M, K] and the transpose of b [N, K], which are quantised along K."""
    return hw.scaled_matmul(a[0], b[0].T, a[1], b[1].T, out_dtype=out)


def _scaled_rows(x: hw.Tensor, weight: Quantised, scaling: str, of_x: DType) -> hw.Tensor:
    made = _product(hw.quantize(_of_rows(x), scaling, of_x), weight, x.dtype)
    return made if x.ndim == 2 else hw.reshape(made, *map(str, (*x.type.shape[:-1], weight[0].type.shape[0])))


def _weight(weight: hw.Tensor, scaling: str) -> Quantised:
    return hw.quantize(weight, "block2d" if scaling == "block" else scaling)


@aten("hostweave.scaled_linear.default")
def _scaled_linear(result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None, scaling: str) -> hw.Tensor:
    made = _scaled_rows(x, _weight(weight, scaling), scaling, hw.f8e4m3)
    return made if bias is None else made + bias


@aten("hostweave.quantized_linear.default")
def _quantized_linear(
    result: Result, x: hw.Tensor, weight: hw.Tensor, scale: hw.Tensor, bias: hw.Tensor | None, bound: hw.Tensor | None, scaling: str
) -> hw.Tensor:
    """Linear whose weights are 8-bit floats with scales. With `bound`, the scale of a row of x is the largest magnitude in the row, clipped
    to the range from 1e-12 to `bound`, divided by 448."""
    rows = _of_rows(x)
    if bound is None:
        values, scales = hw.quantize(rows, scaling)
    else:
        top = hw.max(hw.abs(cast(rows, torch.float32)), -1, keepdims=True)
        scales = hw.clip(hw.minimum(top, bound), min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        values, _ = hw.quantize(rows, scaling, scale=scales)
    made = hw.scaled_matmul(values, weight.T, scales, scale.T, out_dtype=x.dtype)
    made = made if bias is None else made + cast(bias, result.dtype)
    return made if x.ndim == 2 else hw.reshape(made, *map(str, (*x.type.shape[:-1], weight.type.shape[0])))


def _of_gradients(scaling: str) -> DType:
    """Dtype of quantised gradients. f8e4m3 is more precise, but a whole tensor of gradients needs the larger range of f8e5m2."""
    return hw.f8e5m2 if scaling == "tensor" else hw.f8e4m3


@aten("hostweave.scaled_product.default")
def _scaled_product(result: Result, dy: hw.Tensor, weight: hw.Tensor, scaling: str) -> hw.Tensor:
    """Gradient of the activations. With one scale per tensor, forward and backward share the quantised weight."""
    of_weight = _turned(_weight(weight.T, scaling)) if scaling == "tensor" else _weight(weight, scaling)
    return _scaled_rows(dy, of_weight, scaling, _of_gradients(scaling))


@aten("hostweave.scaled_product_of_rows.default")
def _scaled_product_of_rows(result: Result, dy: hw.Tensor, x: hw.Tensor, scaling: str) -> hw.Tensor:
    """Gradient of a weight. With "tensor", dy is quantised as in `scaled_product`."""
    dy, x, of_gradients = _of_rows(dy), _of_rows(x), _of_gradients(scaling)
    if scaling == "tensor":
        return _product(_turned(hw.quantize(dy, scaling, of_gradients)), _turned(hw.quantize(x, scaling)), x.dtype)
    return _product(hw.quantize(dy.T, scaling, of_gradients), hw.quantize(x.T, scaling), x.dtype)


@aten("scaled_dot_product_attention.default")
def _attention(
    result: Result, q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, mask: Any = None, p: float = 0.0, is_causal: bool = False, **named: Any
) -> hw.Tensor:
    if p and "seed" not in named:
        raise refuse(f"attention with dropout_p={p} of tensors of a fusion has no seed; use hw.scaled_dot_product_attention")
    named |= {"dropout_p": p} if p else {}
    if q.ndim > 3 and all(x.type.shape[-3] == Size() for x in (k, v)):  # queries share one head of keys
        named["enable_gqa"] = True
    return hw.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **named)
