"""Calls as graphs on the CPU target: `program.capture`, and automatic capture."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import CDLL, CFUNCTYPE, byref, c_char_p, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, expect, fusion_of, integer_arrays, sizes_of

import hostweave as hw
from hostweave.base.errors import ArgumentError, CaptureError, ExecutionError, ProgramError
from hostweave.base.paths import NATIVE
from hostweave.fusion_ir.ir import Fusion
from hostweave.runtime.cpu import seeded
from hostweave.targets.target import find_target
from hostweave.types.tensor import block_of, holds

RANDOM = np.random.default_rng(0)


def mlp_on(ranks: int, **options: Any) -> hw.Program:
    """Collectives, and a chunk loop over streams."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["T@x", "E"], up=hw.f32["E", "F@x"], down=hw.f32["F@x", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        hidden = hw.maximum(hw.matmul(hw.reshard(x, "T", "E").stream("T", chunks=2) if ranks > 1 else x, up), 0)
        return hw.reshard(hw.matmul(hidden, down), "T@x", "E")

    return hw.compile(mlp, options=hw.Options(**options))


def arrays_of(tokens: int) -> dict[str, np.ndarray]:
    shapes = {"x": (tokens, 8), "up": (8, 16), "down": (16, 8)}
    return {name: RANDOM.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}


def blocks(arrays: Mapping[str, np.ndarray], rank: int, ranks: int) -> list[np.ndarray]:
    axes = {"x": 0, "up": 1, "down": 0}
    return [np.ascontiguousarray(np.split(array, ranks, axes[name])[rank]) for name, array in arrays.items()]


