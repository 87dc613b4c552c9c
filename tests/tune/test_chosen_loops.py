"""Programs with chunk loops that the compiler chooses: results, and text of the choices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.api import Program
from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.build import cuda, figures
from hostweave.cli import calibrate
from hostweave.cli.calibrate import SHAPES, fit
from hostweave.cli.main import main
from hostweave.fusion_ir.choice import Alternative, Choice
from hostweave.pipeline import lower
from hostweave.running import Running, Variants
from hostweave.runtime import search
from hostweave.runtime.group import Group, current
from hostweave.runtime.local import LocalProgram
from hostweave.targets.target import find_target
from hostweave.transports.transport import Transport
from hostweave.tune.cost import Product
from hostweave.tune.explain import times_of
from hostweave.types.machine import H200

# A slow machine. At the small sizes of these tests, a transfer takes about as long as a matmul, as on GPUs at large sizes.
LINKS = tuple(replace(link, points=((0, 1e-6), (1e6, 20e-3))) for link in H200.links)
SLOW = replace(H200, name="slow", multiprocessors=1, flops=2e11, wave=0.0, launch=1e-6, links=LINKS)
SIZES = {"M": 1536, "K": 16, "F": 48, "N": 24}


def layer(ranks: int) -> hw.Fusion:
    """Layer with a gather of a computed value for two matmuls, an all-reduce, and a reduce-scatter."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], wg=hw.f32["K", "F@x"], wu=hw.f32["K", "F@x"], wd=hw.f32["F@x", "N"])
    def layer(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.reshard(hw.relu(x), "M", "K").named("h")
        a = hw.matmul(h, wg) * hw.matmul(h, wu)
        z = hw.reshard(hw.matmul(hw.abs(a), wd), "M", "N").named("z")
        y = hw.reshard(hw.matmul(a, wd), "M@x", "N").named("y")
        return y, z

    return layer


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"x": "MK", "wg": "KF", "wu": "KF", "wd": "FN"}
    return {name: random.integers(-2, 3, [SIZES[size] for size in dims]).astype(np.float32) for name, dims in shapes.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
def test_result_and_choice(ranks: int) -> None:
    choices = {"@layer %y": f"put({ranks})", "@layer %z": "all_reduce(2)"} if ranks > 1 else {}
    program = hw.compile(layer(ranks), options=hw.Options(sizes=SIZES, machine=SLOW, choices=choices))
    taken = {choice.value: choice.chosen.algorithm for choice in program.choices}
    assert taken == ({"h": "put", "y": "put", "z": "all_reduce"} if ranks > 1 else {})
    given = arrays()
    h = np.maximum(given["x"], 0)
    a = (h @ given["wg"]) * (h @ given["wu"])
    y, z = program.run(**given)
    np.testing.assert_array_equal(y, a @ given["wd"])
    np.testing.assert_array_equal(z, np.abs(a) @ given["wd"])


def test_a_reduction_after_a_function_that_communicates() -> None:
    """The matmul in the loop reads chunks of the function's result."""

    @hw.block(x=hw.f32["M", "F@x"], w=hw.f32["F@x", "F"])
    def summed(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(x, w), "M", "F@x")

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M", "F@x"], w=hw.f32["F@x", "F"], wd=hw.f32["F@x", "N"])
    def model(x: hw.Tensor, w: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(summed(x, w), wd), "M@x", "N").named("y")

    program = hw.compile(model, options=hw.Options(sizes={"M": 1536, "F": 48, "N": 24}, machine=SLOW))
    assert {choice.value: choice.chosen.algorithm for choice in program.choices}["y"] == "put"


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(("alternative", "chunks"), [("put", 1), ("put", 2), ("p2p", 1), ("ring", 2)])
def test_a_gather_that_is_read_again_after_its_loop(alternative: str, chunks: int, ranks: int) -> None:
    """One matmul reads chunks of a gathered value, such as a gradient, in a loop. After the loop, another matmul reads the transposed
    value. The value is also a result."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], w=hw.f32["K", "F@x"], a=hw.f32["M", "N"])
    def backward(x: hw.Tensor, w: hw.Tensor, a: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor, hw.Tensor]:
        g = hw.reshard(x, "M", "K").named("g")
        h = hw.matmul(g, w)
        if alternative == "ring":
            h = h.stream("M", chunks * ranks, algorithm="ring")
        return h, hw.matmul(g.T, a), g

    choices = {"@backward %g": f"{alternative}({chunks * ranks})"} if ranks > 1 and alternative != "ring" else {}
    program = hw.compile(backward, options=hw.Options(sizes=SIZES, machine=SLOW, choices=choices))
    random = np.random.default_rng(0)
    x, w, a = (random.integers(-2, 3, [SIZES[size] for size in dims]).astype(np.float32) for dims in ("MK", "KF", "MN"))
    for found, wanted in zip(program.run(x=x, w=w, a=a), (x @ w, x.T @ a, x), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("algorithm", ["put", "p2p"])
def test_a_batch_of_one(algorithm: str) -> None:
    """Chunks of a dim are contiguous if all preceding dims have size 1, as in PyTorch modules with a batch of one."""
    w = hw.f32["K", "F@x"]

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32[1, "M@x", "K"], wg=w, wu=w, wd=hw.f32["F@x", "N"])
    def batch(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        h = hw.reshard(hw.relu(x), 1, "M", "K").named("h")
        return hw.reshard(hw.matmul(hw.matmul(h, wg) * hw.matmul(h, wu), wd), 1, "M@x", "N").named("y")

    choices = {"@batch %h": f"{algorithm}(2)", "@batch %y": f"{algorithm}(2)"}
    program = hw.compile(batch, options=hw.Options(sizes=SIZES, machine=SLOW, choices=choices))
    assert {choice.value: choice.chosen.algorithm for choice in program.choices} == {"h": algorithm, "y": algorithm}
    given = arrays()
    h = np.maximum(given["x"], 0)
    y = program.run(x=given["x"][None], **{name: given[name] for name in ("wg", "wu", "wd")})
    np.testing.assert_array_equal(y[0], (h @ given["wg"]) * (h @ given["wu"]) @ given["wd"])


def test_explain() -> None:
    program = hw.compile(layer(2), options=hw.Options(sizes=SIZES, machine=SLOW, overlap="auto"))
    lines = program.explain().splitlines()
    assert lines[:4] == [
        "layer on mesh(x=2)",
        "  times predicted from the figures of slow, at F=48, K=16, M=1536, N=24",
        "  transport peer where it is faster",
        "@layer",
    ]
    h, z, y = program.choices
    others = ", ".join(f"{one.name} {one.micros:.1f} us" for one in h.alternatives[1:])
    of_h = f"{h.chosen.chunks} chunks by put, peer, predicted {h.chosen.micros:.1f} us; instead of {others}"
    assert lines[4] == f"  %h = all_gather of %relu_x: {of_h}"
    assert lines[6].startswith(f"  %y = reduce_scatter of %matmul_wd_2: {y.chosen.chunks} chunks by put")
    assert z.chosen.name in ("none", "all_reduce(2)", "all_reduce(4)")
    assert len(lines) == 7


def test_explain_names_the_gain_of_a_faster_alternative() -> None:
    """If an alternative is predicted to be faster than the used alternative, the text has the gain. The text also says why the faster
    alternative is not used: the gain is too small, or the user requested another alternative."""
    options = hw.Options(sizes=SIZES, machine=SLOW)
    program = hw.compile(layer(2), options=options)
    (name, taken, fastest) = next((c.name, c.alternatives[-1], c.chosen) for c in program.choices if len(c.alternatives) > 1)
    stated = hw.compile(layer(2), options=replace(options, choices={name: taken.name})).explain()
    assert re.search(rf"{re.escape(fastest.name)} would gain \d+\.\d us, but this one was requested", stated)

    alternatives = (Alternative("none", 0, 100.0), Alternative("put", 1, 96.0))
    assert "; put(1) would gain 4.0 us, but at least 5.0 us are needed" in times_of(Choice("h", "layer", alternatives))
    alternatives = (Alternative("none", 0, 1000.0), Alternative("put", 1, 960.0))
    assert "; put(1) would gain 40.0 us, but at least 50.0 us are needed" in times_of(Choice("h", "layer", alternatives))
    assert "gain" not in times_of(Choice("h", "layer", alternatives[::-1]))


def test_explain_why_not() -> None:
    def explained(**options: object) -> str:
        return hw.compile(layer(2), options=hw.Options(**options)).explain()  # type: ignore[arg-type]

    assert "%h = all_gather of %relu_x: in sequence: sizes are unknown; state them to allow a chunk loop: hw.Options(sizes={" in explained()
    assert 'in sequence: overlap="off"' in explained(overlap="off", sizes=SIZES)
    assert "in sequence, predicted" in explained(sizes=SIZES)
    assert '  only two-sided transport, because of transport="two_sided"' in explained(transport="two_sided")
    why = "puts need NCCL 2.29 or later, and NCCL 2.28.9 was found"
    assert f"  only two-sided transport: {why}" in explained(machine=H200.without("peer", why).without("one_sided", why))

    @hw.fusion(mesh=hw.Mesh(x=2), q=hw.bf16["B", "H@x", "S", 64], m=hw.f32["S", "S"], x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def others(q: hw.Tensor, m: hw.Tensor, x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        stated = hw.matmul(x, w).stream("M", chunks=2)
        fused, composed = hw.scaled_dot_product_attention(q, q, q), hw.scaled_dot_product_attention(q, q, q, attn_mask=m)
        scores = hw.matmul(x, w)
        return stated, fused, composed, scores, hw.reshard(hw.exp(x), "M", "K")

    text = hw.compile(others).explain()
    assert "2 chunks by p2p, two_sided, as the program states" in text
    assert "attention: one call of the library, which does not store the matrix of scores" in text
    composed = [line for line in text.splitlines() if "attention is composed" in line]
    assert len(composed) == 1  # Not of %scores, which is no attention.
    assert "of matmuls and a softmax, because it has dropout, or a mask of another dtype" in composed[0]
    assert "overlapped with other ops on a separate stream: no adjacent matmul gathers or reduces along its outermost dim" in text

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
    def alone(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.exp(x), "M", "K")

    why = (
        "no adjacent matmul gathers .*, and no attention .* as keys; "
        "other ops could hide 0.0 us of its .* us, but at least 10 us are needed"
    )
    assert re.search(f"in sequence: {why}", hw.compile(alone).explain())
    with pytest.raises(ProgramError, match="was compiled from host IR, so there are no choices to explain; see host_ir"):
        hw.compile(hw.HostProgram.parse(hw.compile(others).host_ir)).explain()


def expected(given: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    h = np.maximum(given["x"], 0)
    a = (h @ given["wg"]) * (h @ given["wu"])
    return a @ given["wd"], np.abs(a) @ given["wd"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sizes_that_loops_do_not_divide(ranks: int) -> None:
    """`run`, calls of ranks and captured calls use no loop if the loops do not divide a size."""
    random, choices = np.random.default_rng(ranks), {"@layer %h": f"put({4 * ranks})"}
    program = hw.compile(layer(ranks), options=hw.Options(sizes=SIZES, machine=SLOW, choices=choices))
    given, threads = arrays(), hw.Threads(ranks)
    weights = {name: given[name] for name in ("wg", "wu", "wd")}
    bound = program.bind(**weights)
    some = [*random.integers(1, 200, 6).tolist(), 96, 16 * ranks + 1]
    calls = [random.integers(-2, 3, (rows, SIZES["K"])).astype(np.float32) for rows in some]
    for x in calls:
        for results in (program.run(x=x, **weights), bound.run(x)):
            for got, want in zip(results, expected({**given, "x": x}), strict=True):
                np.testing.assert_array_equal(got, want)
    assert len(program.measure(calls[-1], **weights, warmups=0, repetitions=1)) == ranks
    assert len(program.run_in_flight([{"x": calls[-1], **weights}] * 2)) == 2
    program.check(M=some[-1])
    own = program.compiled.given.inputs

    def on_rank(rank: int) -> list[np.ndarray]:
        hw.init(provider=threads)
        blocks = {v.name: np.ascontiguousarray(v.type.shard(given[v.name], rank, program.mesh)) for v in own[1:]}
        mine = program.bind(**blocks)
        mine.prepare(*({"M": len(x)} for x in calls))
        parts = [np.ascontiguousarray(own[0].type.shard(x, rank, program.mesh)) for x in calls]
        results = [mine(part)[0] for part in parts]
        captured = mine.capture(parts[-1])
        captured()
        return [*results, captured.outputs[0]]

    for x, blocks in zip([*calls, calls[-1]], zip(*threads.run(on_rank), strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(blocks), expected({**given, "x": x})[0])
    assert any(choice.chosen.chunks for choice in program.choices)
    assert not any(choice.chosen.chunks for choice in program.compiled.in_sequence.host.choices)
    with pytest.raises(
        ArgumentError, match="layer: wg: K is 15 here and 16 in x; pass arrays that agree"
    ):  # The message is the same as for the sequential program.
        program.run(x=calls[-1], **{**weights, "wg": given["wg"][:15]})
    program.close()


def test_stated_choices_in_variants() -> None:
    """Without peer memory, a stated choice of sends and recvs holds."""

    @hw.fusion(mesh=hw.Mesh(x=4), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N@x"], v=hw.bf16["N@x", "K"])
    def mlp(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(hw.matmul(x, w), v), "M@x", "K")

    sizes = {"M": 8192, "K": 8192, "N": 28672}
    made = hw.compile(mlp, options=hw.Options(sizes=sizes, machine=H200, check=False, choices={"@mlp %x_gathered": "p2p(4)"}))
    assert [choice.chosen.name for choice in made.choices] == ["p2p(4)", "put(4)"]
    variant = Variants(made.compiled, Running).on(H200.across_hosts)
    assert [choice.chosen.name for choice in variant.compiled.host.choices] == ["p2p(4)", "none"]


def test_choices_in_the_text_of_a_fusion() -> None:
    """The text has loops that an earlier compilation chose. Options replace these choices, and the sequential variant has no loops."""
    stated = hw.Options(sizes={"M": 8192, "K": 8192, "N": 8192}, machine=H200, check=False)
    seen: dict[str, Any] = {}
    fusion = hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N@x"])(lambda x, w: hw.matmul(x, w))
    lower(fusion, replace(stated, choices={"@program %x_gathered": "put(4)"}), seen.__setitem__)
    given = hw.Fusion.parse(str(seen["choose_overlap"]))
    made = hw.compile(given, options=hw.Options(machine=H200, check=False))
    assert [choice.chosen.name for choice in made.choices] == ["put(4)"]
    assert not made.compiled.in_sequence.host.choices
    assert made.predict({"M": 6, "K": 4, "N": 8}).predicted.micros > 0
    (other,) = hw.compile(given, options=replace(stated, choices={"@program %x_gathered": "put(2)"})).choices
    assert other.chosen.name == "put(2)"
    with pytest.raises(ProgramError, match=re.escape("choices: @program %x_gathered: magic(3) is not possible; use one of put(")):
        hw.compile(given, options=replace(stated, choices={"@program %x_gathered": "magic(3)"}))


def test_uneven_sizes_with_stated_choices() -> None:
    """A variant has constants for sizes that the ranks share unevenly. In the variant, only choices of "none" are sure to be possible."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"], t=hw.f32["M@x", 4])
    def uneven(x: hw.Tensor, w: hw.Tensor, t: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.matmul(hw.reshard(x, "M", "K"), w), hw.reshape(t * 2, -1)

    random, sizes = np.random.default_rng(0), {"M": 8192, "K": 8192, "N": 8192}
    x, w, t = (random.integers(-2, 3, shape).astype(np.float32) for shape in ((5, 3), (3, 2), (5, 4)))
    for stated in ("put(2)", "none"):
        program = hw.compile(uneven, options=hw.Options(sizes=sizes, choices={"@uneven %x_gathered": stated}))
        for got, want in zip(program.run(x, w, t), (x @ w, 2 * t.ravel()), strict=True):
            np.testing.assert_array_equal(got, want)
        program.close()


def weights_of(ranks: int) -> hw.Fusion:
    """Layers with sharded weights, which are gathered before their use. One weight is computed."""

    @hw.fusion(mesh=hw.Mesh(dp=ranks), x=hw.f32["M@dp", "K"], **{f"w_{i}": hw.f32["K@dp", "K"] for i in range(3)})
    def layers(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        computed = hw.relu(weights["w_2"])
        for w in (weights["w_0"], weights["w_1"], computed):
            x = hw.relu(hw.matmul(x, hw.reshard(w, "K", "K")))
        return x

    return layers


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_that_overlap_with_matmuls_use_copy_engines(ranks: int) -> None:
    """Copy engines are used if the sizes are known and divisible by the ranks, and if copy engines are predicted to be faster."""
    fusion, random = weights_of(ranks), np.random.default_rng(ranks)
    options = hw.Options(sizes={"M": 48, "K": 48}, machine=SLOW)
    program = hw.compile(fusion, options=options)
    names = [tuple(one.name for one in choice.alternatives) for choice in program.choices]
    assert names == [("put(1)", "none"), ("get(1)", "none"), ("none", "put(1)")]
    options = replace(options, choices={choice.name: choice.chosen.name for choice in program.choices})
    assert program.host_ir == hw.compile(fusion, options=options).host_ir
    assert program.host_ir.count("stream copies[0] {\n    wait ") == 2  # The next transfer does not wait for copies of local shards.
    assert program.choices[-1].value == "w_0_gathered"  # The first weight is needed immediately.
    assert program.host_ir.count("fork comm") == 1  # Both gathers wait for the same work.
    for alternative in ("put", "get"):
        assert f"overlapped with other ops on a separate stream by {alternative}, peer, predicted" in program.explain()
    first = hw.compile(fusion, options=replace(options, choices={"@layers %w_0_gathered": "put(1)"}))
    assert (first.host_ir.count("put %"), first.host_ir.count("all_gather")) == (2, 0)
    assert "\n  copy %w_0 -> " in first.host_ir  # The caller's stream copies the local shard, and then awaits the gather.
    for run, rows, inner in ((program.run, 48, 48), (program.run, 7, 48), (program.run, 48, 49), (first.run, 48, 48)):
        x = random.integers(-2, 3, (rows, inner)).astype(np.float32)
        weights = [random.integers(-1, 2, (inner, inner)).astype(np.float32) for _ in range(3)]
        want = x
        for w in (*weights[:2], np.maximum(weights[2], 0)):
            want = np.maximum(want @ w, 0)
        np.testing.assert_array_equal(run(x, *weights), want)
    for two_sided in ({"transport": "two_sided"}, {"machine": SLOW.without("peer", "here").without("one_sided", "here")}, {"sizes": {}}):
        with pytest.raises(ProgramError, match="there is no choice named @layers %w_1_gathered"):
            hw.compile(fusion, options=replace(options, **two_sided))
    stated = replace(options, choices={"@layers %w_1_gathered": "none", "@layers %computed_gathered": "get(1)"})
    assert [choice.chosen.name for choice in hw.compile(fusion, options=stated).choices] == ["none", "get(1)", "none"]
    with pytest.raises(ProgramError, match=r"Options: choices: @layers %w_1_gathered: put\(2\) is not possible; use one of put\(1\), none"):
        hw.compile(fusion, options=replace(options, choices={"@layers %w_1_gathered": "put(2)"}))
    text = str(hw.Fusion.parse(_stage(fusion, options, "overlap_communication")))
    assert "%w_1_gathered: f32[K, K] pinned async peer = all_gather" in text
    program.close()
    first.close()


def _stage(fusion: hw.Fusion, options: hw.Options, wanted: str) -> str:
    stages: dict[str, str] = {}
    lower(fusion, options, lambda name, stage: stages.setdefault(name, str(stage)))
    return stages[wanted]


def test_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search uses the fastest measured alternative. A second compilation finds the choice in the cache, and runs nothing."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def gathered(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(hw.reshard(x, "M", "K").named("g"), w)

    options = hw.Options(sizes={"M": 256, "K": 16, "N": 8}, machine=SLOW, overlap="search", transport="two_sided")
    monkeypatch.setattr(search, "root", lambda: tmp_path)
    found = hw.compile(gathered, options=options)
    (choice,) = found.choices
    assert choice.is_measured
    assert {one.name for one in choice.alternatives} == {"p2p(2)", "none"}
    assert choice.chosen.micros == min(one.micros for one in choice.alternatives) > 0
    assert f"choice %g of @gathered measured: {choice.chosen.name} {choice.chosen.micros:.1f} us" in found.host_ir
    assert f"measured {choice.chosen.micros:.1f} us" in found.explain()
    assert ("for %i" in found.host_ir) == (choice.chosen.name == "p2p(2)")
    x, w = np.ones((256, 16), np.float32), np.ones((16, 8), np.float32)
    np.testing.assert_array_equal(found.run(x, w), x @ w)
    monkeypatch.setattr(hw.Program, "measure", None)
    assert hw.compile(gathered, options=options).choices == found.choices
    with pytest.raises(ProgramError, match='gathered: overlap="search" runs the program, but sizes are missing: N; pass them as Opt'):
        hw.compile(gathered, options=replace(options, sizes={"M": 256, "K": 16}))
    monkeypatch.setattr(search, "current", lambda: SimpleNamespace(in_process=False, rank=1, count=2))
    with pytest.raises(ProgramError, match="runs all ranks in one process, and this one is rank 1 of 2; "):
        search.search(found.host, options.sizes, ("another",), lambda _: found)
    (file,) = tmp_path.glob("choices/*.json")
    file.write_text("{}}")
    with pytest.raises(ArgumentError, match=r"contains no choices \(.*\); remove it to search again"):
        hw.compile(gathered, options=options)


def test_calibrate_without_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda, "gpus", lambda: ())
    assert main(["calibrate"]) == 1
    assert "calibrate: there is no GPU to measure" in capsys.readouterr().err


def test_calibrate_on_busy_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "seconds_of", lambda *_: 2e-3)
    with pytest.raises(ExecutionError, match="a gather of 16384 bytes among 2 GPUs takes 2000 us, so another program uses them; run it"):
        list(calibrate.links(H200, 2))


