"""The pass gather_ahead: which gathers of functions move to their callers, and programs that gather during the previous call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from compiled_fusions import compiled, expect, integer_arrays

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.passes.fusion.gather_ahead import gather_ahead
from hostweave.pipeline import level_of, lower
from hostweave.runtime.cpu import seeded
from hostweave.timeline.events import COMPUTE
from hostweave.types.machine import H200

LAYER = """\
function @layer(%x: f32[M@x, K], %w: f32[K@x, K]) {
  %wg: f32[K, K] = all_gather(%w, dim=0, axes=(x))
  %y: f32[M@x, K] = matmul(%x, %wg)
  return %y
}
"""
MOVED = """\
function @layer(%x: f32[M@x, K], %w: f32[K, K]) {
  %y: f32[M@x, K] = matmul(%x, %w)
  return %y
}
"""
OF_GROUP = "repeat @layer(%x, %w, depth=L, each=(1,), carried=(0,), returned=(0,))"
OF_GATHERED = OF_GROUP.replace("%w", "%w_gathered")
AHEAD = "%w_gathered: f32[L, K, K] async = all_gather(%w, dim=1, axes=(x))"
WEIGHTS = "%w: f32[L, K@x, K] as w_0 to w_3 of layers"

# A function that also reads its shard of the weight, and whose results and arguments are stacked.
READING = """\
function @layer(%x: f32[M@x, K], %w: f32[K@x, K]) {
  %wg: f32[K, K] = all_gather(%w, dim=0, axes=(x))
  %y: f32[M@x, K] = matmul(%x, %wg)
  %n: f32[K@x, K] = negative(%w)
  return %y, %n
}
"""
READING_MOVED = """\
function @layer(%x: f32[M@x, K], %w: f32[K@x, K], %wg: f32[K, K]) {
  %y: f32[M@x, K] = matmul(%x, %wg)
  %n: f32[K@x, K] = negative(%w)
  return %y, %n
}
"""
NESTED = """\
function @outer(%x: f32[M@x, K], %w: f32[K@x, K]) {
  %y: f32[M@x, K] = call @layer(%x, %w)
  return %y
}
"""
STACKS = (
    "%n: f32[L, K@x, K] = output @layer(%y, index=1, depth=L)\n%k: f32[L, M@x, K] = output @layer(%y, index={}, depth=L)\nreturn %n, %k"
)

# For each name: functions, inputs and ops before the pass, and functions and ops after the pass.
CASES = {
    "a weight of each call": (LAYER, WEIGHTS, f"%y: f32[M@x, K] = {OF_GROUP}", MOVED, f"{AHEAD}\n%y: f32[M@x, K] = {OF_GATHERED}"),
    "the weight of all calls": (
        LAYER,
        "%w: f32[K@x, K]",
        "%y: f32[M@x, K] = repeat @layer(%x, %w, depth=4, carried=(0,), returned=(0,))",
        MOVED,
        "%w_gathered: f32[K, K] = all_gather(%w, dim=0, axes=(x))\n"
        "%y: f32[M@x, K] = repeat @layer(%x, %w_gathered, depth=4, carried=(0,), returned=(0,))",
    ),
    "a further call of the function": (
        LAYER,
        f"{WEIGHTS}, %v: f32[K@x, K]",
        f"%h: f32[M@x, K] = call @layer(%x, %v)\n%y: f32[M@x, K] = {OF_GROUP.replace('%x', '%h')}",
        MOVED,
        "%v_gathered: f32[K, K] = all_gather(%v, dim=0, axes=(x))\n%h: f32[M@x, K] = call @layer(%x, %v_gathered)\n"
        f"{AHEAD}\n%y: f32[M@x, K] = {OF_GATHERED.replace('%x', '%h')}",
    ),
    "the function also reads the weight": (
        READING,
        WEIGHTS,
        f"%y: f32[M@x, K] = {OF_GROUP}\n{STACKS.format(4)}",
        READING_MOVED,
        f"{AHEAD}\n%y: f32[M@x, K] = repeat @layer(%x, %w, %w_gathered, depth=L, each=(1, 2), carried=(0,), returned=(0,))\n"
        f"{STACKS.format(5)}",
    ),
    "a function that a repeated function calls": (
        f"{LAYER}{NESTED}",
        WEIGHTS,
        f"%y: f32[M@x, K] = {OF_GROUP.replace('layer', 'outer')}",
        f"{MOVED}{NESTED.replace('@x, K]) {', ', K]) {').replace('M, K', 'M@x, K')}",
        f"{AHEAD}\n%y: f32[M@x, K] = {OF_GATHERED.replace('layer', 'outer')}",
    ),
}
STAYING = {
    "another weight in the next call": "repeat @layer(%v, %v, depth=4, carried=(1,), returned=(0,))",
    "no repeat": "call @layer(%v, %v)",
}


def program(functions: str, inputs: str, ops: str) -> Fusion:
    lines = ops.splitlines() + ([] if "\nreturn" in ops else ["return %y"])
    body = "".join(f"  {line}\n" for line in lines)
    return Fusion.parse(f"{functions}fusion @f(%x: f32[M@x, K], {inputs}) mesh(x=2) {{\n{body}}}\n")


@pytest.mark.parametrize("case", CASES)
def test_gathers_move_to_callers(case: str) -> None:
    functions, inputs, ops, functions_after, ops_after = CASES[case]
    made = gather_ahead(program(functions, inputs, ops), Options())
    verify_fusion(made, after=level_of("gather_ahead"))
    expected = program(functions_after, inputs, ops_after)
    assert str(made) == str(expected)
    assert gather_ahead(made, Options()) == made


@pytest.mark.parametrize("case", STAYING)
def test_other_gathers_stay(case: str) -> None:
    square = LAYER.replace("M@x, K", "K@x, K")
    given = program(square, "%v: f32[K@x, K]", f"%y: f32[K@x, K] = {STAYING[case]}")
    assert gather_ahead(given, Options()) == given


def test_gathers_stay_without_overlap_and_if_they_are_short() -> None:
    given = program(LAYER, WEIGHTS, f"%y: f32[M@x, K] = {OF_GROUP}")
    assert gather_ahead(given, Options(overlap="off")) == given
    assert gather_ahead(given, Options(sizes={"K": 64})) == given
    assert gather_ahead(given, Options(sizes={"K": 4096})) != given


def test_only_a_repeat_reads_a_gathered_group() -> None:
    other = "%s: f32[K, K] = select(%w_gathered, axis=0, index=1)"
    with pytest.raises(ProgramError, match="%w is a parameter group"):
        program(MOVED, WEIGHTS, f"{AHEAD}\n{other}\n%y: f32[M@x, K] = matmul(%x, %s)")
    with pytest.raises(ProgramError, match="%w is a parameter group"):
        program(MOVED, WEIGHTS, f"{AHEAD.replace(' async', '')}\n%y: f32[M@x, K] = {OF_GATHERED}")


# --- whole programs ---------------------------------------------------------------------------------------------------


def layers(ranks: int, depth: int, columns: bool = False, sums: bool = False) -> Fusion:
    """Layers with a weight that is sharded by rows, and a weight that is sharded by rows or columns. With `sums`, each layer also sums over
    ranks of another mesh axis."""
    mesh, rows = (hw.Mesh(dp=ranks, tp=2), "M@tp") if sums else (hw.Mesh(dp=ranks), "M@dp")
    types = {"up": hw.f32["E@dp", "F"], "down": hw.f32["F", "E@dp"] if columns else hw.f32["F@dp", "E"]}

    @hw.block(x=hw.f32[rows, "E"], **types)
    def layer(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        y = x + hw.relu(x @ hw.reshard(up, "E", "F")) @ hw.reshard(down, "F", "E")
        return y + hw.reshard(hw.mean(y, "M"), "E") if sums else y

    @hw.fusion(mesh=mesh, x=hw.f32[rows, "E"], **{f"{n}_{i}": t for i in range(depth) for n, t in types.items()})
    def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(depth):
            x = layer(x, weights[f"up_{i}"], weights[f"down_{i}"])
        return x

    return model


def trained(ranks: int, depth: int) -> Fusion:
    """Forward and backward pass of layers with a sharded weight. Gradients are sharded like weights, and reverse calls gather again."""

    @hw.block(x=hw.f32["M@dp", "E"], w=hw.f32["E@dp", "E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.relu(x @ hw.reshard(w, "E", "E"))

    @hw.block(dy=hw.f32["M@dp", "E"], x=hw.f32["M@dp", "E"], w=hw.f32["E@dp", "E"])
    def gradients(dy: hw.Tensor, x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor, hw.Tensor]:
        whole = hw.reshard(w, "E", "E")
        dh = hw.where(x @ whole > 0, dy, 0.0)
        dw = hw.reshard(x.T @ dh, "E@dp", "E")
        return dh @ whole.T, dw, w - dw * 0.125

    @hw.fusion(mesh=hw.Mesh(dp=ranks), x=hw.f32["M@dp", "E"], **{f"w_{i}": hw.f32["E@dp", "E"] for i in range(depth)})
    def step(x: hw.Tensor, **weights: hw.Tensor) -> tuple[hw.Tensor, ...]:
        given, gradient, updated = list[hw.Tensor](), dict[int, hw.Tensor](), dict[int, hw.Tensor]()
        for i in range(depth):
            given.append(x)
            x = layer(x, weights[f"w_{i}"])
        for i in reversed(range(depth)):
            x, gradient[i], updated[i] = gradients(x, given[i], weights[f"w_{i}"])
        named = (values[i].named(f"{name}_{i}") for name, values in (("dw", gradient), ("new", updated)) for i in range(depth))
        return x, *named

    return step


PROGRAMS: dict[str, Callable[[int, int], Fusion]] = {
    "by rows": layers,
    "by columns": lambda ranks, depth: layers(ranks, depth, columns=True),
    "with other communication": lambda ranks, depth: layers(ranks, depth, sums=True),
    "training": trained,
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("by rows", 1), ("by rows", 8), ("by columns", 3), ("with other communication", 2), ("training", 3), ("training", 4)],
)
def test_programs_pass_the_check(name: str, ranks: int) -> None:
    for depth, transport in ((1, "auto"), (2, "auto"), (5, "auto"), (4, "peer"), (3, "one_sided")):
        fusion = PROGRAMS[name](ranks, depth)
        host = lower(fusion, Options(transport=transport))
        check(host, fusion=fusion)
        assert ranks == 1 or depth == 1 or _gathers_in_loops(host), host


def _gathers_in_loops(host: ir.HostProgram) -> list[tree.Instruction]:
    """Communications on the stream `comm` in loops of the main program."""
    blocks = (i for loop in host.body if loop.trips for i in tree.walk((loop,)) if tree.names(i, "stream") == ("comm",))
    return [i for block in blocks for i in tree.walk((block,)) if i.posts]


@pytest.mark.parametrize(("name", "ranks", "transport"), [("by rows", 3, "auto"), ("training", 4, "auto"), ("by columns", 2, "peer")])
def test_results(name: str, ranks: int, transport: str) -> None:
    fusion = PROGRAMS[name](ranks, 3)
    program = compiled(fusion, options=Options(transport=transport))
    calls = [integer_arrays(fusion, {"M": 24, "E": 24, "F": 48}, seed) for seed in range(2)]
    for seed in range(3):
        with seeded(seed):
            results = program.run_in_flight(calls, poison=True)
        for arrays, of_ranks in zip(calls, results, strict=True):
            expect(fusion, arrays, of_ranks, exact=True)


@pytest.mark.parametrize(("name", "repeats"), [("by rows", 1), ("training", 2)])
def test_only_the_gathers_of_the_first_call_are_exposed(name: str, repeats: int) -> None:
    """Without overlap, the gathers of all 32 calls are exposed."""
    fusion, sizes = PROGRAMS[name](2, 32), {"M": 65536, "E": 4096, "F": 8192}
    known = {name: size for name, size in sizes.items() if f", {name}]" in str(fusion) or name == "M"}
    for overlap in ("auto", "off"):
        program = hw.compile(fusion, options=Options(sizes=known, overlap=overlap, machine=H200, transport="two_sided"))
        events = [event for event in program.predict().predicted.events if event.rank == 0]
        work = [(event.start, event.end) for event in events if event.kind == COMPUTE]
        gathers = [event for event in events if "all_gather" in event.name]
        hidden = [sum(max(0.0, min(e.end, end) - max(e.start, start)) for start, end in work) >= 0.9 * e.micros for e in gathers]
        assert len(gathers) >= 32 * repeats
        assert hidden.count(False) <= repeats if overlap == "auto" else not any(hidden), overlap


def test_memory_of_two_gathered_tensors_per_weight() -> None:
    """The memory of gathered weights does not grow with the number of layers."""
    hosts = [lower(layers(2, depth), Options()) for depth in (2, 8)]
    slots = [{name: type for name, type in ir.defined_types(host) if name.endswith("_gathered")} for host in hosts]
    assert slots[0] == slots[1]
    assert [str(type) for type in slots[0].values()] == ["f32[2, E, F]", "f32[2, F, E]"]


def test_a_function_waits_for_the_gathers_before_it_communicates() -> None:
    """The sum of each layer is on the stream of the caller. Without the wait, the sum could run at the same time as the next gathers."""
    host = lower(layers(2, 4, sums=True), Options())
    (layer,) = host.functions
    kinds = [next(iter((*tree.names(i, "join"), i.posts or ""))) for i in layer.body if tree.names(i, "join") or i.posts]
    assert kinds == ["comm", "collective"]
    unordered = replace(host, functions=(replace(layer, body=tuple(i for i in layer.body if not tree.names(i, "join"))),))
    check(host)
    with pytest.raises(ProgramError, match="nothing orders them"):
        check(unordered)


def test_a_fork_precedes_each_join() -> None:
    """A further call of the function has no gathers ahead, but the function waits for the stream. CUDA graphs need a fork before."""
    function = """\
