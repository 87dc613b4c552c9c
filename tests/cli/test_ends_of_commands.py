"""Commands whose output is closed or cannot be written, and interrupted commands."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest

from hostweave.base.paths import EXAMPLES
from hostweave.cli import main as commands
from hostweave.cli.main import main


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m hostweave inspect {EXAMPLES / 'seeds.py'}:ag_matmul_p2p | head -1"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.startswith("// ====")


@pytest.mark.parametrize("command", ["doctor", "--version"])
def test_output_that_cannot_be_written_when_the_command_ends(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def run(stdout: int | IO[str]) -> tuple[int, str]:
        arguments = [sys.executable, "-m", "hostweave", command]
        result = subprocess.run(arguments, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        return result.returncode, result.stderr

    assert run(writer) == (0, "")
    os.close(writer)
    with open("/dev/full", "w") as full:
        status, message = run(full)
    assert status == 1
    assert message.startswith("hostweave: No space left on device; free space on that disk")


def test_an_interrupted_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "report", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "hostweave: interrupted\n"
