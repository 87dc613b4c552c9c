"""The pass hoist: values that a thread computes once per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.hoist import hoist

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "reductions, and values of reductions": (
        lambda x: hw.softmax(x),
        {"x": hw.f32["M", "N"]},
        ["+ outside %max_x, %sum_x, %reciprocal_x"],
    ),
    "a divisor": (lambda x: x / hw.sum(x, 1, keepdims=True), {"x": hw.f32["M", "N"]}, ["+ outside %sum_x", "+ prepare %sum_x"]),
    "a divisor of f64": (
        lambda x: x / hw.sum(x, 1, keepdims=True),
        {"x": hw.f64["M", "N"]},
        ["+ outside %sum_x"],
    ),
    "values of a pointwise kernel that do not change in a vector": (
        lambda x, b: x / (b + 1)[:, None],
        {"x": hw.f32["M", "N"], "b": hw.f32["M"]},
        ["+ outside %b, %add_b, %add_b_expanded", "+ prepare %add_b_expanded"],
    ),
    "an input, but not an operand of a concat": (
        lambda x, b: hw.concat([x, b + x], axis=1),
        {"x": hw.f32["M", 64], "b": hw.f32["M", 1]},
        ["+ outside %b"],
    ),
    "values of each element": (lambda x: hw.exp(x) * 2, {"x": hw.f32["M", "N"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_hoist(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(hoist, function, **inputs) == expected
