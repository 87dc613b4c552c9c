"""Locks of the GPUs. A GPU test runs together with other tests, or alone. A test that calls `alone` runs alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

HELD = "HOSTWEAVE_TESTS_HOLD_GPUS"  # Set while a test holds the GPUs. Then pytest sessions that the test starts do not wait.
FOLDER = "HOSTWEAVE_TESTS_OBJECTS"  # The variable names the folder of the locks.
_locks: list[TextIO] = []  # Lock of the GPUs while a test of this process holds it.


@contextmanager
def with_others() -> Iterator[None]:
    """Holds the GPUs together with other tests. Waits while another test runs alone or waits to run alone."""
    if HELD in os.environ:
        yield
        return
    with open(Path(os.environ[FOLDER], "gpus.lock"), "w") as lock:
        _locks.append(lock)
        os.environ[HELD] = "1"
        try:
            _take(lock, fcntl.LOCK_SH)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # Closing the file does not suffice, because forked processes also have the file open.
            del os.environ[HELD]
            _locks.clear()


def alone() -> None:
    """Waits until no other GPU test runs. No other GPU test starts before the test of the caller ends."""
    for lock in _locks:
        fcntl.flock(lock, fcntl.LOCK_UN)
        _take(lock, fcntl.LOCK_EX)


def _take(lock: TextIO, kind: int) -> None:
    """Takes the lock of the GPUs. While a test waits for this lock, later tests wait for the lock `gate`. So later tests do not overtake
    the waiting test."""
    with open(Path(os.environ[FOLDER], "gate.lock"), "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
