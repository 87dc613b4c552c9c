"""The pass vectorise: the number of elements that a thread accesses at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.vectorise import vectorise

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "16 bytes": (lambda x: hw.exp(x), {"x": hw.bf16["M", "N"]}, ["+ vectors of 8 along i"]),
    "16 bytes of the largest elements": (lambda x: hw.astype(x, hw.f32), {"x": hw.bf16["M", "N"]}, ["+ vectors of 4 along i"]),
    "columns that 4 does not divide": (lambda x, b: x + b, {"x": hw.f32["M", 6], "b": hw.f32[6]}, ["+ vectors of 2 along j"]),
    "an odd number of columns": (lambda x, b: x + b, {"x": hw.f32["M", 7], "b": hw.f32[7]}, []),
    "rows of an odd size": (lambda x: x[:, :8] + 1, {"x": hw.f32["M", 63]}, []),
    "the end of an operand of a concat": (lambda x: hw.concat([x, x + 1], axis=1), {"x": hw.f32["M", 6]}, ["+ vectors of 2 along j"]),
    "a reduction of rows": (lambda x: hw.sum(x, 1), {"x": hw.f32["M", "N"]}, ["+ vectors of 4 along j"]),
    "a reduction of columns": (lambda x: hw.sum(x, 0), {"x": hw.bf16["M", 4096]}, ["+ vectors of 8 along j"]),
    "a transpose": (lambda x: hw.permute_dims(x, (1, 0)) * 2, {"x": hw.bf16["M", 64]}, ["+ vectors of 8 along i"]),
    "fibers": (lambda x: hw.cumsum(x, 1), {"x": hw.f32["M", "N"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_vectorise(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(vectorise, function, **inputs) == expected
