"""ATen ops as functions of a fusion: one entry an op.

An entry takes the op's result, `Result`, and then the op's own arguments: tensors of the fusion, Python numbers, lists, None.
Where torch promotes dtypes, operands are cast to the dtype that torch computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hostweave as hw
from hostweave.base.errors import Location, ProgramError
from hostweave.fusion_ir.frontend.recording import record
from hostweave.types.tensor import Dim, DType, TensorType

Number = int | float | bool
Sizes = tuple[int | str, ...]

DTYPES = {
    torch.float64: hw.f64,
    torch.float32: hw.f32,
    torch.float16: hw.f16,
    torch.bfloat16: hw.bf16,
    torch.float8_e4m3fn: hw.f8e4m3,
    torch.float8_e5m2: hw.f8e5m2,
    torch.int64: hw.i64,
    torch.int32: hw.i32,
    torch.int16: hw.i16,
    torch.int8: hw.i8,
    torch.uint64: hw.u64,
    torch.uint32: hw.u32,
    torch.uint16: hw.u16,
    torch.uint8: hw.u8,
    torch.bool: hw.bool_,
}


@dataclass(frozen=True)
class Result:
    """What torch says of an op's results: the dtype and the sizes of each."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Sizes, ...]
    trace: hw.Tensor  # any tensor of the function, beside which a tensor without operands is made

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def shape(self) -> Sizes:
        return self.shapes[0]


Entry = Callable[..., Any]
TABLE: dict[str, Entry] = {}


def _aten(*names: str) -> Callable[[Entry], Entry]:
    def enter(entry: Entry) -> Entry:
        TABLE.update(dict.fromkeys(names, entry))
        return entry

    return enter


def _refuse(why: str) -> ProgramError:
    return ProgramError(why, Location.of_caller())


def dtype_of(dtype: torch.dtype) -> DType:
    """The dtype by its torch name. Raises ProgramError."""
    if dtype not in DTYPES:
        raise _refuse(f"{dtype} is not supported; cast to one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}")
    return DTYPES[dtype]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, hw.Tensor) or x.dtype == dtype_of(dtype):
        return x
    return hw.astype(x, dtype_of(dtype))


def _torch(x: hw.Tensor) -> torch.dtype:
    return next(name for name, dtype in DTYPES.items() if dtype == x.dtype)


def _common(a: Any, b: Any) -> torch.dtype:
    """The dtype in which torch compares or computes with two operands."""
    if isinstance(a, hw.Tensor) and isinstance(b, hw.Tensor):
        return torch.promote_types(_torch(a), _torch(b))
    tensor, number = (a, b) if isinstance(a, hw.Tensor) else (b, a)
    return torch.result_type(torch.empty(1, dtype=_torch(tensor)), number)


def _full(result: Result, value: Number | hw.Tensor) -> hw.Tensor:
    """A tensor of one value."""
    dtype, shape = dtype_of(result.dtype), result.shape
    if isinstance(value, hw.Tensor):
        return hw.broadcast_to(_cast(value, result.dtype), *shape) if shape else _cast(value, result.dtype)
    length = Dim.of(shape[0] if shape else 1)
    zeros = record("iota", target=TensorType(hw.i32, (length,)), beside=result.trace) * 0
    if dtype.kind == "bool":
        filled = zeros == 0 if value else zeros != 0
    elif dtype.kind == "float" and not math.isfinite(value):
        filled = hw.where(zeros == 0, value, hw.astype(zeros, dtype))
    else:
        filled = hw.astype(zeros, dtype) + value if value else hw.astype(zeros, dtype)
    if not shape:
        return hw.squeeze(filled, 0)
    filled = hw.expand_dims(filled, tuple(range(1, len(shape)))) if len(shape) > 1 else filled
    return hw.broadcast_to(filled, *shape)


# --- pointwise --------------------------------------------------------------------------------------------------------


