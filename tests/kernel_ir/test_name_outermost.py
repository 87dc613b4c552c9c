"""The pass name_outermost: kernels over `4*B` and over `8*B` rows become equal, and kernels over any number of contiguous elements."""

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
        [
            "- keep i in 4*B over x.0 and x.1, j in T over x.2",
            "+ keep i in outermost over x.0 and x.1, j in T over x.2",
            "+ outermost = 4*B",
        ],
    ),
    "a stride that is a multiple of the outermost size": (
        lambda x: hw.permute_dims(x, (1, 2, 0)) * 2,
        {"x": hw.f32["T", "B", 4]},
        [
            "- keep i in 4*B over x_transposed.0 and x_transposed.1, j in T over x_transposed.2",
            "- %x_transposed: f32[B, 4, T] strides [4, 1, 4*B] at i + j * 4*B",
            "+ keep i in outermost over x_transposed.0 and x_transposed.1, j in T over x_transposed.2",
            "+ outermost = 4*B",
            "+ %x_transposed: f32[B, 4, T] strides [4, 1, 4*B] at i + j * outermost",
        ],
    ),
    "a symbol": (lambda x, b: x + b, {"x": hw.f32["B", "T"], "b": hw.f32["T"]}, []),
    "a number": (lambda x, b: x + b, {"x": hw.f32[8, "T"], "b": hw.f32["T"]}, []),
    "an inner size with the same symbol": (lambda x, b: x + b, {"x": hw.f32["T", 4, "T"], "b": hw.f32["T"]}, []),
    "contiguous elements": (
        lambda x, scale: x * scale,
        {"x": hw.f32["B", 4, "T"], "scale": hw.f32[()]},
        ["- keep i in 4*B*T over x.0 and x.1 and x.2", "+ keep i in outermost over x.0 and x.1 and x.2", "+ outermost = 4*B*T"],
    ),
    "a number of elements": (
        lambda x: x + 1,
        {"x": hw.f32[8, 32]},
        ["- keep i in 256 over x.0 and x.1", "+ keep i in outermost over x.0 and x.1", "+ outermost = 256"],
    ),
    "a number of elements that is not a multiple of all vectors": (lambda x: x + 1, {"x": hw.f32[8, 33]}, []),
    "elements that are joined": (lambda x, y: hw.concat((x, y)), {"x": hw.f32["M"], "y": hw.f32["M"]}, []),
    "elements at given indices": (lambda x, at: hw.take(x, at, axis=0), {"x": hw.f32["M"], "at": hw.i32["K"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_name_outermost(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(name_outermost, function, **inputs) == expected
