"""Mixtures of experts on 1 to 8 ranks. The layer and its gradients match the results of one device for each of ROUTINGS. Tests of
capacities run only dispatch and combine."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interpret import interpret
from math_mutants import CAUGHT, MISSED, Subject, judged
from moe_reference import ROUTINGS, TOP, H, arrays, experts_of, one_device

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.base.paths import EXAMPLES
from hostweave.check.check import check
from hostweave.cli.programs import load_file, programs_in
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.tensor import block_of

Array = np.ndarray[Any, Any]


@cache
def programs(ranks: int) -> dict[str, Fusion]:
    constants = {"mesh": hw.Mesh(ep=ranks), "EXPERTS": experts_of(ranks), "TOP": TOP, "dtype": hw.f64}
    found = programs_in(load_file(EXAMPLES / "moe.py", constants)).items()
    return {name: program for name, program in found if isinstance(program, Fusion)}


def test_dispatch_and_combine_share_the_gathered_weights() -> None:
    gathers = [i for i in lower(programs(4)["moe_training"], Options()).instructions() if isinstance(i, ir.AllGather)]
    assert [i.src for i in gathers].count("weights") == 1


def expect(results: list[dict[str, Array]], host: ir.HostProgram, wanted: tuple[Array, ...]) -> None:
    for rank, own in enumerate(results):
        for output, want in zip(host.outputs, wanted, strict=True):
            block = want[block_of(output.type, host.mesh, rank, want.shape)]
            np.testing.assert_allclose(own[output.name], block, rtol=1e-5, atol=1e-5, err_msg=output.name)  # Scores are f32.


CASES = [(2, "peer"), (3, "auto"), *(pytest.param(*case, marks=pytest.mark.more) for case in ((1, "auto"), (4, "one_sided")))]
SLOW = [(8, "peer"), (8, "auto"), (3, "peer"), (2, "auto"), (4, "auto")]


@pytest.mark.parametrize(("ranks", "transport"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_every_routing(ranks: int, transport: str) -> None:
    hosts = {name: lower(fusion, Options(transport=transport)) for name, fusion in programs(ranks).items()}
    for name, host in hosts.items():
        check(host, fusion=programs(ranks)[name])
    for routing in ROUTINGS:
        given = arrays(routing, ranks)
        y, gradients = one_device(**given)
        without = {name: array for name, array in given.items() if name != "dy"}
        expect(interpret(hosts["moe"], without), hosts["moe"], (y,))
        expect(interpret(hosts["moe_backward"], given), hosts["moe_backward"], gradients)
        expect(interpret(hosts["moe_training"], given), hosts["moe_training"], (y, *gradients))


def test_tokens_are_sent_once_in_each_direction() -> None:
    """Tokens are all-gathered, and sums are reduce-scattered. All other communication is of ids and weights."""
    sent = [i for i in tree.walk(lower(programs(4)["moe"], Options()).body) if isinstance(i, ir.Communication)]
    assert [type(i) for i in sent].count(ir.ReduceScatter) == 1
    gathered = [i.src for i in sent if isinstance(i, ir.AllGather)]
    assert gathered.count("x") == 1
    assert len(sent) == 1 + len(gathered) == 4


MESHES = [{"ep": 2, "tp": 2}, *(pytest.param(axes, marks=pytest.mark.slow) for axes in ({"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}))]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_meshes(axes: dict[str, int]) -> None:
    """Experts are sharded over `ep`, their inner dim over `tp`, and tokens over `dp` and `ep`, if the mesh has these axes."""
    constants: dict[str, Any] = {"mesh": hw.Mesh(**axes), "EXPERTS": 8, "TOP": TOP, "dtype": hw.f64}
    constants |= {"INNER": "I@tp"} if "tp" in axes else {}
    constants |= {"T": "T@dp,ep"} if "dp" in axes else {}
    found = load_file(EXAMPLES / "moe.py", constants)
    hosts = [lower(fusion, Options()) for fusion in (found.moe, found.moe_backward)]
    for host, fusion in zip(hosts, (found.moe, found.moe_backward), strict=True):
        check(host, fusion=fusion)
    for routing in ROUTINGS:
        given = arrays(routing, 2)
        y, gradients = one_device(**given)
        for host, wanted in zip(hosts, ((y,), gradients), strict=True):
            names = {parameter.name for parameter in host.inputs}
            expect(interpret(host, {name: array for name, array in given.items() if name in names}), host, wanted)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutants_are_caught(seed: int) -> None:
    """The check of results detects wrong blocks, groups and orders in dispatch, products and combine."""
    subjects = [Subject(f"{name} on 2 ranks", fusion) for name, fusion in programs(2).items()]
    verdicts = list(judged(24 if seed == 0 else 200, subjects[: seed + 1], seed))
    assert [where for _, where, verdict in verdicts if verdict == MISSED] == []
    assert {"other groups", "a missing instruction"} <= {kind for kind, _, verdict in verdicts if verdict == CAUGHT}


SEEDS = [range(6), *(pytest.param(range(at, at + 50), marks=pytest.mark.slow) for at in range(10, 310, 50))]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_routings(seeds: range) -> None:
    """Dispatch and combine with random numbers of ranks, experts, tokens and choices, and random capacities."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        ranks, own, choices, tokens = (int(random.integers(1, most)) for most in (5, 4, 4, 6))
        capacity = int(random.integers(1, tokens * choices + 1)) if random.random() < 0.5 else None
        expect_through(ranks, ranks * own, choices, ranks * tokens, capacity, random)


