"""Compilers that run: as processes that end with this one, with all that they have started, or as a library."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hostweave.base.errors import BuildError
from hostweave.base.interrupts import LOOK, expect_not_interrupted, within

T = TypeVar("T")

_VARIABLE, _LIMIT = "HOSTWEAVE_COMPILER_TIMEOUT", "1800"
_GUARD = 'read -r _; kill -KILL -- "-$1"'  # waits until the other end of its input is closed, however this process ends


def run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs a compiler in `folder`. Returns its exit status and its output.

    The compiler is the leader of a group of processes, which a signal to ours does not reach. The group is killed where this work is
    interrupted, where this process ends, and at the time limit. Raises BuildError at the limit, or if it cannot be started.
    """
    expect_not_interrupted()
    seconds = _limit()
    other_end, kept_open = os.pipe()
    try:
        with subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as compiler:
            guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "sh", str(compiler.pid)],
                stdin=other_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                output = _output(compiler, command[0], seconds)
                return compiler.returncode, output
            finally:
                guard.kill()
                guard.wait()
    except OSError as error:
        raise BuildError(f"the compiler {command[0]} cannot be started: {error.strerror}; set CXX to one that can") from error
    finally:
        os.close(kept_open)
        os.close(other_end)


def within_limit(what: str, work: Callable[[], T]) -> T:
    """Returns what `work`, a call of a library, returns. Raises BuildError at the time limit, after which the call goes on by itself."""
    seconds = _limit()
    try:
        return within(seconds, work)
    except TimeoutError:
        raise _too_long(what, seconds) from None


def _output(compiler: subprocess.Popen[str], name: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                return compiler.communicate(timeout=LOOK)[0]
            except subprocess.TimeoutExpired:
                expect_not_interrupted()
                if time.monotonic() > deadline:
                    raise _too_long(f"the compiler {name}", seconds) from None
    except BaseException:
        os.killpg(compiler.pid, signal.SIGKILL)  # it is not reaped yet, so that the group is its own
        raise


def _limit() -> float:
    text = os.environ.get(_VARIABLE) or _LIMIT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise BuildError(f"{_VARIABLE}={text}: is no number of seconds above 0; write one as {_LIMIT}")
    return seconds


def _too_long(what: str, seconds: float) -> BuildError:
    return BuildError(f"{what} does not end within {seconds:g} seconds; set {_VARIABLE} to more seconds if it needs them")
