"""Functions of indices: elements at indices, and the other way round, orders and sums along a dim; and of shapes, what is made of views."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked, public_names
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.composites import _called, _wide
from hostweave.fusion_ir.frontend.functions import _size_of
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, record, stated
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ops import fits
from hostweave.fusion_ir.ops.definition import INTS
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, DType, TensorType, i64, u8

_each, _some = all, any  # Python's own, which have the names of functions here


def _numbers(x: Tensor, axis: int) -> Tensor:
    """The numbers of the indices of a dim."""
    return hw.iota(x, axis, i64)


def _aligned(ids: Tensor, rank: int, axis: int) -> Tensor:
    """Indices whose dims stand from `axis` on among `rank` dims."""
    others = tuple(i for i in range(rank) if not axis <= i < axis + ids.ndim)
    return hw.expand_dims(ids, others) if others else ids


# --- elements at indices ----------------------------------------------------------------------------------------------


@_called("taken")
def take(x: Tensor, indices: Tensor, axis: Axis | None = None) -> Tensor:
    """The elements of x at `indices` along a dim, in whose place the result has the dims of `indices`, any number of them.

    `indices` are ints, from 0 to below the size of the dim; `axis` may be left out where x is a vector. On the CPU target an index
    that is out of range, also a negative one, is an ExecutionError; on GPUs the nearest one is taken. Where the dim is sharded each
    rank takes what it holds, and zeros elsewhere: a partial sum. Raises ProgramError for other dtypes, or no axis.

    Example: `x: f32[M, N]` and `ids: i32[K]` give `f32[M, K]` by `hw.take(x, ids, axis=1)`.
    """
    if axis is None and x.ndim != 1:
        raise ProgramError.here(f"take: {x.type} has {x.ndim} dims; say along which one by axis=")
    number = dim_of(x, 0 if axis is None else axis, "take")
    rows = _numbers(x, number)
    index, rank = record("index", indices, rows), x.ndim - 1 + indices.ndim
    if not indices.ndim:
        one = record("take", x, _aligned(hw.reshape(index, 1), x.ndim, number), rows, axis=number)
        return record("select", one, axis=number, index=0)
    wide = hw.expand_dims(x, tuple(range(number, number + indices.ndim - 1))) if indices.ndim > 1 else x
    return record("take", wide, _aligned(index, rank, number), rows, axis=number + indices.ndim - 1)


@_called("gathered")
def take_along_axis(x: Tensor, indices: Tensor, axis: Axis = -1) -> Tensor:
    """The elements of x at `indices` along a dim, one for each element of `indices`: `y[i][j][k] = x[i][indices[i][j][k]][k]`.

    `indices` are ints, with as many dims as x; those besides `axis` broadcast. For indices out of range, and dims that are sharded,
    see `take`. Raises ProgramError for other shapes.

    Example: `x: f32[M, N]` and `indices: i64[M, K]` give `f32[M, K]` by `hw.take_along_axis(x, indices, axis=1)`.
    """
    number = dim_of(x, axis, "take_along_axis")
    rows = _numbers(x, number)
    return record("take", x, record("index", indices, rows), rows, axis=number)


@_called("gathered")
def gather(x: Tensor, axis: Axis, indices: Tensor) -> Tensor:
    """`take_along_axis`, as torch has it: dims of x besides `axis` may be longer than those of `indices`, and what is past these is left.

    Where sizes are known by name alone they are equal. Raises ProgramError for other shapes.

    Example: `x: f32[8, N]` and `indices: i64[4, K]` give `f32[4, K]` by `hw.gather(x, 1, indices)`.
    """
    number = dim_of(x, axis, "gather")
    return take_along_axis(_cut_to(x, indices, number, "gather"), indices, number)


def _cut_to(x: Tensor, indices: Tensor, axis: int, word: str) -> Tensor:
    """As much of each dim besides `axis` as there are indices."""
    if x.ndim != indices.ndim:
        raise ProgramError.here(f"{word}: {x.type} and {indices.type} differ in their number of dims; use hw.expand_dims")
    pairs = enumerate(zip(x.type.shape, indices.type.shape, strict=True))
    cuts = [slice(int(few)) if i != axis and few != many and few.is_int else slice(None) for i, (many, few) in pairs]
    return x[tuple(cuts)] if cuts else x


@_called("embedded")
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """The rows of a table [V, E] that `indices`, ints of any shape, number: [..., E], as in torch.nn.functional.

    Where the vocabulary is sharded, `V@tp`, each rank looks up its own rows, which gives a partial sum, and nothing is gathered. For
    indices out of range see `take`. Raises ProgramError for a weight that is no table.

    Example: `hw.embedding(ids, table)` of `ids: i64[B@dp, S]` and `table: bf16[V@tp, E]` is `bf16[B@dp, S, E]`.
    """
    if weight.ndim != 2:
        raise ProgramError.here(f"embedding: a weight of {weight.type} is not [V, E]; reshape it")
    return take(weight, indices, 0)


@_called("one_hot")
def one_hot(indices: Tensor, num_classes: int | str, dtype: DType = i64) -> Tensor:
    """A last dim of `num_classes` elements, of which that is 1 whose number is the index, and the others are 0.

    `indices` are ints. For those out of range see `take`. Raises ProgramError for a size that is none.

    Example: `ids: i64[M]` gives `f32[M, 10]` by `hw.one_hot(ids, 10, hw.f32)`.
    """
    size = stated(Size.of, num_classes, "one_hot")
    rows = record("iota", target=TensorType(i64, (Dim(size),)), beside=indices)
    index = record("index", indices, rows)
    return hw.astype(hw.expand_dims(index, -1) == rows, dtype)


# --- elements that go to indices --------------------------------------------------------------------------------------


@_called("scattered")
def scatter(x: Tensor, axis: Axis, indices: Tensor, source: Tensor) -> Tensor:
    """x, with the elements of `source` at `indices` along a dim: `y[i][indices[i][j][k]][k] = source[i][j][k]`, of several the last one.

    As in torch, but dims besides `axis` are equal in all three, or 1 in the indices, which then hold for all. `indices` are ints; for
    those out of range see `take`. The dim may be sharded, and that of the indices is gathered. Raises ProgramError for other shapes.

    Example: `x: f32[M, N]`, `indices: i64[M, K]` and `source: f32[M, K]` give `f32[M, N]` by `hw.scatter(x, 1, indices, source)`.
    """
    number = dim_of(x, axis, "scatter")
    rows = _numbers(x, number)
    return record("scatter", x, record("index", indices, rows), source, rows, axis=number)


@_called("added")
def scatter_add(x: Tensor, axis: Axis, indices: Tensor, source: Tensor) -> Tensor:
    """x, to which the elements of `source` are added at `indices` along a dim, each as often as it is there; shapes as in `scatter`.

    Sums are made in the order of the source, on GPUs too, in the dtype of x, and do not change from run to run. A dim of x may be
    sharded; where that of the indices is, ranks add up what they have: a partial sum. Raises ProgramError for other shapes.

    Example: the gradient of `embedding` is `hw.scatter_add(zeros, 0, ids[:, None], dy)`, of `ids: i64[T@dp]`, `dy: f32[T@dp, E]`
    and `zeros = hw.broadcast_to(hw.astype(hw.iota(table, -1, hw.i32) * 0, hw.f32), table.shape)`.
    """
    number = dim_of(x, axis, "scatter_add")
    rows = _numbers(x, number)
    return x + record("scatter_sum", record("index", indices, rows), source, rows, axis=number)


# --- slices at positions -----------------------------------------------------------------------------------------------

Starts = Sequence[Tensor | int]  # one for each dim


@_called("sliced")
def dynamic_slice(x: Tensor, starts: Starts, sizes: Sequence[int | str]) -> Tensor:
    """As many elements of each dim as `sizes` say, from where `starts` say on: one for each dim, ints or tensors of one int.

    As in jax.lax, a start is moved so that the slice fits: one below 0 is 0, and one that is too large the last that fits. A dim of
    which all is taken has no start. Where a dim that is cut is sharded each rank takes what it holds, and zeros elsewhere: a partial
    sum. Raises ProgramError for starts or sizes that do not fit.

    Example: `hw.dynamic_slice(cache, (position, 0), (1, "D"))` of `cache: f32[S, D]` and `position: i32[]` is `f32[1, D]`.
    """
    lengths = tuple(_size_of(size, "dynamic_slice") for size in sizes)
    for axis, start in _cut_dims(x, starts, lengths, "dynamic_slice"):
        steps = record("iota", target=TensorType(i64, (Dim(lengths[axis]),)), beside=x)
        x = record("take", x, _aligned(start + steps, x.ndim, axis), _numbers(x, axis), axis=axis)
    return x


@_called("updated")
def dynamic_update_slice(x: Tensor, update: Tensor, starts: Starts) -> Tensor:
    """x, with the elements of `update` from where `starts` say on: one for each dim, ints or tensors of one int.

    A start may differ along the dims before the first that is cut: with one of [B] each of a batch has a place of its own. It is moved
    so that the update fits, as in `dynamic_slice`. Of an x that is donated, or needed no more, only the elements of the update are
    written, in place. A dim that is cut may be sharded: each rank writes those that are its own, and has all of the update along it.
    Raises ProgramError for an update or starts that do not fit.

    Example: `hw.dynamic_update_slice(cache, row, (position, 0))` of `cache: f32[S, D]`, `row: f32[1, D]` and `position: i32[]`; and
    `hw.dynamic_update_slice(caches, rows, (0, positions, 0))` of `caches: f32[B, S, D]`, `rows: f32[B, 1, D]` and `positions: i32[B]`.
    """
    if not isinstance(update, Tensor) or update.dtype != x.dtype:
        what = update.type if isinstance(update, Tensor) else repr(update)
        raise ProgramError.here(f"dynamic_update_slice: {what} does not go into {x.type}; use hw.astype")
    cut = _cut_dims(x, starts, update.type.shape, "dynamic_update_slice") or [(0, _start(x, 0, update.type.shape[0], 0))]
    places = [operand for axis, start in cut for operand in (start, _numbers(x, axis))]
    return record("dynamic_update_slice", x, update, *places, axes=tuple(axis for axis, _ in cut))


def _cut_dims(x: Tensor, starts: Starts, lengths: Sequence[Size], word: str) -> list[tuple[int, Tensor]]:
    """The dims of which a part is taken or written, each with where that begins."""
    if isinstance(starts, Tensor) or len(starts) != x.ndim or len(lengths) != x.ndim or not x.ndim:
        many = 1 if isinstance(starts, Tensor) else len(starts)
        why = f"{many} starts and {len(lengths)} sizes for the {x.ndim} dims of {x.type}"
        raise ProgramError.here(f"{word}: {why}; give one of each for every dim")
    cut = [axis for axis, length in enumerate(lengths) if length != x.type.shape[axis]]
    before = x.type.shape[: cut[0]] if cut and word == "dynamic_update_slice" else ()
    return [(axis, _start(x, axis, lengths[axis], starts[axis], word, before)) for axis in cut]


def _start(
    x: Tensor, axis: int, length: Size, start: Tensor | int, word: str = "dynamic_update_slice", before: tuple[Size, ...] = ()
) -> Tensor:
    """Where a slice of so many elements of a dim begins, an i64 of no dims, or of the first of those that are `before` it."""
    size = x.type.shape[axis]
    if size.is_int and length.is_int and int(length) > int(size):
        raise ProgramError.here(f"{word}: {length} elements are more than dim {axis} of {x.type} has; take at most {size}")
    if isinstance(start, int) and fits(start, i64):
        start = record("fill", target=TensorType(i64, ()), beside=x, value=start)
    is_one = isinstance(start, Tensor) and not _some(one != Size() for one in start.type.shape)
    has_each = isinstance(start, Tensor) and not is_one and start.type.shape == before[: start.ndim]
    if not isinstance(start, Tensor) or start.dtype.kind not in INTS or not (is_one or has_each):
        what = start.type if isinstance(start, Tensor) else repr(start)
        each = f", or one for each of [{', '.join(map(str, before))}]" if before else ""
        why = f"pass an int, or a tensor of ints that has one element{each}"
        raise ProgramError.here(f"{word}: dim {axis} cannot start at {what}; {why}")
    rows = record("iota", target=TensorType(i64, (Dim(size - length + 1),)), beside=x)
    return record("start", start if has_each or not start.ndim else hw.reshape(start), rows)


# --- along a dim ------------------------------------------------------------------------------------------------------


@checked
def cumsum(x: Tensor, axis: Axis) -> Tensor:
    """The sums of the elements up to each one along a dim, in the shape and dtype of x, ints or floats, which are added up in f32 at least.

    A sharded dim is gathered first. Raises ProgramError for bools.

    Example: `x: f32[M, N]` gives `f32[M, N]` by `hw.cumsum(x, axis=1)`.
    """
    return record("cumsum", x, axis=dim_of(x, axis, "cumsum"))


@checked
def argsort(x: Tensor, axis: Axis = -1, descending: bool = False) -> Tensor:
    """The indices (i64) of the elements along a dim in their order; equal ones stay in theirs. A NaN counts as the largest, as in NumPy.

    A sharded dim is gathered first. On a GPU a thread block orders a row by itself.

    Example: `x: f32[M, N]` gives `i64[M, N]` by `hw.argsort(x)`.
    """
    return _order(x, dim_of(x, axis, "argsort"), descending)


def _order(x: Tensor, axis: int, descending: bool, first: int | None = None) -> Tensor:
    return record("argsort", hw.astype(x, u8) if x.dtype.kind == "bool" else x, axis=axis, descending=descending, first=first)


@_called("sorted")
def sort(x: Tensor, axis: Axis = -1, descending: bool = False) -> Tensor:
    """The elements along a dim in their order, which `argsort` gives.

    Example: `x: f32[M, N]` gives `f32[M, N]` by `hw.sort(x, descending=True)`.
    """
    number = dim_of(x, axis, "sort")
    return _ordered(x, argsort(x, number, descending), number)


def _ordered(x: Tensor, order: Tensor, axis: int) -> Tensor:
    return record("take", x, order, _numbers(x, axis), axis=axis)


_MOST_CHOSEN = 2048  # elements that a GPU orders without the others: kSorted of sort.h


@checked
def top_k(x: Tensor, k: int, axis: Axis = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dim, or the smallest, and their indices (i64), the first one first; of equal ones those before.

    A NaN counts as the largest. A sharded dim is gathered first. Raises ProgramError for a k that the dim does not have.

    Example: `x: f32[M, N]` gives `f32[M, 8]` and `i64[M, 8]` by `hw.top_k(x, 8)`.
    """
    number = dim_of(x, axis, "top_k")
    size = x.type.shape[number]
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (size.is_int and k > int(size)):
        raise ProgramError.here(f"top_k: k={k!r} is not an int from 1 to {size}, the size of dim {number} of {x.type}")
    order = _order(x, number, largest, k if k <= _MOST_CHOSEN else None)
    if k > _MOST_CHOSEN:
        order = order[(*(slice(None) for _ in range(number)), slice(k))]
    return _ordered(x, order, number), order


