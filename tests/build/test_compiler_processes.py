"""Compilers as child processes. A compiler may hang or start a server, and must end when its parent process ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hostweave as hw
from hostweave.base.errors import BuildError
from hostweave.build.processes import run
from hostweave.cli.main import report


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def doubled(x):
    return x + x


def test_a_compiler_that_does_not_start(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "my-c++"
    compiler.write_bytes(b"\x7fELF no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=r"my-c\+\+ cannot be started: Exec format error; set CXX to another compiler; "):
        hw.compile(doubled).build()


class Hanging:
    def __init__(self, folder: Path):
        self.path, self.started = folder / "hanging-c++", folder / "started"
        self.path.write_text(f"#!/bin/sh\nsleep 1000 & echo $$ $! >> {self.started}\nwait\n")
        self.path.chmod(0o755)

    def wait_until_it_runs(self) -> list[int]:
        deadline = time.monotonic() + 60
        while not (found := self.started.read_text().split() if self.started.exists() else []) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [int(process) for process in found]

    def expect_gone(self) -> None:
        deadline = time.monotonic() + 10
        while (left := [process for process in self.wait_until_it_runs() if self.runs(process)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left

    def runs(self, process: int) -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False


def test_a_compiler_that_hangs(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(tmp_path)
    monkeypatch.setenv("CXX", str(hanging.path))
    monkeypatch.setenv("HOSTWEAVE_COMPILER_TIMEOUT", "0.5")
    reason = r"does not end within 0.5 seconds; set HOSTWEAVE_COMPILER_TIMEOUT to a larger number"
    with pytest.raises(BuildError, match=rf"^the compiler .*hanging-c\+\+ {reason}"):
        hw.compile(doubled).build()
    hanging.expect_gone()
    monkeypatch.setenv("HOSTWEAVE_COMPILER_TIMEOUT", "soon")
    with pytest.raises(
        BuildError, match=r"^HOSTWEAVE_COMPILER_TIMEOUT=soon is not a number of seconds above 0; write a number such as 1800"
    ):
        hw.compile(doubled).build()


def compiler_by_doctor() -> str:
    return dict(report())["compiler"]


def test_doctor_does_not_wait_for_a_compiler_that_hangs(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(tmp_path)
    monkeypatch.setenv("CXX", str(hanging.path))
    monkeypatch.setenv("HOSTWEAVE_COMPILER_TIMEOUT", "0.5")
    assert re.match(r"missing: the compiler .*hanging-c\+\+ does not end within 0.5 seconds", compiler_by_doctor())
    hanging.expect_gone()
    hanging.path.write_bytes(b"\x7fELF no program")
    assert re.match(r"missing: the compiler .* cannot be started: Exec format error", compiler_by_doctor())


def test_a_compiler_that_leaves_a_server_behind(tmp_path: Path) -> None:
    """The server keeps the output pipe open, like the servers of compiler caches."""
    leaves = "sleep 60 & echo $! > server; echo said; exit 3"
    begin = time.monotonic()
    assert run(["/bin/sh", "-c", leaves], tmp_path) == (3, "said\n")
    assert time.monotonic() - begin < 30
    os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)


BUILDS = """
import signal
import hostweave as hw
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
@hw.fusion(x=hw.f32["M"])
def twice(x):
    return x + x
hw.compile(twice).build()
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_compilers_end_with_the_process_that_started_them(by: int, empty_cache: Path, tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDS],
        env={**os.environ, "CXX": str(hanging.path)},
        stderr=subprocess.DEVNULL,
    )
    hanging.wait_until_it_runs()
    process.send_signal(by)
    assert process.wait(30) != 0
    hanging.expect_gone()
