"""Products of matrices, attention."""

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
