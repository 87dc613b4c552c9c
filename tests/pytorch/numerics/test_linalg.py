"""Matrix factorisations, composed of simpler ops, are compared with torch's factorisations. Most tests run the factorisations eagerly."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402
from hostweave.torch.linalg import LINALG  # noqa: E402

aten = torch.ops.aten


def square(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, shape[-1], dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    a = square(*shape)
    return a @ a.mT + torch.eye(shape[-1], dtype=a.dtype)


def wide(n: int, columns: int = 3) -> torch.Tensor:
    return torch.randn(2, n, columns, dtype=torch.float64)


def factors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linalg.lu_factor(square(2, n))


CASES: dict[str, tuple[Any, Any]] = {
    "lower": (aten.linalg_solve_triangular.default, lambda n: ((square(2, n).tril(), wide(n)), {"upper": False})),
    "from the right": (aten.linalg_solve_triangular.default, lambda n: ((square(2, n).triu(), wide(n).mT), {"upper": True, "left": False})),
    "unit": (aten.linalg_solve_triangular.default, lambda n: ((square(2, n), wide(n)), {"upper": True, "unitriangular": True})),
    "transposed": (aten.triangular_solve.default, lambda n: ((wide(n), square(2, n).triu(), True, True), {})),
    "cholesky": (aten.linalg_cholesky_ex.default, lambda n: ((positive(2, n),), {})),
    "cholesky, upper": (aten.linalg_cholesky_ex.default, lambda n: ((positive(2, n),), {"upper": True})),
    "cholesky_solve": (aten.cholesky_solve.default, lambda n: ((wide(n), torch.linalg.cholesky(positive(2, n))), {})),
    "cholesky_inverse": (aten.cholesky_inverse.default, lambda n: ((torch.linalg.cholesky(positive(2, n)).mT, True), {})),
    "lu_factor": (aten.linalg_lu_factor_ex.default, lambda n: ((square(2, n),), {})),
    "lu_factor of rows": (aten.linalg_lu_factor_ex.default, lambda n: ((wide(n, 4),), {})),
    "lu_factor of a singular one": (aten.linalg_lu_factor_ex.default, lambda n: ((torch.zeros(2, n, n).double(),), {})),
    "lu": (aten.linalg_lu.default, lambda n: ((wide(n, 4),), {})),
    "lu_unpack": (aten.lu_unpack.default, lambda n: (factors(n), {})),
    "lu_solve": (aten.linalg_lu_solve.default, lambda n: ((*factors(n), wide(n)), {})),
    "lu_solve, adjoint": (aten.linalg_lu_solve.default, lambda n: ((*factors(n), wide(n)), {"adjoint": True})),
    "lu_solve from the right": (aten.linalg_lu_solve.default, lambda n: ((*factors(n), wide(n).mT), {"left": False})),
    "lu_solve from the right, adjoint": (
        aten.linalg_lu_solve.default,
        lambda n: ((*factors(n), wide(n).mT), {"left": False, "adjoint": True}),
    ),
    "solve": (aten._linalg_solve_ex.default, lambda n: ((square(2, n), wide(n)), {})),
    "solve of vectors": (aten._linalg_solve_ex.default, lambda n: ((square(2, n), wide(n)[..., 0]), {})),
    "solve from the right": (aten._linalg_solve_ex.default, lambda n: ((square(2, n), wide(n).mT), {"left": False})),
    "inv": (aten.linalg_inv_ex.default, lambda n: ((square(2, n),), {})),
    "det": (aten._linalg_det.default, lambda n: ((square(2, n),), {})),
    "slogdet": (aten._linalg_slogdet.default, lambda n: ((square(2, n),), {})),
}


@pytest.mark.parametrize("n", [1, 2, 5, 17])
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str, n: int) -> None:
    torch.manual_seed(n)
    op, draw = CASES[name]
    args, kwargs = draw(n)
    made, want = LINALG[op](*args, **kwargs), op(*args, **kwargs)
    if op in (aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default):
        made, want = (
            made[: 1 if op is not aten._linalg_slogdet.default else 2],
            tuple(want)[: 1 if op is not aten._linalg_slogdet.default else 2],
        )
    for one, other in zip(made if isinstance(made, tuple) else [made], want if isinstance(want, tuple) else [want], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in CASES if "solve" in name or name in ("lower", "from the right", "unit", "transposed")])
def test_infinities_and_nans_reach_the_same_elements(name: str) -> None:
    op, draw = CASES[name]
    for seed, n in enumerate([1, 2, 4, 5, 5, 7, 8, 9, 16, 17, 31, 32]):
        torch.manual_seed(seed)
        args, kwargs = draw(n)
        right = next(one for one in args if one.is_floating_point() and (one.ndim == 2 or one.shape[-1] != one.shape[-2]))
        right[tuple(int(torch.randint(size, ())) for size in right.shape)] = [math.inf, -math.inf, math.nan][seed % 3]
        made, want = LINALG[op](*args, **kwargs), op(*args, **kwargs)
        made, want = (one[0] if isinstance(one, tuple) else one for one in (made, want))
        torch.testing.assert_close(made, want, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_every_op_is_tested_and_larger_ones_are_refused() -> None:
    assert {op for op, _ in CASES.values()} == LINALG.keys()
    assert LINALG[aten.linalg_inv_ex.default](torch.eye(33)) is NotImplemented


@pytest.mark.parametrize("upper", [False, True])
def test_large_triangles_are_inverted_by_blocks(upper: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.rand(2, 70, 70).double() + 8 * torch.eye(70), torch.randn(2, 70, 3).double()
    given = {"upper": upper, "unitriangular": False}
    made = LINALG[aten.linalg_solve_triangular.default](a, b, **given)
    torch.testing.assert_close(made, torch.linalg.solve_triangular(a, b, **given), rtol=1e-9, atol=1e-9)


def test_index_of_the_failing_step() -> None:
    a = torch.eye(4).double()
    a[2, 2] = 0
    for op in (aten.linalg_lu_factor_ex.default, aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default):
        assert int(LINALG[op](a)[-1]) == int(op(a)[-1]) == 3


class Solved(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a, b) + torch.linalg.inv(a).sum(-1, keepdim=True)


@pytest.mark.usefixtures("exported_once")
@pytest.mark.parametrize("training", [False, True])
def test_a_module_raises_as_torch_does(training: bool) -> None:
    own, a, b = Solved(), positive(2, 3).float().requires_grad_(training), wide(3).float()
    singular = a.detach().clone()
    singular[1, 2] = 0
    with pytest.raises(torch.linalg.LinAlgError, match="singular") as wanted:
        own(singular, b)
    for mesh, plan in ((hw.Mesh(tp=1), {}), (hw.Mesh(tp=2), {"a": "tp, -, -", "b": "tp, -, -"})):
        model = hostweave.torch.compile(own, mesh, plan, (a, b), training=training)
        made, want = model(a, b), own(a, b)
        torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
        if training:
            gradients = [torch.autograd.grad(one.square().sum(), a)[0] for one in (made, want)]
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
        with pytest.raises(torch.linalg.LinAlgError) as raised:
            model(singular, b)
        assert str(raised.value) == str(wanted.value)


def test_a_whole_step_has_no_checks() -> None:
    """With checks, the program would update parameters before it raises an error."""
    module = OfMatrix(lambda a: torch.linalg.inv(a).sum())
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ProgramError, match=r"as torch.linalg.inv makes, are not supported in a whole step; .* such as inv_ex"):
        hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (SQUARE,), optimizer=optimizer)


SQUARE = torch.tensor([[4.0, 1, 0, 2], [1, 5, 2, 0], [3, 0, 6, 1], [0, 2, 1, 7]])
LAYOUTS: dict[str, Any] = {
    "view of a solution": lambda a: torch.linalg.solve_ex(a, a + 1)[0].mT.view(-1),
    "memory of an inverse": lambda a: torch.linalg.inv_ex(a)[0].as_strided((16,), (1,)),
    "part of an inverse": lambda a: torch.linalg.inv_ex(a)[0].as_strided((4, 3), (4, 1)),
    "view of a Cholesky inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky_ex(a @ a.mT)[0]).mT.view(-1),
    "memory of strided elements": lambda a: (a + 1).as_strided((2, 2), (1, 2)).as_strided((4,), (1,)),
    "memory of a part": lambda a: (a + 1).unbind(0)[1].as_strided((2, 2), (1, 2)),
    "memory of windows": lambda a: (a + 1).unfold(0, 2, 1).as_strided((4,), (1,)),
    "memory of a copy": lambda a: torch.empty(4, 4).copy_(a.T).view(-1),
    "memory of a permuted copy": lambda a: torch.permute_copy(a + 1, (1, 0)).as_strided((16,), (1,)),
    "memory of a sum": lambda a: torch.scatter_reduce(a.T, 0, torch.zeros(4, 4, dtype=torch.int64), a, "sum").as_strided((16,), (1,)),
}


class OfMatrix(torch.nn.Module):
    """Functions of a matrix, each with a parameter that scales the matrix."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions, self.scales = functions, torch.nn.ParameterList(torch.tensor(1.5) for _ in functions)

    def forward(self, a: torch.Tensor) -> Any:
        return [function(a * scale) for function, scale in zip(self.functions, self.scales, strict=True)]


