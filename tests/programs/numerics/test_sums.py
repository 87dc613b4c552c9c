"""Sums, means and variances of many elements, and of elements far from zero, have small rounding errors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

pytestmark = pytest.mark.usefixtures("optimised_kernels")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ran(function: Any, target: str, **arrays: Any) -> Any:
    program = hw.compile(function, target)
    results = program.run(**arrays)
    program.close()
    return results


def test_more_terms_than_f32_counts(target: str) -> None:
    """In f32, a naive sum of ones would stop at 2^24, because 2^24 + 1 is rounded to 2^24."""

    @hw.fusion(x=hw.f16["N"], y=hw.f16["M", 2])
    def sums(x, y):
        return hw.mean(x), hw.sum(hw.astype(x, hw.f32)), hw.sum(hw.astype(y, hw.f32), 0), hw.var(x)

    ones = np.ones(40_000_000, np.float16)
    mean, total, columns, variance = ran(sums, target, x=ones, y=ones.reshape(-1, 2))
    assert (mean, total, variance) == (1, 40_000_000, 0)
    np.testing.assert_array_equal(columns, [20_000_000, 20_000_000])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_sums_have_few_rounding_errors(dtype: str, axis: int, target: str) -> None:
    """The terms are positive, so sequential addition would have a far larger error."""
    spec = getattr(hw, dtype)

    @hw.fusion(x=spec["M", "N"])
    def sums(x):
        return hw.sum(x, axis), hw.mean(x, axis)

    store = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    x = np.moveaxis(np.random.default_rng(0).uniform(0, 0.1, (300_000, 4)).astype(store), 0, axis)
    exact = x.astype(np.longdouble).sum(axis)
    unit = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
    for result, want in zip(ran(sums, target, x=np.ascontiguousarray(x)), (exact, exact / 300_000), strict=True):
        np.testing.assert_allclose(result.astype(np.longdouble), want, rtol=20 * unit)


@pytest.mark.parametrize("axis", [0, 1])
def test_variance_far_from_zero(axis: int, target: str) -> None:
    """Near 1e8, the spacing of f32 is 8, so the mean is not exact."""

    @hw.fusion(x=hw.f32["M", "N"], y=hw.bf16["M", "N"], z=hw.f32["M", "N"])
    def variances(x, y, z):
        return hw.var(x, axis), hw.var(y, axis), hw.var(z, axis), hw.var(x)

    random = np.random.default_rng(0)
    x = (1e8 + 8.0 * random.integers(0, 2, (1000, 1000))).astype(np.float32)
    y = (100 + random.standard_normal((1000, 1000))).astype(ml_dtypes.bfloat16)
    z = np.full((1000, 1000), 0.1, np.float32)
    of_x, of_y, of_z, of_all = ran(variances, target, x=x, y=y, z=z)
    np.testing.assert_allclose(of_x, x.var(axis, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(of_y.astype(np.float64), y.astype(np.float64).var(axis), rtol=2**-8)
    assert (of_z >= 0).all()
    np.testing.assert_allclose(of_z, 0, atol=1e-14)
    np.testing.assert_allclose(of_all, x.var(dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_layer_norm_errs_as_little_as_torch(offset: float, target: str) -> None:
    x = (offset + np.random.default_rng(0).standard_normal((64, 4096))).astype(np.float32)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    error_of_torch = np.abs(torch.nn.functional.layer_norm(torch.from_numpy(x), (4096,)).numpy() - exact).max()
    result = ran(hw.fusion(x=hw.f32["M", "N"])(lambda x: hw.layer_norm(x)), target, x=x)
    assert np.abs(result - exact).max() <= 4 * error_of_torch


def test_sums_of_infinities_and_nans(target: str) -> None:
    @hw.fusion(x=hw.f32["M", "N"])
    def sums(x):
        return hw.sum(x, 1), hw.mean(x, 1), hw.var(x, 1)

    big = np.finfo(np.float32).max
    x = np.ones((5, 33), np.float32)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6:8], x[4, 7:9] = np.inf, -np.inf, np.nan, (np.inf, -np.inf), big
    total, mean, variance = ran(sums, target, x=x)
    np.testing.assert_array_equal(total, [np.inf, -np.inf, np.nan, np.nan, np.inf])
    np.testing.assert_array_equal(mean, total)
    assert np.isnan(variance[:4]).all()