def _unary(name: str, function: Callable[[hw.Tensor], hw.Tensor]) -> None:
    TABLE[f"{name}.default"] = lambda result, x: _cast(function(_cast(x, result.dtype)), result.dtype)


for _name in [
    "abs",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "erf",
    "sigmoid",
    "relu",
    "silu",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sign",
    "reciprocal",
]:
    _unary(_name, getattr(hw, _name))
_unary("neg", hw.negative)
_unary("bitwise_not", lambda x: ~x)
_unary("log1p", lambda x: hw.log(x + 1))
_unary("expm1", lambda x: hw.exp(x) - 1)
_unary("square", lambda x: x * x)
_unary("log2", lambda x: hw.log(x) * (1 / math.log(2)))
_unary("exp2", lambda x: hw.exp(x * math.log(2)))


@_aten("logical_not.default")
def _logical_not(result: Result, x: Any) -> hw.Tensor:
    return hw.logical_not(x if x.dtype == hw.bool_ else x != 0)


@_aten("isnan.default")
def _isnan(result: Result, x: hw.Tensor) -> hw.Tensor:
    return x != x


@_aten("gelu.default")
def _gelu(result: Result, x: hw.Tensor, approximate: str = "none") -> hw.Tensor:
    return hw.gelu(x, approximate)


def _binary(name: str, function: Callable[[Any, Any], hw.Tensor], overloads: str = "Tensor Scalar") -> None:
    def entry(result: Result, a: Any, b: Any, alpha: Number = 1) -> Any:
        dtype = result.dtype
        a, b = _cast(a, dtype), _cast(b, dtype)
        return _cast(function(a, b if alpha == 1 else b * alpha), dtype)

    TABLE.update({f"{name}.{overload}": entry for overload in overloads.split()})


for _name, _function in {
    "add": lambda a, b: (a | b) if isinstance(a, hw.Tensor) and a.dtype == hw.bool_ else a + b,
    "mul": lambda a, b: (a & b) if isinstance(a, hw.Tensor) and a.dtype == hw.bool_ else a * b,
    "sub": lambda a, b: a - b,
    "remainder": lambda a, b: a % b,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "__and__": lambda a, b: a & b,
    "__or__": lambda a, b: a | b,
}.items():
    _binary(_name, _function)
_binary("maximum", hw.maximum, "default")
_binary("minimum", hw.minimum, "default")
_binary("rsub", lambda a, b: b - a)
_binary("pow", lambda a, b: a**b, "Tensor_Tensor Tensor_Scalar Scalar")


