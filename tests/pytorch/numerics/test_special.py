"""Special functions that are composed of simpler ops, mostly compared with torch's functions in float64. Also integer powers, gcd, lcm,
quantile and frexp."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402
from hostweave.torch.special import SPECIAL  # noqa: E402

aten = torch.ops.aten
WIDE = torch.cat([torch.linspace(-40, 40, 4001), torch.logspace(-6, 2, 400), torch.tensor([0.0, 1.0, -1.0, 2.0, 25.0, 89.0, 91.0, 1e3])])
SHARES = torch.cat([torch.linspace(-1, 1, 999), torch.logspace(-30, -1, 99), 1 - torch.logspace(-7, -1, 99)])
OF_SHARES = (aten.erfinv.default, aten.special_ndtri.default)
OF_ONE = [op for op in SPECIAL if len(op._schema.arguments) == 1]
POLYNOMIALS = [op for op in SPECIAL if "chebyshev" in str(op) and op._overloadname == "default"]


def expect_close(made: torch.Tensor, want: torch.Tensor, rtol: float = 2e-5, atol: float = 5e-7) -> None:
    torch.testing.assert_close(made, want.to(torch.float32), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("op", OF_ONE, ids=str)
def test_of_one_argument(op: object) -> None:
    x = SHARES if op in OF_SHARES else WIDE
    x = x[(x - x.round()).abs() > 0.01] if op == aten.digamma.default else x  # Poles are tested below.
    expect_close(SPECIAL[op](x), op(x.double()))


def test_quantiles_of_small_probabilities() -> None:
    p = torch.logspace(-37, -1, 199)
    expect_close(SPECIAL[aten.special_ndtri.default](p), aten.special_ndtri.default(p.double()), rtol=5e-7, atol=0)


def test_polygamma_of_a_high_order_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"torch\.special_polygamma: aten\.polygamma\.default has no equivalent in a fusion"):
        hw.fusion(x=hw.f32["M"])(lambda x: torch.special.polygamma(21, x))


@pytest.mark.parametrize("order", range(5))
def test_polygamma(order: int) -> None:
    x = WIDE[(WIDE > -8.5) & ((WIDE - WIDE.round()).abs() > 0.05)]
    want = aten.polygamma.default(order, x.double())
    expect_close(SPECIAL[aten.polygamma.default](order, x), want, rtol=1e-4, atol=1e-6 * 60**order)


def test_poles() -> None:
    poles = torch.tensor([0.0, -0.0, -1.0, -7.0])
    assert bool(torch.isinf(SPECIAL[aten.polygamma.default](1, poles)).all())  # torch gives large finite numbers at negative poles.
    for order in (0, 2, 3):
        torch.testing.assert_close(
            SPECIAL[aten.polygamma.default](order, poles), aten.polygamma.default(order, poles), equal_nan=True, rtol=0, atol=0
        )
    ends = torch.tensor([-1.0, 1.0, -1.5, 2.0, float("nan")])
    for op in OF_SHARES:
        torch.testing.assert_close(SPECIAL[op](ends), op(ends), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("degree", range(12))
@pytest.mark.parametrize("op", POLYNOMIALS, ids=str)
def test_polynomials(op: object, degree: int) -> None:
    x = WIDE[WIDE.abs() < 1.5]
    x = (x + 1) / 2 if "shifted" in str(op) else x
    n = torch.full_like(x, degree)
    want = op(x.double(), n.double())
    made = SPECIAL[op](x, n)
    assert float(((made - want).abs() / (1 + want.abs())).max()) < 2e-5


def test_float64_is_refused() -> None:
    for op in OF_ONE:
        assert SPECIAL[op](torch.ones(2, dtype=torch.float64)) is NotImplemented


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_powers_of_integers_wrap(dtype: Any) -> None:
    """A negative exponent gives 0, unless the base is 1 or -1."""

    class Powers(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a**b, 3 ** b.abs(), torch.pow(a, 5)

    base = torch.tensor([0, 1, 2, 3, 5, 7, 0, 1, -1, -1, 2, 3, -2]).to(dtype)
    exponent = torch.tensor([100, 3, 70, 90, 2, 120, -1, -2, -3, -4, -1, 0, 5]).to(dtype)
    made = hostweave.torch.compile(Powers(), hw.Mesh(tp=1), {}, (base, exponent))(base, exponent)
    for one, other in zip(made, Powers()(base, exponent), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_divisors_and_multiples(dtype: Any) -> None:
    class Both(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return torch.gcd(a, b), torch.lcm(a, b)

    pairs = torch.cartesian_prod(*[torch.tensor([0, 1, 2, 6, 7, 10, -4, -9, 11]).to(dtype)] * 2)
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    made = hostweave.torch.compile(Both(), hw.Mesh(tp=1), {}, (a, b))(a, b)
    for one, other in zip(made, Both()(a, b), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("interpreted")
def test_gradients_of_quantile_and_frexp() -> None:
    x = torch.tensor([[0.3, -5.0, 2.0, 1.5], [1e-3, 8.0, -0.7, 100.0]], requires_grad=True)

    class Both(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.quantile(x, torch.tensor([0.1, 0.6]), dim=1).sum() + (torch.frexp(x)[0] * x.detach()).sum()

    made = []
    for module in (hostweave.torch.compile(Both(), hw.Mesh(tp=1), {}, (x,), training=True), Both()):
        x.grad = None
        module(x).backward()
        made.append(x.grad)
    torch.testing.assert_close(*made)
