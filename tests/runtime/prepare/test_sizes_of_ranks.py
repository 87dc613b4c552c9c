"""Ranks that are processes pass inconsistent sizes. All ranks raise an error soon."""

from __future__ import annotations

import pytest
from two_ranks import on_two_ranks

CASES = """
group = anew(0)
program = hw.compile(gathered, options=options)
said(lambda: call(program, 2 + rank))  # at the first call
said(lambda: call(program, 2))
number = group.coordinator.number
for _ in range(3):
    call(program, 2)
assert group.coordinator.number == number
said(lambda: call(program, 4 + rank))  # both sizes are new
said(lambda: call(program, 3, columns=5 + rank))
said(lambda: call(program, 7 - rank))  # an array of 13 rows, without sizes=
said(lambda: call(program, 7, sizes={"M": 13 + rank, "K": 3}))
said(lambda: call(program, 2 - rank, sizes={"M": 3, "K": 3}))
said(lambda: program.prepare({"M": 6 + 2 * rank, "K": 3}))
said(lambda: program.prepare({"M": 6, "K": 3}, {"M": 8, "K": 3}))
number = group.coordinator.number
said(lambda: call(program, 4))
said(lambda: call(program, 3))
assert group.coordinator.number == number + 2
other = hw.compile(gathered, options=options)
said(lambda: other(np.ones((2, 3), np.float32), np.ones(3, np.float64 if rank else np.float32)))  # a wrong array at the first call
said(lambda: call(other, 2))
started = time.monotonic()
said(lambda: call(program, 5 if rank else 4))  # the size is new only on rank 1
assert time.monotonic() - started < 10
"""

RANDOM = """
random, failures = Random(int(os.environ["SEED"])), 0
program, other_program = (hw.compile(gathered, options=options) for _ in range(2))
group = anew(0, call_timeout=30)
captured = {}
started = time.monotonic()

def any_call(called, rows, how):
    if how == "prepare":
        called.prepare({"M": 2 * rows, "K": 3}, {"M": 2, "K": 3})
    if how == "graph":
        if (called, rows) not in captured:
            arrays = np.full((rows, 3), rank + 1, np.float32), np.ones(3, np.float32)
            captured[called, rows] = called.capture(*arrays)
        return captured[called, rows]()
    return call(called, rows)

for number in range(60):
    called, how = random.choice([program, program, other_program]), random.choice(["call", "call", "prepare", "graph"])
    rows, wrong = random.choice([1, 2, 3]), random.choice([None] * 9 + [0, 1])
    other = random.choice([size for size in range(1, 4) if size != rows])
    try:
        result = any_call(called, other if wrong == rank else rows, how)
        assert wrong is None, (number, rows, other)
        assert result[:, 0].tolist() == [1] * rows + [2] * rows
    except HostweaveError as error:
        assert wrong is not None, error
        if wrong is not None:  # After an error, an application makes a new group.
            failures += 1
            group.close()
            group, captured = anew(0, call_timeout=30), {}
            program, other_program = (hw.compile(gathered, options=options) for _ in range(2))
assert time.monotonic() - started < 40
print("done", failures > 0)
"""


