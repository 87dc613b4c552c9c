"""ATen's special functions in terms of other ops: series, asymptotic expansions, and sums that approximate integrals. The rules refuse
complex numbers. The rules also refuse float64, because the sums have only enough terms for float32."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

aten = torch.ops.aten
_FAR = 25.0  # from here on, asymptotic expansions have an error below 1e-7


def _in_float32(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Rule that computes in float32, and refuses float64 and complex operands. Results have the dtype of the first float, or float32."""
    given = [one for one in (x, *others) if isinstance(one, torch.Tensor)]
    if any(one.dtype == torch.float64 or one.is_complex() for one in given):
        return NotImplemented
    floats = [one.dtype for one in given if one.is_floating_point()]
    made = function(*(one.to(torch.float32) if isinstance(one, torch.Tensor) else one for one in (x, *others)))
    return made.to(floats[0] if floats else torch.float32)


# --- Bessel functions -------------------------------------------------------------------------------------------------


def _mean(x: Any, term: Callable[[Any, float], Any], count: int = 20) -> Any:
    """Mean of `term(x, angle)` over angles from 0 to pi, by the trapezoidal rule, which converges fast for smooth even continuations."""
    ends = (term(x, 0.0) + term(x, math.pi)) / 2
    return (ends + sum(term(x, math.pi * k / count) for k in range(1, count))) / count


def _power_series(z: Any, coefficients: Sequence[float]) -> Any:
    made: Any = torch.full_like(z, coefficients[-1])
    for one in reversed(coefficients[:-1]):
        made = made * z + one
    return made


def _hankel(order: int, x: Any, sign: float) -> tuple[Any, Any, Any]:
    """x, at least `_FAR`, and the even and odd part of the asymptotic expansion of I, J, K and Y in 1 / (8 x)."""
    far = x.clamp(min=_FAR)
    mu, term, terms = 4.0 * order * order, 1.0, [1.0]
    for k in range(1, 6):
        term *= (mu - (2 * k - 1) ** 2) / k
        terms.append(term)
    z = 1 / (8 * far)
    even = _power_series(z * z, [terms[0], sign * terms[2], terms[4]])
    odd = z * _power_series(z * z, [terms[1], sign * terms[3], terms[5]])
    return far, even, odd


def _i_scaled(order: int, x: Any) -> Any:
    """exp(-|x|) I(x). The weights cos(angle) of order 1 sum to 0, so expm1 can replace exp, and is precise for small x."""
    size = x.abs()
    near = size.clamp(max=_FAR)
    if order:
        small = _mean(near, lambda x, angle: torch.expm1(x * (math.cos(angle) - 1)) * math.cos(angle))
    else:
        small = _mean(near, lambda x, angle: torch.exp(x * (math.cos(angle) - 1)))
    far, even, odd = _hankel(order, size, 1.0)
    made = torch.where(size <= _FAR, small, (even - odd) / torch.sqrt(2 * math.pi * far))
    return torch.where(x < 0, -made, made) if order else made


def _unscaled(scaled: Callable[[int, Any], Any], sign: float, order: int, x: Any) -> Any:
    half = torch.exp(sign * x.abs() / 2)  # exp(|x|) may overflow
    return half * scaled(order, x) * half


_i = partial(_unscaled, _i_scaled, 1.0)


def _psi(n: int) -> float:
    return -np.euler_gamma + sum(1 / k for k in range(1, n))


def _psi_series(order: int, z: Any, count: int) -> Any:
    terms = (sum(_psi(k + j) for j in range(1, order + 2)) / (math.factorial(k) * math.factorial(k + order)) for k in range(count))
    return _power_series(z, list(terms))


def _k_scaled(order: int, x: Any) -> Any:
    """exp(x) K(x): the series up to x = 1, the integral of exp(-x cosh t) cosh(order t) up to x = 25, then the asymptotic expansion."""
    low = x.clamp(max=1.0)
    z, log = low * low / 4, torch.log(low / 2)
    sums = _psi_series(order, z, 7)
    series = log * _i(1, low) + 1 / low - low / 4 * sums if order else sums - log * _i(0, low)
    high, spacing = x.clamp(min=1.0), 0.2
    total: Any = torch.full_like(high, 0.5)
    for k in range(1, 21):
        wide = math.cosh(spacing * k)
        total = total + torch.exp(high * (1 - wide)) * (wide if order else 1.0)
    far, even, odd = _hankel(order, x, 1.0)
    integral = torch.where(x <= _FAR, total * spacing, (even + odd) * torch.sqrt(math.pi / (2 * far)))
    made = torch.where(x <= 1, series * torch.exp(low), integral)
    return torch.where(x > 0, made, torch.where(x == 0, math.inf, math.nan))


_GAUSS = zip(*np.polynomial.legendre.leggauss(32), strict=True)
_NODES = [(float(node + 1) / 2, float(weight) / 2) for node, weight in _GAUSS]  # for integrals from 0 to 1


