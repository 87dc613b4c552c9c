"""Runs fsdp, and the Python benchmarks that docs/figures.md names, except comm. Prints a table of the figures that have a goal.

Some rows of docs/figures.md need other arguments or another machine. Each part is a benchmark that runs in a separate process with a time
limit. The output of a part is printed immediately. Arguments are names of parts; default: all. The argument `goals` adds the parts that
measure figures of the table. Two GPUs are needed. The exit status is 1 if a part fails, and 2 if a name is unknown. A missed goal is not an
error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter

from peers.report import print_machine

SECONDS = 900  # time limit of a part, including compilation
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

PARTS: dict[str, Sequence[str]] = {
    "layer": ("sequence_parallel.py",),
    "sharded weights": ("fsdp.py",),
    "training": ("torch_door.py", "backward", "step", "fsdp"),
    "training of Llama on one GPU": ("torch_training.py",),
    "training of GPT-2": ("torch_training.py", "--model", "gpt2"),
    "all-reduce": ("small_all_reduce.py",),
    "decode of 70B": ("decode.py", "70B"),
    "decode of 8B": ("decode.py", "8B"),
    "model": ("model.py",),
    "host": ("torch_door.py", "host"),
    "loops": ("overlap.py",),
    "inference": ("torch_door.py", "forward"),
    "MLP": ("layer.py",),
    "8-bit floats": ("fp8.py",),
    "experts": ("moe.py", "products", "layer", "dispatch"),
    "attention": ("attention.py",),
    "kernels": ("kernels.py",),
    "few rows": ("few_rows.py",),
    "generation": (*TORCHRUN, "generate.py", "--layers", "8"),
    "images": ("vit.py",),
    "calls": ("host_time.py",),
    "predictions": ("predictions.py",),
    "compiler": ("compiler.py",),
    "cold compile": ("torch_door.py", "compile"),
}


@dataclass(frozen=True)
class Goal:
    """A figure in the output of a part, and its goal. The single group of `pattern` matches the number of the figure."""

    figure: str
    part: str
    pattern: str
    goal: float
    is_least: bool = True

    def row(self, output: str) -> str:
        found = re.search(self.pattern, output, re.MULTILINE)
        wanted = f"{'at least' if self.is_least else 'at most'} {self.goal:g}"
        if not found:
            return f"| {self.figure} | not measured | {wanted} | |"
        number = float(found[1])
        is_met = number >= self.goal if self.is_least else number <= self.goal
        return f"| {self.figure} | {found[1]} | {wanted} | {'met' if is_met else 'missed'} |"


RATIO = r".*?([\d.]+) times as fast as the best peer"
GOALS = (
    Goal("layer of 70B, 8192 tokens, over the best of PyTorch", "layer", rf"^8192 tokens, 2 GPUs{RATIO}", 1.27),
    Goal("the same, 2048 tokens", "layer", rf"^2048 tokens, 2 GPUs{RATIO}", 1.27),
    Goal("gathers of sharded weights, share hidden, by rows", "sharded weights", r"by rows, as chosen: .*?, ([\d.-]+) of the", 0.85),
    Goal("the same, PyTorch's layout", "sharded weights", r"by rows of transposes, as chosen: .*?, ([\d.-]+) of the", 0.93),
    Goal("4 layers, forward and backward, over the best of PyTorch", "training", rf"^forward and backward: {RATIO}", 1.2),
    Goal("4 layers, whole step of AdamW, over the best of PyTorch", "training", rf"^whole step: {RATIO}", 1.25),
    Goal("all-reduce, residual and RMSNorm, 16 rows, us", "all-reduce", r"^\[16, 8192\].*?in kernels ([\d.]+) us", 7.5, False),
    Goal("16 MLP blocks of 70B, 1 token, share of a copy's speed", "decode of 70B", r" 1 tokens, 2 GPUs.*; ([\d.]+) of a copy", 0.88),
    Goal("the same, over the best of PyTorch", "decode of 70B", rf" 1 tokens, 2 GPUs{RATIO}", 1.25),
    Goal("16 MLP blocks of 8B, 16 tokens, over the best of PyTorch", "decode of 8B", rf" 16 tokens, 1 GPUs{RATIO}", 1.08),
    Goal("the same, 128 tokens", "decode of 8B", rf" 128 tokens, 1 GPUs{RATIO}", 1.08),
    Goal("8 layers of 8B, decode, batch 1, 1 GPU, tokens/s", "model", r"^decode, batch 1, .* 1 GPUs: ours .*?(\d+) tokens", 766),
    Goal("the same, 2 GPUs", "model", r"^decode, batch 1, .* 2 GPUs: ours .*?(\d+) tokens", 1239),
    Goal("host time of a captured pass of 4 layers, us", "host", r"host time, hostweave, captured: ([\d.]+) us", 10, False),
    Goal("its first launch after a wait, us", "host", r"host time, hostweave, captured: .*first after a wait ([\d.]+)", 90, False),
)


def main(words: Sequence[str]) -> int:
    if unknown := set(words) - {*PARTS, "goals"}:
        print(f"figures: unknown part {', '.join(sorted(unknown))}; use goals, or names of parts: {', '.join(PARTS)}")
        return 2
    with_goals = [goal.part for goal in GOALS] if "goals" in words else []
    chosen = [name for name in PARTS if name in (*words, *with_goals) or not words]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print_machine()
    outputs, failed = dict[str, str](), list[str]()
    for name in chosen:
        begin = perf_counter()
        outputs[name], status = _run(PARTS[name])
        print(f"== {name}: exit status {status}, {perf_counter() - begin:.0f} s", flush=True)
        failed += [name] if status else []
    print("\n| figure | measured | goal | |\n|---|---|---|---|")
    print("\n".join(goal.row(outputs[goal.part]) for goal in GOALS if goal.part in outputs))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(words: Sequence[str]) -> tuple[str, int]:
    """Runs a benchmark, prints its output, and returns the output and the exit status. After SECONDS, kills the process of the benchmark,
    but not the processes that the benchmark has started."""
    here = Path(__file__).parent
    command = [sys.executable, "-u", *(str(here / word) if word.endswith(".py") else word for word in words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        limit = Timer(SECONDS, running.kill)
        limit.start()
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        limit.cancel()
    return "".join(lines), running.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
