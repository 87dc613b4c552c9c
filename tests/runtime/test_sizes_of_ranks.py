"""Ranks that are processes and pass arrays of sizes that do not fit together: all of them raise, and none waits for long."""

from __future__ import annotations

import pytest
from test_providers import free_port, run_processes

PROGRAM = """
import os, sys, time
from random import Random
import numpy as np
import hostweave as hw
from hostweave.base.errors import HostweaveError

rank, transport = int(os.environ["RANK"]), os.environ["TRANSPORT"]
options = hw.Options(transport=transport)

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K"])
def gathered(x, w):
    return hw.reshard(x * w, "M", "K")

def anew(attempt, **more):
    return hw.init(hw.Environment({**os.environ, "TORCHELASTIC_RUN_ID": str(attempt)}), timeout=60, **more)

def call(program, rows, columns=3, **more):
    x = np.full((rows, columns), rank + 1, np.float32)
    return program(x, np.ones(columns, np.float32), **more)

def said(call):
    try:
        result = call()
        print("right", *(result[:, 0] if isinstance(result, np.ndarray) else []))
    except HostweaveError as error:
        print(type(error).__name__, *str(error).split())
"""

CASES = """
group = anew(0)
program = hw.compile(gathered, options=options)
said(lambda: call(program, 2 + rank))  # at the first call
said(lambda: call(program, 2))
number = group.meeting.number
for _ in range(3):
    call(program, 2)
assert group.meeting.number == number
said(lambda: call(program, 4 + rank))  # both are new
said(lambda: call(program, 3, columns=5 + rank))
said(lambda: call(program, 7 - rank))  # of 13 rows, without sizes=
said(lambda: call(program, 7, sizes={"M": 13 + rank, "K": 3}))
said(lambda: call(program, 2 - rank, sizes={"M": 3, "K": 3}))
said(lambda: program.prepare({"M": 6 + 2 * rank, "K": 3}))
said(lambda: program.prepare({"M": 6, "K": 3}, {"M": 8, "K": 3}))
number = group.meeting.number
said(lambda: call(program, 4))
said(lambda: call(program, 3))
assert group.meeting.number == number
other = hw.compile(gathered, options=options)
said(lambda: other(np.ones((2, 3), np.float32), np.ones(3, np.float64 if rank else np.float32)))  # a wrong array at the first call
said(lambda: call(other, 2))
started = time.monotonic()
said(lambda: call(program, 5 if rank else 4))  # is new on rank 1 alone
assert time.monotonic() - started < 10
"""

RANDOM = """
random, failures, calls = Random(int(os.environ["SEED"])), 0, 0
program = hw.compile(gathered, options=options)
group = anew(0, call_timeout=30)
known = set()
for number in range(40):
    rows, wrong = random.choice([1, 2, 3, 4, 5]), random.choice([None, None, None, 0, 1])
    other = random.choice([size for size in range(1, 6) if size != rows])
    if wrong is not None and rows in known and other in known:
        continue  # neither rank compares what it has seen
    try:
        result = call(program, other if wrong == rank else rows)
        assert wrong is None, (number, rows, other)
        assert result[:, 0].tolist() == [1] * rows + [2] * rows
        known.add(rows)
    except HostweaveError as error:
        assert wrong is not None, error
        if group.failure:
            failures += 1
            group, known = anew(failures, call_timeout=30), set()
            program = hw.compile(gathered, options=options)
print("done")
"""


def on_two_ranks(script: str, transport: str, **more: str) -> list[list[str]]:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TRANSPORT": transport, **more}
    outputs = run_processes(PROGRAM + script, [common | {"RANK": str(rank)} for rank in range(2)])
    return [[line for line in output.splitlines() if not line.startswith(("hostweave:", "  rank"))] for output in outputs]


@pytest.mark.parametrize("transport", ["peer", "one_sided", "two_sided"])
def test_each_rank_names_the_sizes_of_all(transport: str) -> None:
    fit = "pass blocks of one f32[M@x, K]"
    for rank, lines in enumerate(on_two_ranks(CASES, transport)):
        expected = [
            f"x: rank 0 passes [2, 3] of [4, 3], rank 1 passes [3, 3] of [6, 3]; {fit}",
            "right 1.0 1.0 2.0 2.0",
            f"x: rank 0 passes [4, 3] of [8, 3], rank 1 passes [5, 3] of [10, 3]; {fit}",
            f"x: rank 0 passes [3, 5] of [6, 5], rank 1 passes [3, 6] of [6, 6]; {fit}",
            f"x: rank 0 passes [7, 3] of [14, 3], rank 1 passes [6, 3] of [12, 3]; {fit}, and sizes= where ranks hold blocks",
            "x: rank 0 passes [7, 3] of [13, 3], rank 1 passes [7, 3] of [14, 3]",
            "right 1.0 1.0 2.0",
            "prepare: rank 0 gives M=6 K=3, and rank 1 M=8 K=3; give the same sizes on all ranks",
            "right",
            "right 1.0 1.0 1.0 1.0 2.0 2.0 2.0 2.0",
            "right 1.0 1.0 1.0 2.0 2.0 2.0",
            "w: expected f32[K], got f64[3]" if rank else "rank 1 cannot go on: gathered: w: expected f32[K], got f64[3]",
            "right 1.0 1.0 2.0 2.0",
            "x: rank 0 passes [4, 3] of [8, 3], rank 1 passes [5, 3] of [10, 3]",
        ]
        for line, want in zip(lines, expected, strict=True):
            assert want in line, (rank, lines)
            assert want.startswith(("right", "prepare", "w:", "rank 1 cannot")) or "<string>:" in line, line


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("transport", ["peer", "one_sided", "two_sided"])
def test_random_sizes(transport: str, seed: int) -> None:
    """Whatever sizes ranks have passed before, a call is right or raises on both."""
    assert on_two_ranks(RANDOM, transport, SEED=str(seed)) == [["done"]] * 2


@pytest.mark.parametrize("how", ["late", "dead"])
def test_a_rank_that_does_not_compare(how: str) -> None:
    end = "time.sleep(4)" if how == "late" else "os._exit(0)"
    script = f"""
anew(0, call_timeout=1)
program = hw.compile(gathered, options=options)
call(program, 2)
if rank == 1:
    {end}
started = time.monotonic()
said(lambda: call(program, 3))
assert time.monotonic() - started < 10
"""
    first, *_ = on_two_ranks(script, "one_sided")
    assert ("timed out after 1 s waiting for rank 1" if how == "late" else "rank 1: its process has ended") in first[0]
