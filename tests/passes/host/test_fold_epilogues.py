"""The pass fold_epilogues: kernels that become epilogues of matmuls, completely or in part, and kernels that do not."""

from __future__ import annotations

import re

import pytest

from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.fold_epilogues import fold_epilogues

ADD = "kernel @add_y(%h: {t}[M, N], %b: {t}[N]) {\n  %y: {t}[M, N] = add(%h, %b)\n}\n"
HEAD = "(%x: {t}[M, K], %w: {t}[K, N], %b: {t}[N], %r: {t}[M, N]) -> (%y: {t}[M, N]) mesh(x=2) streams(loop[2])"


def host(kernels: str, body: str, head: str = HEAD, dtype: str = "bf16") -> HostProgram:
    lines = "".join(f"  {line}\n" for line in body.strip().splitlines())
    return HostProgram.parse(f"{kernels}host @f{head} {{\n{lines}}}\n".replace("{t}", dtype))


def folded(program: HostProgram) -> str:
    verify_host(program)
    result = fold_epilogues(program, Options())
    verify_host(result)
    check(result)
    assert HostProgram.parse(str(result)) == result
    assert fold_epilogues(result, Options()) == result
    return str(result)


def kernel(*ops: str, inputs: str = "%h: {t}[M, N], %b: {t}[N]", results: str = "") -> str:
    lines = "".join(f"  %{op.split(' = ')[0]}: {{t}}[M, N] = {op.split(' = ')[1]}\n" for op in ops)
    return f"kernel @k({inputs}) {{\n{lines}{f'  return {results}{chr(10)}' if results else ''}}}\n"


def srcs(inputs: str) -> str:
    return ", ".join(re.findall(r"%\w+", inputs))


PRODUCT = "%h = allocate {t}[M, N]\nmatmul %x, %w -> %h"
BIAS, PLUS = "%h: {t}[M, N], %b: {t}[N]", "%h: {t}[M, N], %r: {t}[M, N]"
BOTH, ALONE = "%h: {t}[M, N], %b: {t}[N], %r: {t}[M, N]", "%h: {t}[M, N]"

# For each name: the inputs and the ops of a kernel, and the epilogue that computes all these ops.
WHOLE = {
    "a bias": (BIAS, ["y = add(%h, %b)"], "bias %b"),
    "a bias on the left": (BIAS, ["y = add(%b, %h)"], "bias %b"),
    "relu": (ALONE, ["y = relu(%h)"], "activation relu"),
    "gelu": (ALONE, ["y = gelu_tanh(%h)"], "activation gelu_tanh"),
    "a residual": (PLUS, ["y = add(%h, %r)"], "accumulate %r"),
    "a factor": (ALONE, ["y = multiply(%h, 0.3)"], "scaled 0.3"),
    "factors": (ALONE, ["a = multiply(2, %h)", "c = negative(%a)", "y = divide(%c, 8.0)"], "scaled -0.25"),
    "all of them": (
        BOTH,
        ["a = multiply(%h, 0.5)", "c = add(%a, %b)", "s = add(%c, %r)", "y = relu(%s)"],
        "scaled 0.5 accumulate %r bias %b activation relu",
    ),
}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", WHOLE)
def test_kernels_that_are_folded_completely(name: str, dtype: str) -> None:
    inputs, ops, ends = WHOLE[name]
    before = host(kernel(*ops, inputs=inputs), f"{PRODUCT}\nlaunch @k {srcs(inputs)} -> %y", dtype=dtype)
    after = f"host @f{HEAD} {{\n  matmul %x, %w {ends} -> %y\n}}\n".replace("{t}", dtype)
    is_inexact = (name, dtype) == ("gelu", "f32")
    assert folded(before) == (str(before) if is_inexact else after)


# For each name: the inputs and the ops of a kernel that the pass does not change.
STAY = {
    "the erf gelu": (ALONE, ["y = gelu(%h)"]),
    "another activation": (BIAS, ["a = add(%h, %b)", "y = silu(%a)"]),
    "a bias after the activation": (BIAS, ["a = relu(%h)", "y = add(%a, %b)"]),
    "a factor after a sum": (BIAS, ["a = add(%h, %b)", "y = multiply(%a, 0.5)"]),
    "a divisor whose inverse is not exact": (ALONE, ["y = divide(%h, 3.0)"]),
    "a division by the product": (ALONE, ["y = divide(1.0, %h)"]),
    "a factor of 0": (ALONE, ["y = multiply(%h, 0.0)"]),
    "a number added": (ALONE, ["y = add(%h, 1.0)"]),
    "the product added to itself": (ALONE, ["y = add(%h, %h)"]),
    "two uses of the product": (ALONE, ["a = relu(%h)", "y = multiply(%a, %h)"]),
    "two residuals": ("%h: {t}[M, N], %r: {t}[M, N], %x: {t}[M, N]", ["a = add(%h, %r)", "y = add(%a, %x)"]),
}


