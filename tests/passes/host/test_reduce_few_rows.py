"""The pass reduce_few_rows. If there are few rows, one kernel computes two consecutive reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower

BODY = """\
  if M <= 4 {
    launch @multiply_sum_y_rows_of_few_rows %x -> %y
  } else {
    launch @multiply_sum_y_rows %x -> %y_rows
    launch @sum_y %y_rows -> %y
  }
"""


def lowered(function: Callable[..., Any], spec: Any, **sizes: int) -> HostProgram:
    return lower(hw.fusion(x=spec)(function), Options(sizes=sizes))


def test_the_size_of_a_shard_is_known_at_run_time() -> None:
    function = hw.fusion(mesh=hw.Mesh(x=3), x=hw.f32["M@x", 4096])(lambda x: hw.sum(x))
    assert "if local(M, x) <= 4 {" in str(lower(function, Options(sizes={"M": 40000})))


def test_a_condition_chooses() -> None:
    assert BODY in str(lowered(lambda x: hw.sum(x * x), hw.f32["M", 4096]))


@pytest.mark.parametrize(("rows", "is_chosen"), [(4, True), (5, False)])
def test_a_stated_size_chooses(rows: int, is_chosen: bool) -> None:
    assert ("_of_few_rows" in str(lowered(lambda x: hw.sum(x * x), hw.f32["M", 4096], M=rows))) == is_chosen


def test_stated_sizes_that_ranks_do_not_divide() -> None:
    function = hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["N@x", "M"])(lambda x: (hw.reshape(x, "M*N"), hw.max(x)))
    assert lower(function, Options(sizes={"M": 3, "N": 3}))


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        (lambda x: hw.sum(x), hw.f32[64, 4096]),  # There are more than 4 rows.
        (lambda x: ((s := hw.sum(x, 1)), hw.sum(s)), hw.f32["M", 4096]),  # The sums of rows are a result.
        (lambda x: hw.max(hw.sum(x, 1), 0), hw.f32["M", 4096]),  # The two reductions differ.
    ],
)
def test_two_kernels_remain(function: Callable[..., Any], spec: Any) -> None:
    assert "_of_few_rows" not in str(lowered(function, spec))


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: hw.sum(x * x), lambda x: np.sum(x * x)),
        (lambda x: hw.sqrt(hw.mean(x, (0, 1))), lambda x: np.sqrt(np.mean(x))),
        (lambda x: hw.max(x, (0, 1), keepdims=True) + 1, lambda x: np.max(x, keepdims=True) + 1),
    ],
)
def test_results(function: Callable[..., Any], expected: Callable[..., Any], rows: int) -> None:
    program = lowered(function, hw.f32["M", 4096])
    assert "_of_few_rows" in str(program)
    x = np.random.default_rng(0).random((rows, 4096), np.float32)
    (found,) = interpret(program, {"x": x})
    np.testing.assert_allclose(found[program.outputs[0].name], expected(x), rtol=1e-5)


def test_two_of_three_consecutive_reductions_become_one_kernel() -> None:
    """The second of three consecutive sums must be fused with only one other sum. Otherwise the result of a sum is lost."""
    ring = Fusion.parse("""fusion @ring(%x: f64[K, K@u], %w: f64[K@u, K]) mesh(u=2) {
  %terms: f64[K, K] = matmul(%x, %w)
  %last: f64[K, K@u] pinned stream(1, 2, p2p) = reshard(%terms)
  %y: f64[] = mean(%last, axis=(0, 1))
  return %y
}""")
    check(lower(ring, Options()), fusion=ring)