def wanted(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return np.maximum(x @ up, 0) @ down


PROGRAMS = {ranks: mlp_on(ranks) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("ranks", PROGRAMS)
def test_replays_beside_calls(ranks: int) -> None:
    """Replays with new inputs; in between calls of the same program, also with larger sizes; two graphs of one program."""
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
    """New local arrays of a rank."""
    return [
        np.array(given[v.name][block_of(v.type, fusion.mesh, rank, given[v.name].shape)], order="C")
        if holds(v.type, fusion.mesh, rank)
        else None
        for v in fusion.inputs
    ]


def check_replays(fusion: Fusion, options: hw.Options | None = None, times: int = 3) -> None:
    """Replays with new inputs give new exact outputs; inputs are small integers.

    Calls with larger sizes come in between, for which the program uses memory outside of the graph. Some launches run as one
    queue, in any order of nodes.
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
def test_nothing_in_a_call_depends_on_what_is_outside_of_the_capture(name: str, ranks: int) -> None:
    """No wait for an outside event, no unjoined stream, no allocation, no query.

    In a pipeline, whose ranks wait only for some others, a rank may launch while others still capture.
    """
    check_replays(fusion_of(name, ranks, 3, hw.bf16))


LOOPS = [("ag_matmul_put", 2), ("ag_pieces_put", 3), ("ag_matmul_pull", 2), ("mlp_put", 3), ("columns_put", 2)]
EXCHANGES = [("exchanges", 3), ("permutes", 4), ("two_layers", 3), ("stages", 4)]


@pytest.mark.parametrize("transport", ["peer", "one_sided"])
@pytest.mark.parametrize(("name", "ranks"), [*LOOPS, *EXCHANGES])
def test_signals_in_graphs(name: str, ranks: int, transport: str) -> None:
    """A signal of a graph is given only after the previous one has been awaited."""
    check_replays(fusion_of(name, ranks, 3, hw.bf16), hw.Options(transport=transport))


@pytest.mark.parametrize(("name", "ranks"), [*LOOPS, *EXCHANGES[:2]])
def test_ranks_decide_together_what_is_a_graph(name: str, ranks: int) -> None:
    """Calls with signals, whose arrays come in a different order on each rank.

    With few arrays, calls become graphs. With new arrays on one rank, that rank captures again; larger sizes follow. With new
    arrays on a rank in each call, calls stop being graphs.
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
            assert one.common_graphs.agreed == (len(results) >= 8)  # from call 9: some arrays were new before call 5
        graphs = one.native.graphs
        call(*sets[0] if rank else new())
        assert one.native.graphs == graphs + (rank == 0)
        program(*local(fusion, larger, rank))
        fresh = [new() for _ in range(40)]
        for i, mine in enumerate(fresh):
            call(*sets[0] if rank or i in (0, 1) else mine)
            assert one.common_graphs.agreed == (len(results) < 63)  # call 65
        return results

    for result in zip(*threads.run(on_rank), strict=True):
        expect(fusion, values, result, exact=True)


def test_graphs_of_windows_that_were_outgrown_are_not_launched() -> None:
    """If a rank captures again, peers write to the new windows, even if they have older graphs of the same arrays."""
    fusion = fusion_of("ag_matmul_put", 2, 3, hw.bf16)
    program, threads = compiled(fusion, options=hw.Options(graph="auto", transport="one_sided")), hw.Threads(2)
    values, larger = (integer_arrays(fusion, {"M": rows, "K": 1024, "N": 4}, 0) for rows in (8, 4096))  # larger than a 2 MiB piece

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


def test_calls_with_the_same_arrays_are_captured_by_themselves() -> None:
    """The last 16 sets of arrays, alternating and repeated; also new sizes in the same memory."""
    program, threads = mlp_on(2, graph="auto"), hw.Threads(2)
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
    """They run one after another, or raise an error that asks for it."""
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
        np.testing.assert_array_equal(step(), wanted(*arrays))  # the other threads have ended

    ranks.run(on_rank)


class Captures:
    """Streams and captures of a rank's device, as in an application that captures by itself."""

    def __init__(self, rank: int):
        self.library = CDLL(str(NATIVE / "libhostweave_cpu.so"))
        self.call("cudaSetDevice", rank)

    def call(self, function: str, *arguments: Any) -> None:
        assert self.library[function](*arguments) == 0, function

    def stream(self) -> int:
        self.call("cudaStreamCreateWithFlags", byref(made := c_void_p()), 1)
        return made.value or 0

    @contextmanager
    def graph(self, stream: int) -> Iterator[c_void_p]:
        """Captures in thread-local mode. The yielded object can be launched afterwards."""
        made, executable = c_void_p(), c_void_p()
        self.call("cudaStreamBeginCapture", c_void_p(stream), 1)
        try:
            yield executable
        finally:
            status = self.library["cudaStreamEndCapture"](c_void_p(stream), byref(made))
        assert status == 0
        self.call("cudaGraphInstantiateWithFlags", byref(executable), made, c_uint64(0))
        self.call("cudaGraphDestroy", made)

    def launch(self, graph: c_void_p, stream: int) -> None:
        self.call("cudaGraphLaunch", graph, c_void_p(stream))

    def wait(self, stream: int) -> None:
        self.call("cudaStreamSynchronize", c_void_p(stream))


@pytest.fixture
def streams_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets calls take streams, as on CUDA."""
    monkeypatch.setattr(type(find_target("cpu")), "stream", lambda self, given: given or 0)


@pytest.mark.usefixtures("streams_given")
@pytest.mark.parametrize("ranks", [1, 2])
def test_captures_of_others(ranks: int) -> None:
    """Two programs in one graph, one of them twice and on two streams; launched on any stream, between calls; and failing captures."""
    program, other, threads = mlp_on(ranks), PROGRAMS[ranks], hw.Threads(ranks)
    calls = [arrays_of(4 * ranks) for _ in range(4)]

    def on_rank(rank: int) -> None:
        group = hw.init(threads)
        captures = Captures(rank)
        stream, second, launching = (captures.stream() for _ in range(3))
        fork, join = c_void_p(), c_void_p()
        for event in (fork, join):
            captures.call("cudaEventCreateWithFlags", byref(event), 2)
        x, up, down = blocks(calls[0], rank, ranks)
        y, z, last, beside = (np.empty_like(x) for _ in range(4))

        def fails(message: str, *arrays: np.ndarray) -> None:
            with pytest.raises(CaptureError, match=message), captures.graph(stream):
                program(*arrays, out=np.empty_like(arrays[0]), stream=stream)

        fails("mlp: the stream is being captured, and this is the first call; call the program once before", x, up, down)
        for one in (program, other):
            one(x, up, down, out=y)
        fails("the program is not prepared for arrays of these shapes; call it once before", x[:2].copy(), up, down)
        if ranks > 1:  # rank threads, which found together that none is prepared
            program(x, up, down, out=y)
        with captures.graph(stream) as graph:
            program(x, up, down, out=y, stream=stream)
            captures.call("cudaEventRecord", fork, c_void_p(stream))
            captures.call("cudaStreamWaitEvent", c_void_p(second), fork, 0)
            other(y, up, down, out=z, stream=stream)
            program(y, up, down, out=last, stream=second)
            captures.call("cudaEventRecord", join, c_void_p(second))
            captures.call("cudaStreamWaitEvent", c_void_p(stream), join, 0)
        for arrays in calls:
            for array, new in zip((x, up, down), blocks(arrays, rank, ranks), strict=True):
                array[:] = new
            want = wanted(**arrays)
            twice = np.split(wanted(want, arrays["up"], arrays["down"]), ranks)[rank]
            captures.launch(graph, launching)
            captures.launch(graph, second)
            program(x, up, down, out=beside)  # ordered after the launches, on another stream
            np.testing.assert_array_equal(beside, np.split(want, ranks)[rank])
            captures.wait(second)
            for got, block in ((y, np.split(want, ranks)[rank]), (z, twice), (last, twice)):
                np.testing.assert_array_equal(got, block)
        assert group.failure is None
        assert group.overdue() is None

    threads.run(on_rank)


@pytest.mark.parametrize("call", ["cudaStreamCreate", "cudaMalloc"])
def test_a_capture_that_fails_is_an_error_of_that_call(call: str) -> None:
    """On one rank: the others are informed, the group remains usable, and the next capture works. Without a failing call nothing fails."""
    program, threads = PROGRAMS[2], hw.Threads(2)
    arrays = arrays_of(8)
    want = np.split(wanted(**arrays), 2)

    def on_rank(rank: int) -> str:
        group = hw.init(threads)
        mine = blocks(arrays, rank, 2)
        program(*mine)
        if rank == 0:
            Captures(rank).library["hw_cpu_fail_call"](c_char_p(call.encode()), 1)
        message = ""
        try:
            program.capture(*mine)
        except ExecutionError as error:
            message = f"{type(error).__name__}: {error}"
        assert group.failure is None
        np.testing.assert_array_equal(program.capture(*mine)(), want[rank])
        return message

    messages = sorted(threads.run(on_rank))
    if call == "cudaMalloc":  # a capture does not allocate
        Captures(0).library["hw_cpu_fail_call"](c_char_p(b""), 0)
        assert messages == ["", ""]
    else:
        failed, heard = messages
        assert failed.startswith("CaptureError: mlp: cannot be captured: instance.cpp")
        assert heard.startswith("ExecutionError: mlp: rank")
        assert "cannot go on: mlp: cannot be captured" in heard


@pytest.mark.usefixtures("streams_given")
def test_a_launch_that_does_not_end_is_seen() -> None:
    """The watchdog detects it without a call: other code launches the graph."""
    program, threads = PROGRAMS[1], hw.Threads(1)

    def on_rank(rank: int) -> None:
        group = hw.init(threads)
        captures, arrays = Captures(rank), list(arrays_of(4).values())
        stream, out = captures.stream(), np.empty((4, 8), np.float32)
        program(*arrays, out=out)
        with captures.graph(stream) as graph:
            program(*arrays, out=out, stream=stream)
        (local,) = group.programs.values()
        assert local.progress[3] == 0
        go = threading.Event()
        held = CFUNCTYPE(None, c_void_p)(lambda _: go.wait(20) and None)
        captures.call("hw_cpu_launch", c_char_p(b"held"), c_void_p(stream), held, None, c_size_t(0), None, 0)
        captures.launch(graph, stream)
        try:
            begin = local.progress[3]
            time.sleep(0.05)
            assert local.progress[3] >= begin + 0.05
        finally:
            go.set()
        captures.wait(stream)
        assert local.progress[3] < 0.05

    threads.run(on_rank)


@pytest.mark.usefixtures("streams_given")
def test_a_launch_by_the_application_names_its_line() -> None:
    """The other rank launches its graph later. The second launch says as much as the first, and so does one behind a call."""
    program, threads = mlp_on(2), hw.Threads(2)
    late = [threading.Event() for _ in range(3)]

    def on_rank(rank: int) -> None:
        group = hw.init(threads)
        captures, arrays = Captures(rank), blocks(arrays_of(8), rank, 2)
        stream, out = captures.stream(), np.empty_like(arrays[0])
        for _ in range(2):
            program(*arrays, out=out)
        with captures.graph(stream) as graph:
            program(*arrays, out=out, stream=stream)
        (local,) = group.programs.values()
        for number, go in enumerate(late):
            if number == 2:
                program(*arrays, out=out)
            before = 2 + number + (number == 2)
            captures.wait(stream)
            assert local.stand().call == 0
            if rank == 1:
                go.wait(20)
            captures.launch(graph, stream)
            if rank == 0:
                until = time.monotonic() + 20
                while not local.stand().streams and time.monotonic() < until:
                    time.sleep(0.005)
                seen = local.stand()
                waits = [stream for stream in seen.streams if stream["edge"] == "transfer"]
                go.set()
                assert (seen.call, seen.made, seen.done, seen.is_graph) == (before + 1, before + 1, before, True)
                assert [stream["ranks"] for stream in waits] == [[1]]
                assert "test_capture.py:" in waits[0]["next"]
        captures.wait(stream)
        assert local.stand().call == 0

    threads.run(on_rank)


@pytest.mark.usefixtures("streams_given")
@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_the_call_that_is_not_done_is_told_by_its_number(before: int) -> None:
    """For any number of finished calls that were not polled in between."""
    program, threads = PROGRAMS[1], hw.Threads(1)

    def on_rank(rank: int) -> None:
        group = hw.init(threads)
        captures, arrays = Captures(rank), list(arrays_of(4).values())
        stream = captures.stream()
        step = program.capture(*arrays, stream=stream)
        for _ in range(before):
            step.launch(stream)
        go = threading.Event()
        held = CFUNCTYPE(None, c_void_p)(lambda _: go.wait(20) and None)
        captures.call("hw_cpu_launch", c_char_p(b"held"), c_void_p(stream), held, None, c_size_t(0), None, 0)
        waiting = threading.Thread(target=step.launch, args=(stream,))
        waiting.start()
        try:
            time.sleep(0.1)  # a poll in between would see more
            name, made, done = "", 0, 0
            while made < before + 2:
                name, made, done, _ = next(iter(group.programs.values())).progress
            assert (name, made, done) == ("mlp", before + 2, before + 1)
        finally:
            go.set()
            waiting.join()

    threads.run(on_rank)


def test_a_rank_that_does_not_launch() -> None:
    """The others get an error that it is late, as for a call."""
    program, threads = PROGRAMS[2], hw.Threads(2)
    arrays, done = arrays_of(8), threading.Event()

    def on_rank(rank: int) -> None:
        hw.init(threads, call_timeout=0.5)
        step = program.capture(*blocks(arrays, rank, 2))
        step()
        if rank == 1:
            done.wait(20)
            return
        try:
            with pytest.raises(ExecutionError, match=r"^mlp: timed out after 0\.5 s waiting for rank 1; `.*` .* needs all ranks"):
                step()
            with pytest.raises(ExecutionError, match=r"^group 'default' has failed and cannot be reused: timed out after"):
                step()
        finally:
            done.set()

    threads.run(on_rank)


def test_a_launch_that_fails() -> None:
    """The error is that of a call: with the place in the program, on all ranks."""

    @hw.fusion(mesh=hw.Mesh(x=2), ids=hw.i64["T"], table=hw.f32["V@x", "E"])
    def looked_up(ids: hw.Tensor, table: hw.Tensor) -> hw.Tensor:
        return hw.embedding(ids, table)

    program, threads = hw.compile(looked_up), hw.Threads(2)
    table = np.arange(12, dtype=np.float32).reshape(4, 3)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        ids = np.array([3, 0])
        step = program.capture(ids, table[2 * rank : 2 * rank + 2].copy())
        np.testing.assert_array_equal(step(), table[ids])
        ids[1] = 4
        with pytest.raises(ExecutionError, match="index 4 is out of range: it goes from 0 to 3"):
            step()
        with pytest.raises(ExecutionError, match=r"^group 'default' has failed and cannot be reused"):
            step()

    threads.run(on_rank)


def test_mistakes() -> None:
    with pytest.raises(ProgramError, match=r"""^Options: graph='always' is neither "auto" nor None; program.capture captures one call$"""):
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
        with pytest.raises(ArgumentError, match="a captured call takes no arguments"):
            step(arrays[0])
        np.testing.assert_array_equal(step(), wanted(*arrays))
        program.close()
        with pytest.raises(ExecutionError, match="mlp: the program is closed; compile it again"):
            step()

    threads.run(on_rank)