@pytest.mark.parametrize("name", STAY)
def test_kernels_that_are_not_folded(name: str) -> None:
    inputs, ops = STAY[name]
    head = "(%x: {t}[M, N], %w: {t}[N, N], %b: {t}[N], %r: {t}[M, N]) -> (%y: {t}[M, N]) mesh()"
    before = host(kernel(*ops, inputs=inputs), f"{PRODUCT}\nlaunch @k {srcs(inputs)} -> %y", head)
    assert folded(before) == str(before)


def test_a_kernel_keeps_the_ops_after_a_folded_value() -> None:
    """A kernel adds, writes the sum, and computes another result from the sum. The addition becomes an epilogue. The kernel then reads the
    sum."""
    ops = ["s = add(%h, %r)", "e = exp(%s)", "y = multiply(%e, %b)"]
    before = host(
        kernel(*ops, inputs=BOTH, results="%s, %y"),
        "%h = allocate {t}[M, N]\nmatmul %x, %w -> %h\nlaunch @k %h, %b, %r -> %s, %y",
        HEAD.replace("(%y: {t}[M, N])", "(%s: {t}[M, N], %y: {t}[M, N])"),
    )
    assert (
        folded(before)
        == """\
kernel @exp_multiply_y(%b: bf16[N], %s: bf16[M, N]) {
  %e: bf16[M, N] = exp(%s)
  %y: bf16[M, N] = multiply(%e, %b)
}
host @f(%x: bf16[M, K], %w: bf16[K, N], %b: bf16[N], %r: bf16[M, N]) -> (%s: bf16[M, N], %y: bf16[M, N]) mesh(x=2) streams(loop[2]) {
  matmul %x, %w accumulate %r -> %s
  launch @exp_multiply_y %b, %s -> %y
}
"""
    )


def test_the_second_of_two_matmuls_adds_the_result_of_the_first() -> None:
    before = host(
        kernel("y = add(%h, %r)", inputs=PLUS),
        "%h = allocate {t}[M, N]\nmatmul %x, %w -> %h\n%g = allocate {t}[M, N]\nmatmul %x, %v -> %g\nlaunch @k %h, %g -> %y",
        "(%x: {t}[M, K], %w: {t}[K, N], %v: {t}[K, N]) -> (%y: {t}[M, N]) mesh()",
    )
    assert (
        folded(before)
        == """\
host @f(%x: bf16[M, K], %w: bf16[K, N], %v: bf16[K, N]) -> (%y: bf16[M, N]) mesh() {
  %h = allocate bf16[M, N]
  matmul %x, %w -> %h
  matmul %x, %v accumulate %h -> %y
}
"""
    )


def test_one_kernel_after_another() -> None:
    """Two consecutive kernels both become parts of the epilogue of one matmul."""
    kernels = ADD + "kernel @relu_y(%a: {t}[M, N]) {\n  %y: {t}[M, N] = relu(%a)\n}\n"
    body = """\
%h = allocate {t}[M, N]
%a = allocate {t}[M, N]
matmul %x, %w in tf32 -> %h
launch @add_y %h, %b -> %a
launch @relu_y %a -> %y"""
    assert "  matmul %x, %w in tf32 bias %b activation relu -> %y\n" in folded(host(kernels, body, dtype="f32"))


