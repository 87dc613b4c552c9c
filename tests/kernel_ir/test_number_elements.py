"""The pass number_elements: the integer type of linear element indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.number_elements import number_elements

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "unknown sizes": (lambda x, b: x + b, {"x": hw.f32["M", "N"], "b": hw.f32["N"]}, ["+ number elements by Index"]),
    "at most 2^30 elements": (lambda x, b: x + b, {"x": hw.f32[1 << 15, 1 << 15], "b": hw.f32[1 << 15]}, ["+ number elements by uint32_t"]),
    "more elements": (lambda x, b: x + b, {"x": hw.f32[1 << 15, 1 << 16], "b": hw.f32[1 << 16]}, []),
    "one loop, so that no index is divided": (lambda x: x + 1, {"x": hw.f32["M", "N"]}, []),
    "rows of blocks": (lambda x: hw.sum(x, 1), {"x": hw.f32["M", "N"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_number_elements(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(number_elements, function, **inputs) == expected
