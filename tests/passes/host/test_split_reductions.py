"""The pass split_reductions splits a large reduction to few results into two kernels. Results equal the reference up to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled_fusions import random_arrays, tolerance_of

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.reference import run_reference
from hostweave.types.machine import H200


def kernels(function: Any, **specs: Any) -> list[str]:
    host_ir = hw.compile(hw.fusion(**specs)(function)).host_ir
    return [line.split()[1] for line in host_ir.splitlines() if line.strip().startswith("launch") and "_of_few_rows" not in line]


@pytest.mark.parametrize(
    ("spec", "launched"),
    [
        (hw.f32["M", "N"], ["@sum_y_rows", "@sum_y"]),
        (hw.bf16["M", "N"], ["@astype_sum_y_rows", "@sum_astype_y"]),
        (hw.i32["M", 4096], ["@sum_y_rows", "@sum_y"]),
        (hw.f32["N"], ["@sum_y"]),  # A single row cannot be split by rows.
        (hw.f32[16, 4096], ["@sum_y_rows", "@sum_y"]),
        (hw.f32[15, 4096], ["@sum_y"]),  # There are too few elements.
    ],
    ids=str,
)
def test_rows_are_reduced_before_their_sums(spec: Any, launched: list[str]) -> None:
    assert kernels(lambda x: hw.sum(x), x=spec) == launched


def test_short_inner_dims_are_reduced_together() -> None:
    text = hw.compile(hw.fusion(x=hw.f32["M", 64, 16])(lambda x: hw.max(x))).host_ir
    assert "%y_rows: f32[M] = max(%x, axis=(1, 2))" in text
    assert "%y: f32[] = max(%y_rows, axis=(0,))" in text


def test_a_reduction_to_many_elements_is_not_split() -> None:
    assert kernels(lambda x: hw.sum(x, (0, 1)), x=hw.f32["M", "N", 64]) == ["@sum_y"]
    assert kernels(lambda x: hw.sum(x, (0, 1)), x=hw.f32["M", "N", 32]) == ["@sum_y_rows", "@sum_y"]
    assert kernels(lambda x: hw.sum(x, (0, 1)), x=hw.f32["M", "N", "K"]) == ["@sum_y"]


def test_a_larger_machine_splits_reductions_to_more_elements() -> None:
    sums = hw.fusion(x=hw.f32["M", "N", 64])(lambda x: hw.sum(x, (0, 1)))
    larger = hw.Options(machine=replace(H200, multiprocessors=2 * H200.multiprocessors))
    assert "@sum_y_rows" not in hw.compile(sums).host_ir
    assert "@sum_y_rows" in hw.compile(sums, options=larger).host_ir


def test_adjacent_ops_are_fused_with_either_kernel() -> None:
    """In the norm of a gradient, the first kernel has the ops before the sum, and the second kernel has the ops after the sum."""
    norm = kernels(lambda x: hw.sqrt(hw.sum(hw.astype(x, hw.f32) ** 2)), x=hw.bf16["M", "N"])
    assert norm == ["@astype_multiply_sum_x_rows", "@sum_sqrt_y"]


def test_reductions_in_loops_are_not_split() -> None:
    def sums(x: hw.Tensor) -> hw.Tensor:
        return hw.sum(x, (1, 2)).stream(0, chunks=4)

    assert kernels(sums, x=hw.f32[4, "M", "N"]) == ["@sum_y"]


def totals(ranks: int) -> hw.Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["M@x", "N"], z=hw.f32["M", "A@x", "N"], n=hw.i32["M@x", "N"])
    def totals(x, z, n):  # type: ignore[no-untyped-def]
        several = hw.max(z, (1, 2), keepdims=True) - hw.min(z, (1, 2), keepdims=True)
        return hw.sum(x), hw.mean(x, keepdims=True), hw.prod(x * 0.01 + 1.0), several, hw.mean(z), hw.sum(n), hw.max(n), hw.var(z)

    return totals


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", [{"M": 12, "A": 6, "N": 40}, {"M": 6, "A": 6, "N": 33}, {"M": 30, "A": 12, "N": 2048}], ids=str)
def test_values(sizes: dict[str, int], target: str) -> None:
    fusion = totals(3 if target == "cpu" else min(3, len(gpus())))
    arrays = random_arrays(fusion, sizes, seed=1)
    program = hw.compile(fusion, target)
    for y, want, output in zip(program.run(**arrays), run_reference(fusion, arrays), fusion.outputs, strict=True):
        allowed = tolerance_of(fusion, output, sizes)
        np.testing.assert_allclose(np.asarray(y, np.float64), np.asarray(want, np.float64), allowed.rtol, allowed.atol)
    program.close()
