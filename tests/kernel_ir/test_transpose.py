"""The pass transpose: blocks transpose tiles in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_changes import changes

import hostweave as hw
from hostweave.kernel_ir.transpose import transpose

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "a transpose": (
        lambda x: hw.permute_dims(x, (1, 0)) * 2,
        {"x": hw.bf16["M", 4096]},
        [
            "- keep i in 4096 over x_transposed.0, j in M over x_transposed.1",
            "- %x_transposed: bf16[4096, M] strides [1, 4096] at i + j * 4096",
            "- %y stored: bf16[4096, M] at i * M + j",
            "- distribute: each thread computes elements",
            "+ keep j in M over x_transposed.1, i in 4096 over x_transposed.0",
            "+ %x_transposed: bf16[4096, M] strides [1, 4096] at j * 4096 + i",
            "+ %y stored: bf16[4096, M] at j + i * M",
            "+ distribute: a block transposes a tile",
        ],
    ),
    "elements of 8 bytes": (lambda x: hw.permute_dims(x, (1, 0)) * 2, {"x": hw.f64["M", 4096]}, []),
    "a dim of fewer than 16 elements": (lambda x: hw.permute_dims(x, (1, 0)) * 2, {"x": hw.bf16["M", 15]}, []),
    "a third dim": (lambda x: hw.permute_dims(x, (0, 2, 1)) * 2, {"x": hw.bf16["B", "M", "N"]}, []),
    "an operand that is contiguous as the result": (
        lambda x, y: hw.permute_dims(x, (1, 0)) * y,
        {"x": hw.bf16["M", 64], "y": hw.bf16[64, "M"]},
        [],
    ),
    "columns": (lambda x: hw.sum(x, 0), {"x": hw.bf16["M", 4096]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_transpose(case: str) -> None:
    function, inputs, expected = CASES[case]
    assert changes(transpose, function, **inputs) == expected