def _j(order: int, x: Any) -> Any:
    size = x.abs()
    near = size.clamp(max=_FAR)
    small = _mean(near, lambda x, angle: torch.cos(x * math.sin(angle) - order * angle), 24)
    far, even, odd = _hankel(order, size, -1.0)
    phase = far - (order / 2 + 0.25) * math.pi
    large = (even * torch.cos(phase) - odd * torch.sin(phase)) * torch.sqrt(2 / (math.pi * far))
    made = torch.where(size <= _FAR, small, large)
    return torch.where(x < 0, -made, made) if order else made


def _y(order: int, x: Any) -> Any:
    """Bessel function Y: the series up to x = 2, integrals up to x = 25, then the asymptotic expansion."""
    low = x.clamp(max=2.0)
    z, log = low * low / 4, torch.log(low / 2)
    sums = _psi_series(order, -z, 10)
    series = (2 * log * _j(order, low) - 2 / low - low / 2 * sums) / math.pi if order else (2 / math.pi) * (log * _j(order, low) - sums)
    middle = x.clamp(2.0, _FAR)
    waves: Any = sum(torch.sin(middle * math.sin(math.pi * at) - order * math.pi * at) * weight for at, weight in _NODES)
    end = torch.asinh(20 / middle)
    tail: Any = 0.0
    for at, weight in _NODES:
        t = end * at
        tail = tail + torch.exp(-middle * torch.sinh(t)) * (2 * torch.sinh(t) if order else 2.0) * weight
    integral = waves - tail * end / math.pi
    far, even, odd = _hankel(order, x, -1.0)
    phase = far - (order / 2 + 0.25) * math.pi
    large = (even * torch.sin(phase) + odd * torch.cos(phase)) * torch.sqrt(2 / (math.pi * far))
    made = torch.where(x <= 2, series, torch.where(x <= _FAR, integral, large))
    return torch.where(x > 0, made, torch.where(x == 0, -math.inf, math.nan))


def _spherical_j0(x: Any) -> Any:
    made = torch.where(x.abs() < 0.5, 1 - x * x / 6 * (1 - x * x / 20 * (1 - x * x / 42)), torch.sin(x) / x)
    return torch.where(torch.isinf(x), 0.0, made)


# --- gamma and error functions ----------------------------------------------------------------------------------------

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
_SHIFT = 10  # added to arguments of asymptotic expansions


def _of_positive(n: int, x: Any) -> Any:
    """n-th derivative of digamma for x > 0: explicit terms below x + 10, then the Euler-Maclaurin formula."""
    y = x + _SHIFT
    if n == 0:
        z = 1 / (y * y)
        tail = torch.log(y) - 0.5 / y - z * _power_series(z, [of / (2 * k) for k, of in enumerate(_BERNOULLI, 1)])
        return tail - sum(1 / (x + k) for k in range(_SHIFT))
    s = n + 1
    total = sum((x + k) ** -s for k in range(_SHIFT)) + y ** (1 - s) / (s - 1) + 0.5 * y**-s
    rising = float(s)
    for k, of in enumerate(_BERNOULLI, 1):
        total = total + of / math.factorial(2 * k) * rising * y ** (1 - s - 2 * k)
        rising *= (s + 2 * k - 1) * (s + 2 * k)
    return total * (math.factorial(n) * (-1) ** (n + 1))


def polygamma(n: int, x: Any) -> Any:
    """n-th derivative of digamma. Negative x need the reflection formula, with derivatives of cot(pi x): polynomials in cot(pi x)."""
    reflected = torch.where(x < 0, 1 - x, x)
    made = _of_positive(n, reflected)
    fraction = x - torch.round(x)
    cot = 1 / torch.tan(math.pi * fraction)
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        polynomial = polynomial.deriv() * np.polynomial.Polynomial([-math.pi, 0.0, -math.pi])
    below = (-1) ** n * made - math.pi * _power_series(cot, [float(one) for one in polynomial.coef])
    at_poles = math.nan if n == 0 else math.inf * (-1) ** (n + 1)
    made = torch.where(x < 0, torch.where(fraction == 0, at_poles, below), made)
    return torch.where(x == 0, -torch.copysign(torch.full_like(x, math.inf), x), made) if n == 0 else made


def _inverse_of_erfc(q: Any) -> Any:
    """Inverse of erfc for q from 0 to 1: two steps of Halley's method from Winitzki's estimate."""
    log = torch.log(q * (2 - q))
    first = 2 / (math.pi * 0.147) + log / 2
    y = torch.sqrt(torch.sqrt(first * first - log / 0.147) - first)
    for _ in range(2):
        half = torch.exp(y * y / 2)  # exp(y * y) may overflow
        off = (torch.erfc(y) - q) * (math.sqrt(math.pi) / 2) * half * half
        y = y + off / (1 - y * off)
    return torch.where(q == 0, math.inf, y)


