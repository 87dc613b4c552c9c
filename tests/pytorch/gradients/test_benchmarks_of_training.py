"""The benchmarks of training run with small sizes on CPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hostweave.base.paths import BENCHMARKS

pytestmark = [pytest.mark.extra("torch", "transformers"), pytest.mark.slow]

CASES = {
    "a whole step of Llama": ("torch_training.py --tiny --turns 1 --layers 1 --ways hostweave,eager --step", "whole step"),
    "a pass of GPT-2": ("torch_training.py --tiny --turns 1 --layers 1 --ways hostweave,eager --model gpt2", "forward and backward"),
    "a whole step on two ranks": ("torch_door.py tiny step", "whole step"),
    "a whole step with FSDP": ("torch_door.py tiny fsdp", "whole step with FSDP"),
}


@pytest.mark.parametrize("case", CASES)
def test_runs_on_cpus(case: str) -> None:
    words, what = CASES[case]
    file, *rest = words.split()
    done = subprocess.run([sys.executable, str(BENCHMARKS / file), *rest], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert f"{what}: hostweave " in last
    assert "times as fast as the best peer" in last
