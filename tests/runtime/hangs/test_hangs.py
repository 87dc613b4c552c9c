"""Reports of hangs: for every rank and stream, the last finished line, the first unfinished line, and the reason of the wait.

Some tests insert a fault into the C++ of a program. The fault affects only rank 2.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import four_ranks
import numpy as np
import pytest
from forked import Forked
from four_ranks import AG_MATMUL, RANKS, W, X, ag_matmul, mesh, on_ranks, x_of
from gpu.test_hangs_on_gpus import FAULT, gathered_by_puts, without_a_signal
from processes import free_port

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.runtime import cpu
from hostweave.runtime.lines import with_source_lines
from hostweave.runtime.standstill import RankPosition, describe, from_json, to_json

FILE = Path(four_ranks.__file__).name
LINE = 1 + Path(four_ranks.__file__).read_text().splitlines().index('    return hw.matmul(x, w).stream("M", chunks=RANKS)')
AT = rf"\({FILE}:{LINE}, program\.cpp:\d+\)"
SIGNAL = "HW_CHECK(channel_x_.signal((rank_x - i + 4) % 4, 0, stream));"
RECV = "HW_CHECK(ncclRecv("
ALWAYS = "rank_.index() == 2 && i == 2"
IS_FAULTY = f"{ALWAYS} && w[0] == 99"


def with_fault(folder: Path, transport: str, place: str, fault: str) -> hw.Program:
    """Returns ag_matmul with `fault` inserted before the text `place` in the C++ code. A fault such as `if (...)` makes the statement at
    `place` conditional."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTWEAVE_EDIT", str(folder))
        options = hw.Options(transport=transport)
        _ = hw.compile(ag_matmul, options=options).folder
        file = folder / "ag_matmul" / "program.cpp"
        head, found, tail = file.read_text().partition(place)
        assert found, file.read_text()
        file.write_text(f"#include <unistd.h>\n#include <csignal>\n{head}{fault}{found}{tail}")
        program = hw.compile(ag_matmul, options=options)
        program.build()
    return program


PROCESS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start without this handler
sys.path.insert(0, {tests!r})
import numpy as np
import hostweave as hw
from hostweave.base.errors import ExecutionError
from four_ranks import X, W, ag_matmul, x_of

rank = int(os.environ["RANK"])
group = hw.init(hw.Environment(), timeout=120, call_timeout={limit})
program = hw.compile(ag_matmul, options=hw.Options(transport={transport!r}))
np.testing.assert_array_equal(program(x_of(rank), W), X @ W)
weights = W.copy()
weights[0, 0] = 99
again = lambda: program(x_of(rank), weights)
if {captured}:
    again = program.capture(x_of(rank), W)
    again()
try:
    print("ready", flush=True)
    if {never} and rank == 2:
        time.sleep(60)
    again()
except (ExecutionError, KeyboardInterrupt) as error:
    print(type(error).__name__, error, flush=True)
