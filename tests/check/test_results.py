"""The check of results compares a host program with its fusion over a finite field, and reports differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
from compiled_fusions import fusion_of

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.check.results.results import ComparedOutput
from hostweave.check.results.samples import Real
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.rewriting import map_functions
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Binary, Const, Coordinate
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower, stages

Rule = Callable[[tree.Instruction], tree.Outcome]


def changed(host: HostProgram, rule: Rule) -> HostProgram:
    return replace(host, body=tree.rewrite(host.body, rule))


def fault(fusion: Fusion, host: HostProgram) -> str:
    with pytest.raises(ProgramError) as caught:
        check(host, fusion=fusion)
    return str(caught.value)


def test_names_output_rank_and_element() -> None:
    fusion = fusion_of("matmul_ar_unstreamed", 4, 3, hw.f32)
    wrong = changed(lower(fusion, Options()), lambda i: replace(i, op="max") if isinstance(i, ir.AllReduce) else None)
    message = fault(fusion, wrong)
    assert "@matmul_ar_unstreamed: rank 0: the output %" in message
    assert "[0, 0] is not what the fusion computes (" in message
    assert "at M=4, K=9, N=4" in message


@pytest.mark.parametrize("dims", [("12@x", 3), (12, "4@x"), ("64@x", 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rounding_errors_of_a_sum_that_is_zero(dims: tuple[int | str, ...], ranks: int) -> None:
    """The sum of differences to the mean is 0 in the finite field. So the check also sets the f64 value of the sum to 0. Then the inverse
    of the sum is infinite for every order of addition."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32[dims])
    def f(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        zero = hw.sum(x - hw.mean(x, 0, keepdims=True), 0)
        return 1.0 / zero, hw.log(hw.abs(zero)), hw.sign(hw.einsum("ij,ik->k", x - hw.mean(x, 0, keepdims=True), x - x + 1))

    host = lower(f, Options())
    assert not check(host, fusion=f)
    if isinstance(dims[0], str):
        assert "is not what the fusion computes" in fault(f, changed(host, lambda i: () if isinstance(i, ir.AllReduce) else None))


def test_names_the_element_in_the_global_output() -> None:
    fusion = fusion_of("reduce_scatter", 4, 3, hw.f32)

    def wrong_on_rank_2(i: tree.Instruction) -> tree.Outcome:
        is_rank_2 = Binary("==", Coordinate("x"), Const(2))
        return (i, ir.If(is_rank_2, (ir.Fill(i.dst, 0.0),))) if isinstance(i, ir.ReduceScatter) else None

    found = fault(fusion, changed(lower(fusion, Options()), wrong_on_rank_2))
    assert "rank 2: the output %y[0, 2, 0] is not what the fusion computes (0, not" in found


@pytest.mark.parametrize("is_selected", [lambda zero: zero - math.inf < math.inf, lambda zero: zero / zero != zero / zero])
def test_comparisons_of_infinities_and_nans(is_selected: Callable[[hw.Tensor], hw.Tensor]) -> None:
    """Both comparisons are true in IEEE arithmetic. A program that computes false is wrong."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"], zero=hw.f32["M@x", "N"])
    def selected(x: hw.Tensor, zero: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.where(is_selected(zero * 0), x, 0.0), "M", "N")

    host = lower(selected, Options())
    assert not check(host, fusion=selected)
    wrong = changed(host, lambda i: (i, ir.Fill(i.dst, 0.0)) if isinstance(i, ir.AllGather) else None)
    assert "is not what the fusion computes" in fault(selected, wrong)


def test_an_infinite_value_in_f64_equals_only_itself() -> None:
    actual, expected = ([[1.0, np.inf, np.nan, -np.inf, 1.0]], [[np.inf, np.inf, np.nan, np.inf, 1.0]])
    samples = [Real.from_components(np.array(values), np.zeros((1, 5), np.uint64)) for values in (actual, expected)]
    assert ComparedOutput("y", 0, *samples, (), (5,)).differs_in_f64(1e-9).tolist() == [[True, False, False, True, False]]


def test_names_the_first_pass_with_another_result() -> None:
    from hostweave.check.match_collectives import match_communications
    from hostweave.check.results.results import Expected, difference, first_wrong_stage
    from hostweave.check.simulate import instantiate
    from hostweave.check.sizes import minimal_sizes

    fusion = fusion_of("epilogues", 4, 3, hw.f32)
    made = stages(fusion, Options())
    names = [name for name, _ in made]

    def scaled(i: tree.Instruction) -> tree.Outcome:
        return replace(i, scale=i.scale * 2) if isinstance(i, ir.Matmul) else None

    at = names.index("fold_epilogues")
    broken = [(name, changed(stage, scaled) if number >= at else stage) for number, (name, stage) in enumerate(made)]  # type: ignore[arg-type]
    last = broken[-1][1]
    assert isinstance(last, HostProgram)
    sizes = minimal_sizes(last)
    instances = instantiate(last, sizes)
    found = difference(Expected(fusion, sizes), instances, match_communications(instances))
    assert found
    assert first_wrong_stage(fusion, made, found) == ("", None)
    name, op = first_wrong_stage(fusion, broken, found)
    assert op
    assert (name, op.kind) == ("fold_epilogues", "add")  # The matmul adds its bias.


def test_compile_names_a_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostweave import pipeline

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])
    def gathered(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "M", "N")

    @wraps(pipeline.PASSES[-1])
    def with_zeros(program: HostProgram, options: Options) -> HostProgram:
        return changed(program, lambda i: (i, ir.Fill(i.dst, 0.0)) if isinstance(i, ir.AllGather) else None)

    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES[:-1], with_zeros))
    first = r"where %y \(test_results.py:\d+\) is the first value that differs"
    with pytest.raises(ProgramError, match=f"the first wrong pass is fold_conditions, {first}: this is a bug of the compiler"):
        hw.compile(gathered)


@pytest.mark.parametrize("wrong", [2, 5])
def test_the_first_value_that_differs_is_named(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass on fusions changes a factor in a function. The error names a pass and the first wrong value."""
    from hostweave import pipeline

    @hw.block(x=hw.f32["M@x", "N"], b=hw.f32["N"])
    def layer(x: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        moved = x + b
        scaled = moved * 2
        return hw.tanh(scaled)

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"], b=hw.f32["N"], c=hw.f32["N"])
    def model(x: hw.Tensor, b: hw.Tensor, c: hw.Tensor) -> hw.Tensor:
        return layer(layer(x, b), c)

    original = pipeline.PASSES[wrong]

    @wraps(original)
    def scaled_more(fusion: Fusion, options: Options) -> Fusion:
        def more(op: Op) -> Op:
            return replace(op, operands=(op.operands[0], 3)) if op.kind == "multiply" else op

        return map_functions(original(fusion, options), lambda body: replace(body, body=tuple(map(more, body.ops))))

    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES[:wrong], scaled_more, *pipeline.PASSES[wrong + 1 :]))
    with pytest.raises(ProgramError, match=r"the first wrong pass is \w+, where %scaled \(test_results.py:\d+\) is the first value"):
        hw.compile(model)


