"""Constructors, ops that move, index or sort elements, and losses."""

from collections.abc import Sequence
from typing import Any

import hostweave as hw
from hostweave.fusion_ir.frontend.recording import record
from hostweave.torch.aten.table import TABLE, Number, Result, aten, cast, full, number_of, refuse
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, TensorType

TABLE |= {
    **dict.fromkeys(("full.default", "full_like.default", "new_full.default"), lambda result, *arguments, **_: full(result, arguments[-1])),
    **dict.fromkeys(
        (
            *("zeros.default", "zeros_like.default", "new_zeros.default", "empty_like.default", "empty.memory_format"),
            *("empty_permuted.default", "empty_strided.default", "new_empty_strided.default"),
        ),
        lambda result, *_, **__: full(result, 0),
    ),
    **dict.fromkeys(("ones.default", "ones_like.default", "new_ones.default"), lambda result, *_, **__: full(result, 1)),
}


@aten("scalar_tensor.default")
def _scalar(result: Result, value: Number | str, **_: Any) -> hw.Tensor:
    if not isinstance(value, str):
        return full(result, value)
    numbers = record("iota", target=TensorType(hw.i64, (Dim.of(value),)), beside=result.trace)  # a size is the largest index plus 1
    return cast(hw.max(numbers) + 1, result.dtype)


@aten("arange.start_step", "arange.start", "arange.default")
def _arange(result: Result, *arguments: Any, **_: Any) -> Any:
    start, step = (0, 1) if len(arguments) == 1 else (arguments[0], arguments[2] if len(arguments) > 2 else 1)
    if not isinstance(step, int):
        raise refuse(f"aten.arange in steps of {step}: they must be known at compile time; write an int")
    numbers = record("iota", target=TensorType(hw.i64, (Dim.of(result.shape[0]),)), beside=result.trace)
    numbers = numbers if step == 1 else numbers * step
    return cast(numbers if isinstance(start, int) and start == 0 else numbers + start, result.dtype)


def _is_same(x: hw.Tensor, result: Result) -> bool:
    return tuple(map(str, x.shape)) == tuple(map(str, result.shape))


