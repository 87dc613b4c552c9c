"""Arithmetic of the check of results: finite field, dual numbers, and several sets of inputs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from hostweave.check.results import field
from hostweave.check.results.arithmetic import MULTIPLICATIVE_EXP, RANDOM_EXP
from hostweave.check.results.dual import Dual
from hostweave.check.results.field import PRIME
from hostweave.check.results.samples import Exact, NeedsSingleSample, Real, apply

RANDOM = np.random.default_rng(5)


def elements(*shape: int) -> field.Elements:
    return RANDOM.integers(1, PRIME, shape, np.uint64)


def test_the_modulus_is_prime() -> None:
    assert all(PRIME % divisor for divisor in range(2, 8193))


def test_inverses() -> None:
    x = elements(100)
    assert (field.product_of(x, field.inverse(x)) == 1).all()
    assert field.inverse(np.zeros(1, np.uint64)) == 0


@pytest.mark.parametrize("shape", [(3, 4, 5), (30, 40, 50), (2, 9000, 3)], ids=str)
def test_products_of_matrices(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    x, y = elements(2, rows, inner), elements(2, inner, columns)
    assert (field.matmul(x, y) == (x.astype(object) @ y.astype(object)) % PRIME).all()


@pytest.mark.parametrize("number", [0.0, 1.0, -3.0, 0.1, 1e-30, -1e30, 2.0**-1060, 1.7e308])
def test_floats_are_exact(number: float) -> None:
    exact = Fraction(number)
    expected = exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME
    assert field.of_floats(np.array([number])) == expected


def test_sums_of_many_are_reduced() -> None:
    x, y = elements(10000), elements(10000)
    assert (field.sum_of(x, y) == (x + y) % PRIME).all()
    assert (field.product_of(x, y) == x.astype(object) * y.astype(object) % PRIME).all()


def random_dual(*shape: int) -> Dual:
    return Dual.without_argument(RANDOM.standard_normal((2, *shape)), elements(2, *shape), elements(2, *shape))


def test_exp_of_a_sum_is_the_product_over_dual_numbers() -> None:
    x, y = random_dual(4), random_dual(4)
    assert not MULTIPLICATIVE_EXP.exp(x + y).differs(MULTIPLICATIVE_EXP.exp(x) * MULTIPLICATIVE_EXP.exp(y)).any()
    positive = Dual.without_argument(np.abs(y.value), *y.components[1:3])
    assert not MULTIPLICATIVE_EXP.exp(MULTIPLICATIVE_EXP.log(positive) + x).differs(positive * MULTIPLICATIVE_EXP.exp(x)).any()
    assert not (x / y * y).differs(x).any()


def test_exp_of_a_field_element_is_a_random_function() -> None:
    x = Real(RANDOM.standard_normal((1, 4)), elements(1, 4))
    assert (RANDOM_EXP.exp(x).element != RANDOM_EXP.exp(x + 1).element).all()
    assert RANDOM_EXP.exp(x - x).element.tolist() == [[1] * 4]


def test_sets_of_inputs_are_computed_separately_if_a_value_is_read() -> None:
    x, at = Exact(np.arange(6).reshape(2, 3)), Exact(np.array([0, 2]))
    with pytest.raises(NeedsSingleSample):
        int(at)
    taken = apply(lambda x, at: x[int(at) :][:1], x, at)
    assert taken.value.tolist() == [[0], [5]]


def test_missing_functions_are_named() -> None:
    with pytest.raises(NotImplementedError, match=r"has no np.kron: add it to functions.py"):
        RANDOM_EXP.kron(Exact(np.ones((1, 2), int)), 2)