def test_calibrated_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are fitted to measurements, stored as JSON, and read for the same GPUs."""
    monkeypatch.setattr(figures, "root", lambda: tmp_path)
    times = [Product(1, m, k, n, hw.bf16).seconds(replace(H200, flops=700e12, wave=5e-6)) for m, k, n in SHAPES]
    fitted = fit(H200, times)
    assert fitted.flops == pytest.approx(700e12, rel=0.02)
    assert fitted.wave == pytest.approx(5e-6, rel=0.1)
    gpus = (cuda.Gpu("Some GPU", "sm_90"),) * 2
    assert figures.measured(gpus) is None
    assert figures.save(SLOW, gpus) == tmp_path / "machines" / "Some_GPU_x2.json"
    assert figures.measured(gpus) == SLOW
    (tmp_path / "machines" / "Some_GPU_x2.json").write_text("{}")
    figures.read.cache_clear()
    with pytest.raises(ProgramError, match=r"Some_GPU_x2.json: contains no valid figures of a machine"):
        figures.measured(gpus)


OLD_DRIVER = "the driver has no stream memory operations"


def why_not(transport: Transport) -> str:
    return OLD_DRIVER if transport.is_optional else ""


@pytest.mark.parametrize("why", ["the ranks are on several hosts", "NCCL finds 2 sets of ranks", OLD_DRIVER])
def test_ranks_out_of_reach(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put loops are chosen for one host. Ranks on several hosts, as reported by the ranks or by NCCL, run a variant without these loops.
    Ranks also run this variant if one rank does not support the transport of put loops."""
    channels, connected = list[str](), Group.connected

    def connect(group: Group, member: Any, module: ModuleType, tune: bool) -> Any:
        channels.extend(key for key, _ in module.missing_process_groups(member))
        return connected(group, member, module, tune)

    if "hosts" in why:
        monkeypatch.setattr(Group, "hosts", 2)
        monkeypatch.setattr(type(find_target("cpu")), "needs_one_host", False)
    elif why == OLD_DRIVER:
        monkeypatch.setattr(type(find_target("cpu")), "why_not", lambda _, by: why_not(by) if (group := current()) and group.rank else "")
    else:
        monkeypatch.setattr(LocalProgram, "out_of_reach", property(lambda _: why, lambda *_: None), raising=False)
    monkeypatch.setattr(Group, "connected", connect)
    program, threads = hw.compile(layer(2), options=hw.Options(sizes=SIZES, machine=SLOW)), hw.Threads(2)
    given = arrays()

    def on_rank() -> np.ndarray:
        index = hw.init(provider=threads).rank
        rows, columns = slice(index * 768, index * 768 + 768), slice(index * 24, index * 24 + 24)
        x, wg, wu, wd = given["x"][rows], given["wg"][:, columns], given["wu"][:, columns], given["wd"][columns]
        return np.asarray(program(*map(np.ascontiguousarray, (x, wg, wu, wd)))[0])

    y = np.concatenate(threads.run(lambda rank: on_rank()))
    h = np.maximum(given["x"], 0)
    np.testing.assert_array_equal(y, (h @ given["wg"]) * (h @ given["wu"]) @ given["wd"])
    assert " peer" in program.host_ir
    (variant,) = program.variants
    made = Program(variant.compiled)
    assert "peer" not in made.host_ir
    assert f"only two-sided transport: {why}" in made.explain()
    assert any("peer" in key for key in channels) == ("finds" in why)
    program.close()


