"""The pass fuse_kernels on traced programs: results of fused kernels, and values that each kernel computes or reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import Links
from hostweave.pipeline import lower


def test_indices_that_are_divided_by_a_constant_are_not_stored() -> None:
    """Division by a constant is a multiplication and a shift. Division by a tensor takes longer, so it is not repeated for each element of
    a row."""

    @hw.fusion(x=hw.f32["M", "N"], i=hw.i32["T"], n=hw.i32["T"])
    def rows(x: hw.Tensor, i: hw.Tensor, n: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.take(x, i // 3, 0), hw.take(x, i // n, 0)

    text = str(hw.compile(rows).host_ir)
    assert re.findall("%(.*) would be computed repeatedly", text) == ["floor_divide_i_2"]


def test_an_op_of_two_fused_kernels_is_computed_once() -> None:
    def both(x: hw.Tensor, c: hw.Tensor) -> hw.Tensor:
        wide = hw.astype(c, hw.f32)
        return hw.exp(x + wide) * (x - wide)

    host_ir = hw.compile(hw.fusion(x=hw.f32["M", "N"], c=hw.bf16["M", "N"])(both)).host_ir
    assert host_ir.count("launch @") == 1
    assert host_ir.count("= astype(%c)") == 1


def test_an_update_is_named_after_the_updated_tensor() -> None:
    step = hw.fusion(x=hw.f32["M", "N"], row=hw.f32[1, "N"], at=hw.i32[()])(lambda x, row, at: hw.dynamic_update_slice(x, row * 2, (at, 0)))
    assert "launch @dynamic_update_slice_x " in hw.compile(step).host_ir


def test_indices_of_rows_and_of_columns_are_computed_separately() -> None:
    def lower_triangle(x: hw.Tensor) -> hw.Tensor:
        rows, columns = hw.iota(x, 0), hw.iota(x, 1)
        return hw.where(rows[:, None] >= columns[None, :], x, 0.0)

    host_ir = hw.compile(hw.fusion(x=hw.f32["N", "N"])(lower_triangle)).host_ir
    assert host_ir.count("launch @") == 1
    assert host_ir.count("= iota()") == 2


@pytest.mark.parametrize(
    "both",
    [
        lambda x: (x + 0.0, x + x),
        lambda x: (x != 0, x != x),
        lambda x: (x * 0, hw.rms_norm(x)),
        lambda x: (hw.maximum(x, 0), hw.maximum(x, x)),
        lambda x: (hw.where(x > 2, x, 1), hw.where(x > 2, x, x)),
        lambda x: (x <= x, x <= 0),
        lambda x: (x / 0.0, x / -0.0),
        lambda x: (hw.exp(x / 0.0), hw.exp(x / -0.0)),
        lambda x: hw.exp(x / 0.0) - hw.exp(x / -0.0),
    ],
)
def test_numbers_are_neither_operands_nor_zeros_of_another_sign(both: Callable[[hw.Tensor], Any]) -> None:
    fusion = hw.fusion(x=hw.f64["M", "N"])(lambda x: both(x))
    x = np.array([[1.0, -2.0, 3.0]])
    with np.errstate(all="ignore"):
        wanted = run_reference(fusion, {"x": x})
        (results,) = interpret(lower(fusion, Options()), {"x": x})
    for result, want in zip(results.values(), wanted, strict=True):
        np.testing.assert_allclose(result, want)


def test_numbers_are_compared_by_their_text() -> None:
    def op(number: float) -> Op:
        return Op("multiply", ("x", number), Value("y", hw.f32["M"]))

    assert op(0.0) != op(-0.0)
    assert op(float("nan")) == op(float("nan"))


def test_a_wider_dtype_is_not_written() -> None:
    """Two kernels need a value in f32 that is also stored in 16 bits. Each kernel casts the 16-bit value."""

    @hw.fusion(x=hw.bf16["M", "N"], y=hw.bf16["M", "N"])
    def both(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
        z = hw.astype(x + y, hw.f32)
        return hw.sum(z * 2, axis=0), hw.sum(z * z, axis=1)

    text = str(lower(both, Options()))
    assert "allocate bf16[M, N]" in text
    assert "allocate f32[M, N]" not in text


def test_a_chain_of_kernels_is_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence is a long chain. With one analysis per kernel, the analyses would take most of the time of lowering."""
    analyses, begin = 0, Links.__init__

    def counted(links: Links, program: HostProgram) -> None:
        nonlocal analyses
        analyses += 1
        begin(links, program)

    monkeypatch.setattr(Links, "__init__", counted)
    x = hw.f32["M", "N"]

    @hw.fusion(x=x)
    def chain(x):
        for _ in range(20):
            x = hw.exp(-x)
        return x

    assert str(lower(chain, Options())).count("launch @") == 1
    assert analyses < 10


