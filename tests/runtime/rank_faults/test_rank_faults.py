"""Faults in groups: ranks that fail, are late, exit, or make different calls."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forked
from four_ranks import AG_MATMUL, RANKS, ROWS_AND_COLUMNS, TWICE, W, X, ag_matmul, on_ranks, x_of
from launched_ranks import run_processes
from processes import environment, free_port

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.runtime import group as groups

GATHER = r"; `recv %\w+ from .* on x` \(four_ranks.py:\d+\) needs all ranks of its channel along x of mesh\(x=4\)"


def messages(results: list[Any]) -> list[str]:
    assert all(isinstance(result, (ArgumentError, ExecutionError)) for result in results), results
    return [str(result) for result in results]


def then_works(fault: Callable[[int], Any]) -> list[Any]:
    """Runs `fault` on all ranks. Tests that the group works afterwards. Returns the error message of each rank."""

    def rank(rank: int) -> Any:
        try:
            fault(rank)
        except (ArgumentError, ExecutionError) as error:
            np.testing.assert_array_equal(AG_MATMUL(x_of(rank), W), X @ W)
            return error
        return None

    return messages(on_ranks(rank))


def test_a_rank_with_a_wrong_array() -> None:
    errors = then_works(lambda rank: AG_MATMUL(x_of(rank), W if rank != 2 else W.astype(np.float64)))
    reason = "ag_matmul: w: expected f32[K, N], got f64[8, 12]; cast it, or compile for f64"
    assert errors == [reason if rank == 2 else f"ag_matmul: rank 2 cannot continue: {reason}" for rank in range(RANKS)]


def test_a_rank_with_another_size() -> None:
    errors = then_works(lambda rank: AG_MATMUL(x_of(rank), W if rank != 3 else W[:, :6].copy()))
    assert errors == ["ag_matmul: w: rank 3 passes [8, 6], and rank 0 [8, 12]; pass blocks of one array f32[K, N]"] * RANKS
    errors = then_works(lambda rank: AG_MATMUL(X[:5] if rank == 2 else x_of(rank), W))
    assert errors == ["ag_matmul: x: rank 2 passes [5, 8], and rank 0 [4, 8]; pass blocks of one array f32[M@x, K]"] * RANKS


def test_a_rank_that_calls_another_program() -> None:
    errors = then_works(lambda rank: TWICE(x_of(rank)) if rank == 1 else AG_MATMUL(x_of(rank), W))
    calls = "rank 1 calls twice on mesh(x=4), and rank 0 calls ag_matmul on mesh(x=4)"
    reason = f"{calls}; all ranks of a group call the same programs in the same order"
    assert errors == [f"{'twice' if rank == 1 else 'ag_matmul'}: {reason}" for rank in range(RANKS)]


def test_ranks_that_call_in_another_order() -> None:
    def rank(rank: int) -> None:
        TWICE(x_of(rank))
        AG_MATMUL(x_of(rank), W)
        for program in (TWICE, AG_MATMUL) if rank else (AG_MATMUL, TWICE):
            program(*([x_of(rank)] if program is TWICE else [x_of(rank), W]))

    errors = messages(on_ranks(rank))
    calls = "rank 1 calls twice on mesh(x=4), and rank 0 calls ag_matmul on mesh(x=4)"
    reason = f"{calls}; all ranks of a group call the same programs in the same order"
    assert errors == [f"{'twice' if rank else 'ag_matmul'}: {reason}" for rank in range(RANKS)]


def test_a_rank_with_another_mesh_or_other_options() -> None:
    wide = hw.compile(ag_matmul, options=hw.Options(streams=2))
    assert (
        then_works(lambda rank: (wide if rank == 1 else AG_MATMUL)(x_of(rank), W))
        == [
            "ag_matmul: rank 1 and rank 0 call different programs of the same name; "
            "compile one program, with the same options, on all ranks"
        ]
        * RANKS
    )
    errors = then_works(lambda rank: ROWS_AND_COLUMNS(X) if rank == 1 else AG_MATMUL(x_of(rank), W))
    assert errors[0].startswith("ag_matmul: rank 1 calls rows_and_columns on mesh(dp=2, tp=2), and rank 0 calls ag_matmul on mesh(x=4)")


@pytest.fixture
def late() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_rank_that_never_calls_the_program(late: threading.Event) -> None:
    def rank(rank: int) -> Any:
        AG_MATMUL(x_of(rank), W)
        if rank == 2:
            late.wait(20)
        else:
            try:
                AG_MATMUL(x_of(rank), W)
            except ExecutionError as error:
                if rank == 0:
                    late.set()
                with pytest.raises(
                    ExecutionError,
                    match=r"^group 'default' has failed and cannot be reused: timed out after 0.5 s waiting for rank 2.*; call hw",
                ):
                    AG_MATMUL(x_of(rank), W)
                return error
        with pytest.raises(ExecutionError, match=r"timed out after 0\.5 s waiting for rank 2"):
            AG_MATMUL(x_of(rank), W)
        return None

    results = on_ranks(rank, call_timeout=0.5)
    assert results.pop(2) is None
    for message in messages(results):
        assert re.fullmatch(r"ag_matmul: timed out after 0.5 s waiting for rank 2" + GATHER, message)


def test_a_rank_that_raises_or_ends() -> None:
    started = time.monotonic()
    provider = hw.Threads(RANKS)
    seen: dict[int, str] = {}
    first_call_done = threading.Barrier(RANKS)

    def rank(rank: int) -> None:
        hw.init(provider)
        AG_MATMUL(x_of(rank), W)
        first_call_done.wait()
        if rank == 1:
            raise KeyError("data")
        try:
            AG_MATMUL(x_of(rank), W)
        except ExecutionError as error:
            seen[rank] = str(error)

    with pytest.raises(KeyError, match="data"):
        provider.run(rank)
    assert sorted(seen) == [0, 2, 3]
    for message in seen.values():
        assert re.fullmatch(r"ag_matmul: rank 1: KeyError: 'data'" + GATHER, message)

    def ends(rank: int) -> Any:
        return None if rank == 1 else AG_MATMUL(x_of(rank), W)

    results = on_ranks(ends)
    assert results.pop(1) is None
    for message in messages(results):
        assert re.fullmatch(r"ag_matmul: rank 1: its thread has ended" + GATHER, message)
    assert time.monotonic() - started < 20


FORK = "  HW_CHECK(loop_.fork(caller));\n"
GUARD = "      const hw::CloseGroupOnError guard;\n"
RECV = "channel_x_.comm(), stream));\n"
PUTS = "HW_CHECK(peer_copies_.fork(caller));\n"


@pytest.mark.parametrize(
    ("transport", "place"),
    [("two_sided", FORK), ("two_sided", GUARD), ("two_sided", RECV), ("peer", PUTS), ("one_sided", PUTS)],
    ids=[
        "before a loop",
        "inside a group",
        "inside a group with a recv in it",
        "while others wait for its signal",
        "while others wait for a signal of NCCL",
    ],
)
def test_a_rank_that_fails_in_the_middle(transport: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 fails while the other ranks are in their calls. Afterwards, a new group of the same threads works, and so does `run`."""
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path))
    options = hw.Options(transport=transport)
    _ = hw.compile(ag_matmul, options=options).folder
    file = tmp_path / "ag_matmul" / "program.cpp"
    head, found, tail = file.read_text().partition(place)
    assert found
    bomb = 'if (rank_.index() == 2 && w[0] == 99) throw hw::ExecutionError("no luck");\n'
    file.write_text('#include "hostweave/errors.h"\n' + head + found + bomb + tail)
    program = hw.compile(ag_matmul, options=options)
    program.build()
    monkeypatch.delenv("HOSTWEAVE_EDIT")
    trap = W.copy()
    trap[0, 0] = 99
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> str:
        hw.init(provider)
        np.testing.assert_array_equal(program(x_of(rank), W), X @ W)
        with pytest.raises(ExecutionError) as caught:
            program(x_of(rank), trap)
        again = hw.init(provider)
        np.testing.assert_array_equal(program(x_of(rank), W, group=again), X @ W)
        np.testing.assert_array_equal(AG_MATMUL(x_of(rank), W, group=again), X @ W)
        return str(caught.value)

    errors = provider.run(rank)
    assert errors[2] == "ag_matmul: no luck"
    for error in (errors[rank] for rank in (0, 1, 3)):
        assert re.search("rank 2: (ag_matmul: )?no luck", error)
    np.testing.assert_array_equal(AG_MATMUL.run(x=X, w=W), X @ W)


