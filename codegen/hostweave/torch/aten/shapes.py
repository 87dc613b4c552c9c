"""Tensors that are made of nothing, and ops that move elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hostweave as hw
from hostweave.fusion_ir.frontend.recording import record
from hostweave.torch.aten.table import Number, Result, aten, cast, full, refuse
from hostweave.types.tensor import Dim, TensorType


@aten("full.default", "full_like.default", "scalar_tensor.default", "new_full.default")
def _full_of(result: Result, *arguments: Any, **_: Any) -> hw.Tensor:
    return full(result, arguments[-1])


@aten("zeros.default", "zeros_like.default", "new_zeros.default", "empty_like.default")
def _zeros(result: Result, *_: Any, **__: Any) -> hw.Tensor:
    return full(result, 0)


@aten("ones.default", "ones_like.default", "new_ones.default")
def _ones(result: Result, *_: Any, **__: Any) -> hw.Tensor:
    return full(result, 1)


@aten("arange.start_step", "arange.start", "arange.default")
def _arange(result: Result, *arguments: Any, **_: Any) -> Any:
    start, step = (0, 1) if len(arguments) == 1 else (arguments[0], arguments[2] if len(arguments) > 2 else 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise refuse(f"aten.arange from {start} in steps of {step}: numbers known at compile time are wanted; write ints")
    numbers = record("iota", target=TensorType(hw.i64, (Dim.of(result.shape[0]),)), beside=result.trace)
    numbers = numbers if step == 1 else numbers * step
    return cast(numbers if start == 0 else numbers + start, result.dtype)


# --- shapes -----------------------------------------------------------------------------------------------------------


@aten("view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "view_copy.default")
def _view(result: Result, x: hw.Tensor, *_: Any) -> hw.Tensor:
    return x if tuple(map(str, x.shape)) == tuple(map(str, result.shape)) else hw.reshape(x, *result.shape)


@aten("expand.default", "expand_copy.default")
def _expand(result: Result, x: hw.Tensor, *_: Any, **__: Any) -> hw.Tensor:
    return x if tuple(map(str, x.shape)) == tuple(map(str, result.shape)) else hw.broadcast_to(x, *result.shape)


@aten("permute.default")
def _permute(result: Result, x: hw.Tensor, dims: Sequence[int]) -> hw.Tensor:
    return hw.permute_dims(x, tuple(d % x.ndim for d in dims))


@aten("transpose.int")
def _transpose(result: Result, x: hw.Tensor, a: int, b: int) -> hw.Tensor:
    dims = list(range(x.ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return hw.permute_dims(x, tuple(dims))


@aten("t.default")
def _t(result: Result, x: hw.Tensor) -> hw.Tensor:
    return x.T if x.ndim == 2 else x


@aten("unsqueeze.default")
def _unsqueeze(result: Result, x: hw.Tensor, dim: int) -> hw.Tensor:
    return hw.expand_dims(x, dim)


@aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(result: Result, x: hw.Tensor, dim: int | Sequence[int] | None = None) -> hw.Tensor:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = tuple(d % x.ndim for d in dims if x.shape[d] == 1)
    return hw.squeeze(x, gone) if gone else x


@aten("slice.Tensor")
def _slice(result: Result, x: hw.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> hw.Tensor:
    if tuple(map(str, x.shape)) == tuple(map(str, result.shape)):
        return x
    end = None if end is None or (isinstance(end, int) and end >= 2**62) else end
    return x[(*(slice(None) for _ in range(dim % x.ndim)), slice(start, end, step))]


@aten("select.int")
def _select(result: Result, x: hw.Tensor, dim: int, index: int) -> hw.Tensor:
    return x[(*(slice(None) for _ in range(dim % x.ndim)), index)]


@aten("cat.default")
def _cat(result: Result, tensors: Sequence[hw.Tensor], dim: int = 0) -> hw.Tensor:
    return hw.concat([cast(tensor, result.dtype) for tensor in tensors], dim)


@aten("stack.default")
def _stack(result: Result, tensors: Sequence[hw.Tensor], dim: int = 0) -> hw.Tensor:
    return hw.stack([cast(tensor, result.dtype) for tensor in tensors], dim)


@aten("split.Tensor", "split_with_sizes.default", "chunk.default", "split.sizes")
def _split(result: Result, x: hw.Tensor, _: Any, dim: int = 0) -> tuple[hw.Tensor, ...]:
    starts, parts = 0, []
    for shape in result.shapes:
        size = shape[dim]
        if not isinstance(size, int):
            raise refuse(f"a split of a dim into {size} is not supported; split a dim of fixed size")
        parts.append(x[(*(slice(None) for _ in range(dim % x.ndim)), slice(starts, starts + size))])
        starts += size
    return tuple(parts)


@aten("unbind.int")
def _unbind(result: Result, x: hw.Tensor, dim: int = 0) -> tuple[hw.Tensor, ...]:
    return tuple(_select(result, x, dim, i) for i in range(len(result.shapes)))


@aten("repeat.default")
def _repeat(result: Result, x: hw.Tensor, repeats: Sequence[int]) -> hw.Tensor:
    x = hw.reshape(x, *(1 for _ in range(len(repeats) - x.ndim)), *x.shape) if len(repeats) > x.ndim else x
    for dim, count in enumerate(repeats):
        x = x if count == 1 else hw.concat([x] * count, dim)
    return x


@aten("constant_pad_nd.default")
def _pad(result: Result, x: hw.Tensor, pad: Sequence[int], value: Number = 0) -> hw.Tensor:
    return hw.pad(x, list(pad), value=value if result.dtype.is_floating_point else int(value))


@aten("tril.default")
def _tril(result: Result, x: hw.Tensor, diagonal: int = 0) -> hw.Tensor:
    seen = hw.iota(x, -2)[:, None] + diagonal >= hw.iota(x, -1)[None, :]
    return x & seen if x.dtype == hw.bool_ else hw.where(seen, x, 0)


@aten("triu.default")
def _triu(result: Result, x: hw.Tensor, diagonal: int = 0) -> hw.Tensor:
    seen = hw.iota(x, -2)[:, None] + diagonal <= hw.iota(x, -1)[None, :]
    return x & seen if x.dtype == hw.bool_ else hw.where(seen, x, 0)