TABLE |= {
    **dict.fromkeys(
        ("view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "view_copy.default"),
        lambda result, x, *_: x if _is_same(x, result) else hw.reshape(x, *result.shape),
    ),
    **dict.fromkeys(
        ("expand.default", "expand_copy.default"),
        lambda result, x, *_, **__: x if _is_same(x, result) else hw.broadcast_to(x, *result.shape),
    ),
    "permute.default": lambda result, x, dims: hw.permute_dims(x, tuple(dims)),
    "transpose.int": lambda result, x, a, b: hw.transpose(x, a, b),
    "t.default": lambda result, x: x.T if x.ndim == 2 else x,
    "select.int": lambda result, x, dim, index: indexed(x, dim, index),
    "unsqueeze.default": lambda result, x, dim: hw.expand_dims(x, dim),
    "cat.default": lambda result, tensors, dim=0: hw.concat([cast(tensor, result.dtype) for tensor in tensors], dim),
    "stack.default": lambda result, tensors, dim=0: hw.stack([cast(tensor, result.dtype) for tensor in tensors], dim),
    "tril.default": lambda result, x, diagonal=0: _seen(x, hw.iota(x, -2)[:, None] + diagonal >= hw.iota(x, -1)[None, :]),
    "triu.default": lambda result, x, diagonal=0: _seen(x, hw.iota(x, -2)[:, None] + diagonal <= hw.iota(x, -1)[None, :]),
}


def _seen(x: hw.Tensor, seen: hw.Tensor) -> hw.Tensor:
    return x & seen if x.dtype == hw.bool_ else hw.where(seen, x, 0)


def indexed(x: hw.Tensor, dim: int, index: int | slice) -> hw.Tensor:
    return x[(*(slice(None) for _ in range(dim % x.ndim)), index)]


@aten("constant_pad_nd.default")
def padded(result: Result, x: hw.Tensor, pad: Sequence[int], value: Number = 0) -> hw.Tensor:
    """Pads x. A negative width removes elements."""
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if before < 0 or after < 0:
            of = slice(max(0, -before), None if after >= 0 else after)
            x = indexed(x, x.ndim - 1 - dim, of)
    widths = [max(0, width) for width in pad]
    return hw.pad(x, widths, value=number_of(x.dtype, value)) if any(widths) else x


def size_along(x: hw.Tensor, dim: int, dtype: Any) -> Any:
    """A size as an int, or as a tensor with one element if the size is unknown at compile time."""
    size = x.shape[dim]
    return size if isinstance(size, int) else hw.max(hw.iota(x, dim, dtype)) + 1


@aten("flip.default")
def _flip(result: Result, x: hw.Tensor, dims: Sequence[int]) -> hw.Tensor:
    for dim in dims:
        x = hw.take(x, size_along(x, dim, hw.i32) - 1 - hw.iota(x, dim), dim)
    return x


@aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(result: Result, x: hw.Tensor, dim: int | Sequence[int] | None = None) -> hw.Tensor:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = tuple(d % x.ndim for d in dims if x.type.shape[d] == Size())
    return hw.squeeze(x, gone) if gone else x


@aten("slice.Tensor")
def _slice(result: Result, x: hw.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> hw.Tensor:
    if _is_same(x, result):
        return x
    dim = dim % x.ndim
    if all(isinstance(bound, int | None) for bound in (x.shape[dim], start, end)):
        end = None if end is None or end >= 2**62 else end
        return indexed(x, dim, slice(start, end, step))
    first = start or 0
    if not isinstance(first, int):  # a start of n - 3 in n elements becomes -3
        from_end = x.type.shape[dim] - Size.of(first)
        if not from_end.is_int:
            raise refuse(f"a slice from {first} of a dim of {x.shape[dim]} is not supported; start at an int, or at an int from the end")
        first = -int(from_end)
    return record("slice", x, target=TensorType(x.dtype, tuple(map(Dim.of, result.shape))), axis=dim, start=first, step=step)


@aten("split.Tensor", "split_with_sizes.default", "chunk.default", "split.sizes")
def _split(result: Result, x: hw.Tensor, _: Any, dim: int = 0) -> tuple[hw.Tensor, ...]:
    starts, results = 0, []
    for shape in result.shapes:
        size = shape[dim]
        if not isinstance(size, int):
            raise refuse(f"a split of a dim into {size} is not supported; split a dim of fixed size")
        results.append(indexed(x, dim, slice(starts, starts + size)))
        starts += size
    return tuple(results)


@aten("unbind.int")
def _unbind(result: Result, x: hw.Tensor, dim: int = 0) -> tuple[hw.Tensor, ...]:
    return tuple(indexed(x, dim, i) for i in range(len(result.shapes)))


@aten("repeat.default")
def _repeat(result: Result, x: hw.Tensor, repeats: Sequence[int]) -> hw.Tensor:
    x = hw.reshape(x, *(1 for _ in range(len(repeats) - x.ndim)), *x.shape) if len(repeats) > x.ndim else x
    for dim, count in enumerate(repeats):
        if isinstance(count, int):
            x = x if count == 1 else hw.concat([x] * count, dim)
        else:  # unknown at compile time
            before, behind = x.shape[:dim], x.shape[dim + 1 :]
            wide = hw.broadcast_to(hw.expand_dims(x, dim), *before, count, *x.shape[dim:])
            x = hw.reshape(wide, *before, result.shape[dim], *behind)
    return x


TABLE |= {
    "embedding.default": lambda result, weight, indices, *_: hw.embedding(indices, weight),
    "index_select.default": lambda result, x, dim, index: hw.take(x, index, dim),
    "gather.default": lambda result, x, dim, index, **_: hw.gather(beside(x, index, dim), dim, index),
    "one_hot.default": lambda result, x, classes: hw.one_hot(x, classes, hw.i64),
    "topk.default": lambda result, x, k, dim=-1, largest=True, *_: hw.top_k(x, k, dim, largest),
    "sort.default": lambda result, x, dim=-1, descending=False: (hw.sort(x, dim, descending), hw.argsort(x, dim, descending)),
    "sort.stable": lambda result, x, stable=True, dim=-1, descending=False: (hw.sort(x, dim, descending), hw.argsort(x, dim, descending)),
}


TensorIndices = Sequence[hw.Tensor | None]


@aten("index.Tensor", "_unsafe_index.Tensor")
def _index(result: Result, x: hw.Tensor, indices: TensorIndices) -> hw.Tensor:
    x, number, dim, _ = numbered(x, indices, "aten.index")
    return hw.take(x, number, dim)


@aten("hostweave.update.default")
def _update(result: Result, x: hw.Tensor, update: hw.Tensor, begin: hw.Tensor, dim: int) -> hw.Tensor:
    """Writes an update along `dim`, from position `begin` on."""
    starts: list[Any] = [begin if i == dim else 0 for i in range(x.ndim)]
    return hw.dynamic_update_slice(x, cast(update, result.dtype), starts)


def numbered(x: hw.Tensor, indices: TensorIndices, op: str) -> tuple[hw.Tensor, hw.Tensor, int, list[int]]:
    """Merges the indexed dims of x. Returns x, the positions along the merged dim, the merged dim, and the order of dims. As in torch, the
    indexed dims come first, unless they are adjacent."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (hw.bool_, hw.u8) for _, index in given):
        why = f"{op} by a mask: the number of selected elements is known only at a call"
        raise refuse(f"{why}; use torch.where(mask, x, 0), or indices by topk or argsort")
    dims = [dim for dim, _ in given]
    begin = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    others = [dim for dim in range(x.ndim) if dim not in dims]
    order = [*others[:begin], *dims, *others[begin:]]
    checked = [record("index", from_begin(x, dim, index), hw.iota(x, dim, hw.i64)) if len(dims) > 1 else index for dim, index in given]
    number = checked[0] if len(dims) > 1 else from_begin(x, dims[0], checked[0])
    for dim, index in zip(dims[1:], checked[1:], strict=True):
        number = number * size_along(x, dim, hw.i64) + index
    if len(dims) > 1:
        turned = hw.permute_dims(x, tuple(order)) if order != sorted(order) else x
        sizes = turned.type.shape
        merged = product(sizes[begin : begin + len(dims)])
        x = hw.reshape(turned, *map(str, (*sizes[:begin], merged, *sizes[begin + len(dims) :])))
    return x, number, begin, order


def beside(x: hw.Tensor, index: hw.Tensor, dim: int) -> hw.Tensor:
    """Slices x to the size of `index` in all dims except `dim`."""
    return first(x, [size if i != dim % x.ndim else x.shape[i] for i, size in enumerate(index.shape)])


def first(x: hw.Tensor, shape: Sequence[int | str]) -> hw.Tensor:
    """Slices x to `shape`, from the start of each dim."""
    slices = [slice(None) if str(own) == str(size) else slice(size) for own, size in zip(x.shape, shape, strict=True)]
    return x if slices == [slice(None)] * x.ndim else x[tuple(slices)]


def from_begin(x: hw.Tensor, dim: int, index: hw.Tensor) -> hw.Tensor:
    """Makes negative indices count from the start. Returns masks unchanged."""
    return index if index.dtype == hw.bool_ else hw.where(index < 0, index + size_along(x, dim, index.dtype), index)


@aten("cross_entropy_loss.default")
def _cross_entropy(
    result: Result, logits: hw.Tensor, target: hw.Tensor, weight: Any = None, reduction: int = 1, ignore: int = -100, smoothing: float = 0.0
) -> hw.Tensor:
    return cast(hw.cross_entropy(logits, target, ignore, ("none", "mean", "sum")[reduction]), result.dtype)