def test_a_rank_that_closes_its_group() -> None:
    gone = threading.Event()

    def rank(rank: int) -> Any:
        if rank == 3:
            groups.current().close()
            gone.set()
            time.sleep(0.5)
            return None
        gone.wait()
        return AG_MATMUL(x_of(rank), W)

    results = on_ranks(rank)
    assert results.pop(3) is None
    for message in messages(results):
        assert re.fullmatch(r"ag_matmul: rank 3 has left" + GATHER, message)


def test_the_process_that_keeps_the_store_is_killed() -> None:
    """Rank 1 reports that the store of rank 0 does not answer. The group has failed, but rank 1 can join a new group of one rank."""
    script = """
import os, subprocess, sys
import hostweave as hw

keep = "import sys, hostweave as hw; group = hw.init(hw.Environment()); print(group.rank, flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
with subprocess.Popen([sys.executable, "-c", keep], env=os.environ | {"RANK": "0"}, **pipes) as keeper:
    group = hw.init(hw.Environment())
    keeper.stdout.readline()
    keeper.kill()
try:
    group.check()
except hw.base.errors.ExecutionError as error:
    print(error)
print(group.failure is not None)
again = hw.init(hw.Environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["OTHER_PORT"]}))
print(again.rank, again.count, again.failure)
"""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OTHER_PORT": free_port()}
    said, has_failed, again = run_processes(script, [{"RANK": "1", "WORLD_SIZE": "2", **address}])[0].splitlines()
    assert re.fullmatch(
        r"group 'default' has failed and cannot be reused: the store in the process of rank 0 does not answer \(.*\); "
        r"check whether that process has ended; call hw\.init again",
        said,
    )
    assert (has_failed, again) == ("True", "0 1 None")