@_aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "true_divide.Tensor")
def _div(result: Result, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    a, b = _cast(a, result.dtype), _cast(b, result.dtype)
    if not result.dtype.is_floating_point or rounding_mode == "floor":
        if rounding_mode == "trunc":
            raise _refuse("aten.div with rounding_mode='trunc' of ints is not supported; use 'floor'")
        return a // b
    return hw.trunc(a / b) if rounding_mode == "trunc" else a / b


def _comparison(name: str, function: Callable[[Any, Any], hw.Tensor]) -> None:
    def entry(result: Result, a: Any, b: Any) -> hw.Tensor:
        dtype = _common(a, b)
        return function(_cast(a, dtype), _cast(b, dtype))

    TABLE.update({f"{name}.{overload}": entry for overload in ("Tensor", "Scalar")})


for _name, _function in {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}.items():
    _comparison(_name, _function)


def _logical(name: str, function: Callable[[Any, Any], hw.Tensor]) -> None:
    TABLE[f"{name}.default"] = lambda result, a, b: function(*(x if x.dtype == hw.bool_ else x != 0 for x in (a, b)))


for _name in ("logical_and", "logical_or", "logical_xor"):
    _logical(_name, getattr(hw, _name))


@_aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(result: Result, condition: hw.Tensor, a: Any, b: Any) -> hw.Tensor:
    a, b = _cast(a, result.dtype), _cast(b, result.dtype)
    if not isinstance(a, hw.Tensor) and not isinstance(b, hw.Tensor):
        b = _full(Result((result.dtype,), ((1,) * condition.ndim,), condition), b)
    return hw.where(condition, a, b)


@_aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(result: Result, x: hw.Tensor, mask: hw.Tensor, value: Any) -> hw.Tensor:
    return hw.where(mask, _cast(value, result.dtype), x)


@_aten("clamp.default", "clamp.Tensor", "hardtanh.default")
def _clamp(result: Result, x: hw.Tensor, min: Any = None, max: Any = None) -> hw.Tensor:
    return hw.clip(x, _cast(min, result.dtype), _cast(max, result.dtype))


@_aten("clamp_min.default")
def _clamp_min(result: Result, x: hw.Tensor, min: Number) -> hw.Tensor:
    return hw.clip(x, min=min)


@_aten("clamp_max.default")
def _clamp_max(result: Result, x: hw.Tensor, max: Number) -> hw.Tensor:
    return hw.clip(x, max=max)


@_aten("_to_copy.default", "to.dtype", "_assert_tensor_metadata.default")
def _to(result: Result, x: hw.Tensor, *_: Any, **__: Any) -> hw.Tensor | None:
    return _cast(x, result.dtype) if result.dtypes else None


@_aten("clone.default", "alias.default", "detach.default", "contiguous.default", "lift_fresh_copy.default")
def _same(result: Result, x: hw.Tensor, **_: Any) -> hw.Tensor:
    return x


@_aten("dropout.default", "native_dropout.default")
def _dropout(result: Result, x: hw.Tensor, p: float, train: bool | None = True) -> hw.Tensor:
    if train and p:
        raise _refuse(f"dropout with p={p} in a module that trains is not supported in a forward program; call module.eval()")
    return x


# --- made of nothing --------------------------------------------------------------------------------------------------


@_aten("full.default", "full_like.default", "scalar_tensor.default", "new_full.default")
def _full_of(result: Result, *arguments: Any, **_: Any) -> hw.Tensor:
    return _full(result, arguments[-1])


@_aten("zeros.default", "zeros_like.default", "new_zeros.default", "empty_like.default")
def _zeros(result: Result, *_: Any, **__: Any) -> hw.Tensor:
    return _full(result, 0)


@_aten("ones.default", "ones_like.default", "new_ones.default")
def _ones(result: Result, *_: Any, **__: Any) -> hw.Tensor:
    return _full(result, 1)


@_aten("arange.start_step", "arange.start", "arange.default")
def _arange(result: Result, *arguments: Any, **_: Any) -> Any:
    start, step = (0, 1) if len(arguments) == 1 else (arguments[0], arguments[2] if len(arguments) > 2 else 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise _refuse(f"aten.arange from {start} in steps of {step}: numbers known at compile time are wanted; write ints")
    numbers = record("iota", target=TensorType(hw.i64, (Dim.of(result.shape[0]),)), beside=result.trace)
    numbers = numbers if step == 1 else numbers * step
    return _cast(numbers if start == 0 else numbers + start, result.dtype)


# --- shapes -----------------------------------------------------------------------------------------------------------


@_aten("view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "view_copy.default")
def _view(result: Result, x: hw.Tensor, *_: Any) -> hw.Tensor:
    return x if tuple(map(str, x.shape)) == tuple(map(str, result.shape)) else hw.reshape(x, *result.shape)


@_aten("expand.default", "expand_copy.default")
def _expand(result: Result, x: hw.Tensor, *_: Any, **__: Any) -> hw.Tensor:
    return x if tuple(map(str, x.shape)) == tuple(map(str, result.shape)) else hw.broadcast_to(x, *result.shape)


@_aten("permute.default")
def _permute(result: Result, x: hw.Tensor, dims: Sequence[int]) -> hw.Tensor:
    return hw.permute_dims(x, tuple(d % x.ndim for d in dims))


@_aten("transpose.int")
def _transpose(result: Result, x: hw.Tensor, a: int, b: int) -> hw.Tensor:
    dims = list(range(x.ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return hw.permute_dims(x, tuple(dims))


@_aten("t.default")
def _t(result: Result, x: hw.Tensor) -> hw.Tensor:
    return x.T if x.ndim == 2 else x


@_aten("unsqueeze.default")
def _unsqueeze(result: Result, x: hw.Tensor, dim: int) -> hw.Tensor:
    return hw.expand_dims(x, dim)


@_aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(result: Result, x: hw.Tensor, dim: int | Sequence[int] | None = None) -> hw.Tensor:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = tuple(d % x.ndim for d in dims if x.shape[d] == 1)
    return hw.squeeze(x, gone) if gone else x


@_aten("slice.Tensor")
def _slice(result: Result, x: hw.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> hw.Tensor:
    if tuple(map(str, x.shape)) == tuple(map(str, result.shape)):
        return x
    end = None if end is None or (isinstance(end, int) and end >= 2**62) else end
    return x[(*(slice(None) for _ in range(dim % x.ndim)), slice(start, end, step))]


@_aten("select.int")
def _select(result: Result, x: hw.Tensor, dim: int, index: int) -> hw.Tensor:
    return x[(*(slice(None) for _ in range(dim % x.ndim)), index)]


@_aten("cat.default")
def _cat(result: Result, tensors: Sequence[hw.Tensor], dim: int = 0) -> hw.Tensor:
    return hw.concat([_cast(tensor, result.dtype) for tensor in tensors], dim)


@_aten("stack.default")
def _stack(result: Result, tensors: Sequence[hw.Tensor], dim: int = 0) -> hw.Tensor:
    return hw.stack([_cast(tensor, result.dtype) for tensor in tensors], dim)


@_aten("split.Tensor", "split_with_sizes.default", "chunk.default", "split.sizes")
def _split(result: Result, x: hw.Tensor, _: Any, dim: int = 0) -> tuple[hw.Tensor, ...]:
    starts, parts = 0, []
    for shape in result.shapes:
        size = shape[dim]
        if not isinstance(size, int):
            raise _refuse(f"a split of a dim into {size} is not supported; split a dim of fixed size")
        parts.append(x[(*(slice(None) for _ in range(dim % x.ndim)), slice(starts, starts + size))])
        starts += size
    return tuple(parts)


@_aten("unbind.int")
def _unbind(result: Result, x: hw.Tensor, dim: int = 0) -> tuple[hw.Tensor, ...]:
    return tuple(_select(result, x, dim, i) for i in range(len(result.shapes)))


@_aten("repeat.default")
def _repeat(result: Result, x: hw.Tensor, repeats: Sequence[int]) -> hw.Tensor:
    x = hw.reshape(x, *(1 for _ in range(len(repeats) - x.ndim)), *x.shape) if len(repeats) > x.ndim else x
    for dim, count in enumerate(repeats):
        x = x if count == 1 else hw.concat([x] * count, dim)
    return x


@_aten("constant_pad_nd.default")
def _pad(result: Result, x: hw.Tensor, pad: Sequence[int], value: Number = 0) -> hw.Tensor:
    return hw.pad(x, list(pad), value=value)


@_aten("tril.default")
def _tril(result: Result, x: hw.Tensor, diagonal: int = 0) -> hw.Tensor:
    seen = hw.iota(x, -2)[:, None] + diagonal >= hw.iota(x, -1)[None, :]
    return x & seen if x.dtype == hw.bool_ else hw.where(seen, x, 0)


@_aten("triu.default")
def _triu(result: Result, x: hw.Tensor, diagonal: int = 0) -> hw.Tensor:
    seen = hw.iota(x, -2)[:, None] + diagonal <= hw.iota(x, -1)[None, :]
    return x & seen if x.dtype == hw.bool_ else hw.where(seen, x, 0)


# --- reductions -------------------------------------------------------------------------------------------------------


def _dims(x: hw.Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims) or tuple(range(x.ndim))


def _reduction(function: Callable[..., hw.Tensor]) -> Entry:
    def entry(result: Result, x: hw.Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return _cast(function(_cast(x, result.dtype), _dims(x, dim), keepdim), result.dtype)

    return entry


for _name, _function in {"sum": hw.sum, "mean": hw.mean}.items():
    TABLE.update({f"{_name}.{overload}": _reduction(_function) for overload in ("default", "dim", "dim_IntList")})
TABLE.update({"amax.default": _reduction(hw.max), "amin.default": _reduction(hw.min)})
TABLE.update({"max.default": _reduction(hw.max), "min.default": _reduction(hw.min)})


def _truths(function: Callable[..., hw.Tensor]) -> Entry:
    def entry(result: Result, x: hw.Tensor, dim: Any = None, keepdim: bool = False) -> hw.Tensor:
        return function(x if x.dtype == hw.bool_ else x != 0, _dims(x, dim), keepdim)

    return entry


for _name, _function in {"any": hw.any, "all": hw.all}.items():
    TABLE.update({f"{_name}.{overload}": _truths(_function) for overload in ("default", "dim", "dims")})


@_aten("var.correction", "var.dim")
def _var(result: Result, x: hw.Tensor, dim: Any = None, correction: Number | None = 1, keepdim: bool = False) -> hw.Tensor:
    dims, less = _dims(x, dim), 1 if correction is None else correction
    sizes = [x.shape[d] for d in dims]
    if less and not all(isinstance(size, int) for size in sizes):
        raise _refuse(f"a variance with correction={less} over sizes that are not known, {sizes}, is not supported; use correction=0")
    variance = hw.var(x, dims, 0, keepdim)
    if not less:
        return variance
    count = math.prod(map(int, sizes))
    return variance * (count / (count - less) if count > less else math.nan)


@_aten("argmax.default")
def _argmax(result: Result, x: hw.Tensor, dim: int | None = None, keepdim: bool = False) -> hw.Tensor:
    return hw.argmax(x, dim, keepdim)


@_aten("max.dim")
def _max_dim(result: Result, x: hw.Tensor, dim: int, keepdim: bool = False) -> tuple[hw.Tensor, hw.Tensor]:
    return hw.max(x, dim, keepdim), hw.argmax(x, dim, keepdim)


@_aten("cumsum.default")
def _cumsum(result: Result, x: hw.Tensor, dim: int, dtype: Any = None) -> hw.Tensor:
    return hw.cumsum(_cast(x, result.dtype), dim)


@_aten("softmax.int", "_softmax.default", "_safe_softmax.default")
def _softmax(result: Result, x: hw.Tensor, dim: int, _: Any = None, dtype: Any = None) -> hw.Tensor:
    return hw.softmax(_cast(x, result.dtype), dim)


@_aten("log_softmax.int", "_log_softmax.default")
def _log_softmax(result: Result, x: hw.Tensor, dim: int, _: Any = None, dtype: Any = None) -> hw.Tensor:
    return hw.log_softmax(_cast(x, result.dtype), dim)


def _normalised(x: hw.Tensor, shape: Sequence[int]) -> hw.Tensor:
    if len(shape) != 1:
        raise _refuse(f"a norm over the dims {list(shape)} is not supported; normalize over the last dim")
    return x


@_aten("layer_norm.default")
def _layer_norm(result: Result, x: hw.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> hw.Tensor:
    return hw.layer_norm(_normalised(x, shape), weight, bias, eps=eps)


@_aten("rms_norm.default")
def _rms_norm(result: Result, x: hw.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> hw.Tensor:
    return hw.rms_norm(_normalised(x, shape), weight, eps=torch.finfo(result.dtype).eps if eps is None else eps)


@_aten("linalg_vector_norm.default")
def _vector_norm(result: Result, x: hw.Tensor, ord: Number = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x, dims = _cast(x, result.dtype), _dims(x, dim)
    if ord == 2:
        return hw.sqrt(hw.sum(x * x, dims, keepdim))
    if ord in (1, math.inf):
        return (hw.sum if ord == 1 else hw.max)(hw.abs(x), dims, keepdim)
    raise _refuse(f"a norm of order {ord} is not supported; use 1, 2 or inf")


@_aten("_native_batch_norm_legit_no_training.default")
def _batch_norm(
    result: Result, x: hw.Tensor, weight: Any, bias: Any, mean: hw.Tensor, var: hw.Tensor, momentum: float, eps: float
) -> tuple[hw.Tensor]:
    def of_channel(y: hw.Tensor) -> hw.Tensor:
        return hw.reshape(_cast(y, torch.promote_types(result.dtype, torch.float32)), -1, *(1 for _ in range(x.ndim - 2)))

    normed = (_cast(x, torch.promote_types(result.dtype, torch.float32)) - of_channel(mean)) * hw.rsqrt(of_channel(var) + eps)
    normed = normed if weight is None else normed * of_channel(weight)
    return (_cast(normed if bias is None else normed + of_channel(bias), result.dtype),)


# --- products ---------------------------------------------------------------------------------------------------------


@_aten("linear.default")
def _linear(result: Result, x: hw.Tensor, weight: hw.Tensor, bias: hw.Tensor | None = None) -> hw.Tensor:
    if x.ndim == 1:
        return hw.squeeze(_linear(result, hw.expand_dims(x, 0), weight, bias), 0)
    return hw.linear(x, weight, bias)


@_aten("mm.default", "bmm.default", "matmul.default")
def _matmul(result: Result, a: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
    if a.ndim == 1 or b.ndim == 1:
        rows = hw.expand_dims(a, 0) if a.ndim == 1 else a
        columns = hw.expand_dims(b, 1) if b.ndim == 1 else b
        gone = tuple(dim for dim, one in ((-2, a.ndim == 1), (-1, b.ndim == 1)) if one)
        product = hw.matmul(rows, columns)
        return hw.squeeze(product, tuple(dim % product.ndim for dim in gone))
    return hw.matmul(a, b)


@_aten("addmm.default", "baddbmm.default")
def _addmm(result: Result, bias: hw.Tensor, a: hw.Tensor, b: hw.Tensor, beta: Number = 1, alpha: Number = 1) -> hw.Tensor:
    product = hw.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@_aten("scaled_dot_product_attention.default")
def _attention(
    result: Result, q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, mask: Any = None, p: float = 0.0, is_causal: bool = False, **named: Any
) -> hw.Tensor:
    if p:
        raise _refuse(f"attention with dropout_p={p} is not supported; call module.eval()")
    return hw.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=named.get("scale"), enable_gqa=bool(named.get("enable_gqa"))
    )


@_aten("convolution.default", "conv2d.default")
def _convolution(
    result: Result,
    x: hw.Tensor,
    weight: hw.Tensor,
    bias: hw.Tensor | None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    *rest: Any,
) -> hw.Tensor:
    """Of patches: a kernel as large as its stride is a matmul of the patches."""
    kernel, count = [int(size) for size in weight.shape[2:]], weight.ndim - 2
    stride, padding, dilation = ([v] * count if isinstance(v, int) else (list(v) * count)[:count] for v in (stride, padding, dilation))
    transposed, groups = (bool(rest[0]), rest[2]) if len(rest) > 2 else (False, rest[0] if rest else 1)
    sizes = x.shape[2:]
    fits = all(isinstance(size, int) and size % k == 0 for size, k in zip(sizes, kernel, strict=True))
    if stride != kernel or any(padding) or any(d != 1 for d in dilation) or transposed or groups != 1 or not fits:
        raise _refuse(
            f"a convolution of kernel {kernel}, stride {stride}, padding {padding}, groups {groups} is not supported; only one whose "
            "kernel is as large as its stride, as patches of an image are"
        )
    batch, channels = x.shape[:2]
    across = [int(size) // k for size, k in zip(sizes, kernel, strict=True)]
    split = hw.reshape(x, batch, channels, *(part for pair in zip(across, kernel, strict=True) for part in pair))
    patches = hw.permute_dims(split, (0, *range(2, 2 + 2 * count, 2), 1, *range(3, 3 + 2 * count, 2)))
    rows = hw.reshape(patches, batch, math.prod(across), int(channels) * math.prod(kernel))
    y = hw.matmul(rows, hw.reshape(weight, int(weight.shape[0]), -1).T)
    y = y if bias is None else y + bias
    return hw.reshape(hw.permute_dims(y, (0, 2, 1)), *result.shape)


# --- indices ----------------------------------------------------------------------------------------------------------


@_aten("embedding.default")
def _embedding(result: Result, weight: hw.Tensor, indices: hw.Tensor, *_: Any) -> hw.Tensor:
    return hw.embedding(indices, weight)


@_aten("index_select.default")
def _index_select(result: Result, x: hw.Tensor, dim: int, index: hw.Tensor) -> hw.Tensor:
    return hw.take(x, index, dim)


@_aten("gather.default")
def _gather(result: Result, x: hw.Tensor, dim: int, index: hw.Tensor, **_: Any) -> hw.Tensor:
    return hw.gather(x, dim % x.ndim, index)


@_aten("index.Tensor")
def _index(result: Result, x: hw.Tensor, indices: Sequence[hw.Tensor | None]) -> hw.Tensor:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype != hw.bool_:
        return hw.take(x, given[0][1], given[0][0])
    dims, sizes = [dim for dim, _ in given], x.shape[: len(given)]
    if dims != list(range(len(given))) or any(i.dtype == hw.bool_ for _, i in given) or not all(isinstance(size, int) for size in sizes):
        raise _refuse("aten.index by a mask, or not by the first dims, is not supported; use torch.gather, index_select or where")
    number = given[0][1]  # of the element in the first dims, flattened
    for size, (_, index) in zip(sizes[1:], given[1:], strict=True):
        number = number * int(size) + index
    return hw.take(hw.reshape(x, math.prod(map(int, sizes)), *x.shape[len(given) :]), number, 0)


@_aten("topk.default")
def _topk(result: Result, x: hw.Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any) -> tuple[hw.Tensor, hw.Tensor]:
    return hw.top_k(x, k, dim, largest)


@_aten("sort.default")
def _sort(result: Result, x: hw.Tensor, dim: int = -1, descending: bool = False) -> tuple[hw.Tensor, hw.Tensor]:
    return hw.sort(x, dim, descending), hw.argsort(x, dim, descending)


@_aten("argsort.default")
def _argsort(result: Result, x: hw.Tensor, dim: int = -1, descending: bool = False) -> hw.Tensor:
    return hw.argsort(x, dim, descending)


@_aten("cross_entropy_loss.default")
def _cross_entropy(
    result: Result, logits: hw.Tensor, target: hw.Tensor, weight: Any = None, reduction: int = 1, ignore: int = -100, smoothing: float = 0.0
) -> hw.Tensor:
    if weight is not None or smoothing or logits.ndim != 2:
        raise _refuse("cross_entropy with weights, label smoothing or more than 2 dims is not supported; flatten the logits")
    return hw.cross_entropy(logits, target, ignore, ("none", "mean", "sum")[reduction])


@_aten("mse_loss.default")
def _mse_loss(result: Result, a: hw.Tensor, b: hw.Tensor, reduction: int = 1) -> hw.Tensor:
    squares = (a - b) * (a - b)
    return squares if reduction == 0 else hw.mean(squares) if reduction == 1 else hw.sum(squares)
