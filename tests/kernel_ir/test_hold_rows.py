"""The pass hold_rows: how threads share rows, and which rows they hold in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.hold_rows import hold_rows

REDUCED = "- distribute: a block reduces an element"
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "a row that is read once is not held": (
        lambda x: hw.sum(x, 1),
        {"x": hw.bf16["M", 4096]},
        [REDUCED, "+ distribute: a block shares a row, 128 threads"],
    ),
    "a row that is read twice": (
        lambda x: hw.rms_norm(x),
        {"x": hw.bf16["M", 4096]},
        [REDUCED, "+ distribute: a block shares a row, 128 threads", "+ hold %x"],
    ),
    "a row that threads load before the reduction": (
        lambda x, w: hw.rms_norm(x, w),
        {"x": hw.bf16["M", 4096], "w": hw.bf16[4096]},
        [REDUCED, "+ distribute: a block shares a row, 128 threads", "+ hold %x, %w"],
    ),
    "such a row that is too long": (
        lambda x, w: hw.rms_norm(x, w),
        {"x": hw.bf16["M", 16384], "w": hw.bf16[16384]},
        [REDUCED, "+ distribute: a block shares a row, 512 threads, 2 blocks per multiprocessor", "+ hold %x"],
    ),
    "expensive values": (
        lambda x: hw.softmax(x),
        {"x": hw.f32["M", 1024]},
        [REDUCED, "+ distribute: a block shares a row, 64 threads, 16 blocks per multiprocessor", "+ hold %x, %exp_x"],
    ),
    "short rows": (
        lambda x: hw.rms_norm(x),
        {"x": hw.bf16["M", 32, 128]},
        [REDUCED, "+ distribute: a part of a warp shares a row, 8 threads", "+ hold %x"],
    ),
    "rows of unknown length": (
        lambda x: hw.rms_norm(x),
        {"x": hw.bf16["M", "N"]},
        [REDUCED, "+ distribute: a block shares a row of unknown length", "+ hold %x"],
    ),
    "rows of unknown length that are read once": (lambda x: hw.sum(x, 1), {"x": hw.bf16["M", "N"]}, []),
    "rows without vectors": (lambda x: hw.rms_norm(x), {"x": hw.bf16["M", 4095]}, []),
    "columns": (lambda x: hw.sum(x, 0), {"x": hw.f32["M", 4096]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_hold_rows(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(hold_rows, function, **inputs) == expected