def test_parts_that_are_not_compared_are_reported() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", 4])
    def doubled(x: hw.Tensor) -> hw.Tensor:
        source = "__global__ void twice(const float* x, float* y, int64_t n) { for (int64_t i : hw::over_grid(4 * n)) y[i] = 2 * x[i]; }"
        return hw.kernel(source, "twice", "M@x", [x, hw.f32["M@x", 4], "M@x"]) + 1

    program = hw.compile(doubled)
    assert program.unchecked == ("the C++ of the kernel twice",)
    assert program.check(M=8) == ("the C++ of the kernel twice",)
    assert hw.compile(doubled, options=hw.Options(check=False)).unchecked == ("everything: the program was compiled without a check",)
    assert hw.compile(lower(doubled, Options())).unchecked[-1].startswith("the results: the program was compiled from host IR")
    (first, _) = program.check(M=2**26)
    assert first.startswith("the results, M=67108864: ")


def test_reports_lines_that_never_ran() -> None:
    fusion = fusion_of("matmul_ar_unstreamed", 4, 3, hw.f32)

    def under_a_condition(i: tree.Instruction) -> tree.Outcome:
        return ir.If(Const(1), (i,), (i,)) if isinstance(i, ir.Matmul) else None

    host = changed(lower(fusion, Options()), under_a_condition)
    assert check(host, fusion=fusion) == ()  # Both bodies have the same line.
    host = changed(host, lambda i: replace(i, orelse=(ir.Fill(i.body[0].dst, 0.0),)) if isinstance(i, ir.If) else None)  # type: ignore[attr-defined]
    (line,) = check(host, fusion=fusion)
    assert line.startswith("never ran: fill %")


