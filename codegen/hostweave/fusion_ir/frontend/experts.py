"""Functions for mixtures of experts: products of groups of rows, counts, and results of a stated size."""

from typing import TYPE_CHECKING

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import public_names
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend import indices
from hostweave.fusion_ir.frontend.composites import _called
from hostweave.fusion_ir.frontend.functions import SizeLike, _size_of
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ops.definition import INTS
from hostweave.types.size import product
from hostweave.types.tensor import Dim, TensorType, i32, i64


@_called("grouped")
def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Matrix products of groups of rows, as torch.nn.functional.grouped_mm. `offsets` [E] of i32 has the end of each group.

    | a | b | result | group e |
    |---|---|---|---|
    | [T, K] | [E, K, N] | [T, N] | its rows of `a` times b[e] |
    | [K, T] | [T, N] | [E, K, N] | its columns of `a` times its rows of `b` |

    The second form is the gradient of b in the first one. A group begins where the one before ends. Offsets are data: they do not decrease,
    and are not read by the host. On the CPU target groups that overlap are an ExecutionError. Rows after the last group are zeros in the
    first form. Products of f16 and bf16 are summed in f32.

    E, K, N and T may be sharded. A rank multiplies its part of the rows by its matrices. A sharded dim that the result lacks gives a
    partial sum.

    Raises ProgramError for other shapes and dtypes.

    Example: `x: bf16[T, K]`, `w: bf16[64, K, N@tp]` and `offsets: i32[64]` give `bf16[T, N@tp]`.
    """
    if offsets.ndim != 1 or offsets.dtype != i32:
        raise ProgramError.here(f"grouped_matmul: offsets are {offsets.type}, and not i32 of one dim; use hw.astype")
    if b.ndim == 2 and a.ndim == 2:
        return record("grouped_outer", a.T, b, starts_of(offsets), offsets)
    return record("grouped_matmul", a, b, starts_of(offsets), offsets)


def starts_of(ends: Tensor) -> Tensor:
    """First row of each group: 0, and the ends of the others."""
    return hw.pad(ends[:-1], (1, 0))


@_called("counts")
def bincount(x: Tensor, length: int | str) -> Tensor:
    """Number of elements of ints x that are 0, 1, ..., `length` - 1: i64 [length], as jax.numpy.bincount. Other values are not counted.

    If x is sharded, ranks count their own elements, which is a partial sum.

    Raises ProgramError for floats.

    Example: `ids: i64[T@dp, 2]` gives `i64[8]` by `hw.bincount(ids, 8)`.
    """
    if x.dtype.kind not in INTS:
        raise ProgramError.here(f"bincount: x is {x.type}, and not of ints; use hw.astype")
    bins = record("iota", target=TensorType(i64, (Dim(_size_of(length, "bincount")),)), beside=x)
    found = hw.expand_dims(hw.astype(x, i64), x.ndim) == bins
    return hw.sum(hw.astype(found, i64), tuple(range(x.ndim))) if x.ndim else hw.astype(found, i64)


@_called("nonzero")
def nonzero(x: Tensor, size: SizeLike, fill_value: int = -1) -> Tensor:
    """Indices of the elements of x that are not zero, in row-major order: i64 [size, dims of x], as torch.nonzero_static.

    If there are fewer, the other rows are `fill_value`. If there are more, the first ones are taken.

    Raises ProgramError for an x without dims, or a size that is no int.

    Example: `mask: bool[T]` gives `i64[16, 1]` by `hw.nonzero(mask, size=16)`.
    """
    wanted = _size_of(size, "nonzero")
    if not x.ndim:
        raise ProgramError.here(f"nonzero: {x.type} has no dims; use hw.reshape(x, 1)")
    if not wanted.is_int:
        raise ProgramError.here(f"nonzero: size={size} is no int; write the largest number of rows")
    flat = hw.reshape(x, str(product(x.type.shape))) if x.ndim > 1 else x
    is_there = flat if flat.dtype.kind == "bool" else flat != 0
    length, count = flat.type.shape[0], int(wanted)
    if length.is_int and int(length) < count:
        is_there = hw.pad(hw.astype(is_there, i32), (0, count - int(length))) != 0
    is_zero = hw.astype(~is_there, i32)
    order = indices.argsort(is_zero, 0)[:count]  # the sort is stable
    places = [order]
    for dim in reversed(x.type.shape[1:]):
        if not dim.is_int:
            raise ProgramError.here(f"nonzero: dim {dim} of {x.type} is no int; only the first dim may be symbolic")
        places[:1] = [places[0] // int(dim), places[0] % int(dim)]
    total = hw.sum(hw.astype(is_there, i64), 0, keepdims=True)
    rows = hw.concat([hw.expand_dims(place, 1) for place in places], axis=1) if len(places) > 1 else hw.expand_dims(order, 1)
    return hw.where(hw.expand_dims(hw.iota(order, 0, i64) < total, 1), rows, fill_value)


@_called("repeated")
def repeat_interleave(x: Tensor, repeats: Tensor | int, axis: Axis = 0, total: SizeLike | None = None) -> Tensor:
    """Repeats each index of a dim, as torch.repeat_interleave: `repeats` times, or each as often as an element of ints `repeats` [D] says.

    `total` is the size of the dim afterwards, which counts that are data need. Indices after the last repetition repeat the last one.
    Repetitions after `total` are cut off.

    Raises ProgramError for counts of another shape, or a total that is missing.

    Example: `x: f32[M, N]` and `counts: i32[M]` give `f32[64, N]` by `hw.repeat_interleave(x, counts, total=64)`.
    """
    axis = dim_of(x, axis, "repeat_interleave")
    size = x.type.shape[axis]
    if isinstance(repeats, int):
        wide = hw.expand_dims(x, axis + 1)
        shape = [str(each) for each in x.type.shape]
        spread = hw.broadcast_to(wide, *shape[: axis + 1], repeats, *shape[axis + 1 :])
        return hw.reshape(spread, *shape[:axis], str(size * repeats), *shape[axis + 1 :])
    if total is None:
        raise ProgramError.here("repeat_interleave: the size of the result is known only at a call; state the largest by total=")
    if repeats.dtype.kind not in INTS or repeats.type.shape != (size,):
        raise ProgramError.here(f"repeat_interleave: repeats are {repeats.type}, and not ints [{size}], one for each index of dim {axis}")
    ends = indices.cumsum(hw.astype(repeats, i64), 0)
    places = record("iota", target=TensorType(i64, (Dim(_size_of(total, "repeat_interleave")),)), beside=x)
    begun = hw.sum(hw.astype(hw.expand_dims(places, 1) >= ends, i64), 1)  # repetitions that have ended
    last = hw.iota(repeats, 0, i64)[-1:]
    return indices.take(x, hw.minimum(begun, last), axis)


if not TYPE_CHECKING:
    __all__ = public_names(globals())