# --- whether ----------------------------------------------------------------------------------------------------------


@_called("any")
def any(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Whether any element is true, of bools, or is not 0, over `axis` as in `max`; a NaN is not 0.

    Example: `x: f32[M, N]` gives `bool[M]` by `hw.any(x, axis=-1)`.
    """
    return hw.max(_truth(x), axis, keepdims)


@_called("all")
def all(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Whether all elements are true, of bools, or are not 0, over `axis` as in `max`; a NaN is not 0.

    Example: `x: f32[M, N]` gives `bool[M]` by `hw.all(x, axis=-1)`.
    """
    return hw.min(_truth(x), axis, keepdims)


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype.kind == "bool" else x != 0


# --- shapes -----------------------------------------------------------------------------------------------------------


@_called("stacked")
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors, which are of one type, joined along a new dim at position `axis` of the result.

    Raises ProgramError for an empty list, or tensors that do not fit.

    Example: `hw.stack([a, b])` of two `f32[M, N]` is `f32[2, M, N]`.
    """
    if isinstance(tensors, Tensor) or not tensors or not _each(isinstance(tensor, Tensor) for tensor in tensors):
        raise ProgramError.here(f"stack: {tensors!r} is not a list of tensors of this fusion; write hw.stack([a, b])")
    rank = tensors[0].ndim + 1
    if not -rank <= axis < rank:
        raise ProgramError.here(f"stack: axis {axis} is out of range: the result has {rank} dims")
    return hw.concat([hw.expand_dims(tensor, axis) for tensor in tensors], axis % rank)


@checked
def split(x: Tensor, sections: int | Sequence[int], axis: Axis = 0) -> tuple[Tensor, ...]:
    """x in parts along a dim, as torch splits it: of `sections` elements each, the last one maybe less, or of the lengths of a list.

    Parts are views. Raises ProgramError for a dim of a size that is known by name alone, or lengths that are not all of it.

    Example: `x: f32[M, 10]` gives `f32[M, 4]`, `f32[M, 4]` and `f32[M, 2]` by `hw.split(x, 4, axis=1)`.
    """
    number = dim_of(x, axis, "split")
    size = x.type.shape[number]
    if not size.is_int:
        raise ProgramError.here(f"split: {size}, dim {number} of {x.type}, is not known at compile time; take slices such as x[:4]")
    whole = int(size)
    if isinstance(sections, int):
        step = sections
        if step < 1:
            raise ProgramError.here(f"split: {sections} elements are no part; give at least 1")
        lengths = [min(step, whole - begin) for begin in range(0, whole, step)]
    else:
        lengths = list(sections)
    if sum(lengths) != whole or _some(length < 1 for length in lengths):
        raise ProgramError.here(f"split: parts of {lengths} are not the {whole} elements of dim {number} of {x.type}; correct them")
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    before = [slice(None)] * number
    return tuple(x[(*before, slice(begin, begin + length))] for begin, length in zip(begins, lengths, strict=True))


@checked
def squeeze(x: Tensor, axis: Axis | tuple[Axis, ...]) -> Tensor:
    """x without the dims `axis`, which have one element. A view. Raises ProgramError for others.

    Example: `x: f32[M, 1]` becomes `f32[M]` by `hw.squeeze(x, 1)`.
    """
    given = axis if isinstance(axis, tuple) else (axis,)
    gone = {dim_of(x, one, "squeeze") for one in given}
    for number in sorted(gone):
        if x.type.shape[number] != Size():
            raise ProgramError.here(f"squeeze: dim {number} of {x.type} has more than one element; take one by an index, or reduce it")
    return hw.reshape(x, *(str(size) for i, size in enumerate(x.type.shape) if i not in gone)) if gone else x


# --- losses -----------------------------------------------------------------------------------------------------------


@_called("cross_entropy")
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-log(softmax(logits)) at the target, as in torch.nn.functional: logits [..., V], of floats, and a target [...] of ints: f32, or f64.

    `reduction` is "mean", over those targets that are not `ignore_index`, "sum", or "none", which has the shape of the target, with
    zeros where it is ignored. Where V is sharded, ranks all-reduce the largest logit of each row, then the sum and the target's logit
    together, and no logits are gathered. For targets out of range see `take`. Raises ProgramError for other shapes, or another reduction.

    Example: `hw.cross_entropy(logits, target)` of `bf16[T, V@tp]` and `i64[T]` is `f32[]`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ProgramError.here(f"cross_entropy: reduction={reduction!r} is not 'mean', 'sum' or 'none'")
    if logits.type.shape[:-1] != target.type.shape or not logits.ndim or logits.dtype.kind != "float":
        why = f"{logits.type} and a target of {target.type} are not floats [..., V] and ints [...]"
        raise ProgramError.here(f"cross_entropy: {why}; reshape them")
    wide = _wide(logits)
    shifted = wide - hw.max(wide, -1, keepdims=True)
    is_counted = target != ignore_index if fits(ignore_index, target.dtype) else None
    known = target if is_counted is None else hw.where(is_counted, target, 0)
    at_target = squeeze(take_along_axis(shifted, hw.expand_dims(known, -1), -1), -1)
    both = stack([hw.sum(hw.exp(shifted), -1), at_target])  # partial sums of ranks, which one all_reduce adds up
    losses = hw.log(both[0]) - both[1]
    losses = losses if is_counted is None else hw.where(is_counted, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "mean" and is_counted is None:
        return hw.mean(losses)
    total = hw.sum(losses)
    return total if reduction == "sum" or is_counted is None else total / hw.sum(hw.astype(is_counted, losses.dtype))


if not TYPE_CHECKING:
    __all__ = public_names(globals())
