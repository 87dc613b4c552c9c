"""The pass fuse_kernels: launches that become one kernel, names of the values in the kernel, and reasons why a kernel ends."""

from __future__ import annotations

import host_text
import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import fuse_kernels
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


def host(body: str, header: str = "(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(loop[2])") -> HostProgram:
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
host @f(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(loop[2]) {
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
host @f(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(loop[2]) {
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


@pytest.mark.parametrize(("rows", "kernels"), [(2, 1), (8, 1), (9, 2)])
def test_short_columns_are_reduced_and_used_by_one_kernel(rows: int, kernels: int) -> None:
    @hw.fusion(x=hw.f32[rows, "N"])
    def shifted(x: hw.Tensor) -> hw.Tensor:
        return hw.exp(x - hw.max(x, axis=0, keepdims=True))

    assert str(lower(shifted, Options())).count("launch ") == kernels


def test_chunks_of_a_loop() -> None:
    before = host("""\
%h = allocate f32[M, N]
fork loop
for %i in 0..M {
  stream loop[%i] {
    %x_i = chunk %x[0: %i of M]
    %h_i = chunk %h[0: %i of M]
    %y_i = chunk %y[0: %i of M]
    launch @a %x_i -> %h_i
    launch @b %h_i -> %y_i
  }
}
join loop""")
    kernels = "kernel @{}(%{}: f32[1, N]) {{\n  %{}: f32[1, N] = negative(%{})\n}}\n"
    before = host_text.parse(kernels.format("a", "x", "h", "x") + kernels.format("b", "h", "y", "h") + str(before))
    assert (
        fused(before)
        == """\
kernel @negative_negative_y(%x: f32[1, N]) {
  %h: f32[1, N] = negative(%x)
  %y: f32[1, N] = negative(%h)
}
host @f(%x: f32[M, N], %r: f32[N]) -> (%y: f32[M, N]) mesh(x=2) streams(loop[2]) {
  fork loop
  for %i in 0..M {
    stream loop[%i] {
      %x_i = chunk %x[0: %i of M]
      %y_i = chunk %y[0: %i of M]
      launch @negative_negative_y %x_i -> %y_i
    }
  }
  join loop
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
    """True if two kernels stay separate. The first kernel reads %x. `later` launches the second kernel, after `between`."""
    inputs = "(%x: f32[N, N], %w: f32[N, N]) -> (%y: f32[N, N], %z: f32[N, N]) mesh() streams(s[1]) events(e[1])"
    body = f"launch @negative_h %x -> %y\n{between}\n%b = allocate f32[N, N]\n{later}\nmatmul %w, %b -> %z"
    text = fused(host_text.parse(str(host(body, inputs)).replace("[M, N]", "[N, N]")))
    return text.count("launch @") == 2


def test_kernels_that_read_the_same_are_one() -> None:
    assert not apart("")
    assert not apart("%a = allocate f32[N, N]\nmatmul %y, %w -> %a")
    assert not apart("", "%v = permute %w by [1, 0]\nlaunch @multiply_y %x, %v -> %b")
    assert apart("%a = allocate f32[N, N]\nmatmul %y, %y -> %a", "launch @multiply_y %x, %a -> %b")  # The second kernel depends on %y.
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
    """In the backward pass of a norm, two kernels compute a column sum and a row sum from the same intermediate values. The first kernel
    writes %x to new memory, and %dy to the memory of a result. The second kernel reads %x and %dy, and recomputes the other values."""
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
    text = fused(
        host(
            "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nfork loop\n"
            "stream loop[0] {\n  copy %x -> %k\n}\nlaunch @multiply_y %h, %x -> %y\njoin loop"
        )
    )
    assert "launch @negative_multiply_y %x -> %y\n  join loop" in text


def test_kernels_are_fused_across_streams_of_an_earlier_loop() -> None:
    """An earlier loop has written the input of the first kernel in chunks. A fork of streams is between the two kernels."""
    text = fused(
        host(
            "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\n"
            "for %i in 0..2 {\n  %k_i = chunk %k[1: %i of 2]\n  %x_i = chunk %x[1: %i of 2]\n  copy %x_i -> %k_i\n}\n"
            "launch @negative_h %k -> %h\nfork loop\nlaunch @multiply_y %h, %x -> %y\njoin loop"
        )
    )
    assert "launch @negative_multiply_y %k, %x -> %y\n  join loop" in text


# For each name: instructions, and the reason why a kernel ends.
ENDS = {
    "communication": (
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nall_reduce sum %h -> %y on x",
        "all_reduce uses %h",
    ),
    "forked, written": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\ncopy %x -> %k\nlaunch @negative_h %k -> %h\nfork loop\n"
        "launch @multiply_y %h, %x -> %y\nstream loop[0] {\n  copy %x -> %k\n}\njoin loop",
        "other streams continue before %h is used",
    ),
    "forked, written in the next iteration": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\nfor %i in 0..2 {\n  copy %x -> %k\n  launch @negative_h %k -> %h\n"
        "  fork loop\n  launch @multiply_y %h, %x -> %y\n  join loop\n}",
        "other streams continue before %h is used",
    ),
    "forked, kept": (
        "%h = allocate f32[M, N]\n%k = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nfork loop\n"
        "launch @multiply_y %h, %x -> %y\nstream loop[0] {\n  copy %h -> %k\n}\njoin loop",
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
        "%h = allocate f32[M, N]\nlaunch @negative_h %x -> %h\nfork loop\n"
        "stream loop[0] {\n  launch @multiply_y %h, %x -> %y\n}\njoin loop",
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
