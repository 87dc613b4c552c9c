"""The pass split_walks: loop nests for reductions that depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.split_walks import split_walks

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "reductions of reductions": (
        lambda x: hw.softmax(x),
        {"x": hw.f32["M", "N"]},
        ["+ walk 0: reduce %max_x", "+ walk 1: reduce %sum_x", "+ walk 2: store %y"],
    ),
    "independent reductions": (lambda x: hw.sum(x, 1) + hw.max(x, 1), {"x": hw.f32["M", "N"]}, ["+ walk 0: reduce %sum_x, %max_x"]),
    "a result that does not depend on the reductions": (
        lambda x: (hw.sum(x * 2, 1), x * 2),
        {"x": hw.f32["M", "N"]},
        ["+ walk 0: reduce %sum_x; store %multiply_x_2"],
    ),
    "a result that depends on an earlier reduction only": (
        lambda x: (e := hw.exp(x - hw.max(x, 1, keepdims=True)), hw.sum(e, 1)),
        {"x": hw.f32["M", "N"]},
        ["+ walk 0: reduce %max_x", "+ walk 1: reduce %sum_e; store %e"],
    ),
    "pointwise": (lambda x: hw.exp(x), {"x": hw.f32["M", "N"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_split_walks(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(split_walks, function, **inputs) == expected
