"""Functions for gather, scatter, dynamic slices, sorting, cumulative sums, any and all, changes of shape, and cross entropy."""

from collections.abc import Sequence

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.composites import _called, _wide
from hostweave.fusion_ir.frontend.functions import _size_of
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, record, stated
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ops import fits
from hostweave.fusion_ir.ops.indexing import MAX_BLOCK_SORT
from hostweave.types.size import Size
from hostweave.types.tensor import INTS, Dim, DType, TensorType, i64, u8

_each, _some = all, any  # Python's built-in functions; their names are redefined below


def _aligned(ids: Tensor, rank: int, axis: int) -> Tensor:
    """Inserts dims of one element, so that the result has `rank` dims and the dims of `ids` begin at dim `axis`."""
    others = tuple(i for i in range(rank) if not axis <= i < axis + ids.ndim)
    return hw.expand_dims(ids, others) if others else ids


@_called("taken")
def take(x: Tensor, indices: Tensor, axis: Axis | None = None) -> Tensor:
    """Elements of x at `indices` along a dim. The dims of `indices` replace this dim in the result.

    `indices` is a tensor of ints, with any number of dims. The first element has index 0. If an index is negative or too large, the CPU
    target raises ExecutionError, and GPUs use the nearest valid index. `axis` may be omitted if x is a vector. If the dim is sharded, the
    result is a partial sum: each rank reads the elements of its shard, and zeros for other indices.

    Raises ProgramError if `indices` are not ints, or if a required `axis` is missing.

    Example: `x: f32[M, N]` and `ids: i32[K]` give `f32[M, K]` by `hw.take(x, ids, axis=1)`.
    """
    if axis is None and x.ndim != 1:
        raise ProgramError.here(f"take: {x.type} has {x.ndim} dims; {'choose one by axis=' if x.ndim else 'use a tensor with dims'}")
    number = dim_of(x, 0 if axis is None else axis, "take")
    rows = hw.iota(x, number, i64)
    index, rank = record("index", indices, rows), x.ndim - 1 + indices.ndim
    if not indices.ndim:
        one = record("take", x, _aligned(hw.reshape(index, 1), x.ndim, number), rows, axis=number)
        return record("select", one, axis=number, index=0)
    wide = hw.expand_dims(x, tuple(range(number, number + indices.ndim - 1))) if indices.ndim > 1 else x
    return record("take", wide, _aligned(index, rank, number), rows, axis=number + indices.ndim - 1)


@_called("gathered")
def take_along_axis(x: Tensor, indices: Tensor, axis: Axis = -1) -> Tensor:
    """Elements of x at `indices` along a dim, one per element of `indices`. For 3 dims and `axis=1`: `y[i][j][k] =
    x[i][indices[i][j][k]][k]`.

    `indices` is a tensor of ints with as many dims as x. Dims other than `axis` broadcast. See `take` for indices out of range and sharded
    dims.

    Raises ProgramError for other shapes or dtypes.

    Example: `x: f32[M, N]` and `indices: i64[M, K]` give `f32[M, K]` by `hw.take_along_axis(x, indices, axis=1)`.
    """
    number = dim_of(x, axis, "take_along_axis")
    rows = hw.iota(x, number, i64)
    return record("take", x, record("index", indices, rows), rows, axis=number)


@_called("gathered")
def gather(x: Tensor, axis: Axis, indices: Tensor) -> Tensor:
    """Like `take_along_axis`, but x may be longer than `indices` along dims other than `axis`, as in torch. The additional elements of x
    are not read. If a dim of `indices` other than `axis` is longer or symbolic, the same dim of x must have the same size, or size 1.

    Raises ProgramError for other shapes or dtypes.

    Example: `x: f32[8, N]` and `indices: i64[4, K]` give `f32[4, K]` by `hw.gather(x, 1, indices)`.
    """
    number = dim_of(x, axis, "gather")
    if x.ndim != indices.ndim:
        raise ProgramError.here(f"gather: {x.type} and {indices.type} differ in their number of dims; use hw.expand_dims")
    cuts = [
        slice(int(few)) if i != number and few.is_int and not (many.is_int and int(many) <= int(few)) else slice(None)
        for i, (many, few) in enumerate(zip(x.type.shape, indices.type.shape, strict=True))
    ]
    return take_along_axis(x[tuple(cuts)] if cuts else x, indices, number)


