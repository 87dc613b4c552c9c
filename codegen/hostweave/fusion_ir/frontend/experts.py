"""Functions for mixtures of experts: grouped matmuls, counts, routing of tokens, and results with data-dependent numbers of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend import indices
from hostweave.fusion_ir.frontend.composites import _called, _worded
from hostweave.fusion_ir.frontend.functions import SizeLike, _size_of
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.types.size import Size
from hostweave.types.tensor import INTS, Dim, DType, TensorType, f32, i32, i64


@_called("grouped")
def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Computes one matmul per group, like torch.nn.functional.grouped_mm. `offsets`, i32 [E], are the ends of the groups.

    | a | b | result | group e computes |
    |---|---|---|---|
    | [T, K] | [E, K, N] | [T, N] | the group's rows of `a` times b[e] |
    | [K, T] | [T, N] | [E, K, N] | the group's columns of `a` times the group's rows of `b` |

    The second form is the gradient of b in the first form. A group begins at the end of the previous group. Offsets must not decrease; the
    CPU target raises ExecutionError if they do. In the first form, result rows after the last group are zeros. 16-bit floats are
    summed in f32. All operands may have a leading batch dim, as the results of `moe_dispatch` do.

    E, K, N and T may be sharded. If a sharded dim is not in the result, the result is a partial sum.

    Raises ProgramError for other shapes and dtypes.

    Example: `x: bf16[T, K]`, `w: bf16[64, K, N@tp]` and `offsets: i32[64]` give `bf16[T, N@tp]`.
    """
    if offsets.ndim not in (1, 2) or offsets.dtype != i32:
        raise ProgramError.here(f"grouped_matmul: offsets are {offsets.type}, not i32 [E]; use hw.astype or hw.reshape")
    # a group begins at the end of the previous group
    starts = offsets * 0 if offsets.type.shape[-1] == Size() else hw.pad(offsets[..., :-1], (1, 0))
    if b.ndim == a.ndim == offsets.ndim + 1:
        return record("grouped_outer", hw.transpose(a, -2, -1), b, starts, offsets)
    return record("grouped_matmul", a, b, starts, offsets)


@_called("counts")
def bincount(x: Tensor, length: int | str) -> Tensor:
    """Counts the elements of x that equal i, for each i from 0 to `length` - 1, and ignores elements outside of this range. x is a tensor
    of ints. The result is i64 [length].

    If x is sharded, each rank counts its elements, and the result is a partial sum.

    Raises ProgramError for floats and bools.

    Example: `ids: i64[T@dp, 2]` gives `i64[8]` by `hw.bincount(ids, 8)`.
    """
    if x.dtype.kind not in INTS:
        raise ProgramError.here(f"bincount: x is {x.type}, not of ints; use hw.astype")
    bins = record("iota", target=TensorType(i64, (Dim(_size_of(length, "bincount")),)), beside=x)
    found = hw.expand_dims(hw.astype(x, i64), x.ndim) == bins
    return hw.sum(hw.astype(found, i64), tuple(range(x.ndim))) if x.ndim else hw.astype(found, i64)