CHUNKS = {
    "rows": ("M/2, N", "%x_i = chunk %x[0: %i of 2]", "0", "%x_i, %w", "%b"),
    "columns": ("M, N/2", "%w_i = chunk %w[1: %i of 2]\n%b_i = chunk %b[0: %i of 2]", "1", "%x, %w_i", "%b_i"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_a_loop(name: str) -> None:
    shape, views, dim, operands, bias = CHUNKS[name]
    inputs = f"%h: {{t}}[{shape}], %r: {{t}}[{shape}], %b: {{t}}[{shape.split(', ')[1]}]"
    ops = [f"%s: {{t}}[{shape}] = add(%h, %r)", f"%a: {{t}}[{shape}] = add(%s, %b)", f"%y: {{t}}[{shape}] = relu(%a)"]
    before = host(
        f"kernel @k({inputs}) {{\n{chr(10).join(ops)}\n}}\n",
        f"""\
%h = allocate {{t}}[M, N]
fork loop
for %i in 0..2 {{
stream loop[%i] {{
{views}
%h_i = chunk %h[{dim}: %i of 2]
matmul {operands} -> %h_i
%r_i = chunk %r[{dim}: %i of 2]
%y_i = chunk %y[{dim}: %i of 2]
launch @k %h_i, %r_i, {bias} -> %y_i
}}
}}
join loop""",
    )
    result = folded(before)
    assert f"      matmul {operands} accumulate %r_i bias {bias} activation relu -> %y_i\n" in result
    assert not {"launch", "%h", "kernel"} & set(re.findall(r"%?\w+", result))


LAUNCH = "launch @add_y %h, %b -> %y"
BODIES = {
    "another instruction reads the product": f"matmul %x, %w -> %h\n{LAUNCH}\ncopy %h -> %z",
    "another instruction writes to the product": f"fill %h with 0.0\nmatmul %x, %w -> %h\n{LAUNCH}",
    "the launch is before the matmul, in a loop": f"for %i in 0..2 {{\n{LAUNCH}\nmatmul %x, %w -> %h\n}}",
    "a loop uses the product": f"matmul %x, %w -> %h\nfor %i in 0..2 {{\n{LAUNCH}\n}}",
    "an operand of the matmul is overwritten": f"copy %x -> %z\nmatmul %z, %w -> %h\nfill %z with 0.0\n{LAUNCH}",
    "the streams fork between the matmul and the launch": f"matmul %x, %w -> %h\nfork loop\n{LAUNCH}\njoin loop",
    "a view of the product is used": "matmul %x, %w -> %h\n%v = reshape %h to [M, N]\nlaunch @add_y %v, %b -> %y",
    "the result is transposed": "%t = allocate {t}[N, M]\n%u = permute %t by [1, 0]\nmatmul %x, %w -> %h\nlaunch @add_y %h, %b -> %u",
    "the bias is not contiguous": "%c = select %w[1: 0]\nmatmul %x, %w -> %h\nlaunch @add_y %h, %c -> %y",
    "the result overwrites an operand of the matmul": f"copy %x -> %y\nmatmul %y, %w -> %h\n{LAUNCH}",
}


@pytest.mark.parametrize("name", BODIES)
def test_programs_that_the_pass_does_not_change(name: str) -> None:
    head = "(%x: {t}[M, N], %w: {t}[N, N], %b: {t}[N]) -> (%y: {t}[M, N], %z: {t}[M, N]) mesh() streams(loop[2])"
    before = host(ADD, "%h = allocate {t}[M, N]\n" + BODIES[name], head)
    assert str(fold_epilogues(before, Options())) == str(before)


def test_a_broadcast_row_is_not_folded() -> None:
    head = "(%x: {t}[1, K], %w: {t}[K, N], %r: {t}[M, N]) -> (%y: {t}[M, N]) mesh()"
    add = "kernel @k(%h: {t}[1, N], %r: {t}[M, N]) {\n  %y: {t}[M, N] = add(%r, %h)\n}\n"
    before = host(add, "%h = allocate {t}[1, N]\nmatmul %x, %w -> %h\nlaunch @k %h, %r -> %y", head)
    assert folded(before) == str(before)


def test_batched_matmuls_fold_only_sums_and_factors() -> None:
    """A batched matmul folds no bias, unless all matrices of x have the same weight."""
    head = "(%x: {t}[B, M, K], %w: {t}[B, K, N], %b: {t}[N], %r: {t}[B, M, N]) -> (%y: {t}[B, M, N]) mesh()"
    body = "%h = allocate {t}[B, M, N]\nmatmul %x, %w -> %h\n"
    type = "{t}[B, M, N]"
    bias = host(f"kernel @k(%h: {type}, %b: {{t}}[N]) {{\n  %y: {type} = add(%h, %b)\n}}\n", body + "launch @k %h, %b -> %y", head)
    assert folded(bias) == str(bias)
    ops = f"%s: {type} = multiply(%h, 0.5)\n  %y: {type} = add(%s, %r)"
    added = host(f"kernel @k(%h: {type}, %r: {type}) {{\n  {ops}\n}}\n", body + "launch @k %h, %r -> %y", head)
    assert "  matmul %x, %w scaled 0.5 accumulate %r -> %y\n" in folded(added)
    tall = host(
        f"kernel @k(%h: {type}, %b: {{t}}[N]) {{\n  %y: {type} = add(%h, %b)\n}}\n",
        body + "launch @k %h, %b -> %y",
        head.replace("%w: {t}[B, K, N]", "%w: {t}[K, N]"),
    )
    assert "  matmul %x, %w bias %b -> %y\n" in folded(tall)


def test_f64_matmuls_fold_only_sums() -> None:
    """An f64 matmul folds the addition of a matrix, but not of a bias."""
    body = "%h = allocate {t}[M, N]\nmatmul %x, %w -> %h\n"
    bias = host(ADD, body + "launch @add_y %h, %b -> %y", dtype="f64")
    assert folded(bias) == str(bias)
    added = host(kernel("y = add(%h, %r)", inputs=PLUS), body + "launch @k %h, %r -> %y", dtype="f64")
    assert "  matmul %x, %w accumulate %r -> %y\n" in folded(added)


def test_each_matmul_of_a_sum_adds_to_the_previous_result() -> None:
    head = "(%x: {t}[M, K], %w: {t}[K, N], %u: {t}[K, N], %v: {t}[K, N]) -> (%y: {t}[M, N]) mesh()"
    type = "{t}[M, N]"
    ops = f"%s: {type} = add(%a, %b)\n  %y: {type} = add(%s, %c)"
    sums = f"kernel @k(%a: {type}, %b: {type}, %c: {type}) {{\n  {ops}\n}}\n"
    body = "".join(f"%{h} = allocate {type}\nmatmul %x, %{w} -> %{h}\n" for h, w in zip("abc", "wuv", strict=True))
    result = folded(host(sums, body + "launch @k %a, %b, %c -> %y", head))
    assert "matmul %x, %w -> %a\n" in result
    assert "matmul %x, %u accumulate %a -> %b\n" in result
    assert "matmul %x, %v accumulate %b -> %y\n" in result
    assert "launch" not in result
