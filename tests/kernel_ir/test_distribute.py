"""The pass distribute: which threads compute the elements of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.distribute import distribute

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "pointwise": (lambda x: hw.exp(x), {"x": hw.f32["M", "N"]}, ["+ distribute: each thread computes elements"]),
    "rows of a known length below 32": (lambda x: hw.sum(x, 1), {"x": hw.f32["M", 31]}, ["+ distribute: each thread computes elements"]),
    "longer rows": (lambda x: hw.sum(x, 1), {"x": hw.f32["M", 32]}, ["+ distribute: a block reduces an element"]),
    "rows of unknown length": (lambda x: hw.sum(x, 1), {"x": hw.f32["M", "N"]}, ["+ distribute: a block reduces an element"]),
    "columns": (lambda x: hw.sum(x, 0), {"x": hw.f32["M", "N"]}, ["+ distribute: a block reduces a tile of columns, 512 threads"]),
    "at most one tile of columns per multiprocessor": (
        lambda x: hw.sum(x, 0),
        {"x": hw.f32["M", 132 * 32]},
        ["+ distribute: a block reduces a tile of columns, 1024 threads, 1 block per multiprocessor"],
    ),
    "a tile more": (lambda x: hw.sum(x, 0), {"x": hw.f32["M", 133 * 32]}, ["+ distribute: a block reduces a tile of columns, 512 threads"]),
    "contiguous fibers": (lambda x: hw.cumsum(x, 1), {"x": hw.f32["M", "N"]}, ["+ distribute: a block processes a fiber"]),
    "fibers that are columns": (lambda x: hw.cumsum(x, 0), {"x": hw.f32["M", "N"]}, ["+ distribute: a thread processes a fiber"]),
    "matmuls of few rows": (
        lambda x, v, w: hw.matmul(x, v) * hw.matmul(x, w),
        {"x": hw.f32[4, 64], "v": hw.f32[64, 64], "w": hw.f32[64, 64]},
        ["+ distribute: a cluster multiplies a tile of columns, 2 blocks per multiprocessor"],
    ),
    "fibers to sort": (lambda x: hw.argsort(x, 1), {"x": hw.f32["M", "N"]}, ["+ distribute: a cluster processes a fiber"]),
}


@pytest.mark.parametrize("case", CASES)
def test_distribute(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(distribute, function, **inputs) == expected
