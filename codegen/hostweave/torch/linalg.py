"""ATen's matrix factorisations in terms of other ops, for matrices of up to 32 rows and columns, with one step per pivot.

The result `info` of ops with the suffix `_ex` is the number of the first row that fails, or 0, as in torch. Larger triangular matrices are
inverted by blocks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
_ROWS = 32


def _rows(a: Any) -> Any:
    return torch.arange(a.shape[-2], device=a.device).unsqueeze(-1)


def _for_small(function: Callable[..., Any], rows: float, *args: Any, check_errors: bool = False, **kwargs: Any) -> Any:
    """Rule of an op, which calls `function`. Returns NotImplemented, which keeps the op, for complex matrices, if `check_errors` is set, or
    if a matrix does not have 1 to `rows` rows and columns."""
    given = [one for one in args if isinstance(one, torch.Tensor)]
    fits = all(isinstance(size, int) and 0 < size <= rows for one in given for size in one.shape[-2:])
    fits = fits and not check_errors and not any(one.is_complex() for one in given)
    return function(*args, **kwargs) if fits else NotImplemented


def _first(failed: list[Any]) -> Any:
    """Number of the first step that failed, counted from 1, or 0."""
    info = torch.zeros_like(failed[0], dtype=torch.int32)
    for number in range(len(failed), 0, -1):
        info = torch.where(failed[number - 1], number, info)
    return info.to(torch.int32)


def _solved(a: Any, b: Any, upper: bool, unit: bool = False) -> Any:
    """Solves a x = b. Up to `_ROWS` rows are substituted one by one. An infinity or NaN in a row of b then reaches only rows that depend on
    this row, as in torch. Larger matrices are inverted, because substitution needs a kernel per row."""
    n = a.shape[-1]
    if n > _ROWS:
        return torch.matmul(_inverse(a.mT, unit).mT if upper else _inverse(a, unit), b)
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    rest, solved = b.expand(*shape, *b.shape[-2:]), list[Any]()
    for k in reversed(range(n)) if upper else range(n):
        at = k if upper else 0  # position of row k in `rest`
        x = rest[..., at : at + 1, :]
        solved.append(x if unit else x / a[..., k : k + 1, k : k + 1])
        others, factors = (rest[..., :k, :], a[..., :k, k : k + 1]) if upper else (rest[..., 1:, :], a[..., k + 1 :, k : k + 1])
        rest = others - factors * solved[-1]
    return torch.cat(solved[::-1] if upper else solved, -2)


def _inverse(a: Any, unit: bool) -> Any:
    """Inverts a lower triangular matrix. Each step doubles the size of the inverted diagonal blocks: the inverse of [[A, 0], [C, B]] has
    the block -B^-1 C A^-1 below A^-1."""
    n, rows = a.shape[-1], _rows(a)
    columns = rows.mT
    made: Any = (rows == columns).to(a.dtype)
    made = made if unit else made / torch.where(rows == columns, a, 1.0)  # zeros off the diagonal would make the gradient NaN
    size = 1
    while size < n:
        is_below = (rows // (2 * size) == columns // (2 * size)) & (rows // size > columns // size)
        made = made - torch.matmul(torch.matmul(made, torch.where(is_below, a, 0.0)), made)
        size *= 2
    return made


def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    if left:
        return _solved(a, b, upper, unitriangular)
    return _solved(a.mT, b.mT, not upper, unitriangular).mT


def triangular_solve(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    of = a.mT if transpose else a
    return _solved(of, b, upper != transpose, unitriangular).expand(*shape, *b.shape[-2:]), a.expand(*shape, *a.shape[-2:])


def cholesky_ex(a: Any, upper: bool = False) -> Any:
    a = a.mT if upper else a
    rows, columns, failed = _rows(a), list[Any](), list[Any]()
    for j in range(a.shape[-1]):
        pivot = a[..., j : j + 1, j : j + 1]
        failed.append(~(pivot > 0)[..., 0, 0])
        columns.append(torch.where(rows >= j, a[..., :, j : j + 1] / torch.sqrt(pivot), 0.0))
        a = a - columns[-1] * columns[-1].mT
    lower = torch.cat(columns, -1)
    return lower.mT if upper else lower, _first(failed)


def cholesky_solve(b: Any, a: Any, upper: bool = False) -> Any:
    low = a.mT if upper else a
    return _solved(low.mT, _solved(low, b, False), True)


def cholesky_inverse(a: Any, upper: bool = False) -> Any:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
    return cholesky_solve(identity, a, upper)


def _factored(a: Any, pivots: bool = True) -> tuple[Any, Any, Any, list[Any]]:
    """LU factorisation: L and U in one matrix, the pivot row of each step (from 1), the source of each row, and whether each step fails."""
    rows, n = _rows(a), min(a.shape[-2:])
    order = rows.expand(*a.shape[:-1], 1)
    taken, failed = [], []
    for k in range(n):
        column = a[..., :, k : k + 1]
        size = torch.where(rows >= k, column.abs(), -1.0)
        chosen = size.argmax(-2, keepdim=True) if pivots else torch.full_like(order[..., :1, :], k)
        taken.append(chosen[..., 0, 0] + 1)
        moved = torch.where(rows == k, chosen, torch.where(rows == chosen, k, rows))
        a, order = torch.gather(a, -2, moved.expand(a.shape)), torch.gather(order, -2, moved)
        pivot = a[..., k : k + 1, k : k + 1]
        failed.append((pivot == 0)[..., 0, 0])
        factor = torch.where(rows > k, a[..., :, k : k + 1] / torch.where(pivot == 0, 1.0, pivot), 0.0)
        right = torch.arange(a.shape[-1], device=a.device) > k
        a = torch.where(right, a - factor * a[..., k : k + 1, :], a)
        a = torch.where((rows > k) & (torch.arange(a.shape[-1], device=a.device) == k), factor, a)
    return a, torch.stack(taken, -1).to(torch.int32), order, failed


def lu_factor_ex(a: Any, *, pivot: bool = True) -> Any:
    factors, pivots, _, failed = _factored(a, pivot)
    return factors, pivots, _first(failed)


def _order_of(pivots: Any, rows: Any, undone: bool = False) -> Any:
    """Source of each row after all row exchanges, or after all exchanges are undone. `pivots` has the pivot row of each step."""
    order = rows.expand(*pivots.shape[:-1], *rows.shape)
    for k in reversed(range(pivots.shape[-1])) if undone else range(pivots.shape[-1]):
        chosen = pivots[..., k : k + 1].unsqueeze(-1).to(torch.int64) - 1
        order = torch.gather(order, -2, torch.where(rows == k, chosen, torch.where(rows == chosen, k, rows)))
    return order


def _lower_and_upper(factors: Any) -> tuple[Any, Any]:
    n = min(factors.shape[-2:])
    low = factors[..., :, :n].tril(-1)
    return low + torch.eye(low.shape[-2], n, dtype=low.dtype, device=low.device), factors[..., :n, :].triu()


def _permutation(order: Any, dtype: torch.dtype) -> Any:
    return (order == _rows(order).mT).to(dtype).mT


def lu(a: Any, *, pivot: bool = True) -> Any:
    factors, _, order, _ = _factored(a, pivot)
    return (_permutation(order, a.dtype) if pivot else a.new_empty(0), *_lower_and_upper(factors))


def lu_unpack(factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    if not unpack_data or not unpack_pivots:
        return NotImplemented
    return (_permutation(_order_of(pivots, _rows(factors)), factors.dtype), *_lower_and_upper(factors))


def _solved_by(factors: Any, order: Any, b: Any) -> Any:
    moved = torch.gather(b, -2, order.expand(b.shape))
    return _solved(factors, _solved(factors, moved, False, True), True)


def lu_solve(factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    shape = torch.broadcast_shapes(factors.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    factors, pivots, b = (one.expand(*shape, *one.shape[-count:]) for one, count in ((factors, 2), (pivots, 1), (b, 2)))
    order, right = _order_of(pivots, _rows(factors), undone=left == adjoint), b if left else b.mT
    if left != adjoint:
        made = _solved_by(factors, order, right)
    else:
        turned = _solved(factors.mT, _solved(factors.mT, right, False), True, True)
        made = torch.gather(turned, -2, order.expand(turned.shape))
    return made if left else made.mT


def solve_ex(a: Any, b: Any, *, left: bool = True) -> Any:
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    factors, pivots, order, failed = _factored(a)
    if not left:
        return lu_solve(factors, pivots, b, left=False), factors, pivots, _first(failed)
    right = b.unsqueeze(-1) if is_vector else b
    shape = torch.broadcast_shapes(a.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    right, of, order = (one.expand(*shape, *one.shape[-2:]) for one in (right, factors, order))
    made = _solved_by(of, order, right)
    return made.squeeze(-1) if is_vector else made, factors, pivots, _first(failed)


def inv_ex(a: Any) -> Any:
    made, _, _, info = solve_ex(a, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape))
    return made, info


def _eliminated(a: Any) -> tuple[Any, Any, Any, Any]:
    """LU factorisation of a, the diagonal of U, and the sign of the row exchanges: 1 if their number is even, otherwise -1."""
    factors, pivots, _, _ = _factored(a)
    moved = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)).sum(-1)
    return factors, pivots, torch.diagonal(factors, dim1=-2, dim2=-1), 1 - 2 * torch.remainder(moved, 2)


def det(a: Any) -> Any:
    factors, pivots, diagonal, sign = _eliminated(a)
    return diagonal.prod(-1) * sign, factors, pivots


def slogdet(a: Any) -> Any:
    factors, pivots, diagonal, sign = _eliminated(a)
    return torch.sign(diagonal).prod(-1) * sign, torch.log(diagonal.abs()).sum(-1), factors, pivots


_OF_TRIANGLES: dict[Any, Callable[..., Any]] = {
    aten.linalg_solve_triangular.default: solve_triangular,
    aten.triangular_solve.default: triangular_solve,
    aten.cholesky_solve.default: cholesky_solve,
    aten.cholesky_inverse.default: cholesky_inverse,
}
_RULES: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex.default: cholesky_ex,
    aten.linalg_lu_factor_ex.default: lu_factor_ex,
    aten.linalg_lu.default: lu,
    aten.lu_unpack.default: lu_unpack,
    aten.linalg_lu_solve.default: lu_solve,
    aten._linalg_solve_ex.default: solve_ex,
    aten.linalg_inv_ex.default: inv_ex,
    aten._linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
}
# Ops that rules of torch differentiate. The rules of torch give Cholesky ops symmetric gradients.
DERIVED = {
    aten.linalg_cholesky_ex.default,
    aten.cholesky_solve.default,
    aten.cholesky_inverse.default,
    aten.linalg_solve_triangular.default,
}
LINALG: dict[Any, Callable[..., Any]] = {
    **{op: partial(_for_small, rule, _ROWS) for op, rule in _RULES.items()},
    **{op: partial(_for_small, rule, math.inf) for op, rule in _OF_TRIANGLES.items()},
}