def test_rank_0_is_stopped_before_the_first_call() -> None:
    """A request to the store ends after `call_timeout`, although the first call of a program may take longer, up to `timeout`."""
    script = "import hostweave as hw, sys; hw.init(group='stopped'); print('ready', flush=True); sys.stdin.read()"
    limit = 2
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
    def gathered(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "M", "K")

    program = hw.compile(gathered)
    program.build()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Forked([sys.executable, "-c", script], env=environment(**place, RANK="0"), **pipes) as first:
        try:
            group = hw.init(hw.Environment({**place, "RANK": "1"}), "stopped", call_timeout=limit)
            assert first.stdout
            first.stdout.readline()
            first.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(ExecutionError, match="the store in the process of rank 0 does not answer"):
                program(x_of(1), group=group)
            assert time.monotonic() - started < limit + 4
        finally:
            first.kill()
        group.close()
        for thread in threading.enumerate():
            if thread.name == "hostweave watchdog of stopped":  # The report of this thread would reach the terminal after the test.
                thread.join(20)


FAULTS = """
import os, time
import numpy as np
import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.runtime import cpu, rendezvous

mesh = hw.Mesh(x=2)

@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def gathered(x):
    return hw.reshard(x, "M", "K")

@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def other(x):
    return hw.reshard(x + x, "M", "K")

def said(call):
    try:
        print(call())
    except HostweaveError as error:
        print(type(error).__name__, *str(error).split())

def anew(attempt, **more):
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": str(attempt)}
    return hw.init(hw.Environment(environment), timeout=20, **more)

rank = int(os.environ["RANK"])
x = np.full((2, 3), rank, np.float32)
program, verified, another = hw.compile(gathered), hw.compile(gathered, options=hw.Options(verify_calls=True)), hw.compile(other)
anew(0)
said(lambda: program(x)[::2, 0])
with cpu.seeded(3):
    said(lambda: program(x))
said(lambda: (hw.compile(gathered) if rank else another)(x))  # compares programs
said(lambda: verified(x if rank else x[:, :2].copy()))
said(lambda: verified(x)[::2, 0])
said(lambda: program(x if rank else x[:1]))  # only rank 0 compares sizes
anew(1, call_timeout=1)
said(lambda: program(x)[::2, 0])
if rank == 1:
    time.sleep(4)
said(lambda: program(x))
rendezvous.this_host = lambda: str(rank)
anew(2)
said(lambda: program(x))
"""


def test_errors_of_ranks_as_processes_on_the_cpu() -> None:
    """Ranks report different programs and sizes, a late rank, and features that need threads or one host."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    outputs = run_processes(FAULTS, [common | {"RANK": str(rank)} for rank in range(2)])
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if not line.startswith(("hostweave:", "  "))]  # Reports of the watchdog are omitted.
        right, seeded, programs, sizes, again, counts, anew, late, hosts = lines
        assert (right, again, anew) == ("[0. 1.]",) * 3
        assert seeded == (
            "ArgumentError gathered: seeded schedules, buffered sends and the check of dependencies need ranks that are threads of one "
            "process, but group 'default' has 2 processes; use hw.Threads or program.run"
        )
        assert "rank 1 calls gathered on mesh(x=2), and rank 0 calls other on mesh(x=2); all ranks of a group call the same" in programs
        assert "gathered: x: rank 1 passes [2, 3], and rank 0 [2, 2]; pass blocks of one array f32[M@x, K]" in sizes
        assert (
            "x: rank 0 passes block [1, 3] of an array [2, 3], rank 1 passes block [2, 3] of an array [4, 3]; pass blocks of one array"
            in counts
        )
        assert "rank 0: call 2 of gathered is not done after 1 seconds" in late or (rank == 1 and "has failed" in late), late
        assert hosts == (
            "ArgumentError gathered: is for the target cpu, whose ranks share the memory of one host; group 'default' is on 2 hosts; "
            "compile for cuda, or start all ranks on one host"
        )
