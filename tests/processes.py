"""Starts ranks as processes, exchanges lines of text with them, and kills them. Measures this process."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from forked import Forked

import hostweave as hw
from hostweave.runtime.launchers import launched

SCRIPT = Path(__file__).with_name("rank_process.py")
PATHS = (Path(hw.__file__).parents[1], Path(__file__).parent)
SECONDS = 60  # time limit for ranks to detect a failure, to continue, or to exit


def environment(**more: str) -> dict[str, str]:
    """Environment of this process, without MASTER_* and the variables that identify a launcher. Adds PYTHONUNBUFFERED, the paths of
    Hostweave and the tests, and `more`."""
    clean = {name: value for name, value in os.environ.items() if not launched({name: value}) and not name.startswith("MASTER_")}
    paths = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**clean, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **more}


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# Each worker has its own 500 ports. Linux takes ports of 32768 to 60999 for connections, so these ports are less than 32768.
_FIRST = 20000 + 500 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 25)
_PORTS = itertools.cycle(range(_FIRST, _FIRST + 500))


def free_port() -> str:
    """A port that no other test or connection takes before the test uses it."""
    for port in itertools.islice(_PORTS, 500):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)
    pytest.fail(f"all ports from {_FIRST} to {_FIRST + 499} are taken")


def as_rank(rank: int, count: int, port: str) -> dict[str, str]:
    """Environment variables of one of `count` processes that a launcher starts on this host."""
    return {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Ranks:
    def __init__(self, environments: list[dict[str, str]], *arguments: str, start: type[subprocess.Popen[str]] = Forked):
        self.lines: list[queue.Queue[str | None]] = [queue.Queue() for _ in environments]
        self.said: list[list[str]] = [[] for _ in environments]
        self.processes = [
            start(
                [sys.executable, str(SCRIPT), *arguments],
                env=environment(**one),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for one in environments
        ]
        self.readers = [threading.Thread(target=self.read, args=(rank,), daemon=True) for rank in range(len(environments))]
        for reader in self.readers:
            reader.start()

    def read(self, rank: int) -> None:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            self.said[rank].append(line)
            self.lines[rank].put(line.strip())
        self.lines[rank].put(None)

    def line(self, rank: int, seconds: float, *, beginning: str = "") -> str:
        """Next line of a rank's output that begins with `beginning` (default "rank " and its number). Skips other lines, such as warnings
        of libraries."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines[rank].get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"rank {rank} hangs; its output:\n{''.join(self.said[rank])}")
            if line is None:
                pytest.fail(f"rank {rank} has ended; its output:\n{''.join(self.said[rank])}")
            if line.startswith(beginning or f"rank {rank}"):
                return line

    def tell(self, rank: int, text: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def ended(self, rank: int) -> int:
        return self.processes[rank].wait(SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, reader in zip(self.processes, self.readers, strict=True):
            process.kill()
            process.wait()
            reader.join(SECONDS)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe:
                        pipe.close()