@pytest.mark.parametrize("transport", ["peer", "one_sided", "two_sided"])
def test_each_rank_names_the_sizes_of_all(transport: str) -> None:
    fit = "pass blocks of one array f32[M@x, K]"
    for rank, lines in enumerate(on_two_ranks(CASES, transport)):
        expected = [
            f"x: rank 0 passes block [2, 3] of an array [4, 3], rank 1 passes block [3, 3] of an array [6, 3]; {fit}",
            "right 1.0 1.0 2.0 2.0",
            f"x: rank 0 passes block [4, 3] of an array [8, 3], rank 1 passes block [5, 3] of an array [10, 3]; {fit}",
            f"x: rank 0 passes block [3, 5] of an array [6, 5], rank 1 passes block [3, 6] of an array [6, 6]; {fit}",
            f"rank 1 passes block [6, 3] of an array [12, 3]; {fit}, and sizes= where ranks hold blocks",
            "x: rank 0 passes block [7, 3] of an array [13, 3], rank 1 passes block [7, 3] of an array [14, 3]",
            "right 1.0 1.0 2.0",
            "prepare: rank 0 gives M=6 K=3, and rank 1 M=8 K=3; give the same sizes on all ranks",
            "right",
            "right 1.0 1.0 1.0 1.0 2.0 2.0 2.0 2.0",
            "right 1.0 1.0 1.0 2.0 2.0 2.0",
            "w: expected f32[K], got f64[3]" if rank else "rank 1 cannot continue: gathered: w: expected f32[K], got f64[3]",
            "right 1.0 1.0 2.0 2.0",
            "x: rank 0 passes block [4, 3] of an array [8, 3], rank 1 passes block [5, 3] of an array [10, 3]",
        ]
        for line, want in zip(lines, expected, strict=True):
            assert want in line, (rank, lines)
            assert want.startswith(("right", "prepare", "w:", "rank 1 cannot")) or "<string>:" in line, line


@pytest.mark.parametrize(
    ("transport", "by"),
    [
        *(("peer", "memory"), ("one_sided", "store"), ("two_sided", "memory")),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("peer", "store"), ("one_sided", "memory"), ("two_sided", "store"))),
    ],
)
def test_random_sizes(transport: str, by: str) -> None:
    """Calls, preparations and captures are in random order. The results of a call are right, or both ranks raise an error."""
    assert on_two_ranks(RANDOM, transport, BY=by, SEED=str(len(by + transport))) == [["done True"]] * 2


@pytest.mark.parametrize("by", ["memory", "store"])
def test_sizes_of_two_variants(by: str) -> None:
    """In the last call, 2 divides the M of rank 1, but not the M of rank 0. Without an error, the ranks would run different variants."""
    script = """
@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def gathered(x):
    return hw.reshard(hw.reshape(x, "M * K"), "M * K")

group = anew(0, call_timeout=30)
program = hw.compile(gathered, options=options)

def call(rows, total):
    return program(np.ones((rows, 3), np.float32), sizes={"M": total, "K": 3})[:, None]

said(lambda: call(2, 4))
said(lambda: call(3 - rank, 5))
said(lambda: call(2, 4))
started = time.monotonic()
said(lambda: call(2, 4) if rank else call(3, 5))
assert time.monotonic() - started < 10
"""
    for first, second, third, last in on_two_ranks(script, "one_sided", BY=by):
        assert (first[:5], second[:5], third[:5]) == ("right", "right", "right")
        assert "x: rank 0 passes block [3, 3] of an array [5, 3], rank 1 passes block [2, 3] of an array [4, 3]" in last


@pytest.mark.parametrize("by", ["memory", "store"])
def test_a_first_call_of_another_program(by: str) -> None:
    script = """
group = anew(0, call_timeout=30)
program, other = (hw.compile(gathered, options=options) for _ in range(2))
said(lambda: call(program, 2))
started = time.monotonic()
said(lambda: call(program, 2) if rank else call(other, 2))
assert time.monotonic() - started < 10
"""
    for first, second in on_two_ranks(script, "one_sided", BY=by):
        assert first.startswith("right")
        assert "rank 0 and rank 1 make different calls as call 2; make the same calls on all ranks" in second


@pytest.mark.parametrize("transport", ["peer", "one_sided", "two_sided"])
def test_a_call_of_the_last_sizes_exchanges_nothing(transport: str) -> None:
    script = """
group = anew(0)
program = hw.compile(gathered, options=options)
call(program, 2), call(program, 3)
exchanges = [group.coordinator.number]
for rows in (3, 3, 2, 2, 3):
    call(program, rows)
    exchanges.append(group.coordinator.number - exchanges[0])
print(*exchanges[1:], group.barrier[0] is not None)
"""
    assert on_two_ranks(script, transport) == [["0 0 1 1 2 True"]] * 2


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
