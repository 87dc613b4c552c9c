"""Communication outside chunk loops with the transports peer and one_sided, on 1 to 8 ranks and in random schedules."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import EXCHANGES, compiled, expect, fusion_of, integer_arrays, sizes_of, with_transports
from interpret import interpret

import hostweave as hw
from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded

PEER, ONE_SIDED = Options(transport="peer"), Options(transport="one_sided")


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.more), pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", EXCHANGES)
def test_both_transports_have_the_same_ir(name: str, ranks: int) -> None:
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    host = lower(fusion, PEER)
    assert str(lower(fusion, ONE_SIDED)) == str(host).replace(" peer", " one_sided")
    check(host)
    assert HostProgram.parse(str(host)) == host
    assert "two_sided" not in str(host)
    assert (" peer" in str(host)) == (fusion.mesh.size > 1)
    for more in (0, 1, 1 - ranks):  # Sizes are even, uneven, or smaller than the number of ranks.
        arrays = integer_arrays(host, sizes_of(host, 1 if more < 0 else 3, more), seed=0)
        ranks_of = [tuple(rank.get(output.name) for output in host.outputs) for rank in interpret(host, arrays)]
        expect(fusion, arrays, [results if len(results) > 1 else results[0] for results in ranks_of], exact=True)


RUNS = [("exchanges", 3), ("exchanges", 8), ("permutes", 2), ("permutes", 4), ("two_axes", 2), ("two_layers", 3)]
RUNS += [("stages", 3), ("stages", 4), ("uneven", 3)]


@pytest.mark.parametrize(("name", "ranks", "transport"), with_transports(RUNS))
def test_matches_numpy(name: str, ranks: int, transport: str) -> None:
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    program = compiled(fusion, options=Options(transport=transport))
    for times, more in ((1, 0), (3, 1), (2, -1)):  # Larger calls enlarge the memory. Smaller calls reuse the memory.
        arrays = integer_arrays(fusion, sizes_of(program.host, times, more), seed=times)
        expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)
    for seed in range(4 if ranks < 8 else 1):
        calls = [integer_arrays(fusion, sizes_of(program.host, 1, (1, 0, 1 - ranks)[seed % 3]), number) for number in range(3)]
        with seeded(seed, check_dependencies=True):
            for arrays, results in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
                expect(fusion, arrays, results, exact=True)


@pytest.mark.parametrize("size", ["M", 7, 12])
@pytest.mark.parametrize("ranks", [([0, 1], [2, 3, 4]), ([0, 1, 2, 3], [3, 1]), ([2], [0, 4])], ids=str)
def test_blocks_of_different_sizes_are_gathered_first(size: int | str, ranks: tuple[list[int], list[int]]) -> None:
    """Remote reads need blocks of equal size. A dim with blocks of several sizes is gathered before the read, and sliced after the read."""
    mesh = hw.Mesh(x=5)
    before, after = (mesh.ranks(some, y=len(some)) for some in ranks)

    @hw.fusion(mesh=mesh, x=hw.f32[f"{size}@y", 2].on(before))
    def moved(x):  # type: ignore[no-untyped-def]
        return hw.reshard(hw.reshard(x + 1, size, 2), f"{size}@y", 2, mesh=after)

    count = size if isinstance(size, int) else 12
    host = lower(moved, ONE_SIDED)
    arrays = integer_arrays(host, {"M": count}, seed=0)
    check(host, fusion=moved)
    found = [rank["y"] for rank in interpret(host, arrays) if "y" in rank]
    np.testing.assert_array_equal(np.concatenate([found[sorted(ranks[1]).index(rank)] for rank in ranks[1]]), arrays["x"] + 1)


def test_a_part_is_copied_before_others_read_it() -> None:
    """The offset of a slice differs between ranks. So the slice is copied to a buffer before peers read it."""

    @hw.fusion(mesh=hw.Mesh(a=2, b=2), x=hw.f32["M@a", "K"])
    def turned(x):  # type: ignore[no-untyped-def]
        return hw.reshard(hw.relu(x), "M@b,a", "K")

    host = lower(turned, ONE_SIDED)
    arrays = integer_arrays(host, {"M": 8, "K": 3}, seed=0)
    expect(turned, arrays, [rank["y"] for rank in interpret(host, arrays)], exact=True)


def test_a_named_uneven_size_is_moved_by_remote_reads() -> None:
    """A call with an uneven size compiles a variant in which this size is an int. In the variant, ranks 1 and 2 read the whole tensor."""
    mesh = hw.Mesh(x=3)

    @hw.fusion(mesh=mesh, x=hw.f32["M"].on(mesh.ranks([0])))
    def moved(x):  # type: ignore[no-untyped-def]
        return hw.reshard(x + 1, "M@x", mesh=mesh.ranks([1, 2]))

    x = np.arange(3, dtype="f4")
    np.testing.assert_array_equal(compiled(moved, options=ONE_SIDED).run(x), x + 1)


@pytest.mark.parametrize("is_1f1b", [False, True], ids=["gpipe", "1f1b"])
def test_no_stage_waits_for_a_later_communication(is_1f1b: bool) -> None:
    """Each stage has one rank, and executes forward and backward passes of micro-batches."""
    count, batches = 3, 4
    mesh = hw.Mesh(x=count)
    stages = [mesh.ranks([rank]) for rank in range(count)]
    weights = {f"w{stage}": hw.f32["N", "N"].on(stages[stage]) for stage in range(count)}

    @hw.fusion(mesh=mesh, **{f"x{batch}": hw.f32["M", "N"].on(stages[0]) for batch in range(batches)}, **weights)
    def pipeline(**given):  # type: ignore[no-untyped-def]
        there = [[given[f"x{batch}"]] for batch in range(batches)]
        back: list[list[hw.Tensor]] = [[] for _ in range(batches)]

        def forward(batch: int, stage: int) -> None:
            h = hw.clip(hw.matmul(there[batch][stage], given[f"w{stage}"]), -1, 1)
            there[batch].append(hw.reshard(h, "M", "N", mesh=stages[stage + 1]) if stage + 1 < count else h)

        def backward(batch: int, stage: int) -> None:
            g = hw.clip(hw.matmul(back[batch][-1] if back[batch] else there[batch][-1], given[f"w{stage}"].T), -1, 1)
            back[batch].append(hw.reshard(g, "M", "N", mesh=stages[stage - 1]) if stage else g)

        steps = [(batch + stage, 0, batch, stage) for batch in range(batches) for stage in range(count)]
        late = 0 if is_1f1b else batches
        steps += [(late + batch + 2 * count - stage, 1, batch, stage) for batch in range(batches) for stage in reversed(range(count))]
        for _, is_backward, batch, stage in sorted(steps):
            (backward if is_backward else forward)(batch, stage)
        return tuple(gradient for _, gradient in sorted((batch, back[batch][-1]) for batch in range(batches)))

    for options in (PEER, ONE_SIDED, Options()):
        host = lower(pipeline, options)
        check(host)
        arrays = integer_arrays(host, {"M": 2, "N": 3}, seed=1)
        results = [tuple(rank.get(output.name) for output in host.outputs) for rank in interpret(host, arrays)]
        expect(pipeline, arrays, results, exact=True)