@_called("nonzero")
def nonzero(x: Tensor, size: SizeLike, fill_value: int = -1) -> Tensor:
    """Indices of the nonzero elements of x, in row-major order: i64 [size, number of dims of x], as in torch.nonzero_static.

    If fewer than `size` elements are nonzero, the last rows are `fill_value`. If more elements are nonzero, the result has only the first
    `size` indices. If the first dim is symbolic, x must have at least `size` elements in each call.

    Raises ProgramError if x has no dims, if `size` is not an int, or if a dim other than the first dim is symbolic.

    Example: `mask: bool[T]` gives `i64[16, 1]` by `hw.nonzero(mask, size=16)`.
    """
    wanted = _size_of(size, "nonzero")
    if not x.ndim:
        raise ProgramError.here(f"nonzero: {x.type} has no dims; use hw.reshape(x, 1)")
    if not wanted.is_int:
        raise ProgramError.here(f"nonzero: size={size} is not an int; write the upper bound of the number of rows")
    flat = hw.reshape(x, -1) if x.ndim > 1 else x
    is_there = flat if flat.dtype.kind == "bool" else flat != 0
    length, count = flat.type.shape[0], int(wanted)
    if length.is_int and int(length) < count:
        is_there = hw.pad(hw.astype(is_there, i32), (0, count - int(length))) != 0
    is_zero = hw.astype(~is_there, i32)
    order = indices.argsort(is_zero, 0)[:count]  # the sort is stable
    positions = [order]
    for dim in reversed(x.type.shape[1:]):
        if not dim.is_int:
            raise ProgramError.here(f"nonzero: dim {dim} of {x.type} is not an int; only the first dim may be symbolic")
        positions[:1] = [positions[0] // int(dim), positions[0] % int(dim)]
    total = hw.sum(hw.astype(is_there, i64), 0, keepdims=True)
    rows = hw.concat([hw.expand_dims(position, 1) for position in positions], axis=1) if len(positions) > 1 else hw.expand_dims(order, 1)
    return hw.where(hw.expand_dims(hw.iota(order, 0, i64) < total, 1), rows, fill_value)


@_called("repeated")
def repeat_interleave(x: Tensor, repeats: Tensor | int, axis: Axis = 0, total: SizeLike | None = None) -> Tensor:
    """Repeats each slice along a dim, like torch.repeat_interleave. `repeats` is an int, or an int tensor [D] with the number of
    repetitions of each slice.

    If `repeats` is a tensor, `total` must give the size of the dim in the result. The last slice is then repeated until the result is full,
    and repetitions beyond `total` are cut off. If `repeats` is an int, `total` is ignored.

    Raises ProgramError if `repeats` is an int below 1 or has another shape or dtype, or if `total` is required and missing.

    Example: `x: f32[M, N]` and `counts: i32[M]` give `f32[64, N]` by `hw.repeat_interleave(x, counts, total=64)`.
    """
    axis = dim_of(x, axis, "repeat_interleave")
    size = x.type.shape[axis]
    if isinstance(repeats, int):
        if repeats < 1:
            raise ProgramError.here(f"repeat_interleave: repeats={repeats} leaves no elements; repeat at least once")
        wide = hw.expand_dims(x, axis + 1)
        before, after = x.type.shape[:axis], x.type.shape[axis + 1 :]
        return hw.reshape(hw.broadcast_to(wide, *before, size, repeats, *after), *before, size * repeats, *after)
    if total is None:
        raise ProgramError.here("repeat_interleave: the size of the result is unknown at compile time; pass its upper bound as total=")
    if repeats.dtype.kind not in INTS or repeats.type.shape != (size,):
        raise ProgramError.here(f"repeat_interleave: repeats are {repeats.type}, not ints [{size}], one for each index of dim {axis}")
    ends = indices.cumsum(hw.astype(repeats, i64), 0)
    positions = record("iota", target=TensorType(i64, (Dim(_size_of(total, "repeat_interleave")),)), beside=x)
    begun = hw.sum(hw.astype(hw.expand_dims(positions, 1) >= ends, i64), 1)  # per position, number of indices whose repetitions have ended
    last = hw.iota(repeats, 0, i64)[-1:]
    return indices.take(x, hw.minimum(begun, last), axis)


@dataclass(frozen=True)
class Routing:
    """Result of `moe_routing`: the rank and the row of each choice. Each token has k choices, one for each of its experts.

    - `ends`, i32 [R, E/R]: on each of R ranks, the end of the rows of each expert. `grouped_matmul` takes `ends` as offsets.
    - `rows`: upper bound of the number of rows on a rank. Rows after the last end are unused.
    """

    ends: Tensor
    rows: Size
    axes: tuple[str, ...]
    ranks: int
    choices: int
    _order: Tensor  # [R, rows]: index of the choice in each row; rows are sorted by expert
    _positions: Tensor  # [R, T, k]: row of each choice; 0 on ranks without a row for the choice
    _is_own: Tensor  # [R, T, k]: True if the rank has a row for the choice


@checked
def moe_routing(experts: Tensor, num_experts: int, axes: str | Sequence[str] = (), capacity: SizeLike | None = None) -> Routing:
    """Routes each token to the ranks of its experts. `experts`, ints [T, k], are the experts that each token chooses.

    The mesh axes `axes` have R ranks. The tokens and the E = `num_experts` experts are split over these ranks: the rank with index r has
    the experts from r * E/R to (r + 1) * E/R - 1. A choice is a token with one of its k experts. All ranks gather `experts`, and each rank
    finds the choices of its experts.

    At most `capacity` choices of each pair of ranks are kept. By default, no choice is dropped. Beyond the capacity, choices of the
    destination's highest-numbered experts are dropped first. Among choices of one expert, choices of the last tokens are dropped first. The
    host never reads the numbers of choices.

    Raises ProgramError for other shapes or dtypes of `experts`, for axes that the mesh lacks, or if R does not divide the number of
    experts. With a capacity, R must also divide the number of tokens.

    Example, with `ids: i64[T@ep, 8]`, `x: bf16[T@ep, H]`, `w: bf16[64@ep, H, H]` reshaped to [R, 64/R, H, H], and `weights: f32[T@ep, 8]`:
    `routing = hw.moe_routing(ids, 64, axes="ep")`, `rows = hw.moe_dispatch(x, routing)`, `h = hw.grouped_matmul(rows, w, routing.ends)`, `y
    = hw.moe_combine(h, routing, weights)`.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh = experts.type.mesh_in(experts._trace.mesh)
    known = dict(mesh.axes)
    if unknown := [name for name in names if name not in known]:
        raise ProgramError.here(f"moe_routing: {unknown[0]} is not an axis of {mesh}; the axes are {', '.join(known) or 'none'}")
    ranks = mesh.size_of(names)
    if experts.ndim != 2 or experts.dtype.kind not in INTS or not experts.type.shape[1].is_int:
        raise ProgramError.here(f"moe_routing: experts are {experts.type}, not ints [T, k] with k an int; use hw.astype or hw.reshape")
    if num_experts < 1 or num_experts % ranks:
        raise ProgramError.here(f"moe_routing: the {ranks} ranks need a positive multiple of {ranks} experts, not {num_experts}")
    choices, own = int(experts.type.shape[1]), num_experts // ranks
    total = experts.type.shape[0] * choices
    split = f"{ranks}@{','.join(names)}" if names else str(ranks)
    number = hw.reshard(record("iota", target=TensorType(i32, (Dim(Size(ranks)),)), beside=experts), split)
    ids, rows = experts, total
    if capacity is not None:
        if total.is_int and int(experts.type.shape[0]) % ranks:
            why = f"{ranks} ranks do not divide {experts.type.shape[0]} tokens, which capacity= requires"
            raise ProgramError.here(f"moe_routing: {why}; pad the tokens, or omit capacity=")
        room = _size_of(capacity, "moe_routing")
        ids, rows = _with_room(hw.astype(ids, i32), room, num_experts, split, ranks), room * ranks
    flat = hw.astype(_on_all_ranks(hw.reshape(ids, total)), i32)  # gathered before the cast, which is then part of the next kernel
    local = hw.reshard(flat - hw.expand_dims(number * own, 1), split, total)
    is_own = (local >= 0) & (local < own)
    found = record("group_order", hw.where(is_own, local, own), axis=1, groups=own)
    ends, both = found[:, :own], hw.reshape(found[:, own:], ranks, 2, total)
    order, positions = _worded("order", both[:, 0]), _worded("positions", both[:, 1])
    if capacity is not None:
        slot = record("iota", target=TensorType(i64, (Dim(rows),)), beside=local)
        last = hw.iota(flat, 0, i64)[-1:]
        order = indices.take_along_axis(order, hw.minimum(hw.expand_dims(slot, 0), last), 1)
        order = hw.where(hw.iota(order, 1, i32) < ends[:, -1:], order, 0)  # unused rows all read row 0, which stays in the cache
    of_choices = ranks, experts.type.shape[0], choices
    positions, is_own = hw.reshape(positions, *of_choices), hw.reshape(is_own, *of_choices)
    return Routing(ends, rows, names, ranks, choices, order, positions, is_own)


def _with_room(ids: Tensor, room: Size, num_experts: int, split: str, ranks: int) -> Tensor:
    """Replaces the expert of each choice beyond the capacity by `num_experts`, which no rank has."""
    length = ids.type.shape[0] // ranks * ids.type.shape[1]
    own = hw.reshard(hw.reshape(ids, ranks, length), split, length)
    # index of each choice when the rank's choices are sorted by expert
    positions = record("inverse_order", indices.argsort(own, 1), axis=1)
    target = own // (num_experts // ranks)
    every = record("iota", target=TensorType(i32, (Dim(Size(ranks)),)), beside=own)
    to_ranks = hw.sum(hw.astype(hw.expand_dims(target, 2) == every, i64), 1)
    begins = indices.cumsum(to_ranks, 1) - to_ranks  # [R, R]: index of the first choice for each destination rank
    earlier = positions - indices.take_along_axis(begins, target, 1)
    has_room = earlier < (int(room) if room.is_int else record("iota", target=TensorType(i64, (Dim(room),)), beside=own)[-1] + 1)
    return hw.reshape(hw.where(has_room, own, num_experts), *ids.type.shape)


@_called("dispatched")
def moe_dispatch(x: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sends each row of x [T, H] to the ranks of its experts. The result [R, rows, H] is sharded over the axes of the routing.

    On each rank, rows are sorted by expert, then by token. `routing.ends` are the ends of the experts' rows. Rows after the last end are
    undefined. If `weights` [T, k] are given, each row is multiplied by the weight of its choice, as in the gradient of `moe_combine`.

    All ranks gather x, and each rank copies the rows of its experts.

    Raises ProgramError if `weights` do not have k elements per token.

    Example: see `moe_routing`.
    """
    rows = indices.take(_on_all_ranks(x), routing._order // routing.choices, 0)
    if weights is None:
        return rows
    flat = hw.reshape(_on_all_ranks(weights), str(weights.type.shape[0] * routing.choices))
    factor = indices.take(flat, routing._order, 0)
    return rows * hw.astype(hw.expand_dims(factor, 2), x.dtype)


@_called("combined")
def moe_combine(rows: Tensor, routing: Routing, weights: Tensor | None = None, sent: DType | None = None) -> Tensor:
    """Sends the rows of experts [R, rows, H] back, and sums the rows of each token: [T, H]. If `weights` [T, k] are given, each row is
    first multiplied by the weight of its choice.

    The sum is at least in f32. Each rank sums its rows, and one reduce-scatter sums over the ranks. Dropped choices contribute nothing.
    With `sent=hw.bf16`, the sums of a rank and the sums over ranks are rounded to bf16. This rounding halves the sent bytes.

    Raises ProgramError for other shapes, and if `sent` is not a dtype of floats.

    Example: see `moe_routing`.
    """
    own = _rows_of_choices(rows, routing)
    wide = hw.astype(own, f32) if own.dtype.itemsize < f32.itemsize else own
    if weights is not None:
        wide = wide * hw.expand_dims(hw.astype(_on_all_ranks(weights), wide.dtype), 2)
    if sent is None:
        return hw.astype(_on_own_rank(hw.sum(wide, (0, 2)), routing), rows.dtype)
    if sent.kind != "float":
        raise ProgramError.here(f"moe_combine: sent={sent}: sums are floats; write sent=hw.bf16")
    return hw.astype(_on_own_rank(hw.sum(hw.astype(hw.sum(wide, 2), sent), 0), routing), rows.dtype)


@_called("returned")
def moe_return(rows: Tensor, routing: Routing) -> Tensor:
    """Sends the rows of experts [R, rows, H] back without summing: [T, k, H], one row per choice. Rows of dropped choices are zeros.

    This function moves k times as many elements as `moe_combine`. The example below computes the gradient of the weights.
    The tensors h and y are those of the example of `moe_routing`, and dy is the gradient of y.

    Raises ProgramError for other shapes.

    Example: `hw.moe_return(hw.sum(h * hw.moe_dispatch(dy, routing), -1, keepdims=True), routing)`.
    """
    return _on_own_rank(hw.sum(_rows_of_choices(rows, routing), 0), routing)


def _rows_of_choices(rows: Tensor, routing: Routing) -> Tensor:
    """Rows of all choices on each rank: [R, T, k, H], with zeros for choices without a row on the rank."""
    own = indices.take_along_axis(hw.expand_dims(rows, 2), hw.expand_dims(routing._positions, 3), 1)
    return hw.where(hw.expand_dims(routing._is_own, 3), own, 0.0)


def _on_all_ranks(x: Tensor) -> Tensor:
    return hw.reshard(x, *x.type.shape)


def _on_own_rank(x: Tensor, routing: Routing) -> Tensor:
    tokens, *others = map(str, x.type.shape)
    return hw.reshard(x, f"{tokens}@{','.join(routing.axes)}" if routing.axes else tokens, *others)