"""


class Processes:
    """Ranks as processes. Each rank prints "ready" before its last call."""

    def __init__(
        self,
        folder: Path,
        transport: str,
        place: str = "",
        fault: str = "",
        limit: float = 60,
        never: bool = False,
        captured: bool = False,
    ):
        tests = str(Path(four_ranks.__file__).parent)
        script = PROCESS.format(tests=tests, transport=transport, limit=limit, never=never, captured=captured)
        common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        if fault:
            with_fault(folder, transport, place, fault).close()  # The program is built once. The ranks find the edited files.
            common["HOSTWEAVE_EDIT"] = str(folder)
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
        paths = os.pathsep.join([tests, str(Path(tests).parent), os.environ.get("PYTHONPATH", "")])
        self.processes = [
            Forked(
                [sys.executable, "-c", script],
                env=clean | common | {"RANK": str(rank), "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def __enter__(self) -> Processes:
        for process in self.processes:
            assert process.stdout
            first = process.stdout.readline()
            assert first == "ready\n", first + (process.stderr.read() if process.stderr else "")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def said(self, rank: int) -> tuple[str, str]:
        return self.processes[rank].communicate(timeout=120)


def of_rank(report: str, rank: int) -> str:
    found = re.search(rf"^  rank {rank}: .*(?:\n    .*)*", report, re.M)
    assert found, report
    return found[0]


def test_a_rank_that_is_killed_in_a_loop(tmp_path: Path) -> None:
    fault = f"if ({IS_FAULTY}) {{ usleep(500000); raise(SIGKILL); }}\n"
    with Processes(tmp_path, "two_sided", RECV, fault) as ranks:
        out, err = ranks.said(1)
    for report in (out, err):
        assert "group 'default': rank 2: its process has ended" in report
        assert of_rank(report, 2) == "  rank 2: does not answer"
        assert re.search(
            rf"  loop\[\d\]: ncclRecv\(\w+, \.\.\.\) {AT} waits on x for rank 2, which does not answer; done up to ", of_rank(report, 1)
        )
        assert re.search(rf"  caller: loop_\.join\(caller\) {AT} waits for loop\[\d\]; done up to ", of_rank(report, 1))


@pytest.mark.parametrize("transport", ["peer", "one_sided"])
def test_a_signal_that_is_lost(transport: str, tmp_path: Path) -> None:
    place = SIGNAL if transport == "peer" else "HW_CHECK(ncclSignal((rank_x - i + 4) % 4, "
    with Processes(tmp_path, transport, place, f"if (!({IS_FAULTY}))\n", limit=3) as ranks:
        _, report = ranks.said(0)
    assert "call 2 of ag_matmul is not done after 3 seconds" in report
    # Rank 0 waits for a signal of rank 2. Rank 2 has received all signals, so it has ended the call.
    waits = (
        rf"peer_copies\[0\]: \S*wait_signal\(p, .*\) {AT} waits on x for signal 0 of rank 2, which is done with call 2; "
        rf"done up to \S+\(.*\) {AT}; \d+ more operations? queued"
    )
    assert re.search(waits, of_rank(report, 0)), report
    assert re.search(
        rf"loop\[\d\]: cudaStreamWaitEvent\(stream, arrived_\[i\], 0\) {AT} waits for peer_copies\[0\], for the event of ",
        of_rank(report, 0),
    )
    assert of_rank(report, 2) == "  rank 2: ag_matmul: 2 calls, 2 done"


def test_a_rank_that_never_calls(tmp_path: Path) -> None:
    with Processes(tmp_path, "two_sided", limit=3, never=True) as ranks:
        _, report = ranks.said(1)
    assert re.search(r"waits on x for rank 2, which has not made call 2; ", of_rank(report, 0)), report
    assert of_rank(report, 2) == "  rank 2: ag_matmul: 1 calls, 1 done"


def test_ctrl_c_reports_the_positions_of_ranks(tmp_path: Path) -> None:
    fault = f"if ({IS_FAULTY}) usleep(20000000);\n"
    with Processes(tmp_path, "two_sided", RECV, fault) as ranks:
        time.sleep(3)  # Rank 1 should then wait in its call. The fault of rank 2 lasts for 20 seconds.
        ranks.processes[1].send_signal(signal.SIGINT)
        out, report = ranks.said(1)
    assert out == "KeyboardInterrupt \n", report
    assert "group 'default': rank 1: KeyboardInterrupt" in report
    assert re.search(r"loop\[\d\]: ncclRecv\(\w+, \.\.\.\) .* waits on x for rank 2; done up to ", of_rank(report, 1)), report
    assert re.search(rf"  host: enqueued up to \S+\(.*\) {AT}\n", of_rank(report, 2)), report


def test_ctrl_c_of_all_ranks_in_a_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault = f"for (int waits = 0; {ALWAYS} && hw_cpu_failed() == 0 && waits < 600; ++waits) usleep(100000);\n"
    program = with_fault(tmp_path, "two_sided", RECV, fault)
    timer = threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            program.run(X, W)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    report = capfd.readouterr().err
    assert "hostweave: ag_matmul: KeyboardInterrupt" in report
    assert re.search(rf"loop\[\d\]: ncclRecv\(\w+, \.\.\.\) {AT} waits on x for rank 2; done up to ", of_rank(report, 0)), report
    assert "  host: enqueued up to " in of_rank(report, 2)
    np.testing.assert_array_equal(AG_MATMUL.run(X, W), X @ W)


def test_a_lost_signal_in_one_process(tmp_path: Path) -> None:
    """The report of the CPU device names the rank whose signal is missing."""
    program = with_fault(tmp_path, "peer", SIGNAL, f"if (!({ALWAYS}))\n")
    with cpu.parallel(timeout_seconds=20), pytest.raises(ExecutionError) as caught:
        program.run(X, W)
    waits = rf"rank 0 stream \d+: [^\n]*signal[^\n]* {AT} waits for a signal of rank 2, with \d+ operations? behind it; done up to .* {AT}"
    assert re.search(waits, str(caught.value)), caught.value


def test_the_fault_on_gpus_is_before_the_signal_after_the_put() -> None:
    source = hw.compile(gathered_by_puts, target="cuda", options=hw.Options(transport="peer")).source
    for text in (source, re.sub(" +//.*", "", source)):  # with and without comments
        before, _, after = without_a_signal(text).partition(FAULT)
        assert "cudaMemcpyAsync(arena_.on_peer(channel_x_, (rank_x - i + 2) % 2, " in before.split(";")[-2]
        assert after.startswith("HW_CHECK(channel_x_.signal((rank_x - i + 2) % 2, ")


def test_a_rank_that_never_launches_a_graph(tmp_path: Path) -> None:
    """A report also has lines for the streams of a launched graph."""
    with Processes(tmp_path, "two_sided", limit=3, never=True, captured=True) as ranks:
        _, report = ranks.said(1)
    assert re.search(rf"loop\[\d\]: ncclRecv\(\w+, \.\.\.\) {AT} waits on x for rank 2, which has not made call 4; ", of_rank(report, 0)), (
        report
    )
    assert of_rank(report, 2) == "  rank 2: ag_matmul: 3 calls, 3 done"


def test_notes() -> None:
    position = RankPosition("p", 3, 2, call=3, begun=[("x", [0, 1], 2)])
    assert from_json(to_json([position])) == [position]


def test_ranks_that_have_reached_a_collective() -> None:
    waits = {
        "name": "comm[0]",
        "done": "",
        "next": "b (program.cpp:8)",
        "behind": 0,
        "edge": "collective",
        "source": "",
        "source_stream": "",
    }
    stream = waits | {"channel": "x", "ranks": [0, 1, 2, 3], "number": 0, "nth": 2}
    first = RankPosition("p", 5, 4, call=5, streams=[stream], begun=[("x", [0, 1, 2, 3], 2)])
    behind = RankPosition("p", 5, 4, call=5, begun=[("x", [0, 1, 2, 3], 1)])
    lines = describe([[first], [behind], [RankPosition("p", 5, 5)], [RankPosition("p", 4, 4)]])
    assert lines[1] == "    comm[0]: b (program.cpp:8) waits on x for rank 1, rank 3, which has not made call 5; nothing done"
    assert describe([[first], None, [first], [first]])[1].endswith("waits on x for rank 1, which does not answer; nothing done")
    assert "has begun on x, and so have all ranks that it waits for" in describe([[first]] * 4)[1]


def test_a_missing_rank_that_is_a_thread() -> None:
    late = threading.Event()

    def rank(rank: int) -> None:
        AG_MATMUL(x_of(rank), W)
        if rank == 2:
            late.wait(20)
            return
        try:
            AG_MATMUL(x_of(rank), W)
        finally:
            late.set()

    message = str(on_ranks(rank, call_timeout=1)[0])
    assert re.search(rf"timed out after 1 s waiting for rank 2; .* on x` \({FILE}:{LINE}\) needs all ranks of its channel along x", message)


@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def summed_only_here(x):
    return hw.sum(x, axis=0)


def test_messages_name_the_users_line() -> None:
    """If the user's lines are added to a message twice, the message names each line once."""
    module = hw.compile(summed_only_here).compiled.module
    lines = Path(str(module.__file__)).with_name("program.cpp").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if "ncclAllReduce" in line)
    users = re.search(r"// (test_hangs\.py:\d+)  return hw\.sum\(x, axis=0\)", "\n".join(lines))
    assert users
    named = f"{users[1]}, program.cpp:{number}"
    text = f"program.cpp:{number}: call: failed; also (program.cpp:{number}) and program.cpp:1"
    once = with_source_lines(text, module)
    assert once == f"{named}: call: failed; also ({named}) and program.cpp:1"
    assert with_source_lines(once, module) == once