function @layer(%x: f32[M@x, K], %w: f32[K@x, K]) {
  %wg: f32[K, K] = all_gather(%w, dim=0, axes=(x))
  %h: f32[M@x, K] = matmul(%x, %wg)
  %s: f32[K] partial(sum, x) = sum(%h, axis=(0,))
  %t: f32[K] = all_reduce(%s, axes=(x), reduction=sum)
  %y: f32[M@x, K] = add(%h, %t)
  return %y
}
"""
    call = "%h: f32[M@x, K] = call @layer(%x, %v)"
    host = lower(program(function, f"{WEIGHTS}, %v: f32[K@x, K]", f"{call}\n%y: f32[M@x, K] = {OF_GROUP.replace('%x', '%h')}"), Options())
    kinds = [i for i in host.body if tree.names(i, "fork", "call", "stream") or i.trips]
    assert tree.names(kinds[0], "fork") == ("comm",)
    assert tree.names(kinds[1], "call") == ("layer",)
    check(host)


def test_gathers_in_chunk_loops_stay() -> None:
    function = """\
function @layer(%x: f32[M@x, K], %w: f32[K@x, K]) {
  loop 2 chunks by_shard local_first {
    %wg: f32[K, K] stream(0, ring) = all_gather(%w, dim=0, axes=(x))
    %v: f32[K, K] stream(0) = matmul(%wg, %w_2)
  }
  %y: f32[M@x, K] = matmul(%x, %v)
  return %y
}
""".replace("%w: f32[K@x, K])", "%w: f32[K@x, K], %w_2: f32[K, K])")
    repeat = "repeat @layer(%x, %w, %v, depth=L, each=(1,), carried=(0,), returned=(0,))"
    given = program(function, f"{WEIGHTS}, %v: f32[K, K]", f"%y: f32[M@x, K] = {repeat}")
    assert gather_ahead(given, Options()) == given
