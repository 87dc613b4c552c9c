"""The pass fuse_kernels: launches that become one kernel, names of the values in the kernel, and reasons why a kernel ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import host_text
import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import Links, fuse_kernels
from hostweave.pipeline import lower

KERNELS = """\
kernel @negative_h(%x: f32[M, N]) {
  %h: f32[M, N] = negative(%x)
}
kernel @exp_h(%x: f32[M, N]) {
  %h: f32[M, N] = exp(%x)
}
kernel @multiply_y(%h: f32[M, N], %x: f32[M, N]) {
  %y: f32[M, N] = multiply(%h, %x)
}
kernel @max_m(%h: f32[M, N]) {
  %m: f32[M] = max(%h, axis=(1,))
}
kernel @max_columns(%h: f32[M, N]) {
  %m: f32[N] = max(%h, axis=(0,))
}
kernel @max_all(%h: f32[M, N]) {
  %m: f32[] = max(%h, axis=(0, 1))
}
kernel @subtract_row(%h: f32[M, N], %m_column: f32[M, 1]) {
  %y: f32[M, N] = subtract(%h, %m_column)
}
kernel @multiply_twice(%k: f32[M, N], %h: f32[M, N]) {
  %y: f32[M, N] = multiply(%k, %h)
}
kernel @subtract_column(%x: f32[M, N], %m: f32[N]) {
  %y: f32[M, N] = subtract(%x, %m)
}
kernel @subtract_all(%x: f32[M, N], %m: f32[]) {
  %y: f32[M, N] = subtract(%x, %m)
}
kernel @exp_column(%x: f32[N]) {
  %e: f32[N] = exp(%x)
}
kernel @negative_column(%x: f32[N]) {
  %e: f32[N] = negative(%x)
}
kernel @negative_t(%x: f32[N, M]) {
  %z: f32[N, M] = negative(%x)
}
kernel @turn_y(%h: f32[M, N], %t: f32[N, M]) {
  %s: f32[M, N] = permute_dims(%t, axes=(1, 0))
  %y: f32[M, N] = add(%h, %s)
}
"""


def host(body: str, header: str = "(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(ring[2])") -> HostProgram:
    lines = "".join(f"  {line}\n" for line in body.strip().splitlines())
    used = [f"kernel {k}" for k in KERNELS.split("kernel ")[1:] if f"launch {k.split('(')[0]} " in body]
    return host_text.parse(f"{''.join(used)}host @f{header} {{\n{lines}}}\n")


def fused(program: HostProgram) -> str:
    result = fuse_kernels(program, Options())
    verify_host(result)
    assert HostProgram.parse(str(result)) == result
    return str(result)


def test_a_chain() -> None:
    before = host("%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nlaunch @multiply_y %h, %x -> %y")
    assert (
        fused(before)
        == """\
