"""Reports of hangs on GPUs. In most tests, two ranks are processes that share one GPU, and signal each other by transport `peer`."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.build.cuda import gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpus(), reason="needs a GPU, and there is none"),
]
RANKS = 2
SIGNAL = "HW_CHECK(channel_x_.signal((rank_x - i + 2) % 2, 0, stream));"
FAULT = 'if (!(rank_.index() == 1 && i == 1 && std::getenv("HOSTWEAVE_TEST_FAULT")))\n'
AT = r"\(test_hangs_on_gpus\.py:\d+, program\.cpp:\d+\)"


@hw.fusion(mesh=hw.Mesh(x=RANKS), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def gathered_by_puts(x, w):
    return hw.matmul(x, w).stream("M", chunks=RANKS, algorithm="put")


def without_a_signal(source: str) -> str:
    """C++ in which rank 1 omits the signal after a put, if an environment variable is set."""
    head, found, tail = source.partition(SIGNAL)
    assert source.count(SIGNAL) == 1, source
    return f"#include <cstdlib>\n{head}{FAULT}{found}{tail}"


def with_fault(folder: Path) -> hw.Program:
    """Builds the program with the C++ of `without_a_signal`."""
    os.environ["HOSTWEAVE_EDIT"] = str(folder)
    options = hw.Options(transport="peer")
    _ = hw.compile(gathered_by_puts, target="cuda", options=options).folder
    file = folder / "gathered_by_puts" / "program.cpp"
    file.write_text(without_a_signal(file.read_text()))
    program = hw.compile(gathered_by_puts, target="cuda", options=options)
    program.build()
    del os.environ["HOSTWEAVE_EDIT"]
    return program


def hang(folder: str, how: str) -> None:
    """Runs one rank: correct calls, and then a call that hangs on rank 0. Prints the error of the group."""
    import torch

    group = hw.init(hw.Environment(), timeout=120, call_timeout=4, device=0)
    torch.cuda.set_device(0)
    program = with_fault(Path(folder) / str(group.rank))
    x, w = torch.ones(128, 64, device="cuda"), torch.ones(64, 32, device="cuda")
    call = lambda: program(x, w)  # noqa: E731
    assert call().sum().item() == 256 * 32 * 64
    if how == "graph":
        call = program.capture(x, w)
        call()
        torch.cuda.synchronize()
    if how == "signal":
        os.environ["HOSTWEAVE_TEST_FAULT"] = "1"
    if how == "signal" or group.rank == 0:
        for _ in range(3 if how == "graph" else 1):  # With several launches, the host is ahead of the GPU.
            call()
    torch.cuda.synchronize()  # This call returns when the watchdog has aborted the channel.
    while not group.failure:
        torch.cuda.synchronize()
    try:
        group.check()
    except ExecutionError as error:
        print(error, flush=True)


def report_of(folder: Path, how: str) -> str:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), how],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    return said[0]


def test_a_signal_that_is_lost(tmp_path: Path) -> None:
    """The report names the signal, and the rank that omitted the signal."""
    report = report_of(tmp_path, "signal")
    assert "call 2 of gathered_by_puts is not done after 4 seconds" in report, report
    assert "rank 0: gathered_by_puts: 2 calls, 1 done" in report, report
    waits = (
        rf"peer_copies\[0\]: channel_x_\.wait_signal\(p, 0, stream\) {AT} waits on x for signal 0 of rank 1[^;]*; "
        rf"done up to channel_x_\.signal\(.*\) {AT}"
    )
    assert re.search(waits, report), report
    assert re.search(rf"loop\[\d\]: cudaStreamWaitEvent\(stream, arrived_\[i\], 0\) {AT} waits for peer_copies\[0\]", report), report


def test_a_rank_that_never_launches_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the unfinished launch, and the variable HOSTWEAVE_GRAPH_PROGRESS. If the variable is set, the report names the lines
    that wait."""
    report = report_of(tmp_path, "graph")
    assert "call 4 of gathered_by_puts is not done after 4 seconds" in report, report
    assert "rank 1: gathered_by_puts: 3 calls, 3 done" in report, report
    unknown = r"or a later line is not done \(graphs report progress only with HOSTWEAVE_GRAPH_PROGRESS=1\)"
    assert re.search(rf"peer_copies\[0\]: .* {AT} {unknown}", report), report
    monkeypatch.setenv("HOSTWEAVE_GRAPH_PROGRESS", "1")
    report = report_of(tmp_path, "graph")
    waits = rf"peer_copies\[0\]: .* {AT} waits on x for (the credit of )?signal 0.* (of|by) rank 1, which has not made call 4"
    assert re.search(rf"{waits}; done up to .* {AT}", report), report
    assert re.search(rf"loop\[\d\]: cudaStreamWaitEvent\(stream, arrived_\[i\], 0\) {AT} waits for peer_copies\[0\]", report), report


if __name__ == "__main__":
    hang(*sys.argv[1:])


ENDS = """
import os, signal, sys, threading
import numpy as np
import hostweave as hw

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def total(x):
    return hw.sum(x, axis=0)

program = hw.compile(total, target="cuda")
program.build()
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        program.run(np.ones((4, 3), np.float32))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(len(gpus()) < 2, reason="needs 2 GPUs")
def test_a_process_ends_while_it_makes_channels() -> None:
    """The process can exit while its daemon threads are in calls of NCCL."""
    delays = ("0.1", "0.3", "0.5", "0.7", "0.9", "1.2")
    command = [sys.executable, "-c", ENDS]
    started = [subprocess.Popen([*command, delay], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for delay in delays]
    for process in started:
        printed, errors = process.communicate(timeout=100)
        assert (process.returncode, printed) == (0, "interrupted\n"), errors
