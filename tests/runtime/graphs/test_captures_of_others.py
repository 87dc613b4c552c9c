"""Graphs that the application or `program.capture` captures, on the CPU target. Some launches fail or do not end."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, CFUNCTYPE, byref, c_char_p, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
from mlp_of_ranks import arrays_of, blocks, mlp_on, wanted

import hostweave as hw
from hostweave.base.errors import CaptureError, ExecutionError
from hostweave.base.paths import NATIVE
from hostweave.targets.target import find_target

PROGRAMS = {ranks: mlp_on(ranks) for ranks in (1, 2, 4)}


class Captures:
    """Creates streams and captures on the device of a rank, as an application does."""

    def __init__(self, rank: int):
        self.library = CDLL(str(NATIVE / "libhostweave_cpu.so"))
        self.graphs: list[c_void_p] = []
        self.call("cudaSetDevice", rank)

    def __del__(self) -> None:
        """Destroys the graphs. Otherwise, the end of the group would wait 5 s for them, because they hold its communicators."""
        for graph in self.graphs:
            self.call("cudaGraphExecDestroy", graph)

    def call(self, function: str, *arguments: Any) -> None:
        assert self.library[function](*arguments) == 0, function

    def stream(self) -> int:
        self.call("cudaStreamCreateWithFlags", byref(made := c_void_p()), 1)
        return made.value or 0

    @contextmanager
    def graph(self, stream: int) -> Iterator[c_void_p]:
        """Captures in thread-local mode. After the block, the yielded object can be launched."""
        made, executable = c_void_p(), c_void_p()
        self.call("cudaStreamBeginCapture", c_void_p(stream), 1)
        try:
            yield executable
        finally:
            status = self.library["cudaStreamEndCapture"](c_void_p(stream), byref(made))
        assert status == 0
        self.call("cudaGraphInstantiateWithFlags", byref(executable), made, c_uint64(0))
        self.call("cudaGraphDestroy", made)
        self.graphs.append(executable)

    def launch(self, graph: c_void_p, stream: int) -> None:
        self.call("cudaGraphLaunch", graph, c_void_p(stream))

    def wait(self, stream: int) -> None:
        self.call("cudaStreamSynchronize", c_void_p(stream))


@pytest.fixture
def streams_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows calls on the CPU target to take streams, as on CUDA."""
    monkeypatch.setattr(type(find_target("cpu")), "stream", lambda self, given: given or 0)


@pytest.mark.usefixtures("streams_given")
@pytest.mark.parametrize("ranks", [1, 2])
def test_captures_of_others(ranks: int) -> None:
    """The application captures three calls in one graph: two calls of one program, on two streams, and a call of another program. The
    application launches the graph on two streams, between calls. Captures of an unprepared program fail."""
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

        fails("mlp: the stream is being captured, but this is the first call; make one call before", x, up, down)
        for one in (program, other):
            one(x, up, down, out=y)
        fails("the program is not prepared for arrays of these shapes; call it once before", x[:2].copy(), up, down)
        if ranks > 1:  # Ranks that are threads compare their calls. So after a refused call, no rank is prepared.
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
            program(x, up, down, out=beside)  # The call is on another stream, but the program orders the call after the launches.
            np.testing.assert_array_equal(beside, np.split(want, ranks)[rank])
            captures.wait(second)
            for got, block in ((y, np.split(want, ranks)[rank]), (z, twice), (last, twice)):
                np.testing.assert_array_equal(got, block)
        assert group.failure is None
        assert group.overdue() is None

    threads.run(on_rank)


@pytest.mark.usefixtures("streams_given")
def test_a_program_may_be_freed_during_a_capture() -> None:
    """Python may collect a program at any time, also in the thread that captures."""
    program, threads, arrays = PROGRAMS[1], hw.Threads(1), arrays_of(4)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        captures, forgotten = Captures(rank), mlp_on(1)
        stream, out = captures.stream(), np.empty_like(arrays["x"])
        for one in (program, forgotten):
            one(**arrays, out=out)
        with captures.graph(stream):
            program(**arrays, out=out, stream=stream)
            del one, forgotten
            gc.collect()
            program(**arrays, out=out, stream=stream)

    threads.run(on_rank)