def test_a_changed_operand_of_a_user_kernel_is_detected() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", 4])
    def rows(x: hw.Tensor) -> hw.Tensor:
        source = "__global__ void f(const float* x, float* y, int64_t n) { for (int64_t i : hw::over_grid(4 * n)) y[i] = x[i]; }"
        return hw.kernel(source, "f", "M@x", [x * 2, hw.f32["M@x", 4], "M@x"])

    host = lower(rows, Options())
    assert check(host, fusion=rows)
    (kernel,) = host.kernels
    wrong = replace(host, kernels=(replace(kernel, ops=tuple(replace(op, operands=(op.operands[0], 3)) for op in kernel.ops)),))
    assert "the output" in fault(rows, wrong)


Z_LOSS = """fusion @z(%q: f32[2, S, 8], %k: f32[2, T@x, 8]) mesh(x=2) {
  %lse: f32[2, S] = attention_lse(%q, %k, scale=0.5)
  %scaled: f32[2, S] = multiply(%lse, 0.001)
  return %scaled
}
"""


def test_a_multiple_of_a_joined_log_sum_exp_is_accepted() -> None:
    """The finite field cannot represent the result, so the check compares f64 values. A real error is still detected."""
    fusion = Fusion.parse(Z_LOSS)
    host = lower(fusion, Options())
    assert check(host, fusion=fusion) == ()
    kernels = [
        replace(k, ops=tuple(replace(op, operands=(op.operands[0], 0.002)) if 0.001 in op.operands else op for op in k.ops))
        for k in host.kernels
    ]
    assert kernels != list(host.kernels)
    assert "is not what the fusion computes" in fault(fusion, replace(host, kernels=tuple(kernels)))


def test_branches_for_large_sizes_are_executed() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M", "K@x"])
    def sums(x: hw.Tensor) -> hw.Tensor:
        return hw.sum(x, axis=1) * 2

    host = lower(sums, Options())
    (condition,) = [i for i in tree.walk(host.body) if isinstance(i, ir.If)]
    assert str(condition.condition) == "M <= 131072"
    assert check(host, fusion=sums) == ()
    wrong = changed(host, lambda i: replace(i, op="max") if isinstance(i, ir.AllReduce) else None)
    assert "is not what the fusion computes" in fault(sums, wrong)


@pytest.mark.parametrize("algorithm", ["p2p", "broadcast", "reduce"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_in_different_steps_use_buffers_of_different_streams(ranks: int, algorithm: str) -> None:
    """Ranks may be in different iterations of the loop at the same time. The streams of the iterations differ."""
    is_sum, chunks = algorithm == "reduce", 2 * ranks

    @hw.fusion(mesh=hw.Mesh(x=ranks), a=hw.f32["M", "L@x"], b=hw.f32["L@x", "N"], x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def steps(a: hw.Tensor, b: hw.Tensor, x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        if is_sum:
            return hw.reshard(a @ b, "M", "N@x").stream("N", chunks=chunks, algorithm="reduce")
        return (hw.copy(x) @ w).stream("M", chunks=chunks, algorithm=algorithm)

    host = lower(steps, Options())
    assert any(isinstance(i, ir.Allocate) for loop in tree.walk(host.body) if isinstance(loop, ir.OnStream) for i in loop.body)
    assert check(host, fusion=steps) == ()
    wrong = changed(host, lambda i: (i, ir.Fill(i.dst, 0.0)) if isinstance(i, ir.Matmul) else None)
    assert "is not what the fusion computes" in fault(steps, wrong)


def test_a_kernel_gathers_one_element_per_rank() -> None:
    bits = hw.fusion(mesh=hw.Mesh(x=2), x=hw.i16["N@x"])(lambda x: hw.reduce_and(x))
    host = lower(bits, Options())
    assert "launch_all_gather" in str(host)
    assert check(host, fusion=bits) == ()
    assert "is not what the fusion computes" in fault(bits, HostProgram.parse(str(host).replace("= reduce_and(%x,", "= reduce_or(%x,")))
