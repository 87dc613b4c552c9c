"""The pass stream_by_cost: which reshards are pipelined with matmuls at which sizes, and the text of the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fusion_text import fusion

import hostweave as hw
from hostweave.base.errors import ParseError, ProgramError
from hostweave.base.paths import EXAMPLES
from hostweave.cli.programs import load_file
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.fusion.stream_by_cost import stream_by_cost
from hostweave.pipeline import lower
from hostweave.tune.cost import communication, seconds
from hostweave.types.machine import H100, H200, Link, Machine, shipped

GATHER = "%x: bf16[M@x, K], %w: bf16[K, N]", "%g: bf16[M, K] = all_gather(%x, dim=0, axes=(x))\n%y: bf16[M, N] = matmul(%g, %w)"
SCATTER = (
    "%x: bf16[M, K@x], %w: bf16[K@x, N]",
    "%h: bf16[M, N] partial(sum, x) = matmul(%x, %w)\n%y: bf16[M@x, N] = reduce_scatter(%h, dim=0, axes=(x), reduction=sum)",
)
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


# --- the model --------------------------------------------------------------------------------------------------------

# Measured on 2 H200 by `hostweave bench overlap`: rows, inner dim and columns of one rank; microseconds of the matmul and, by
# number of chunks, of put loops.
MEASURED = [
    (GATHER, 8192, 8192, 7168, 1200, {2: 1223, 4: 1320, 8: 1344}),
    (GATHER, 8192, 8192, 1280, 221, {2: 319, 4: 335}),
    (GATHER, 8192, 4096, 3584, 310, {2: 340, 4: 367, 8: 359}),
    (GATHER, 2048, 8192, 7168, 324, {2: 352, 4: 349}),
    (SCATTER, 8192, 3584, 8192, 630, {2: 689, 4: 701, 8: 707}),
    (SCATTER, 8192, 1024, 8192, 201, {2: 359, 4: 318, 8: 312}),
    (SCATTER, 8192, 1792, 4096, 166, {2: 229, 4: 206, 8: 220}),
    (SCATTER, 2048, 3584, 8192, 164, {2: 182, 4: 190, 8: 222}),
]


@pytest.mark.parametrize(("program", "rows", "inner", "columns", "matmul", "loops"), MEASURED)
def test_times(program: tuple[str, str], rows: int, inner: int, columns: int, matmul: float, loops: dict[int, float]) -> None:
    """Predicted times are within 15% of the measurements."""
    sizes = {"M": rows, "K": inner * (2 if program is SCATTER else 1), "N": columns}
    given = fusion(*program, "x=2")
    times = seconds(given, sizes)
    assert times["y" if program is GATHER else "h"] * 1e6 == pytest.approx(matmul, rel=0.15)
    (choice,) = stream_by_cost(given, Options(sizes=sizes)).choices
    predicted = {one.chunks: one.micros for one in choice.alternatives if one.algorithm == "put"}
    for chunks, micros in loops.items():
        assert predicted[chunks] == pytest.approx(micros, rel=0.15)


# Causal attention with sharded rows and keys, head size 128. Rows, heads, groups; microseconds without a loop, with put(2) and with p2p(2).
ATTENDED = [
    (8192, 32, 8, 838, 729, 788),
    (8192, 32, 32, 1165, 752, 994),
    (32768, 32, 8, 11141, 10746, 11045),
    (4096, 32, 32, 467, 283, 375),
]


@pytest.mark.parametrize(("rows", "heads", "groups", *("none", "put", "p2p")), ATTENDED)
def test_times_of_attention(rows: int, heads: int, groups: int, none: float, put: float, p2p: float) -> None:
    keys = f"bf16[{groups}, S@x, 128]"
    gathers = "\n".join(f"%{name}: bf16[{groups}, S, 128] = all_gather(%{name[0]}, dim=1, axes=(x))" for name in ("k_all", "v_all"))
    attention = f"%y: bf16[{heads}, S@x, 128] = attention(%q, %k_all, %v_all, scale=0.1, causal=top_left)"
    given = fusion(f"%q: bf16[{heads}, S@x, 128], %k: {keys}, %v: {keys}", f"{gathers}\n{attention}", "x=2")
    (choice,) = stream_by_cost(given, Options(sizes={"S": rows})).choices
    predicted = {one.name: one.micros for one in choice.alternatives}
    assert (predicted["put(2)"], predicted["p2p(2)"]) == pytest.approx((put, p2p), rel=0.15)
    assert predicted["none"] == pytest.approx(none, rel=0.2)


OF_FEW_ROWS = [  # Sizes, the alternative that the model should choose, and measured microseconds of this alternative and of `none`.
    *((GATHER, 512, 8192, 7168, "put(2)", 99, 127), (GATHER, 16, 8192, 7168, "none", 49.5, 49.5)),
    *((SCATTER, 512, 3584, 8192, "put(2)", 68, 79), (SCATTER, 16, 3584, 8192, "none", 31, 31)),
]


@pytest.mark.parametrize(("program", "rows", "inner", "columns", "alternative", "micros", "none"), OF_FEW_ROWS)
def test_times_of_few_rows(
    program: tuple[str, str], rows: int, inner: int, columns: int, alternative: str, micros: float, none: float
) -> None:
    sizes = {"M": rows, "K": inner * (2 if program is SCATTER else 1), "N": columns}
    (choice,) = stream_by_cost(fusion(*program, "x=2"), Options(sizes=sizes)).choices
    assert choice.chosen.name == alternative
    assert choice.chosen.micros == pytest.approx(micros, rel=0.15)
    assert next(other.micros for other in choice.alternatives if other.name == "none") == pytest.approx(none, rel=0.1)


def test_links() -> None:
    link = Link("put", 2, ((0, 1.0), (10, 2.0), (20, 4.0)))
    assert [link.seconds(size) for size in (0, 5, 10, 15, 20, 40)] == [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]
    assert H200.link("collective", 3).ranks == 4
    assert H200.link("get", 8).ranks == 2
    assert communication(H200, "all_reduce", 2, 2**26) > 1.5 * communication(H200, "reduce_scatter", 2, 2**26)


def test_machine_as_json() -> None:
    assert Machine.from_json(H200.to_json(), "here") == H200
    for wrong in ("", "[]", "{}", H200.to_json().replace("put", "pot"), H200.to_json().replace('"flops": 8', '"flops": -8')):
        with pytest.raises(
            ProgramError, match=r"h200.json: contains no valid figures of a machine .*; remove it, and run hostweave calibrate"
        ):
            Machine.from_json(wrong, "h200.json")
    with pytest.raises(ProgramError, match=r"Options: machine='H200' is not an hw.Machine"):
        Options(machine="H200")  # type: ignore[arg-type]


def test_figures_of_known_and_unknown_gpus() -> None:
    assert (shipped("NVIDIA H200"), shipped("NVIDIA H100 80GB HBM3")) == (H200, H100)
    other = shipped("NVIDIA B300")
    assert other.flops == H200.flops

    @hw.fusion(x=hw.f32["M"])
    def f(x: hw.Tensor) -> hw.Tensor:
        return x + 1

    text = hw.compile(f, options=Options(machine=other)).explain()
    assert (
        "times predicted from the figures of NVIDIA H200, at no stated sizes; there are no figures of NVIDIA B300: run hostweave calibrate"
        in text
    )