kernel @negative_multiply_y(%x: f32[M, N]) {
  %h: f32[M, N] = negative(%x)
  %y: f32[M, N] = multiply(%h, %x)
}
host @f(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(ring[2]) {
  launch @negative_multiply_y %x -> %y
}
"""
    )


def test_a_reduction_and_its_consumers_read_the_input_once() -> None:
    before = host("""\
%h = allocate f32[M, N]
launch @negative_h %x -> %h
%m = allocate f32[M]
launch @max_m %h -> %m
%m_column = reshape %m to [M, 1]
launch @subtract_row %h, %m_column -> %y""")
    assert (
        fused(before)
        == """\
kernel @fused_y(%x: f32[M, N]) {
  %h: f32[M, N] = negative(%x)
  %m: f32[M] = max(%h, axis=(1,))
  %m_column: f32[M, 1] = reshape(%m)
  %y: f32[M, N] = subtract(%h, %m_column)
}
host @f(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(ring[2]) {
  launch @fused_y %x -> %y
}
"""
    )


@pytest.mark.parametrize(("elements", "kernels"), [(4096, 1), (14336, 1), (1 << 15, 3)])
def test_one_short_row_is_reduced_and_used_by_one_kernel(elements: int, kernels: int) -> None:
    @hw.fusion(x=hw.bf16[1, elements])
    def quantized(x: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.quantize(hw.silu(x), "row")

    assert str(lower(quantized, Options())).count("launch ") == kernels
    held = f"hw::Row<{elements}, " in hw.compile(quantized, "cuda").sources["kernels.cu"]
    assert held or kernels > 1


def test_chunks_of_a_loop() -> None:
    before = host("""\
%h = allocate f32[M, N]
fork ring
for %i in 0..M {
  stream ring[%i] {
    %x_i = chunk %x[0: %i of M]
    %h_i = chunk %h[0: %i of M]
    %y_i = chunk %y[0: %i of M]
    launch @a %x_i -> %h_i
    launch @b %h_i -> %y_i
  }
}
join ring""")
    kernels = "kernel @{}(%{}: f32[1, N]) {{\n  %{}: f32[1, N] = negative(%{})\n}}\n"
    before = host_text.parse(kernels.format("a", "x", "h", "x") + kernels.format("b", "h", "y", "h") + str(before))
    assert (
        fused(before)
        == """\
kernel @negative_negative_y(%x: f32[1, N]) {
  %h: f32[1, N] = negative(%x)
  %y: f32[1, N] = negative(%h)
}
host @f(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(ring[2]) {
  fork ring
  for %i in 0..M {
    stream ring[%i] {
      %x_i = chunk %x[0: %i of M]
      %y_i = chunk %y[0: %i of M]
      launch @negative_negative_y %x_i -> %y_i
    }
  }
  join ring
}
"""
    )


def test_equal_kernels_are_shared_and_names_are_unique() -> None:
    before = host(
        """\
%h = allocate f32[M, N]
launch @negative_h %x -> %h
%k = allocate f32[M, N]
launch @negative_h %h -> %k
launch @multiply_twice %k, %h -> %y
launch @negative_h %w -> %z
""",
        "(%x: f32[M, N], %w: f32[M, N]) -> (%y: f32[M, N], %z: f32[M, N]) mesh()",
    )
    assert (
        fused(before)
        == """\
kernel @negative_negative_multiply_y(%x: f32[M, N]) {
  %h: f32[M, N] = negative(%x)
  %k: f32[M, N] = negative(%h)
  %y: f32[M, N] = multiply(%k, %h)
}
kernel @negative_z(%w: f32[M, N]) {
  %z: f32[M, N] = negative(%w)
}
host @f(%x: f32[M, N], %w: f32[M, N]) -> (%y: f32[M, N], %z: f32[M, N]) mesh() {
  launch @negative_negative_multiply_y %x -> %y
  launch @negative_z %w -> %z
}
"""
    )


def test_a_cast_is_made_by_each_kernel_that_uses_it() -> None:
    kernels = """\
kernel @astype_h(%x: f16[N]) {
  %h: f32[N] = astype(%x)
}
kernel @exp_y(%h: f32[N]) {
  %y: f32[N] = exp(%h)
}
kernel @sum_z(%h: f32[N]) {
  %z: f32[] = sum(%h, axis=(0,))
}
"""
    before = host(
        "%h = allocate f32[N]\nlaunch @astype_h %x -> %h\nlaunch @exp_y %h -> %y\nlaunch @sum_z %h -> %z",
        "(%x: f16[N]) -> (%y: f32[N], %z: f32[]) mesh()",
    )
    assert (
        fused(host_text.parse(kernels + str(before)))
        == """\
kernel @astype_exp_y(%x: f16[N]) {
  %h: f32[N] = astype(%x)
  %y: f32[N] = exp(%h)
}
kernel @astype_sum_z(%x: f16[N]) {
  %h: f32[N] = astype(%x)
  %z: f32[] = sum(%h, axis=(0,))
}
host @f(%x: f16[N]) -> (%y: f32[N], %z: f32[]) mesh() {
  launch @astype_exp_y %x -> %y
  launch @astype_sum_z %x -> %z
}
"""
    )


def apart(between: str, later: str = "launch @multiply_y %x, %w -> %b") -> bool:
    """True if two kernels stay separate. One reads %x. The other reads %x and %w after the instructions in `between`."""
    inputs = "(%x: f32[N, N], %w: f32[N, N]) -> (%y: f32[N, N], %z: f32[N, N]) mesh() streams(s[1]) events(e[1])"
    body = f"launch @negative_h %x -> %y\n{between}\n%b = allocate f32[N, N]\n{later}\nmatmul %w, %b -> %z"
    text = fused(host_text.parse(str(host(body, inputs)).replace("[M, N]", "[N, N]")))
    return text.count("launch @") == 2


def test_kernels_that_read_the_same_are_one() -> None:
    assert not apart("")
    assert not apart("%a = allocate f32[N, N]\nmatmul %y, %w -> %a")
    assert not apart("", "%v = permute %w by [1, 0]\nlaunch @multiply_y %x, %v -> %b")
    assert apart("%a = allocate f32[N, N]\nmatmul %y, %y -> %a", "launch @multiply_y %x, %a -> %b")  # The second kernel reads %a.
    assert apart("fork s\nstream s[0] {\nrecord e[0]\n}\nwait e[0]")  # The wait may be for data that the second kernel reads.
    assert apart("", "launch @multiply_y %w, %w -> %b")  # The two kernels have no common operand.


def test_parts_of_one_buffer_are_written_by_one_kernel() -> None:
    """One kernel writes two adjacent slices of a concat. The common operand of the slices is not written to memory."""
    x = hw.f32["M", "N"]

    @hw.fusion(x=x, w=hw.f32["M", "M"])
    def halves(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        h = hw.exp(x)
        return w @ hw.concat([h * x, h + x], axis=1)

    text = str(lower(halves, Options()))
    assert text.count("launch @") == 1
    assert [line.split()[0] for line in text.splitlines() if "= allocate" in line] == ["%multiply_h_joined"]
    values = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32), np.eye(2, dtype=np.float32)
    (result,) = interpret(host_text.parse(text), dict(zip(("x", "w"), values, strict=True)))
    exp = np.exp(values[0])
    np.testing.assert_allclose(*result.values(), np.concatenate([exp * values[0], exp + values[0]], 1), rtol=1e-6)


@pytest.mark.parametrize("order", ["wgns", "gnws", "gnsw", "gsnw"])
def test_a_kernel_is_not_fused_if_its_other_consumers_are_not(order: str) -> None:
    """In the backward pass of a norm, two kernels compute a column sum and a row sum. Both kernels need several values. Only %x is written
    to memory; each kernel computes the other values again."""
    x = hw.bf16["M", "N"]

    @hw.fusion(a=x, b=x, p=x, q=x, w=hw.bf16["N"], r=hw.f32["M", 1], t=x)
    def norm_backward(a, b, p, q, w, r, t):
        dy, x, made = hw.astype(hw.astype(a, hw.f32) + hw.astype(b, hw.f32), hw.bf16), p + q, {}
        makers = {
            "w": lambda: hw.sum(hw.astype(dy, hw.f32) * (hw.astype(x, hw.f32) * r), axis=0, keepdims=True),
            "g": lambda: hw.astype(dy, hw.f32) * hw.astype(w, hw.f32),
            "n": lambda: made["g"] * r,
            "s": lambda: hw.sum(made["g"] * hw.astype(x, hw.f32), axis=1, keepdims=True),
        }
        for name in order:
            made[name] = makers[name]()
        return made["w"], t + hw.astype(made["n"] + made["s"] * r * (hw.astype(x, hw.f32) * 2.0), hw.bf16)

    text = str(lower(norm_backward, Options()))
    assert [line.strip() for line in text.splitlines() if "allocate" in line] == ["%x = allocate bf16[M, N]"]
    assert text.count("launch @") == 2


def test_a_value_with_other_uses_is_also_written() -> None:
    returned = host("launch @negative_h %x -> %y\n%z = allocate f32[M, N]\nlaunch @multiply_y %y, %x -> %z\nall_reduce sum %z -> %z on x")
    assert fused(returned).startswith("""\
kernel @negative_multiply_h_y(%x: f32[M, N]) {
  %h: f32[M, N] = negative(%x)
  %y: f32[M, N] = multiply(%h, %x)
  return %h, %y
}  # ends here: all_reduce uses %y
""")
    assert "launch @negative_multiply_h_y %x -> %y, %z\n" in fused(returned)


def test_readers_of_one_value_become_one_kernel() -> None:
    readers = host(
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nlaunch @multiply_y %h, %x -> %y\n"
        "%m = allocate f32[M]\nlaunch @max_m %h -> %m\nall_reduce max %m -> %m on x"
    )
    assert fused(readers).startswith("""\
kernel @negative_multiply_max_y_m(%x: f32[M, N]) {
  %h: f32[M, N] = negative(%x)
  %y: f32[M, N] = multiply(%h, %x)
  %m: f32[M] = max(%h, axis=(1,))
  return %y, %m
}  # ends here: all_reduce uses %m
""")


def test_kernels_are_fused_across_streams_that_write_other_buffers() -> None:
    """The copy is on another stream, and writes another buffer."""
    text = fused(
        host(
            "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nfork ring\n"
            "stream ring[0] {\n  copy %x -> %k\n}\nlaunch @multiply_y %h, %x -> %y\njoin ring"
        )
    )
    assert "launch @negative_multiply_y %x -> %y\n  join ring" in text


def test_kernels_are_fused_across_streams_of_an_earlier_loop() -> None:
    """An earlier loop has written the input of the first kernel in chunks. A fork of streams is between the two kernels."""
    text = fused(
        host(
            "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\n"
            "for %i in 0..2 {\n  %k_i = chunk %k[1: %i of 2]\n  %x_i = chunk %x[1: %i of 2]\n  copy %x_i -> %k_i\n}\n"
            "launch @negative_h %k -> %h\nfork ring\nlaunch @multiply_y %h, %x -> %y\njoin ring"
        )
    )
    assert "launch @negative_multiply_y %k, %x -> %y\n  join ring" in text


# For each name: instructions, and the reason why a kernel does not include the next instruction.
ENDS = {
    "communication": (
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nall_reduce sum %h -> %y on x",
        "all_reduce uses %h",
    ),
    "forked, written": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\ncopy %x -> %k\nlaunch @negative_h %k -> %h\nfork ring\n"
        "launch @multiply_y %h, %x -> %y\nstream ring[0] {\n  copy %x -> %k\n}\njoin ring",
        "other streams continue before %h is used",
    ),
    "forked, written in the next iteration": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\nfor %i in 0..2 {\n  copy %x -> %k\n  launch @negative_h %k -> %h\n"
        "  fork ring\n  launch @multiply_y %h, %x -> %y\n  join ring\n}",
        "other streams continue before %h is used",
    ),
    "forked, kept": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nfork ring\n"
        "launch @multiply_y %h, %x -> %y\nstream ring[0] {\n  copy %h -> %k\n}\njoin ring",
        "other streams continue before %h is used",
    ),
    "used between": (
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\n%k = allocate f32[M, N]\ncopy %h -> %k\nlaunch @multiply_y %h, %k -> %y",
        "copy uses %h before the next kernel",
    ),
    "used before": (
        "%h = allocate f32[M, N]\nfor %i in 0..2 {\nlaunch @multiply_y %h, %x -> %y\nlaunch @negative_h %x -> %h\n}",
        "%h is used before, in a loop",
    ),
    "loop": (
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nfork ring\n"
        "stream ring[0] {\n  launch @multiply_y %h, %x -> %y\n}\njoin ring",
        "another loop uses %h",
    ),
    "overwritten": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\n"
        "copy %x -> %k\nlaunch @negative_h %k -> %h\ncopy %x -> %k\nlaunch @multiply_y %h, %x -> %y",
        "an operand of %h is overwritten",
    ),
    "columns": (
        "%m = allocate f32[N]\nlaunch @max_columns %x -> %m\nlaunch @subtract_column %x, %m -> %y",
        "few threads would compute all of %y",
    ),
    "all": (
        "%m = allocate f32[]\nlaunch @max_all %x -> %m\nlaunch @subtract_all %x, %m -> %y",
        "few threads would compute all of %y",
    ),
    "again": (
        "%e = allocate f32[N]\nlaunch @exp_column %r -> %e\nlaunch @subtract_column %x, %e -> %y",
        "%m would be computed repeatedly",
    ),
    "other dims": (
        "%m = allocate f32[M]\nlaunch @max_m %x -> %m\n%m_column = reshape %m to [M, 1]\n%k = allocate f32[M, N]\n"
        "launch @subtract_row %x, %m_column -> %k\n%c = allocate f32[N]\nlaunch @max_columns %k -> %c\n"
        "launch @subtract_column %x, %c -> %y",
        "%m is reduced over other dims",
    ),
    "parts apart": (
        "%h = allocate f32[2*M, N]\n%a = slice %h[0: M from 0]\n%b = slice %h[0: M from 1]\n%k = allocate f32[M, N]\n"
        "launch @negative_h %x -> %a\nlaunch @exp_h %x -> %b\ncopy %a -> %y",
        "%h is written in parts",
    ),
    "parts": (
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\n%part = chunk %h[0: 0 of 1]\nlaunch @multiply_y %part, %x -> %y",
        "parts of %h are used",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_why_a_kernel_ends(case: str) -> None:
    body, reason = ENDS[case]
    assert f"}}  # ends here: {reason}\n" in fused(host(body))


def test_a_cheap_vector_is_computed_where_it_is_used() -> None:
    text = fused(host("%e = allocate f32[N]\nlaunch @negative_column %r -> %e\nlaunch @subtract_column %x, %e -> %y"))
    assert "kernel @negative_subtract_y(%x_2: f32[N], %x: f32[M, N]) {" in text


def test_indices_that_are_divided_by_a_constant_are_not_stored() -> None:
    """The division is a multiplication and a shift. Other divisions take longer, so they are not repeated for each element of a row."""

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
    """Two kernels need a value in f32 that is also stored in 16 bits. Each kernel casts the stored value."""

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
    """The indices of this lookup are an iota over the rows. The lookup returns all rows, even if there is only one."""

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
    """The normalised rows of LayerNorm are not written in f32. Each kernel computes them from the 16-bit rows."""

    def f(x: hw.Tensor, mean: hw.Tensor, dy: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        normal = hw.astype(x, hw.f32) - mean
        return hw.sum(normal * dy, 0), hw.max(normal + dy, 1)

    text = hw.compile(hw.fusion(x=hw.bf16[64, 96], mean=hw.f32[64, 1], dy=hw.f32[64, 96])(f)).host_ir
    assert text.count("launch ") == 2
    assert "allocate" not in text