@pytest.mark.usefixtures("interpreted")
def test_results_are_laid_out_as_by_torch() -> None:
    """After a decomposed op, `as_strided` must read the right elements, and `view` must be supported."""
    module, found = OfMatrix(*LAYOUTS.values()), []
    for call in (hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (SQUARE,), training=True), module):
        results = call(SQUARE)
        loss = sum((result * torch.linspace(0.1, 1, result.numel()).view(result.shape)).sum() for result in results)
        found.append((results, torch.autograd.grad(loss, [*module.scales])))
    (made, gradients), (want, wanted) = found
    for name, *parts in zip(LAYOUTS, made, want, gradients, wanted, strict=True):
        torch.testing.assert_close(parts[0], parts[1], rtol=1e-4, atol=1e-4, msg=lambda why, name=name: f"{name}: {why}")
        torch.testing.assert_close(parts[2], parts[3], rtol=1e-3, atol=1e-3, msg=lambda why, name=name: f"{name}: {why}")


class OfSamples(torch.nn.Module):
    """Inverts regularised covariances, and computes the log-determinants of covariances, for each element of a batch.

    The covariance of two samples is singular. The check in `hw.compile` uses small sizes, so this check computes with singular covariances.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        centred = x @ self.w
        centred = centred - centred.mean(0, keepdim=True)
        covariance = torch.einsum("sbi,sbj->bij", centred, centred)
        return torch.linalg.inv_ex(covariance + torch.eye(3) * self.w.square().sum())[0], torch.linalg.slogdet(covariance)[1]


def test_the_check_accepts_matrices_that_are_singular() -> None:
    """The program adds the terms of a covariance in another order than the fusion, so the pivots have different rounding errors."""
    torch.manual_seed(0)
    x, module = torch.randn(2, 5, 3), OfSamples()
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"x": "tp, -, -"}, (x,), training=True)
    torch.testing.assert_close(model(x)[0], module(x)[0], rtol=1e-4, atol=1e-4)
