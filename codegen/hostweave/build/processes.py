"""Runs compilers in this process, or as child processes that end with this process."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hostweave.base.errors import BuildError
from hostweave.base.forks import starting
from hostweave.base.interrupts import POLL_SECONDS, expect_not_interrupted, within
from hostweave.base.shortages import remedy_of

T = TypeVar("T")

_VARIABLE, _LIMIT = "HOSTWEAVE_COMPILER_TIMEOUT", "1800"
_GUARD = "read -r _; kill -s KILL 0"  # kills the group when the input ends, for example because this process was killed


def run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs a compiler in `folder`. Returns the exit status and the output.

    Ctrl-C in a terminal does not reach the compiler, which is in a separate process group. The group is killed if the build is interrupted,
    if this process ends, or at the time limit.
    """
    expect_not_interrupted()
    seconds = _limit()
    try:
        with _guarded_group() as group:
            return _run(command, folder, group, seconds)
    except OSError as error:
        remedy = remedy_of(str(error)) or "set CXX to another compiler"
        raise BuildError(f"the compiler {command[0]} cannot be started: {error.strerror}; {remedy}") from error


def within_limit(what: str, work: Callable[[], T]) -> T:
    """Calls `work`, a library function. Raises BuildError at the time limit, but cannot end the call."""
    seconds = _limit()
    try:
        return within(seconds, work)
    except TimeoutError:
        raise _too_long(what, seconds) from None


@contextmanager
def _guarded_group() -> Iterator[int]:
    """Creates a process group with a shell that kills the group when this process ends."""
    read_end, write_end = os.pipe()
    devnull = subprocess.DEVNULL
    try:
        with starting:
            guard = subprocess.Popen(["/bin/sh", "-c", _GUARD], stdin=read_end, stdout=devnull, stderr=devnull, process_group=0)
        try:
            yield guard.pid
        finally:
            guard.kill()
            guard.wait()
    finally:
        os.close(write_end)
        os.close(read_end)


def _run(command: Sequence[str], folder: Path, group: int, seconds: float) -> tuple[int, str]:
    deadline = time.monotonic() + seconds
    with starting:
        started = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=group,
        )
    with started as compiler:
        try:
            while True:
                has_exited = compiler.poll() is not None
                try:
                    output = compiler.communicate(timeout=POLL_SECONDS)[0]
                except subprocess.TimeoutExpired as expired:
                    if has_exited:  # a background process, such as a compiler cache, has the output open
                        output = (expired.output or b"").decode(errors="replace")
                    else:
                        expect_not_interrupted()
                        if time.monotonic() > deadline:
                            raise _too_long(f"the compiler {command[0]}", seconds) from None
                        continue
                if (status := compiler.returncode) < 0:
                    output += f"the compiler was ended by signal {-status} ({signal.strsignal(-status)})\n"
                return status, output
        except BaseException:
            os.killpg(group, signal.SIGKILL)
            raise


def _limit() -> float:
    text = os.environ.get(_VARIABLE) or _LIMIT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise BuildError(f"{_VARIABLE}={text} is not a number of seconds above 0; write a number such as {_LIMIT}")
    return seconds


def _too_long(what: str, seconds: float) -> BuildError:
    return BuildError(f"{what} does not end within {seconds:g} seconds; set {_VARIABLE} to a larger number")
