"""Reports of progress during long operations: a line on a terminal, nothing if stderr is piped, and records of the logger."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hostweave as hw
from hostweave.base.progress import expect_tasks, progress, task_done, tell

COMPILE = [sys.executable, "-m", "hostweave", "compile", "seeds:ag_matmul_p2p"]


def on_terminal(command: list[str], cache: Path) -> tuple[str, str]:
    """Runs a command with a terminal as stderr. Returns the command's output on stdout and on the terminal."""
    terminal, stderr = pty.openpty()
    environment = {**os.environ, "HOSTWEAVE_CACHE": str(cache), "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True) as run:
        os.close(stderr)
        shown = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # On Linux, os.read fails after the other end of the terminal is closed.
                break
            if not part:
                break
            shown += part
        out, _ = run.communicate(timeout=300)
    os.close(terminal)
    assert run.returncode == 0, shown
    return out, shown.decode()


def test_compiling_shows_its_tasks_on_a_terminal(tmp_path: Path) -> None:
    out, shown = on_terminal(COMPILE, tmp_path)
    tasks = [
        (int(done), int(count)) for done, count in re.findall(r"hostweave: compiling ag_matmul_p2p: (\d+) of (\d+), \S+, [\d.]+ s", shown)
    ]
    assert tasks
    assert [done for done, _ in tasks] == list(range(1, len(tasks) + 1))
    assert all(done <= count for done, count in tasks)
    assert tasks[-1][0] == tasks[-1][1]  # The last task is linking.
    assert shown.endswith("\r\x1b[K")  # The line is cleared.
    assert "hostweave:" not in out
    assert on_terminal(COMPILE, tmp_path) == (out, "\r\x1b[K")  # In the second run, the program is in the cache.


def test_nothing_is_shown_where_stderr_is_piped(tmp_path: Path) -> None:
    run = subprocess.run(COMPILE, env={**os.environ, "HOSTWEAVE_CACHE": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_tasks_of_nested_work_are_counted_with_the_outer_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with progress("calibrating"):
        expect_tasks(2)
        task_done("first")
        with progress("compiling f"):
            expect_tasks(1)
            task_done("f.cpp")
        tell("a line")
        task_done("a task with a long name, " * 5)
    out, shown = capsys.readouterr()
    assert out == "a line\n"
    lines = [line for line in shown.split("\r\x1b[K") if line]
    assert [re.sub(r"[\d.]+ s$", "0 s", line) for line in lines[:2]] == [
        "hostweave: calibrating: 1 of 2, first, 0 s",
        "hostweave: calibrating: 2 of 3, f.cpp, 0 s",
    ]
    assert len(lines[2]) == 79
    task_done("outside")
    assert capsys.readouterr().err == ""


def test_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hostweave")
    fusion = hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])(lambda x, w: hw.reshard(hw.matmul(x, w), "M", "N"))
    hw.compile(fusion, options=hw.Options(sizes={"M": 8192, "K": 8192, "N": 8192}, check=False)).build()
    texts = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(r"program on mesh\(x=2\): lowered to \d+ instructions in [\d.]+ s", text) for text in texts), texts
    assert any(re.fullmatch(r"compiling program: [\d.]+ s", text) for text in texts), texts
    assert all(record.name == "hostweave" for record in caplog.records)
    assert isinstance(logging.getLogger("hostweave").handlers[0], logging.NullHandler)
