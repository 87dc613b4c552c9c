"""The pass stream_by_cost: which reshards are pipelined with matmuls at which sizes, and the text of the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fusion_text import GATHER, SCATTER, fusion

import hostweave as hw
from hostweave.base.errors import ParseError, ProgramError
from hostweave.base.paths import EXAMPLES
from hostweave.cli.programs import load_file
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.fusion.stream_by_cost import stream_by_cost
from hostweave.pipeline import lower
from hostweave.types.machine import H200, Machine

LARGE = {"M": 8192, "K": 8192, "N": 7168}
SLOW_LINKS = replace(H200, links=tuple(replace(link, points=tuple((x, 10 * y) for x, y in link.points)) for link in H200.links))


def taken(program: tuple[str, str], ranks: int = 2, machine: Machine = H200, **options: object) -> list[str]:
    """For each reshard with alternatives, the alternative that the pass chooses."""
    inputs, ops = program
    chosen = stream_by_cost(fusion(inputs, ops, f"x={ranks}"), Options(machine=machine, **{"sizes": LARGE, **options}))  # type: ignore[arg-type]
    return [choice.chosen.name for choice in chosen.choices]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("program", [GATHER, SCATTER])
def test_large_rows_overlap_and_small_ones_do_not(program: tuple[str, str], ranks: int) -> None:
    (large,) = taken(program, ranks)
    assert large.startswith("put(")
    assert int(large[4:-1]) % ranks == 0
    for rows in (16, 128):
        assert taken(program, ranks, sizes={**LARGE, "M": rows}) == ["none"]


@pytest.mark.parametrize("program", [GATHER, SCATTER])
def test_sends_and_recvs_are_not_chosen_on_4_or_more_ranks(program: tuple[str, str]) -> None:
    for ranks in (4, 8):
        for columns in (1280, 7168, 28672):
            assert taken(program, ranks, transport="two_sided", sizes={**LARGE, "N": columns}) == ["none"]
            assert taken(program, ranks, H200.without("peer", "here").without("one_sided", "here"), sizes={**LARGE, "N": columns}) == [
                "none"
            ]


def test_programs_without_a_choice() -> None:
    """There is no choice with `.stream`, with overlap="off", or if a size is unknown. There is also none if chunks are not contiguous, or
    if an op before the matmul uses the gathered value. If no number of chunks divides a size, the pass chooses "none"."""
    assert taken(GATHER, sizes={"M": 8192, "K": 8192}) == []
    assert taken(GATHER, sizes={**LARGE, "M": 8191}) == ["none"]
    inputs, ops = GATHER
    assert taken((inputs, ops.replace("%y", "%z: bf16[M, K] = negative(%g)\n%y"))) == []
    assert taken((inputs, ops.replace("%y: bf16[M, N]", "%y: bf16[M, N] stream(M, 2)"))) == []
    assert taken(GATHER, overlap="off") == []
    turned = "%g: bf16[K, M] = all_gather(%x, dim=1, axes=(x))\n%y: bf16[N, M] = matmul(%w, %g)"
    assert taken(("%x: bf16[K, M@x], %w: bf16[N, K]", turned)) == []  # Chunks of columns are not contiguous.
    both = "%g: bf16[M, K] = all_gather(%x, dim=0, axes=(x))\n%y: bf16[M, M] = matmul(%g, %v)"
    assert taken(("%x: bf16[M@x, K], %v: bf16[K, M]", both)) == [taken(GATHER, sizes={**LARGE, "N": 8192})[0]]


def test_rows_that_ranks_share_unevenly_are_summed_in_sequence() -> None:
    inputs = "%x: bf16[9@y, K@x], %w: bf16[K@x, N]"
    ops = "%h: bf16[9@y, N] partial(sum, x) = matmul(%x, %w)\n%z: bf16[9@y, N] = all_reduce(%h, axes=(x), reduction=sum)"
    chosen = stream_by_cost(fusion(inputs, ops, "x=2, y=4"), Options(sizes=LARGE))
    assert [[one.name for one in choice.alternatives] for choice in chosen.choices] == [["none"]]


@pytest.mark.parametrize(
    ("size", "message"),
    [(7, "%h of f32[M/2, 2]: M/2: 2 does not divide 7; state a size that is divisible"), (2, "(M - 4) = -2; state larger sizes")],
)
def test_impossible_typical_sizes(size: int, message: str) -> None:
    @hw.fusion(x=hw.f32["M"])
    def f(x: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.reshape(x, "M/2", 2)
        return -h, x[4:] * 2

    with pytest.raises(ProgramError, match=r"^test_stream_by_cost.py:\d+: Options: sizes: ") as caught:
        hw.compile(f, options=Options(sizes={"M": size}))
    assert message in str(caught.value)
    with pytest.raises(ProgramError, match=r"^f: Options: sizes: there is no size named m, N; the sizes of the program: M$"):
        hw.compile(f, options=Options(sizes={"m": 8, "N": 8, "M": 8}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": {"M": 0}}, "sizes: M=0: a typical size is an int of at least 1; correct it, or omit it"),
        ({"sizes": {"M": 1.5}}, "sizes: M=1.5: a typical size is an int"),
        ({"sizes": ["M"]}, "sizes=['M'] is not a dict of names; write sizes={\"NAME\": ...}"),
        ({"choices": "none"}, "choices='none' is not a dict of names; write choices={\"NAME\": ...}"),
        ({"tf32": "no"}, "tf32='no' is neither True nor False; write one of them"),
    ],
)
def test_options_of_other_types(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        Options(**wrong)
    assert str(caught.value).startswith(f"Options: {message}")


def test_several_matmuls_share_a_loop() -> None:
    inputs = "%x: bf16[M@x, K], %v: bf16[K, N], %w: bf16[K, N]"
    ops = """%g: bf16[M, K] = all_gather(%x, dim=0, axes=(x))
    %a: bf16[M, N] = matmul(%g, %v)
    %s: bf16[M, N] = silu(%a)
    %b: bf16[M, N] = matmul(%g, %w)
    %y: bf16[M, N] = multiply(%s, %b)"""
    chosen = stream_by_cost(fusion(inputs, ops, "x=2"), Options(sizes=LARGE))
    streams = {op.result.name: op.result.stream for op in chosen.ops if op.result.stream}
    assert list(streams) == ["a", "b"]
    assert streams["a"] == streams["b"]
    later = ops.replace("%b: bf16[M, N] = matmul(%g, %w)", "%t: bf16[K, N] = negative(%w)\n%b: bf16[M, N] = matmul(%g, %t)")
    chosen = stream_by_cost(fusion(inputs, later, "x=2"), Options(sizes=LARGE))
    assert [op.result.name for op in chosen.ops if op.result.stream] == ["a"]  # %t is computed after %a, so %b cannot be in the loop of %a.


def test_sums_of_a_matmul_in_slices() -> None:
    """On 8 ranks, the compiler chooses no loop for the all-reduce after a matmul. On 2 ranks, all_reduce(4) can be requested: one
    all-reduce per slice."""
    ops = "%h: bf16[M, N] partial(sum, x) = matmul(%x, %w)\n%y: bf16[M, N] = all_reduce(%h, axes=(x), reduction=sum)"
    program = "%x: bf16[M, K@x], %w: bf16[K@x, N]", ops
    assert taken(program, 8) == ["none"]
    assert taken(program, 2, choices={"@f %y": "all_reduce(4)"}) == ["all_reduce(4)"]


def test_a_reduce_scatter_that_other_ops_hide_is_not_in_a_loop() -> None:
    """A reduce-scatter is not in a loop if later ops can hide it. An example is the reduce-scatter of a weight's gradient. Without later
    ops, the reduce-scatter is in a loop."""
    inputs, ops = SCATTER
    inputs, rest = f"{inputs}, %v: bf16[N, N], %u: bf16[M, N]", "\n%a: bf16[M, N] = matmul(%u, %v)\n%z: bf16[M, N] = negative(%a)"
    assert taken((inputs, ops)) != ["none"]
    assert taken((inputs, ops + rest)) == ["none"]


def test_a_sum_is_fused_with_its_consumer() -> None:
    """With puts, the kernel that uses the sum also adds the received terms. So the sum is neither written nor read again."""
    inputs, ops = SCATTER
    residual = f"{inputs}, %r: bf16[M@x, N]", ops + "\n%z: bf16[M@x, N] = add(%r, %y)"
    micros = []
    for given, more in (SCATTER, residual):
        (choice,) = stream_by_cost(fusion(given, more, "x=2"), Options(sizes=LARGE)).choices
        micros.append({one.name: one.micros for one in choice.alternatives})
    alone, behind = micros
    moved = 2 * 8192 // 2 * 7168 * 2 / H200.memory * 1e6  # microseconds to write and read the sum
    assert alone["put(4)"] - behind["put(4)"] == pytest.approx(moved + H200.launch * 1e6, abs=0.2)
    assert (alone["none"], alone["p2p(2)"]) == (behind["none"], behind["p2p(2)"])


def test_choice_in_the_text() -> None:
    program = fusion(*GATHER, "x=2")
    stages: dict[str, Fusion | HostProgram] = {}
    host = lower(program, Options(sizes=LARGE), stages.__setitem__)
    (choice,) = host.choices
    after = stages["stream_by_cost"]
    assert Fusion.parse(str(after)) == after
    assert HostProgram.parse(str(host)) == host
    for stated in ("none", "put(2)"):
        made = stream_by_cost(program, Options(sizes=LARGE, choices={"@f %g": stated}))
        again = hw.compile(made, options=Options(sizes=LARGE))  # The text has the choice. `in_sequence` has no chosen loop.
        assert [one.chosen.name for one in again.choices] == [stated]
        assert [one.chosen.name for one in again.compiled.in_sequence.host.choices] == ["none"] * (stated == "none")
    line = str(choice)
    assert line.startswith("choice %g of @f predicted: put(2) ")
    assert f"  {line}\n  return %y" in str(after)
    assert f"{line}\nhost @f(" in str(host)
    assert [one.micros for one in choice.alternatives] == sorted(one.micros for one in choice.alternatives)
    header = hw.compile(program, options=Options(sizes=LARGE)).sources["program.h"]
    assert f"// {choice.value} of {choice.function}, {choice.times}" in header
    assert "choice" not in host.code
    assert "choice" not in str(lower(program, Options()))
    for wrong, message in {"predicted": "guessed", "put(2)": "put(two)", " us": " ms"}.items():
        with pytest.raises(ParseError):
            Fusion.parse(str(after).replace(wrong, message, 1))


def test_layers_of_llama_overlap_by_default() -> None:
    llama = load_file(EXAMPLES / "llama.py")
    for ranks in (2, 8):
        host = lower(llama.program(llama.Config(), tp=ranks), Options(sizes={"S": 8192, "B": 1}))
        assert {choice.function for choice in host.choices} == {"layer"}
        taken = [choice.chosen.algorithm for choice in host.choices]
        assert len(taken) == 4
        assert taken.count("put") >= 2


def test_stated_alternatives() -> None:
    assert taken(GATHER, choices={"@f %g": "none"}) == ["none"]
    assert taken(GATHER, choices={"@f %g": "p2p(2)"}) == ["p2p(2)"]
    with pytest.raises(ProgramError) as caught:
        taken(GATHER, choices={"@f %g": "put(3)"})
    assert "@f %g: put(3) is not possible; use one of put(2), " in str(caught.value)
    with pytest.raises(ProgramError, match=r"f: Options: choices: there is no choice named @f %y; choices at these sizes: @f %g"):
        hw.compile(fusion(*GATHER, "x=2"), options=Options(sizes=LARGE, choices={"@f %y": "none"}))
