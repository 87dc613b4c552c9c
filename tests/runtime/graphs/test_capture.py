"""Graphs on the CPU target: `program.capture`, and automatic capture."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, expect, fusion_of, integer_arrays, sizes_of, with_transports
from mlp_of_ranks import arrays_of, blocks, mlp_on, wanted

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.runtime.cpu import seeded
from hostweave.types.tensor import block_of, holds

PROGRAMS = {ranks: mlp_on(ranks) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("ranks", PROGRAMS)
def test_replays_between_calls(ranks: int) -> None:
    """Replays two graphs of one program with new inputs. Most calls between the replays have sizes that no replay has."""
    program, threads = PROGRAMS[ranks], hw.Threads(ranks)
    calls = [arrays_of(4 * ranks) for _ in range(6)]
    others = [arrays_of(size * ranks) for size in (4, 8, 32, 2, 64, 4)]

    def on_rank(rank: int) -> None:
        hw.init(threads)
        mine = blocks(calls[0], rank, ranks)
        step = program.capture(*mine)
        again = program.bind(up=mine[1], down=mine[2]).capture(x=mine[0], out=(given := np.empty_like(step.outputs)))
        assert again.outputs is given
        for arrays, other in zip(calls, others, strict=True):
            for array, new in zip(mine, blocks(arrays, rank, ranks), strict=True):
                array[:] = new
            want = np.split(wanted(**arrays), ranks)[rank]
            step.outputs[:] = given[:] = np.nan
            assert step() is step.outputs
            np.testing.assert_array_equal(step.outputs, want)
            result = program(*blocks(other, rank, ranks))
            np.testing.assert_array_equal(result, np.split(wanted(**other), ranks)[rank])
            np.testing.assert_array_equal(again(), want)
            np.testing.assert_array_equal(step.outputs, want)

    threads.run(on_rank)


def local(fusion: Fusion, given: Mapping[str, Any], rank: int) -> list[np.ndarray | None]:
    return [
        np.array(given[v.name][block_of(v.type, fusion.mesh, rank, given[v.name].shape)], order="C")
        if holds(v.type, fusion.mesh, rank)
        else None
        for v in fusion.inputs
    ]


def check_replays(fusion: Fusion, options: hw.Options | None = None, times: int = 3) -> None:
    """Tests that replays with new inputs give the exact outputs. Inputs are small integers.

    Calls between the replays have larger sizes, and do not use the memory of the graph. Some launches run the nodes of the graph one by
    one, in a random order that the dependencies allow.
    """
    ranks = fusion.mesh.size
    program, threads = compiled(fusion, options=options), hw.Threads(ranks)
    arrays = [integer_arrays(fusion, sizes_of(fusion, times), seed) for seed in range(2)]
    larger = integer_arrays(fusion, sizes_of(fusion, 16 * times), 0)

    def on_rank(rank: int) -> list[Any]:
        hw.init(threads)
        mine = local(fusion, arrays[0], rank)
        step = program.capture(*mine)
        results = []
        for given in arrays:
            for array, new in zip(mine, local(fusion, given, rank), strict=True):
                if array is not None:
                    array[...] = new
            outputs = step()
            results.append(copy.deepcopy(outputs))
            program(*local(fusion, larger, rank))
        for seed in range(SEEDS):
            with seeded(seed):
                results.append(copy.deepcopy(step()))
        return results

    for given, results in zip([*arrays, *arrays[-1:] * SEEDS], zip(*threads.run(on_rank), strict=True), strict=True):
        expect(fusion, given, results, exact=True)


SEEDS = 4


@pytest.mark.parametrize(("name", "ranks"), [("ag_matmul_flat", 2), ("matmul_rs_flat", 2), ("two_stages", 4)])
def test_a_captured_call_depends_only_on_the_capture(name: str, ranks: int) -> None:
    """A captured call waits for no event outside of the capture, joins all streams, does not allocate, and does not query the device.

    In the pipeline `two_stages`, a rank waits only for some ranks. So a rank may launch while other ranks still capture.
    """
    check_replays(fusion_of(name, ranks, 3, hw.bf16))


LOOPS = [("ag_matmul_put", 2), ("ag_pieces_put", 3), ("ag_matmul_pull", 2), ("mlp_put", 3), ("columns_put", 2)]
EXCHANGES = [("exchanges", 3), ("permutes", 4), ("two_layers", 3), ("stages", 4)]


@pytest.mark.parametrize(("name", "ranks", "transport"), with_transports([*LOOPS, *EXCHANGES]))
def test_signals_in_graphs(name: str, ranks: int, transport: str) -> None:
    """A graph sends a signal only after the receiver has waited for the previous signal."""
    check_replays(fusion_of(name, ranks, 3, hw.bf16), hw.Options(transport=transport))


@pytest.mark.parametrize(("name", "ranks"), [*LOOPS, *EXCHANGES[:2]])
def test_ranks_decide_together_to_use_graphs(name: str, ranks: int) -> None:
    """With graph="auto", calls become graphs on all ranks at the same call, if every rank passes few sets of arrays, in any order.

    If one rank passes new arrays once, only this rank captures again. If this rank passes new arrays in each call, no rank uses graphs any
    more. The programs use signals.
    """
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    program, threads = compiled(fusion, options=hw.Options(graph="auto", transport="one_sided")), hw.Threads(ranks)
    values, larger = (integer_arrays(fusion, sizes_of(fusion, times), 0) for times in (3, 24))

    def on_rank(rank: int) -> list[Any]:
        group, random, results = hw.init(threads, call_timeout=20), np.random.default_rng(rank), []
        shape = program(*local(fusion, values, rank))

        def new() -> tuple[list[np.ndarray | None], Any]:
            return local(fusion, values, rank), copy.deepcopy(shape)

        def call(arrays: list[np.ndarray | None], out: Any) -> None:
            with seeded(len(results) % SEEDS):
                results.append(copy.deepcopy(program(*arrays, out=out)))

        sets = [new() for _ in range(3)]
        (one,) = group.programs.values()
        for i in (*random.permutation(3), *random.integers(3, size=26)):
            call(*sets[i])
            # Ranks vote before calls 3, 5 and 9. Calls 1 to 4 pass new arrays, so the ranks use graphs from call 9 on.
            assert one.common_graphs.agreed == (len(results) >= 8)
        graphs = one.native.graphs
        call(*sets[0] if rank else new())
        assert one.native.graphs == graphs + (rank == 0)
        program(*local(fusion, larger, rank))
        fresh = [new() for _ in range(40)]
        for i, mine in enumerate(fresh):
            call(*sets[0] if rank or i in (0, 1) else mine)
            assert one.common_graphs.agreed == (len(results) < 63)  # Call 65 ends the use of graphs. `results` lacks two earlier calls.
        return results

    for result in zip(*threads.run(on_rank), strict=True):
        expect(fusion, values, result, exact=True)


def test_graphs_of_windows_that_were_outgrown_are_not_launched() -> None:
    """After windows have grown, all ranks capture again. An earlier graph would write to the old windows of peers, even if its arrays are
    the same."""
    fusion = fusion_of("ag_matmul_put", 2, 3, hw.bf16)
    program, threads = compiled(fusion, options=hw.Options(graph="auto", transport="one_sided")), hw.Threads(2)
    values, larger = (integer_arrays(fusion, {"M": rows, "K": 1024, "N": 4}, 0) for rows in (8, 4096))  # x of `larger` exceeds 2 MiB.

    def on_rank(rank: int) -> list[Any]:
        group, results = hw.init(threads, call_timeout=20), []
        first, second = local(fusion, values, rank), local(fusion, values, rank)
        out = copy.deepcopy(program(*first))

        def call(arrays: list[np.ndarray | None]) -> None:
            results.append(program(*arrays, out=out).copy())

        for _ in range(8):
            call(first)
        (one,) = group.programs.values()
        assert one.common_graphs.agreed
        program(*local(fusion, larger, rank))
        for value in (1, -1):
            first[0][:] *= value
            second[0][:] = first[0]
            call(second if rank else first)
        return results

    results = list(zip(*threads.run(on_rank), strict=True))
    for result in results[:-1]:
        expect(fusion, values, result, exact=True)
    expect(fusion, values | {"x": -values["x"]}, results[-1], exact=True)


def test_calls_with_collectives_are_graphs_on_all_ranks_or_on_none() -> None:
    """NCCL requires that all ranks or no ranks capture a collective. One rank passes a new output in each of its first five calls."""
    program, threads = mlp_on(2, graph="auto", transport="two_sided"), hw.Threads(2)
    arrays = arrays_of(8)
    want = np.split(wanted(**arrays), 2)

    def on_rank(rank: int) -> list[int]:
        group, graphs, kept = hw.init(threads), [], []
        x, up, down = blocks(arrays, rank, 2)
        out = np.empty_like(x)
        for call in range(24):
            if rank and call < 5:
                kept.append(out)
                out = np.empty_like(x)
            np.testing.assert_array_equal(program(x, up, down, out=out), want[rank])
            (local,) = group.programs.values()
            graphs.append(local.native.graphs)
        return graphs

    first, second = threads.run(on_rank)
    assert first == second
    assert (first[0], first[-1]) == (0, 1)


def test_calls_with_the_same_arrays_are_captured_automatically() -> None:
    """Graphs of the last 16 sets of arrays are kept. New sizes in the same memory need another graph."""
    program, threads = mlp_on(2, graph="auto", transport="peer"), hw.Threads(2)
    weights, sets = arrays_of(4), [arrays_of(8)["x"] for _ in range(18)]

    def on_rank(rank: int) -> None:
        hw.init(threads)
        _, up, down = blocks(weights, rank, 2)
        xs = [np.split(x, 2)[rank].copy() for x in sets]
        outs = [np.empty_like(x) for x in xs]
        for repetition in (1, 2, 3):
            for x, whole, out in zip(xs, sets, outs, strict=True):
                for _ in range(repetition):
                    x[:] = np.split(whole, 2)[rank] * repetition
                    assert program(x, up, down, out=out) is out
                    want = wanted(whole * repetition, weights["up"], weights["down"])
                    np.testing.assert_array_equal(out, np.split(want, 2)[rank])
            (local,) = hw.init().programs.values()
            assert local.native.graphs == (0 if repetition == 1 else 16)
        for rows in (4, 2, 4, 2, 2):
            x = sets[0][: 2 * rows]
            xs[0][:rows] = np.split(x, 2)[rank]
            want = np.split(wanted(x, weights["up"], weights["down"]), 2)[rank]
            np.testing.assert_array_equal(program(xs[0][:rows], up, down, out=outs[0][:rows]), want)
            np.testing.assert_array_equal(program(xs[0][:rows], up, down), want)

    threads.run(on_rank)


def test_threads_that_share_a_captured_call() -> None:
    """Launches by several threads inside `with step:` run one after another. Otherwise, a launch raises an error if another
    thread made the last launch and still runs."""
    program, ranks = PROGRAMS[1], hw.Threads(1)
    arrays = list(arrays_of(64).values())
    x, *weights = arrays

    def on_rank(rank: int) -> None:
        hw.init(ranks)
        step = program.capture(*arrays)
        wrong, refused = [], []

        def by_turns(number: int) -> None:
            for call in range(50):
                with step:
                    x[:] = number + call % 3
                    wrong.append((step() != wanted(x, *weights)).any())

        def alone(number: int) -> None:
            try:
                for _ in range(50):
                    step()
                    time.sleep(0.001)
            except ExecutionError as error:
                refused.append(str(error))

        for work in (by_turns, alone, by_turns):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == [False] * 800
        assert len(refused) == 7
        assert "several threads launch this captured call" in refused[0]
        np.testing.assert_array_equal(step(), wanted(*arrays))  # The other threads have ended, so no lock is needed.

    ranks.run(on_rank)


def test_mistakes() -> None:
    with pytest.raises(ProgramError, match=r"""^Options: graph='always' is neither "auto" nor None; omit it, or use program.capture$"""):
        hw.Options(graph="always")
    program = mlp_on(1)
    with pytest.raises(ExecutionError, match=r"mlp: this process has not joined a group; call hw\.init first"):
        program.capture(*arrays_of(4).values())
    threads = hw.Threads(1)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        arrays = list(arrays_of(4).values())
        for wrong, message in ((arrays[:2], "mlp: takes 3 arrays"), ([*arrays[:2], arrays[2].T], "mlp: down: is not contiguous")):
            with pytest.raises(ArgumentError, match=message):
                program.capture(*wrong)
        step = program.capture(*arrays)
        with pytest.raises(ArgumentError, match="mlp: stream= is for the target cuda"):
            step(stream=1)
        with pytest.raises(ArgumentError, match="a captured call takes no arrays"):
            step(arrays[0])
        np.testing.assert_array_equal(step(), wanted(*arrays))
        program.close()
        with pytest.raises(ExecutionError, match="mlp: the program is closed; compile it again"):
            step()

    threads.run(on_rank)
