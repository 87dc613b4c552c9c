"""Grouped matmuls: products of groups of rows with one matrix per group, or with the same groups of another operand (grouped_outer).

Group e consists of rows `starts[e]` to `ends[e]` - 1. The bounds are data. Groups must be in order, and must not overlap.
If the rows are sharded, each rank computes with its own rows of each group. If the groups are sharded, a rank has some of the groups.

All operands may have a leading batch dim. Each batch has separate groups and matrices. A grouped_matmul may use the same rows for all
batches.
"""

from collections.abc import Callable
from typing import Any

from hostweave.fusion_ir.index_map import IndexMap
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, same_dtype
from hostweave.fusion_ir.ops.reductions import widens
from hostweave.types.tensor import BufferType, Dim, TensorType, i32

MATMUL, OUTER = GROUPED = ("grouped_matmul", "grouped_outer")

AnyType = TensorType | BufferType


def why_not_grouped(x: AnyType, other: AnyType, starts: AnyType, ends: AnyType, is_outer: bool) -> str:
    """Reason why a grouped matmul cannot have these operands, or ""."""
    batch = starts.shape[:-1]
    is_shared = bool(batch) and not is_outer and len(x.shape) == 2
    if len(x.shape) != 2 + len(batch) - is_shared or len(batch) > 1 or len(other.shape) != 2 + len(batch) + (not is_outer):
        wanted = "[T, K] and [T, N]" if is_outer else "[T, K] and [E, K, N]"
        return f"{x} and {other} are not {wanted}; reshape them"
    if x.dtype.kind != "float" or x.dtype.itemsize < 2:
        return f"not defined for {x.dtype}; use hw.astype to f16, bf16, f32 or f64"
    if is_outer and x.shape[:-1] != other.shape[:-1]:
        return f"{x} and {other} differ in their number of rows; make the numbers equal"
    if not is_outer and (x.shape[-1] != other.shape[-2] or x.shape[:-2] not in (batch, ()) or other.shape[:-3] != batch):
        return f"inner dims differ: {x} x {other}; the matrices are [E, K, N]"
    for bound in (starts, ends):
        groups = (*batch, starts.shape[-1] if is_outer else other.shape[-3])
        if bound.dtype != i32 or bound.shape != groups:
            return f"{bound} is not one i32 for each group; use hw.astype, or hw.reshape"
    return ""


def _inferred(types: Types, op: Op) -> TensorType:
    x, other, starts, ends = types
    if why := why_not_grouped(x, other, starts, ends, op.kind == OUTER):
        raise Mismatch(why)
    dtype = same_dtype((x, other))
    sizes = (*starts.shape, x.shape[-1], other.shape[-1]) if op.kind == OUTER else (*starts.shape[:-1], x.shape[-2], other.shape[-1])
    result = op.result.type.dtype if widens(dtype, op.result.type.dtype) else dtype
    return TensorType(result, tuple(map(Dim, sizes)))


UNWALKED = frozenset(("t", "e"))  # data decide which rows belong to which group


def _of_matmul(types: Types, op: Op) -> IndexMap:
    b = ("b",) * (len(types[2].dims) - 1)
    x = ("b", "t", "k")[3 - len(types[0].dims) :]
    return IndexMap((x, (*b, "e", "k", "n"), (*b, "e"), (*b, "e")), (*b, "t", "n"), unwalked=UNWALKED)


def _of_outer(types: Types, op: Op) -> IndexMap:
    b = ("b",) * (len(types[0].dims) - 2)
    return IndexMap(((*b, "t", "k"), (*b, "t", "n"), (*b, "e"), (*b, "e")), (*b, "e", "k", "n"), unwalked=UNWALKED)


def groups_of(starts: Any, ends: Any, first: int, rows: int) -> list[tuple[int, int]]:
    """Local row range of each group. `first` is the global index of the rank's first row."""
    found, last = [], 0
    for start, end in ((int(starts[e]), int(ends[e])) for e in range(len(starts))):
        if end < start or start < min(last, end):
            raise IndexError(f"groups overlap: one has rows {start} to {end}, and the one before ends at {last}; offsets must not decrease")
        last = max(last, end)
        found.append((min(max(start - first, 0), rows), min(max(end - first, 0), rows)))
    return found


def multiplied(np: Any, x: Any, w: Any, starts: Any, ends: Any, first: int = 0) -> Any:
    """NumPy reference of grouped_matmul. Rows outside of all groups are zeros."""
    products, last = [], 0
    for e, (start, end) in enumerate(groups_of(starts, ends, first, x.shape[0])):
        if start < end:
            products += [np.zeros((start - last, w.shape[2]), x.dtype), np.matmul(x[start:end], w[e])]
            last = end
    return np.concatenate([*products, np.zeros((x.shape[0] - last, w.shape[2]), x.dtype)], 0)


def summed(np: Any, x: Any, y: Any, starts: Any, ends: Any, first: int = 0) -> Any:
    """NumPy reference of grouped_outer. The products of empty groups are zeros."""
    empty = np.zeros((1, x.shape[1], y.shape[1]), x.dtype)
    products = [
        np.matmul(np.swapaxes(x[start:end], 0, 1), y[start:end])[None] if start < end else empty
        for start, end in groups_of(starts, ends, first, x.shape[0])
    ]
    return np.concatenate([*products, empty[:0]], 0)


def _batched(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_each(np: Any, x: Any, *others: Any) -> Any:
        if others[1].ndim == 1:
            return function(np, x, *others)
        each = ((x if x.ndim == 2 else x[i], *(array[i] for array in others)) for i in range(len(others[1])))
        return np.stack([function(np, *operands) for operands in each])

    return of_each


OPS = {
    MATMUL: OpDef(4, _inferred, _of_matmul, _batched(multiplied), partial="sum", is_product=True, whole="cut into groups"),
    OUTER: OpDef(4, _inferred, _of_outer, _batched(summed), partial="sum", is_product=True, whole="cut into groups"),
}