@pytest.mark.parametrize("call", ["cudaStreamCreate", "cudaMalloc"])
def test_a_capture_that_fails_is_an_error_of_that_call(call: str) -> None:
    """The rank whose call does not fail is informed. The group stays usable, and the next capture works."""
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
    if call == "cudaMalloc":  # A capture does not allocate.
        Captures(0).library["hw_cpu_fail_call"](c_char_p(b""), 0)
        assert messages == ["", ""]
    else:
        failed, heard = messages
        assert failed.startswith("CaptureError: mlp: cannot be captured: streams.cpp")
        assert heard.startswith("ExecutionError: mlp: rank")
        assert "cannot continue: mlp: cannot be captured" in heard


@pytest.mark.usefixtures("streams_given")
@pytest.mark.parametrize("looked_before", [True, False])
def test_a_launch_that_does_not_end_is_seen(looked_before: bool) -> None:
    """`progress` reports a waiting time. This time begins when `progress` is first read during the launch."""
    program, threads = PROGRAMS[1], hw.Threads(1)

    def on_rank(rank: int) -> None:
        group = hw.init(threads)
        captures, arrays = Captures(rank), list(arrays_of(4).values())
        stream, out = captures.stream(), np.empty((4, 8), np.float32)
        program(*arrays, out=out)
        with captures.graph(stream) as graph:
            program(*arrays, out=out, stream=stream)
        (local,) = group.programs.values()
        assert not looked_before or local.progress[3] == 0
        go = threading.Event()
        held = CFUNCTYPE(None, c_void_p)(lambda _: go.wait(20) and None)
        captures.call("hw_cpu_launch", c_char_p(b"held"), c_void_p(stream), held, None, c_size_t(0), None, 0)
        captures.launch(graph, stream)
        try:
            begin = local.progress[3]
            assert begin < 0.05
            time.sleep(0.05)
            assert local.progress[3] >= begin + 0.05
        finally:
            go.set()
        captures.wait(stream)
        assert local.progress[3] < 0.05

    threads.run(on_rank)


@pytest.mark.usefixtures("streams_given")
def test_a_launch_by_the_application_names_its_line() -> None:
    """Rank 1 launches its graph late. The position of rank 0 then names the line that waits. The test covers the first launch, the
    second launch, and a launch after a call."""
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
            assert local.position().call == 0
            if rank == 1:
                go.wait(20)
            captures.launch(graph, stream)
            if rank == 0:
                until = time.monotonic() + 20
                while not local.position().streams and time.monotonic() < until:
                    time.sleep(0.005)
                seen = local.position()
                waits = [stream for stream in seen.streams if stream["edge"] == "transfer"]
                go.set()
                assert (seen.call, seen.made, seen.done, seen.is_graph) == (before + 1, before + 1, before, True)
                assert [stream["ranks"] for stream in waits] == [[1]]
                assert "mlp_of_ranks.py:" in waits[0]["next"]
        captures.wait(stream)
        assert local.position().call == 0

    threads.run(on_rank)


@pytest.mark.usefixtures("streams_given")
@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_the_report_names_the_number_of_the_unfinished_call(before: int) -> None:
    """The number is right although `progress` was not read while earlier calls ended."""
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
            time.sleep(0.1)  # Earlier calls end before `progress` is read.
            name, made, done = "", 0, 0
            while made < before + 2:
                name, made, done, _ = next(iter(group.programs.values())).progress
            assert (name, made, done) == ("mlp", before + 2, before + 1)
        finally:
            go.set()
            waiting.join()

    threads.run(on_rank)


def test_a_rank_that_does_not_launch() -> None:
    """Rank 0 waits for rank 1, and raises the time-out error of an ordinary call."""
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
    """All ranks raise the error of a failed call."""

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
        with pytest.raises(ExecutionError, match="index 4 is out of range for a dim of 4 elements"):
            step()
        with pytest.raises(ExecutionError, match=r"^group 'default' has failed and cannot be reused"):
            step()

    threads.run(on_rank)