def _erfinv(x: Any) -> Any:
    made = _inverse_of_erfc(1 - x.abs())
    small = x * (math.sqrt(math.pi) / 2) * (1 + math.pi / 12 * x * x * (1 + 7 * math.pi / 40 * x * x))
    return torch.where(x.abs() < 0.05, small, torch.where(x < 0, -made, made))


def _ndtri(p: Any) -> Any:
    made = math.sqrt(2) * _inverse_of_erfc(2 * torch.where(p < 0.5, p, 1 - p))
    return torch.where(p < 0.5, -made, made)


def _erfcx(x: Any) -> Any:
    z = 1 / (x * x)
    far = (1 - z / 2 * (1 - 1.5 * z * (1 - 2.5 * z))) / (x * math.sqrt(math.pi))
    low = x.clamp(max=8.0)
    return torch.where(x > 8, far, torch.exp(low * low) * torch.erfc(low))


def _chebyshev(kind: str, is_shifted: bool, x: Any, n: Any) -> Any:
    """Function for a Chebyshev polynomial: uses the angle with cosine x, or the hyperbolic angle if |x| is larger than 1."""
    x = 2 * x - 1 if is_shifted else x
    n = torch.trunc(n) if isinstance(n, torch.Tensor) else torch.full_like(x, math.trunc(n))
    size = x.abs()
    inside, outside = torch.acos(x.clamp(-1, 1)), torch.acosh(size.clamp(min=1))
    parity = torch.where(torch.remainder(n, 2) == 1, -1.0, 1.0)
    sign: Any = torch.where(x < 0, parity, 1.0)
    power = torch.exp(n * outside)  # a quotient of hyperbolic functions may be finite although both overflow
    if kind == "t":
        a, b = torch.cos(n * inside), sign * torch.cosh(n * outside)
    elif kind == "u":
        a = torch.where(torch.sin(inside).abs() < 1e-4, sign * (n + 1), torch.sin((n + 1) * inside) / torch.sin(inside))
        b = sign * torch.where(outside < 1e-4, n + 1, power * torch.expm1(-2 * (n + 1) * outside) / torch.expm1(-2 * outside))
    else:  # the third kind at x equals the fourth kind at -x, up to the sign for odd degrees
        half, near, sign = n + 0.5, x if kind == "v" else -x, 1.0 if kind == "v" else parity
        angle = torch.acos(near.clamp(-1, 1))
        a = sign * torch.where(torch.cos(angle / 2).abs() < 1e-4, parity * (2 * n + 1), torch.cos(half * angle) / torch.cos(angle / 2))
        positive = power * (1 + torch.exp(-2 * half * outside)) / (1 + torch.exp(-outside))
        negative = parity * torch.where(outside < 1e-4, 2 * n + 1, power * torch.expm1(-2 * half * outside) / torch.expm1(-outside))
        b = sign * torch.where(near >= 0, positive, negative)
    made = torch.where(size <= 1, a, b)
    return torch.where(n > 0, made, torch.where(n == 0, 1.0, 0.0))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "i0": partial(_i, 0),
    "special_i1": partial(_i, 1),
    **{f"special_i{order}e": partial(_i_scaled, order) for order in (0, 1)},
    **{f"special_modified_bessel_i{order}": partial(_i, order) for order in (0, 1)},
    **{f"special_modified_bessel_k{order}": partial(_unscaled, _k_scaled, -1.0, order) for order in (0, 1)},
    **{f"special_scaled_modified_bessel_k{order}": partial(_k_scaled, order) for order in (0, 1)},
    **{f"special_bessel_j{order}": partial(_j, order) for order in (0, 1)},
    **{f"special_bessel_y{order}": partial(_y, order) for order in (0, 1)},
    "special_spherical_bessel_j0": _spherical_j0,
    "digamma": partial(polygamma, 0),
    "erfinv": _erfinv,
    "special_ndtri": _ndtri,
    "special_erfcx": _erfcx,
}
# Ops that torch's own rules differentiate.
_WORDS = "i0 special_i0e special_i1 special_i1e digamma polygamma erfinv special_ndtri special_erfcx"
DERIVED = {getattr(aten, name).default for name in _WORDS.split()}
SPECIAL: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, name).default: partial(_in_float32, function) for name, function in _FUNCTIONS.items()},
    aten.polygamma.default: lambda n, x: NotImplemented if n > 20 else _in_float32(partial(polygamma, n), x),
}
for _kind in "tuvw":
    for _word in ("", "shifted_"):
        _op = getattr(aten, f"special_{_word}chebyshev_polynomial_{_kind}")
        _rule = partial(_in_float32, partial(_chebyshev, _kind, bool(_word)))
        SPECIAL |= {_op.default: _rule, _op.n_scalar: _rule}