@_called("embedded")
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table [V, E], as in torch.nn.functional. `indices` is a tensor of ints of any shape; the result is [..., E].

    If the vocabulary is sharded, `V@tp`, each rank looks up the rows of its shard, and the result is a partial sum. See `take` for indices
    out of range.

    Raises ProgramError if `weight` does not have two dims, or if `indices` are not ints.

    Example: `hw.embedding(ids, table)` with `ids: i64[B@dp, S]` and `table: bf16[V@tp, E]` gives `bf16[B@dp, S, E]`.
    """
    if weight.ndim != 2:
        raise ProgramError.here(f"embedding: a weight of {weight.type} is not [V, E]; reshape it")
    return take(weight, indices, 0)


@_called("one_hot")
def one_hot(indices: Tensor, num_classes: int | str, dtype: DType = i64) -> Tensor:
    """One-hot encoding: adds a last dim of `num_classes` elements. The element at the index is 1, and all other elements are 0.

    `indices` is a tensor of ints. See `take` for indices out of range.

    Raises ProgramError if `indices` are not ints, or if `num_classes` is not a known size.

    Example: `ids: i64[M]` gives `f32[M, 10]` by `hw.one_hot(ids, 10, hw.f32)`.
    """
    size = stated(Size.of, num_classes, "one_hot")
    rows = record("iota", target=TensorType(i64, (Dim(size),)), beside=indices)
    index = record("index", indices, rows)
    return hw.astype(hw.expand_dims(index, -1) == rows, dtype)


@_called("scattered")
def scatter(x: Tensor, axis: Axis, indices: Tensor, source: Tensor) -> Tensor:
    """Writes elements of `source` to a copy of x, at `indices` along a dim. For 3 dims and `axis=1`: `y[i][indices[i][j][k]][k] =
    source[i][j][k]`. If indices repeat, the last element wins.

    Unlike in torch, dims other than `axis` must be equal in all three tensors. In one of `indices` and `source`, a dim other than `axis`
    may also be 1. `indices` is a tensor of ints; see `take` for indices out of range. Dim `axis` of x may be sharded; dim `axis` of
    `indices` and `source` is gathered.

    Raises ProgramError for other shapes or dtypes.

    Example: `x: f32[M, N]`, `indices: i64[M, K]` and `source: f32[M, K]` give `f32[M, N]` by `hw.scatter(x, 1, indices, source)`.
    """
    number = dim_of(x, axis, "scatter")
    rows = hw.iota(x, number, i64)
    return record("scatter", x, record("index", indices, rows), source, rows, axis=number)


@_called("added")
def scatter_add(x: Tensor, axis: Axis, indices: Tensor, source: Tensor) -> Tensor:
    """Adds elements of `source` to a copy of x, at `indices` along a dim. Shapes are as in `scatter`.

    Elements with equal indices are summed in the order of `source`, so results are reproducible on GPUs too. The sums are then added to x.
    Dim `axis` of x may be sharded. If dim `axis` of `indices` is sharded, each rank sums its elements, and the sums of all ranks are added.

    Raises ProgramError for other shapes or dtypes.

    Example: the gradient of `embedding` is `hw.scatter_add(zeros, 0, ids[:, None], dy)` with `ids: i64[T@dp]`, `dy: f32[T@dp, E]` and
    `zeros = hw.broadcast_to(hw.astype(hw.iota(table, -1, hw.i32) * 0, hw.f32), table.shape)`.
    """
    number = dim_of(x, axis, "scatter_add")
    rows = hw.iota(x, number, i64)
    sums = record("scatter_sum", record("index", indices, rows), source, rows, axis=number)
    if sums.type.shape != x.type.shape:
        why = f"cannot add {source.type} to {x.type}: the sums would be {sums.type}"
        raise ProgramError.here(f"scatter_add: {why}; make all dims except dim {number} equal")
    return x + sums


Starts = Sequence[Tensor | int]  # one start per dim


@_called("sliced")
def dynamic_slice(x: Tensor, starts: Starts, sizes: Sequence[int | str]) -> Tensor:
    """Slice of x with `sizes` elements per dim, beginning at `starts`. A start is an int, or an int tensor with one element.

    Starts are clamped so that the slice fits. Unlike in jax.lax, a negative start becomes 0. If the slice covers a whole dim, the start of
    this dim is ignored. If the slice covers a part of a sharded dim, the result is a partial sum: each rank reads the elements of its
    shard, and zeros elsewhere.

    Raises ProgramError if starts or sizes do not match x.

    Example: `hw.dynamic_slice(cache, (position, 0), (1, "D"))` with `cache: f32[S, D]` and `position: i32[]` gives `f32[1, D]`.
    """
    lengths = tuple(_size_of(size, "dynamic_slice") for size in sizes)
    for axis, start in _cut_dims(x, starts, lengths, "dynamic_slice"):
        offsets = record("iota", target=TensorType(i64, (Dim(lengths[axis]),)), beside=x)
        x = record("take", x, _aligned(start + offsets, x.ndim, axis), hw.iota(x, axis, i64), axis=axis)
    return x


@_called("updated")
def dynamic_update_slice(x: Tensor, update: Tensor, starts: Starts) -> Tensor:
    """Writes `update` to a copy of x, beginning at `starts`. A start is an int, or an int tensor.

    Starts are clamped as in `dynamic_slice`. A dim is cut if `update` is shorter than x along the dim. A start has one element, or may vary
    along the dims before the first cut dim: a start of shape [B] is a separate start for each batch. A cut dim may be sharded; the update
    is then gathered along this dim, and each rank writes the elements of its shard. If x is a donated input, or a temporary without later
    uses, x is updated in place.

    Raises ProgramError if the update or the starts do not match x.

    Example: `hw.dynamic_update_slice(cache, row, (position, 0))` with `cache: f32[S, D]`, `row: f32[1, D]` and `position: i32[]`. With a
    batch: `hw.dynamic_update_slice(caches, rows, (0, positions, 0))` with `caches: f32[B, S, D]`, `rows: f32[B, 1, D]` and `positions:
    i32[B]`.
    """
    if not isinstance(update, Tensor) or update.dtype != x.dtype:
        what, remedy = (update.type, "use hw.astype") if isinstance(update, Tensor) else (repr(update), "pass a tensor of this fusion")
        raise ProgramError.here(f"dynamic_update_slice: cannot write {what} to {x.type}; {remedy}")
    cut = _cut_dims(x, starts, update.type.shape, "dynamic_update_slice") or [(0, _start(x, 0, update.type.shape[0], 0))]
    starts_and_rows = [operand for axis, start in cut for operand in (start, hw.iota(x, axis, i64))]
    return record("dynamic_update_slice", x, update, *starts_and_rows, axes=tuple(axis for axis, _ in cut))


def _cut_dims(x: Tensor, starts: Starts, lengths: Sequence[Size], word: str) -> list[tuple[int, Tensor]]:
    """Cut dims, each with its start."""
    if isinstance(starts, Tensor) or len(starts) != x.ndim or len(lengths) != x.ndim or not x.ndim:
        many = 1 if isinstance(starts, Tensor) else len(starts)
        why = f"{many} starts and {len(lengths)} sizes for the {x.ndim} dims of {x.type}"
        raise ProgramError.here(f"{word}: {why}; {'give one of each for every dim' if x.ndim else 'use a tensor with dims'}")
    cut = [axis for axis, length in enumerate(lengths) if length != x.type.shape[axis]]
    before = x.type.shape[: cut[0]] if cut and word == "dynamic_update_slice" else ()
    return [(axis, _start(x, axis, lengths[axis], starts[axis], word, before)) for axis in cut]


def _start(
    x: Tensor, axis: int, length: Size, start: Tensor | int, word: str = "dynamic_update_slice", before: tuple[Size, ...] = ()
) -> Tensor:
    """Clamped start of a slice of `length` elements, as an i64 tensor. The start may vary along dims of the sizes `before`."""
    size = x.type.shape[axis]
    if size.is_int and length.is_int and int(length) > int(size):
        raise ProgramError.here(f"{word}: {length} elements exceed dim {axis} of {x.type}; take at most {size}")
    if isinstance(start, int) and fits(start, i64):
        start = record("fill", target=TensorType(i64, ()), beside=x, value=start)
    is_one = isinstance(start, Tensor) and not _some(one != Size() for one in start.type.shape)
    has_each = isinstance(start, Tensor) and not is_one and start.type.shape == before[: start.ndim]
    if not isinstance(start, Tensor) or start.dtype.kind not in INTS or not (is_one or has_each):
        what = start.type if isinstance(start, Tensor) else repr(start)
        each = f", or one for each of [{', '.join(map(str, before))}]" if before else ""
        why = f"pass an int that fits i64, or a tensor of ints that has one element{each}"
        raise ProgramError.here(f"{word}: dim {axis} cannot start at {what}; {why}")
    rows = record("iota", target=TensorType(i64, (Dim(size - length + 1),)), beside=x)
    return record("start", start if has_each or not start.ndim else hw.reshape(start), rows)


@checked
def cumsum(x: Tensor, axis: Axis) -> Tensor:
    """Cumulative sums along a dim, in the shape and dtype of x, a tensor of ints or floats. Floats of at most 16 bits are summed in f32.

    If the dim is sharded, it is gathered first. Raises ProgramError for bools.

    Example: `x: f32[M, N]` gives `f32[M, N]` by `hw.cumsum(x, axis=1)`.
    """
    return record("cumsum", x, axis=dim_of(x, axis, "cumsum"))


@checked
def argsort(x: Tensor, axis: Axis = -1, descending: bool = False) -> Tensor:
    """Indices (i64) that sort the elements along a dim. The sort is stable. A NaN counts as the largest element, as in NumPy.

    If the dim is sharded, it is gathered first.

    Example: `x: f32[M, N]` gives `i64[M, N]` by `hw.argsort(x)`.
    """
    return _order(x, dim_of(x, axis, "argsort"), descending)


def _order(x: Tensor, axis: int, descending: bool, first: int | None = None) -> Tensor:
    return record("argsort", hw.astype(x, u8) if x.dtype.kind == "bool" else x, axis=axis, descending=descending, first=first)


@_called("sorted")
def sort(x: Tensor, axis: Axis = -1, descending: bool = False) -> Tensor:
    """Sorted elements along a dim, in the order of `argsort`.

    Example: `x: f32[M, N]` gives `f32[M, N]` by `hw.sort(x, descending=True)`.
    """
    number = dim_of(x, axis, "sort")
    return _ordered(x, argsort(x, number, descending), number)


def _ordered(x: Tensor, order: Tensor, axis: int) -> Tensor:
    return record("take", x, order, hw.iota(x, axis, i64), axis=axis)


@checked
def top_k(x: Tensor, k: int, axis: Axis = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dim, or the k smallest if `largest` is false, and their indices (i64). The results are sorted, with
    the most extreme element first. Equal elements keep their order.

    A NaN counts as the largest element. If the dim is sharded, it is gathered first.

    Raises ProgramError if k is not an int of at least 1, or exceeds a dim of known size.

    Example: `x: f32[M, N]` gives `f32[M, 8]` and `i64[M, 8]` by `hw.top_k(x, 8)`.
    """
    number = dim_of(x, axis, "top_k")
    size = x.type.shape[number]
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (size.is_int and k > int(size)):
        raise ProgramError.here(f"top_k: k={k!r} is not an int from 1 to {size}, the size of dim {number} of {x.type}")
    order = _order(x, number, largest, k if k <= MAX_BLOCK_SORT else None)
    if k > MAX_BLOCK_SORT:
        order = order[(*(slice(None) for _ in range(number)), slice(k))]
    return _ordered(x, order, number), order


