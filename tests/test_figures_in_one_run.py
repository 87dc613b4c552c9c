"""benchmarks/figures.py runs the benchmarks that docs/figures.md names, except `comm`, and finds figures in their output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import benchmark

from hostweave.base.paths import BENCHMARKS

DOCS = Path(__file__).parents[1] / "docs"  # The documentation is not part of the package.
LINES = {
    "layer": "8192 tokens, 2 GPUs, goal 1.25: ours 2.907 ms (2.899 to 2.940); torch 3.700 ms (3.692 to 3.860);"
    " 1.273 times as fast as the best peer, torch async TP",
    "sharded weights": "  by rows, as chosen: 3.690 ms, 0.80 of the communication is hidden",
    "model": "decode, batch 1, 8 layers, 2 GPUs: ours 16.280 (16.2 to 16.4) ms, 983 tokens/s, transformers 26 (26 to 27) ms, 613 tokens",
    "host": "host time, hostweave, captured: 10.0 us, 9.7 to 14.9; the first after a wait 61.0",
}


@pytest.fixture(scope="module")
def figures() -> Any:
    return benchmark("figures")


def test_all_commands_of_the_page(figures: Any) -> None:
    page = (DOCS / "figures.md").read_text()
    named = {name for command in re.findall("`hostweave bench ([a-z_ ]+)`", page) for name in command.split()}
    named |= set(re.findall(r"benchmarks/([a-z_]+)\.py", page))
    run = {word.removesuffix(".py") for words in figures.PARTS.values() for word in words}
    assert named - {"figures", "comm"} <= run
    assert all((BENCHMARKS / f"{name}.py").exists() for name in named)


def test_rows_of_goals(figures: Any) -> None:
    rows = {goal.figure: goal.row(LINES[goal.part]) for goal in figures.GOALS if goal.part in LINES}
    assert rows["layer of 70B, 8192 tokens, over the best of PyTorch"].endswith("| 1.273 | at least 1.27 | met |")
    assert rows["gathers of sharded weights, share hidden, by rows"].endswith("| 0.80 | at least 0.85 | missed |")
    assert rows["the same, 2 GPUs"].endswith("| 983 | at least 1239 | missed |")
    assert rows["host time of a captured pass of 4 layers, us"].endswith("| 10.0 | at most 10 | met |")
    assert rows["its first launch after a wait, us"].endswith("| 61.0 | at most 90 | met |")
    assert rows["8 layers of 8B, decode, batch 1, 1 GPU, tokens/s"].endswith("| not measured | at least 766 | |")
