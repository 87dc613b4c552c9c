"""The pass name_outermost: kernels over `4*B` and over `8*B` rows become equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.name_outermost import name_outermost

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "a multiple of a symbol": (
        lambda x, b: x + b,
        {"x": hw.f32["B", 4, "T"], "b": hw.f32["T"]},
        ["- keep i in 4*B, j in T", "+ keep i in outermost, j in T", "+ outermost = 4*B"],
    ),
    "a stride that is a multiple of the outermost size": (
        lambda x: hw.permute_dims(x, (1, 2, 0)) * 2,
        {"x": hw.f32["T", "B", 4]},
        [
            "- keep i in 4*B, j in T",
            "- %x_transposed: f32 at i + j * 4*B",
            "+ keep i in outermost, j in T",
            "+ outermost = 4*B",
            "+ %x_transposed: f32 at i + j * outermost",
        ],
    ),
    "a symbol": (lambda x, b: x + b, {"x": hw.f32["B", "T"], "b": hw.f32["T"]}, []),
    "a number": (lambda x, b: x + b, {"x": hw.f32[8, "T"], "b": hw.f32["T"]}, []),
    "an inner size with the same symbol": (lambda x, b: x + b, {"x": hw.f32["T", 4, "T"], "b": hw.f32["T"]}, []),
    "one loop": (lambda x: x + 1, {"x": hw.f32["B", 4, "T"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_name_outermost(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(name_outermost, function, **inputs) == expected
