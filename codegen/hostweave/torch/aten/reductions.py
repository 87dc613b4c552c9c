"""Reductions and normalisations."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import hostweave as hw
from hostweave.torch.aten.table import TABLE, Number, Result, aten, cast, wide


def _dims(x: hw.Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims) or tuple(range(x.ndim))


def _reduction(
    function: Callable[..., hw.Tensor], result: Result, x: hw.Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    return cast(function(cast(x, result.dtype), _dims(x, dim), keepdim), result.dtype)


for _name, _function in {"sum": hw.sum, "mean": hw.mean, "prod": hw.prod}.items():
    TABLE.update({f"{_name}.{overload}": partial(_reduction, _function) for overload in ("default", "dim", "dim_IntList", "dim_int")})
TABLE.update({"amax.default": partial(_reduction, hw.max), "amin.default": partial(_reduction, hw.min)})
TABLE.update({"max.default": partial(_reduction, hw.max), "min.default": partial(_reduction, hw.min)})


def _truths(function: Callable[..., hw.Tensor], result: Result, x: hw.Tensor, dim: Any = None, keepdim: bool = False) -> hw.Tensor:
    return cast(function(x if x.dtype == hw.bool_ else x != 0, _dims(x, dim), keepdim), result.dtype)  # torch's result for u8 is u8


for _name, _function in {"any": hw.any, "all": hw.all}.items():
    TABLE.update({f"{_name}.{overload}": partial(_truths, _function) for overload in ("default", "dim", "dims")})


@aten("var.correction")
def _var(result: Result, x: hw.Tensor, dim: Any = None, correction: Number | None = 1, keepdim: bool = False) -> hw.Tensor:
    return hw.var(x, _dims(x, dim), 1 if correction is None else correction, keepdim)


@aten("std.correction")
def _std(result: Result, x: hw.Tensor, dim: Any = None, correction: Number | None = 1, keepdim: bool = False) -> hw.Tensor:
    return hw.sqrt(_var(result, x, dim, correction, keepdim))


def _argmax(result: Result, x: hw.Tensor, dim: int | None = None, keepdim: bool = False) -> hw.Tensor:
    return hw.argmax(hw.astype(x, hw.u8) if x.dtype == hw.bool_ else x, dim, keepdim)


def _argmin(result: Result, x: hw.Tensor, dim: int | None = None, keepdim: bool = False) -> hw.Tensor:
    """Argmax of negated floats, or of complemented ints, because negation of ints may overflow."""
    return _argmax(result, -x if x.dtype.kind == "float" else ~x, dim, keepdim)


def _with_mean(function: Any, result: Result, x: hw.Tensor, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return function(result, x, dim, correction, keepdim), hw.mean(x, _dims(x, dim), keepdim)


TABLE |= {
    "var_mean.correction": partial(_with_mean, _var),
    "std_mean.correction": partial(_with_mean, _std),
    "argmax.default": _argmax,
    "max.dim": lambda result, x, dim, keepdim=False: (hw.max(x, dim, keepdim), _argmax(result, x, dim, keepdim)),
    "argmin.default": _argmin,
    "min.dim": lambda result, x, dim, keepdim=False: (hw.min(x, dim, keepdim), _argmin(result, x, dim, keepdim)),
    "cumsum.default": lambda result, x, dim, dtype=None: hw.cumsum(cast(x, result.dtype), dim),
    **dict.fromkeys(("softmax.int", "_softmax.default"), lambda result, x, dim, _=None, dtype=None: hw.softmax(cast(x, result.dtype), dim)),
    **dict.fromkeys(
        ("log_softmax.int", "_log_softmax.default"), lambda result, x, dim, _=None, dtype=None: hw.log_softmax(cast(x, result.dtype), dim)
    ),
}


def _norm(function: Callable[..., hw.Tensor], x: hw.Tensor, shape: Sequence[int], *scales: hw.Tensor | None, eps: float) -> hw.Tensor:
    """Normalises over the last dims."""
    if len(shape) == 1:
        return function(x, *scales, eps=eps)
    flat = hw.reshape(x, *x.shape[: x.ndim - len(shape)], math.prod(shape))
    return hw.reshape(function(flat, *(scale if scale is None else hw.reshape(scale, -1) for scale in scales), eps=eps), *x.shape)


@aten("layer_norm.default")
def _layer_norm(result: Result, x: hw.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> hw.Tensor:
    return _norm(hw.layer_norm, x, shape, weight, bias, eps=eps)


@aten("rms_norm.default")
def _rms_norm(result: Result, x: hw.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> hw.Tensor:
    eps = torch.finfo(torch.promote_types(result.dtype, torch.float32)).eps if eps is None else eps
    return _norm(hw.rms_norm, x, shape, weight, eps=eps)


@aten("linalg_vector_norm.default")
def _vector_norm(result: Result, x: hw.Tensor, ord: Number = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x, dims = cast(x, result.dtype), _dims(x, dim)
    if ord == 2:
        return hw.sqrt(hw.sum(x * x, dims, keepdim))
    size = hw.abs(x)
    if ord in (math.inf, -math.inf):
        return (hw.max if ord > 0 else hw.min)(size, dims, keepdim)
    if ord in (0, 1):
        return hw.sum(cast(x != 0, result.dtype) if ord == 0 else size, dims, keepdim)
    return hw.sum(size ** float(ord), dims, keepdim) ** (1 / ord)


@aten("_native_batch_norm_legit_no_training.default")
def _batch_norm(
    result: Result, x: hw.Tensor, weight: Any, bias: Any, mean: hw.Tensor, var: hw.Tensor, momentum: float, eps: float
) -> tuple[hw.Tensor]:
    def of_channel(y: hw.Tensor) -> hw.Tensor:
        return hw.reshape(wide(y, result), -1, *(1 for _ in range(x.ndim - 2)))

    normed = (wide(x, result) - of_channel(mean)) * hw.rsqrt(of_channel(var) + eps)
    normed = normed if weight is None else normed * of_channel(weight)
    return (cast(normed if bias is None else normed + of_channel(bias), result.dtype),)
