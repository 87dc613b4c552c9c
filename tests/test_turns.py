"""A test that must be alone on the GPUs waits for all running GPU tests. No later GPU test overtakes the waiting test."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from turns import FOLDER, HELD

TURN = """
import sys
from turns import alone, with_others
with with_others():
    if sys.argv[1] == "alone":
        alone()
    print("runs", flush=True)
    sys.stdin.readline()
"""


def test_a_test_is_alone(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != HELD}
    environment |= {FOLDER: str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    with ExitStack() as ends:

        def start(kind: str) -> subprocess.Popen[str]:
            command, pipe = [sys.executable, "-c", TURN, kind], subprocess.PIPE
            return ends.enter_context(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))

        def runs(turn: subprocess.Popen[str], seconds: float) -> bool:
            return bool(select.select([turn.stdout], [], [], seconds)[0])

        others = [start("with others"), start("with others")]
        assert all(runs(turn, 60) for turn in others)
        only = start("alone")
        deadline = time.monotonic() + 60
        while not is_locked(tmp_path / "gate.lock"):  # Once `only` waits, it holds this lock.
            assert time.monotonic() < deadline
        later = start("with others")
        for turn in others:
            assert not runs(only, 0.2)
            turn.communicate("\n", timeout=60)
        assert runs(only, 60)
        assert not runs(later, 0.5)
        only.communicate("\n", timeout=60)
        assert runs(later, 60)
        later.communicate("\n", timeout=60)


def is_locked(path: Path) -> bool:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
