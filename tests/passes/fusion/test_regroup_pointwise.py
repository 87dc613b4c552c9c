"""The pass regroup_pointwise: pointwise ops next to reshapes fuse with the kernels on the other side of the reshapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compiled_fusions import random_arrays

import hostweave as hw
from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.passes.fusion import regroup_pointwise


def launches(function: Callable[..., Any], **specs: Any) -> int:
    """Compares the results of a program with the reference. Returns the number of launches of generated kernels."""
    fusion = hw.fusion(**specs)(function)
    program = hw.compile(fusion)
    arrays = random_arrays(fusion, {}, seed=0)
    found = program.run(**arrays)
    for one, right in zip(found if isinstance(found, tuple) else (found,), run_reference(fusion, arrays), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)
    return str(program.host_ir).count("launch ")


X, W = hw.f32[12, 8], hw.f32[8, 5]


def test_between_reshapes() -> None:
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        h = hw.reshape(x * x + 1.0, 3, 4, 8)
        g = hw.tanh(h) * h
        return hw.sum(hw.reshape(g, 12, 8), 1)

    assert launches(f, x=X, w=W) == 1


@pytest.mark.parametrize("depth", [3, 9])
def test_the_number_of_rewrites_does_not_depend_on_the_depth(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups without a common reshape move in one rewrite. So the time of the pass is linear in the number of layers."""
    rewrites, rewritten = list[str](), OpRewriter.rewritten

    def counted(rewriter: OpRewriter) -> Fusion:
        rewrites.append(type(rewriter).__module__)
        return rewritten(rewriter)

    monkeypatch.setattr(OpRewriter, "rewritten", counted)

    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        for _ in range(depth):
            g = hw.tanh(hw.reshape(x * x + 1.0, 3, 4, 8))
            x = hw.sort(hw.sum(hw.reshape(g, 12, 8), 1, keepdims=True) * x, 0)
        return x

    launches(f, x=X, w=W)
    assert rewrites.count(regroup_pointwise.__name__) == 2


def test_a_value_that_is_returned_or_multiplied_keeps_its_shape() -> None:
    def f(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.tanh(hw.reshape(x * x + 1.0, 3, 4, 8))
        return h, h @ w

    assert launches(f, x=X, w=W) == 1


def test_operands_that_are_broadcast() -> None:
    """A scalar, or a vector along an unchanged dim, is broadcast without a reshape. An input with all dims gets a reshape, which is a
    view."""

    def f(x: hw.Tensor, v: hw.Tensor, y: hw.Tensor, s: hw.Tensor) -> hw.Tensor:
        h = hw.reshape(hw.exp(x), 3, 4, 8)
        return (h + v) * y - s

    sizes: dict[str, Any] = {"x": X, "v": hw.f32[8], "y": hw.f32[3, 4, 8], "s": hw.f32[()]}
    assert launches(f, **sizes) == 1
    assert launches(f, **{**sizes, "y": hw.f32[3, 4, 1]}) == 1
    assert launches(f, **{**sizes, "y": hw.f32[3, 1, 8]}) == 1  # y cannot be reshaped, so the ops before the reshape move.


@pytest.mark.parametrize("has_norm", [False, True])
def test_other_kernels_at_the_present_shape(has_norm: bool) -> None:
    """An op does not move across a reshape if another kernel reads the value of the op. After the move, the op could not be fused with this
    kernel."""

    def f(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        h = hw.tanh(hw.reshape(hw.exp(x), 3, 12, 8))
        return (h, hw.sum(h, 1)) if has_norm else (h,)

    assert launches(f, x=hw.f32[36, 8], w=W) == 1 + has_norm


def test_a_bias_stays_an_epilogue() -> None:
    def f(x: hw.Tensor, w: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
        return hw.sum(hw.reshape(x @ w + bias, 3, 4, 5), 1)

    assert launches(f, x=X, w=W, bias=hw.f32[5]) == 1


def test_a_cast_of_a_product_moves() -> None:
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.sum(hw.reshape(hw.astype(hw.reshape(x, 3, 4, 8) @ w, hw.f64), 12, 5), 1)

    assert launches(f, x=X, w=W) == 1


@pytest.mark.parametrize("shape", [(1, 12, 8), (1, 96), (12, 1, 8)])
def test_dims_of_one_element(shape: tuple[int, ...]) -> None:
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.tanh(hw.reshape(hw.exp(x), *shape))

    assert launches(f, x=X, w=W) == 1


def test_reshaped_values_that_are_broadcast() -> None:
    """A reshape does not move past ops that broadcast the reshaped value, because the results of these ops have more elements."""

    def rows(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.exp(x) / hw.reshape(hw.sum(x * x, 1) + 1.0, 12, 1) * w

    def scalar(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.exp(x) / hw.reshape(hw.sum(x * x) + 1.0, 1, 1) * w

    for f in (rows, scalar):
        assert launches(f, x=X, w=hw.f32[8]) == 1


def test_sharded_values_stay() -> None:
    def f(x: hw.Tensor) -> hw.Tensor:
        return hw.sum(hw.reshape(hw.tanh(hw.reshape(hw.exp(x), 4, 3, 8)), 12, 8), 1)

    assert launches(f, mesh=hw.Mesh(x=2), x=hw.f32["12@x", 8]) == 3