def test_rows_of_a_scatter_are_an_index_expression() -> None:
    """The kernel of the scatter computes the indices of the rank's rows. No kernel writes these indices to memory."""

    @hw.fusion(mesh=hw.Mesh(x=2), table=hw.f32["32@x", 4], ids=hw.i64["T", 1], rows=hw.f32["T", 4])
    def scattered(table: hw.Tensor, ids: hw.Tensor, rows: hw.Tensor) -> hw.Tensor:
        return hw.scatter_add(table, 0, ids, rows)

    program = lower(scattered, Options())
    assert all(kernel.inputs for kernel in program.kernels)
    table, ids, rows = np.ones((32, 4), np.float32), np.array([[0], [31], [16], [0]]), np.arange(16, dtype=np.float32).reshape(4, 4)
    of_ranks = interpret(program, {"table": table, "ids": ids, "rows": rows})
    want = table.copy()
    np.add.at(want, ids[:, 0], rows)
    np.testing.assert_array_equal(np.concatenate([result for outputs in of_ranks for result in outputs.values()]), want)


@pytest.mark.parametrize("rows", [1, 4])
def test_numbers_that_are_computed_with_are_not_the_rows_of_a_lookup(rows: int) -> None:
    """The indices of this lookup are an iota over the rows. The lookup returns all rows, even if there is only one row."""

    @hw.fusion(x=hw.f32[rows, "N"])
    def looked_up(x: hw.Tensor) -> hw.Tensor:
        return hw.take(x, hw.iota(x, 0, hw.i64), 0)

    x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    (result,) = interpret(lower(looked_up, Options()), {"x": x})
    np.testing.assert_array_equal(result["y"], x)


def of_rows(first: str, second: str) -> int:
    def reduced(of: str, x: hw.Tensor) -> hw.Tensor:
        return hw.sum(x, (0, 1)) if of == "columns" else hw.max(x, 2)

    def f(x: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return reduced(first, x), reduced(second, x * s)

    fusion = hw.fusion(x=hw.f32[3, 5, 64], s=hw.f32[3, 5, 1])(f)
    program = hw.compile(fusion)
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((3, 5, 64), np.float32), "s": rng.random((3, 5, 1), np.float32)}
    for y, want in zip(program.run(**arrays), run_reference(fusion, arrays), strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5)
    return program.host_ir.count("launch ")


def test_reductions_over_the_same_dims_read_their_operand_once() -> None:
    assert of_rows("columns", "columns") == of_rows("rows", "rows") == 1
    assert of_rows("rows", "columns") == 2


def test_a_cheap_formula_of_fewer_bytes_is_computed_again() -> None:
    """Rows minus their means, as in LayerNorm, are not written in f32. Each kernel computes the differences from the 16-bit rows."""

    def f(x: hw.Tensor, mean: hw.Tensor, dy: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        normal = hw.astype(x, hw.f32) - mean
        return hw.sum(normal * dy, 0), hw.max(normal + dy, 1)

    text = hw.compile(hw.fusion(x=hw.bf16[64, 96], mean=hw.f32[64, 1], dy=hw.f32[64, 96])(f)).host_ir
    assert text.count("launch ") == 2
    assert "allocate" not in text


def test_a_copy_of_a_gathered_value_is_written_by_the_same_kernel() -> None:
    """Signals between ranks do not write the value that peers read."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def model(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.relu(x).named("h")
        copied = hw.copy(h)
        return copied, hw.matmul(h, w).stream("M", chunks=2, algorithm="put")

    host = lower(model, Options())
    assert str(host).count("launch @") == 1
    assert " copy %" not in str(host)
    assert "get %h " in str(host)
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal((4, 3)).astype(np.float32), "w": random.standard_normal((3, 5)).astype(np.float32)}
    for local, rows in zip(interpret(host, arrays), np.split(np.maximum(arrays["x"], 0), 2), strict=True):
        np.testing.assert_array_equal(next(iter(local.values())), rows)