def test_an_old_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine does not support one-sided transports, ranks of one process run a variant without chosen puts. A requested one-sided
    transport is an error."""
    chosen = hw.compile(layer(2), options=hw.Options(sizes=SIZES, machine=SLOW))
    stated = hw.compile(layer(2), options=hw.Options(transport="one_sided"))
    monkeypatch.setattr(type(find_target("cpu")), "why_not", lambda _, by: why_not(by))
    given = arrays()
    h = np.maximum(given["x"], 0)
    np.testing.assert_array_equal(chosen.run(**given)[0], (h @ given["wg"]) * (h @ given["wu"]) @ given["wd"])
    assert [one.compiled.variant for one in chosen.variants] == ["without some transports"]
    refused = rf'layer: ranks cannot access each other.s memory: {OLD_DRIVER}; compile with transport="two_sided"'
    with pytest.raises(ExecutionError, match=refused):
        stated.run(**given)
    threads = hw.Threads(2)

    def on_rank() -> None:
        index = hw.init(provider=threads).rank
        own = {p.name: np.ascontiguousarray(p.type.shard(given[p.name], index, stated.mesh)) for p in stated.compiled.host.inputs}
        with pytest.raises(ExecutionError, match=refused):
            stated(**own)

    threads.run(lambda rank: on_rank())
    chosen.close()
    stated.close()