@_called("any")
def any(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor:
    """True if an element along `axis` is true or nonzero. `axis` is as in `max`. A NaN is nonzero.

    Example: `x: f32[M, N]` gives `bool[M]` by `hw.any(x, axis=-1)`.
    """
    return hw.max(_truth(x), axis, keepdims)


@_called("all")
def all(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor:
    """True if all elements along `axis` are true or nonzero. `axis` is as in `max`. A NaN is nonzero.

    Example: `x: f32[M, N]` gives `bool[M]` by `hw.all(x, axis=-1)`.
    """
    return hw.min(_truth(x), axis, keepdims)


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype.kind == "bool" else x != 0


@_called("stacked")
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Stacks tensors of equal dtypes and dims along a new dim, at position `axis` of the result.

    Raises ProgramError for an empty list, for different dtypes or dims, or if `axis` is out of range.

    Example: `hw.stack([a, b])` with two `f32[M, N]` gives `f32[2, M, N]`.
    """
    if isinstance(tensors, Tensor) or not tensors or not _each(isinstance(tensor, Tensor) for tensor in tensors):
        raise ProgramError.here(f"stack: {tensors!r} is not a list of tensors of this fusion; write hw.stack([a, b])")
    rank = tensors[0].ndim + 1
    if not -rank <= axis < rank:
        raise ProgramError.here(f"stack: axis {axis} is out of range: the result has {rank} dims")
    return hw.concat([hw.expand_dims(tensor, axis) for tensor in tensors], axis % rank)


@checked
def split(x: Tensor, sections: int | Sequence[int], axis: Axis = 0) -> tuple[Tensor, ...]:
    """Splits x along a dim, as in torch. If `sections` is an int, each part has this length, and the last part may be shorter. If
    `sections` is a list, the list has the length of each part.

    The parts are views, unless the dim is sharded. A sharded dim is gathered first.

    Raises ProgramError if the dim's size is symbolic, if a length is below 1, or if the lengths do not add up to the size.

    Example: `x: f32[M, 10]` gives `f32[M, 4]`, `f32[M, 4]` and `f32[M, 2]` by `hw.split(x, 4, axis=1)`.
    """
    number = dim_of(x, axis, "split")
    size = x.type.shape[number]
    if not size.is_int:
        raise ProgramError.here(f"split: {size}, dim {number} of {x.type}, is not known at compile time; take slices such as x[:4]")
    whole = int(size)
    if isinstance(sections, int):
        if sections < 1:
            raise ProgramError.here(f"split: parts of {sections} elements are not possible; give at least 1")
        lengths = [min(sections, whole - begin) for begin in range(0, whole, sections)]
    else:
        lengths = list(sections)
    if sum(lengths) != whole or _some(length < 1 for length in lengths):
        raise ProgramError.here(f"split: lengths {lengths} of dim {number} of {x.type} must be at least 1, and add up to {whole}")
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    before = [slice(None)] * number
    return tuple(x[(*before, slice(begin, begin + length))] for begin, length in zip(begins, lengths, strict=True))


@checked
def squeeze(x: Tensor, axis: Axis | tuple[Axis, ...]) -> Tensor:
    """Removes the dims that `axis` names. Each of these dims must have one element. The result is a view.

    Raises ProgramError if one of these dims has another size. Example: `x: f32[M, 1]` becomes `f32[M]` by `hw.squeeze(x, 1)`.
    """
    given = axis if isinstance(axis, tuple | list) else (axis,)
    gone = {dim_of(x, one, "squeeze") for one in given}
    for number in sorted(gone):
        if x.type.shape[number] != Size():
            raise ProgramError.here(f"squeeze: dim {number} of {x.type} does not have size 1; select one index, or reduce the dim")
    return hw.reshape(x, *(size for i, size in enumerate(x.type.shape) if i not in gone)) if gone else x


@_called("cross_entropy")
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Cross entropy, as in torch.nn.functional: -log(softmax(logits)) at the target. Computed in f32, or in f64 for f64 logits.

    The logits are floats [..., V], and the target ints [...]. `reduction` is "mean" (over targets other than `ignore_index`), "sum", or
    "none". With "none", the result has the shape of the target, and zeros at ignored targets.

    If V is sharded, two all-reduces communicate a few numbers per row, and no logits are gathered. See `take` for targets out of range.

    Raises ProgramError for other shapes or dtypes, or an unknown reduction.

    Example: `hw.cross_entropy(logits, target)` with `logits: bf16[T, V@tp]` and `target: i64[T]` gives `f32[]`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ProgramError.here(f"cross_entropy: reduction={reduction!r} is not 'mean', 'sum' or 'none'")
    if logits.type.shape[:-1] != target.type.shape or not logits.ndim or logits.dtype.kind != "float":
        why = f"{logits.type} and a target of {target.type} are not floats [..., V] and ints [...]"
        raise ProgramError.here(f"cross_entropy: {why}; reshape or cast them")
    wide = _wide(logits)
    shifted = wide - hw.max(wide, -1, keepdims=True)
    is_counted = target != ignore_index if fits(ignore_index, target.dtype) else None
    known = target if is_counted is None else hw.where(is_counted, target, 0)
    at_target = squeeze(take_along_axis(shifted, hw.expand_dims(known, -1), -1), -1)
    both = stack([hw.sum(hw.exp(shifted), -1), at_target])  # one all-reduce then reduces both partial sums
    losses = hw.log(both[0]) - both[1]
    losses = losses if is_counted is None else hw.where(is_counted, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "mean" and is_counted is None:
        return hw.mean(losses)
    total = hw.sum(losses)
    return total if reduction == "sum" or is_counted is None else total / hw.sum(hw.astype(is_counted, losses.dtype))
