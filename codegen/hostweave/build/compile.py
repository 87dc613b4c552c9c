"""Runs compilers in parallel and keeps their output."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hostweave.base.errors import BuildError


def run_together(commands: list[list[str]], folder: Path) -> None:
    """Runs the commands in `folder`, as many at a time as there are cores, and appends them and their output to `build.log`.

    Raises BuildError with the first error line where one fails.
    """

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        except OSError as error:
            raise BuildError(f"the compiler {command[0]} cannot be started: {error.strerror}; set CXX to one that can") from error

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(run, commands))
    with open(folder / "build.log", "a") as log:
        log.writelines(f"$ {' '.join(result.args)}\n{result.stdout}" for result in results)
    if failed := next((result for result in results if result.returncode != 0), None):
        raise BuildError(f"the compiler failed: {_first_error(failed.stdout)}")


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line or "undefined reference" in line), lines[-1])
