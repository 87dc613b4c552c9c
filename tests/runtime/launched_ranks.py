"""Starts ranks as processes with a script, or as threads, and returns their results."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forked import Forked

from hostweave.runtime.launchers import launched


def run_processes(script: str, environments: list[dict[str, str]], timeout: float = 60) -> list[str]:
    """Runs one process per environment. Returns the outputs of the processes. Raises AssertionError if a process failed."""
    clean = {name: value for name, value in os.environ.items() if not launched({name: value}) and not name.startswith("MASTER_")}
    processes = [
        Forked([sys.executable, "-c", script], env=clean | one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for one in environments
    ]
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [output.strip() for output in outputs]


def in_threads(count: int, function: Any) -> list[Any]:
    """Returns, for every rank, the result or the exception of `function(rank)`."""
    results: list[Any] = [None] * count

    def call(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextmanager
def soon(function: Callable[..., object], *arguments: object) -> Iterator[None]:
    """Calls a function after a short time, on a thread that is joined at the end of the block."""
    timer = threading.Timer(0.1, function, arguments)
    timer.start()
    try:
        yield
    finally:
        timer.join()
