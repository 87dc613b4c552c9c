"""Programs that deadlock, or whose communications do not match. The check raises an error at compile time. Without the check, a run ends
with a report."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import host_text
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.options import Options
from hostweave.runtime.cpu import parallel, seeded

SEVERAL_SECONDS = 60  # time limit, far longer than the time until a report

SEND_ALONE = """\
if rank.x == 0 {
  send %x to 1 on x
}
copy %x -> %y
"""
BOTH_SEND_FIRST = """\
send %x to 1 - rank.x on x
recv %y from 1 - rank.x on x
"""
COUNTS = """\
%half = chunk %y[1: 0 of 2]
if rank.x == 0 {
  send %x to 1 on x
  copy %x -> %y
} else {
  recv %half from 0 on x
}
"""
ROOTS = """\
broadcast %x -> %y from rank.x on x
"""
NO_SIGNAL = """\
%w = allocate_window f32[1, N]
copy %x -> %w
if rank.x == 0 {
  wait_signal 0 from 1 until %w is free on peers
}
copy %w -> %y
"""
# For each body: the message of the check, and the report of the CPU device.
CASES = {
    "send_alone": (
        SEND_ALONE,
        "text:3: rank 0, the caller's stream: send %x to 1 on x: rank 1 posts no recv for it: add the recv, or drop this send",
        "send_alone: deadlock: no rank can continue\n"
        "  rank 0 stream S: send x over communicator C (program.cpp:L) waits for rank 1, with 3 operations behind it; "
        "done up to wait (program.cpp:L)\n"
        "  host of rank 0 waits for a copy (staging.cpp:L)",
    ),
    "both_send_first": (
        BOTH_SEND_FIRST,
        "text:2: rank 0, the caller's stream: send %x to 1 - rank.x on x meets rank 1, the caller's stream: recv %y from 1 - rank.x on x, "
        "which comes after rank 1, the caller's stream: send %x to 1 - rank.x on x, which meets rank 0, the caller's stream: "
        "recv %y from 1 - rank.x on x, which comes after rank 0, the caller's stream: send %x to 1 - rank.x on x: "
        "none of them can proceed; "
        "post matching communications in one group, or in the same order on every rank",
        "both_send_first: deadlock: no rank can continue\n"
        "  rank 0 stream S: send x over communicator C (program.cpp:L) waits for rank 1, with 3 operations behind it; "
        "done up to wait (program.cpp:L)\n"
        "  rank 1 stream S: send x over communicator C (program.cpp:L) waits for rank 0, with 3 operations behind it; "
        "done up to wait (program.cpp:L)\n"
        "  host of rank 0 waits for a copy (staging.cpp:L)\n"
        "  host of rank 1 waits for a copy (staging.cpp:L)",
    ),
    "counts": (
        COUNTS,
        "text:4: rank 0, the caller's stream: send %x to 1 on x: sends 4 f32, not the 2 f32 of the matching recv, "
        "rank 1, the caller's stream: recv %half from 0 on x: make them equal",
        "counts: mismatch: the counts differ: 4 and 2\n"
        "  rank 0 stream S: send x over communicator C (program.cpp:L)\n"
        "  rank 1 stream S: recv y over communicator C (program.cpp:L)",
    ),
    "roots": (
        ROOTS,
        "text:2: rank 0, the caller's stream: broadcast %x -> %y from rank.x on x: is collective 1 of its process group, "
        "but another rank calls a different one, "
        "rank 1, the caller's stream: broadcast %x -> %y from rank.x on x: "
        "issue the same collectives in the same order, with equal counts, on every rank",
        "roots: mismatch: the roots differ: 0 and 1\n"
        "  rank 0 stream S: broadcast y over communicator C (program.cpp:L)\n"
        "  rank 1 stream S: broadcast y over communicator C (program.cpp:L)",
    ),
    "no_signal": (
        NO_SIGNAL,
        "text:5: rank 0, the caller's stream: wait_signal 0 from 1 until %w is free on peers: rank 1 sends no such signal: "
        "add the signal, or drop this wait",
        "no_signal: deadlock: no rank can continue\n"
        "  rank 0 stream S: wait for signals over communicator C (program.cpp:L) waits for a signal of rank 1, "
        "with 3 operations behind it; "
        "done up to copy w_ (program.cpp:L)\n"
        "  host of rank 0 waits for a copy (staging.cpp:L)",
    ),
}


def program_of(name: str) -> hw.HostProgram:
    body = CASES[name][0]
    channels = " channels(peers: x one_sided)" if "on peers" in body else ""
    return host_text.parse(f"host @{name}(%x: f32[2@x, N]) -> (%y: f32[2@x, N]) mesh(x=2){channels} {{\n{body}}}\n")


@pytest.mark.parametrize("name", CASES)
def test_the_check_reports_the_deadlock(name: str) -> None:
    with pytest.raises(ProgramError) as caught:
        hw.compile(program_of(name))
    assert str(caught.value) == CASES[name][1]


@pytest.mark.parametrize("how", [lambda: parallel(timeout_seconds=20), lambda: seeded(0, buffered_sends=False)], ids=["parallel", "seeded"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_reports_the_deadlock(name: str, how: Callable[[], AbstractContextManager[None]]) -> None:
    program = hw.compile(program_of(name), options=Options(check=False))
    same_report(report_of(program, how), CASES[name][2])


def same_report(found: str, wanted: str) -> None:
    """Compares two reports. Either rank may be reported first."""
    assert sorted(found.split()) == sorted(wanted.split()), found


def report_of(program: hw.Program, how: Callable[[], AbstractContextManager[None]]) -> str:
    """Error of a run. S, C and L replace the numbers of streams, communicators and lines."""
    reports: list[str] = []

    def run() -> None:
        try:
            with how():
                program.run(x=np.ones((2, 4), np.float32))
        except ExecutionError as error:
            reports.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SEVERAL_SECONDS)
    assert not thread.is_alive(), "it hangs"
    (report,) = reports
    for number, letter in ((r"(?<=stream )\d+", "S"), (r"(?<=communicator )\d+", "C"), (r"(?<=\.cpp:)\d+", "L")):
        report = re.sub(number, letter, report)
    return report


EXAMPLE = """\
host @orders(%x: f32[2@x, N]) -> (%y: f32[2@x, N], %z: f32[2, N]) mesh(x=2) {
  all_reduce sum %x -> %y on x
  all_gather %x -> %z on x
}
"""


def test_collectives_in_another_order_on_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host IR cannot express different orders of collectives on different ranks, so the test edits the C++."""
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path))
    hw.compile(host_text.parse(EXAMPLE)).build()
    source = tmp_path / "orders" / "program.cpp"
    first, second = (line for line in source.read_text().splitlines() if line.startswith("  HW_CHECK(nccl"))
    swapped = f"if (rank_.index() == 0) {{ {first} {second} }} else {{ {second} {first} }}"
    source.write_text(source.read_text().replace(f"{first}\n{second}", swapped))
    program = hw.compile(host_text.parse(EXAMPLE))
    same_report(
        report_of(program, lambda: parallel(timeout_seconds=20)),
        "orders: mismatch: the kinds differ: all_reduce and all_gather\n"
        "  rank 0 stream S: all_reduce y over communicator C (program.cpp:L)\n"
        "  rank 1 stream S: all_gather z over communicator C (program.cpp:L)",
    )