def test_compiled() -> None:
    compiled = {name: hw.compile(fusion) for name, fusion in programs(2).items()}
    for number, routing in enumerate(ROUTINGS):
        given = arrays(routing, 2)
        y, gradients = one_device(**given)
        without = {name: array for name, array in given.items() if name != "dy"}
        for schedule in (parallel(check_dependencies=True), seeded(number)):
            with schedule:
                np.testing.assert_allclose(compiled["moe"].run(**without), y, rtol=1e-5, atol=1e-5)
                for got, want in zip(compiled["moe_backward"].run(**given), gradients, strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("capacity", [1, 3, 5])
def test_capacities(ranks: int, capacity: int) -> None:
    """For each pair of source and destination rank, only the first `capacity` choices are kept, ordered by expert, then by token. Other
    choices add nothing to the result."""
    expect_through(ranks, 4, TOP, 8, capacity, np.random.default_rng(capacity))


def expect_through(ranks: int, experts: int, choices: int, tokens: int, capacity: int | None, random: np.random.Generator) -> None:
    """Checks the dispatch to the ranks of the experts, and the combine. The experts of a token are random, and may be equal."""

    @hw.fusion(mesh=hw.Mesh(ep=ranks), x=hw.f64["T@ep", H], ids=hw.i32["T@ep", choices], weights=hw.f64["T@ep", choices])
    def through(x: hw.Tensor, ids: hw.Tensor, weights: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        routing = hw.moe_routing(ids, experts, axes="ep", capacity=capacity)
        return hw.moe_combine(hw.moe_dispatch(x, routing), routing, weights), routing.ends

    host = lower(through, Options())
    check(host, fusion=through)
    x, weights = random.standard_normal((tokens, H)), random.random((tokens, choices))
    # The last experts may get no tokens.
    ids = random.integers(0, int(random.integers(1, experts + 1)), (tokens, choices)).astype(np.int32)
    wanted, counts, own = np.zeros_like(x), np.zeros(experts, int), tokens // ranks
    for source in range(ranks):
        chosen = [(int(ids[t, i]), t, i) for t in range(source * own, (source + 1) * own) for i in range(choices)]
        for target in range(ranks):
            for e, t, i in sorted(one for one in chosen if one[0] // (experts // ranks) == target)[:capacity]:
                wanted[t] += weights[t, i] * x[t]
                counts[e] += 1
    expect(interpret(host, {"x": x, "ids": ids, "weights": weights}), host, (wanted, np.cumsum(counts.reshape(ranks, -1), 1)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_round_the_sums_that_they_send(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(ep=ranks), x=hw.f32["8@ep", H], ids=hw.i32["8@ep", 3], weights=hw.f32["8@ep", 3])
    def through(x: hw.Tensor, ids: hw.Tensor, weights: hw.Tensor) -> hw.Tensor:
        routing = hw.moe_routing(ids, 4, axes="ep")
        return hw.moe_combine(hw.moe_dispatch(x, routing), routing, weights, sent=hw.bf16)

    host = lower(through, Options())
    check(host, fusion=through)
    random = np.random.default_rng(ranks)
    # f32 sums are exact.
    x, weights = random.integers(0, 1000, (8, H)).astype(np.float32), random.integers(1, 4, (8, 3)).astype(np.float32)
    ids = random.integers(0, 4, (8, 3)).astype(np.int32)
    terms = np.where(ids[:, :, None] // (4 // ranks) == np.arange(ranks), weights[:, :, None], 0)  # [token, choice, rank]
    sums = np.einsum("tcr,th->rth", terms, x)
    wanted = sums.astype(ml_dtypes.bfloat16).astype(np.float32).sum(0).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (wanted != sums.sum(0)).any()
    for rank, results in enumerate(interpret(host, {"x": x, "ids": ids, "weights": weights})):
        np.testing.assert_array_equal(
            results[host.outputs[0].name], wanted[rank * 8 // ranks : (rank + 1) * 8 // ranks].astype(ml_dtypes.bfloat16)
        )


def test_arguments_of_routing_that_are_wrong() -> None:
    def fails(message: str, experts: int = 4, axes: str = "ep", ids: Any = hw.i32["T@ep", 2], capacity: int | None = None) -> None:
        with pytest.raises(ProgramError, match=message):
            hw.fusion(mesh=hw.Mesh(ep=2), ids=ids)(lambda ids: hw.moe_routing(ids, experts, axes, capacity).ends)

    fails("moe_routing: the 2 ranks need a positive multiple of 2 experts, not 5", experts=5)
    fails("a positive multiple of 2 experts, not 0", experts=0)
    fails("tp is not an axis of", axes="tp")
    fails("not ints", ids=hw.f32["T@ep", 2])
    fails("not ints", ids=hw.i32["T@ep"])
    fails("2 ranks do not divide 5 tokens, which capacity= requires", ids=hw.i32["5@ep", 2], capacity=2)
    with pytest.raises(ProgramError, match=r"^test_moe.py:\d+: moe_combine: sent=i32: sums are floats; write sent=hw.bf16$"):
        hw.fusion(rows=hw.f32[1, 2, H], ids=hw.i32[2, 1])(lambda rows, ids: hw.moe_combine(rows, hw.moe_routing(ids, 4), sent=hw.i32))
