"""The pass multiply_few_rows fuses matmuls of few rows with the kernel that uses the products, and makes other matmuls concurrent."""

from __future__ import annotations

from typing import Any

import pytest
from stages_of_passes import changes

import hostweave as hw
from hostweave.host_ir.ir import FEW_ROWS
from hostweave.passes.host.multiply_few_rows import multiply_few_rows


def gated(rows: int | str) -> hw.Fusion:
    @hw.fusion(x=hw.f32[rows, "K"], wg=hw.f32["K", "N"], wu=hw.f32["K", "N"])
    def gated(x: Any, wg: Any, wu: Any) -> Any:
        return hw.maximum(hw.matmul(x, wg), 0) * hw.matmul(x, wu)

    return gated


def body(rows: int | str) -> list[str]:
    """Lines with launches, matmuls, conditions, forks, joins and streams that the pass adds."""
    added = [line.removeprefix("+ ") for line in changes(multiply_few_rows, gated(rows)).splitlines() if line.startswith("+ ")]
    return [line for line in added if line.startswith(("launch", "matmul", "if", "fork", "join", "stream"))]


def test_a_symbolic_number_of_rows_is_a_condition() -> None:
    assert body("T") == [
        f"if T <= {FEW_ROWS} {{",
        "launch @maximum_multiply_y_of_few_rows %x, %wg, %wu -> %y",
        "fork beside first 1",
        "stream beside[0] {",
        "matmul %x, %wu -> %matmul_wu",
        "join beside first 1",
    ]


@pytest.mark.parametrize(("rows", "fuses"), [(1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)])
def test_a_known_number_of_rows_selects_the_kernel(rows: int, fuses: bool) -> None:
    assert body(rows) == (["launch @maximum_multiply_y_of_few_rows %x, %wg, %wu -> %y"] if fuses else [])


@pytest.mark.parametrize(("rows", "columns", "is_concurrent"), [(16, 1024, True), (16, 256, False), (129, 1024, False)])
def test_matmuls_that_read_many_weights_of_one_operand_are_concurrent(rows: int, columns: int, is_concurrent: bool) -> None:
    """Here, two matmuls of one operand are concurrent only if they have large weights and at most 128 rows. The third matmul reads the
    results of both, so the third matmul is not concurrent."""

    @hw.fusion(x=hw.f32[rows, 1024], a=hw.f32[1024, columns], b=hw.f32[1024, columns], c=hw.f32[columns, 1024])
    def projected(x: Any, a: Any, b: Any, c: Any) -> Any:
        return hw.matmul(hw.matmul(x, a) * hw.sum(hw.matmul(x, b), 1, keepdims=True), c), hw.matmul(x, b)

    added = [line.removeprefix("+ ").strip() for line in changes(multiply_few_rows, projected).splitlines() if line.startswith("+ ")]
    assert [line.split()[0] for line in added if line.startswith(("fork", "join"))] == ["fork", "join"] * is_concurrent


def test_one_matmul_keeps_its_epilogue() -> None:
    @hw.fusion(x=hw.f32["T", "K"], w=hw.f32["K", "N"])
    def one(x: Any, w: Any) -> Any:
        return hw.maximum(hw.matmul(x, w), 0) * 2

    assert changes(multiply_few_rows, one) == ""
