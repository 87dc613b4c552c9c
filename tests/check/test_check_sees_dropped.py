"""The static check detects each dropped synchronisation of some programs. The cost of the check is bounded."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any, cast

import host_text
import numpy as np
import pytest
from forked import run
from lowered_fusions import NAMES, program
from processes import environment

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.check.memory import ByteBlocks, Memory, Pieces, starts_of_runs
from hostweave.check.operations import ByteRegion, Root, layout
from hostweave.host_ir import ir, tree
from hostweave.types.tensor import bf16


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_instruction_is_seen(name: str) -> None:
    """On 4 ranks, the programs have no redundant fork, join, record or wait."""
    host = program(name)
    for dropped in tree.walk(host.body):
        if isinstance(dropped, ir.Fork | ir.Join | ir.Record | ir.Wait):
            mutant = replace(host, body=tree.rewrite(host.body, lambda i, dropped=dropped: () if i is dropped else None))
            assert mutant != host
            with pytest.raises(ProgramError):
                check(mutant)


def test_speed() -> None:
    """Compilations for up to 16 ranks run the static check by default. The fastest of 5 checks of a small program for 8 ranks takes less
    than 0.1 s of CPU time."""
    host = program("ag_matmul_p2p", 8)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        check(host)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1


def test_the_garbage_collector_is_enabled_after_a_check() -> None:
    copied = host_text.parse("host @f(%x: f32[N]) -> (%y: f32[N]) mesh(x=1) {\n  copy %x -> %y\n}\n")
    check(copied)
    assert gc.isenabled()
    with pytest.raises(ProgramError, match="write all of every output"):
        check(replace(copied, body=()))
    assert gc.isenabled()


CHECK_AND_COLLECT = """
import gc
from lowered_fusions import NAMES, program
from hostweave.check.check import check

for name in NAMES:
    host = program(name)
    check(host)
    gc.collect()
    gc.disable()
    check(host)
    if garbage := gc.collect():
        print(name, garbage)
    gc.enable()
"""


def test_a_check_creates_no_reference_cycles() -> None:
    """A garbage collection of cycles would take as long as the check. The test runs in a separate process, because threads of other tests
    may leave cycles at any time."""
    done = run([sys.executable, "-c", CHECK_AND_COLLECT], env=environment(), timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bytes_that_are_accessed_together_are_one_piece() -> None:
    """Bytes of different rows with the same accesses are one piece. So the time of the check does not grow with the number of rows."""
    rows, columns = 4096, 64
    whole = layout(bf16, (rows, columns), (columns, 1))
    left = layout(bf16, (rows, columns // 2), (columns, 1))  # The right half has the same layout, and begins 64 bytes later.
    top = layout(bf16, (rows // 2, columns), (columns, 1))
    places = [(offset, of.rows, of.run) for offset, of in ((0, whole), (0, left), (columns, left), (0, top))]
    pieces = Pieces(rows * columns * 2, frozenset(places))
    assert pieces.first_segments == [range(start, start + columns) for start in (0, columns, rows * columns, (rows + 1) * columns)]
    assert [pieces.covered[place] for place in places] == [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1)]


def steps_of_python(divide: Callable[[], Pieces]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        divide()
    finally:
        sys.settrace(before)
    return count


def test_dividing_more_rows_takes_no_more_steps() -> None:
    """The check also uses large sizes, so the number of executed lines must not depend on the number of rows."""

    def divided(rows: int) -> Pieces:
        return Pieces(32 * rows, frozenset((offset, ((count, 32),), 8) for offset in (0, 8, 16, 24) for count in (rows, rows // 2)))

    assert len(divided(2**12).first_segments) == 8
    assert steps_of_python(lambda: divided(2**12)) == steps_of_python(lambda: divided(2**6))


def rows_of(count: int) -> frozenset[ByteBlocks]:
    return frozenset({(0, (), 32 * count), (0, ((count // 2, 64),), 24), *((offset, ((count, 32),), 8) for offset in (0, 8, 16, 24))})


def test_dividing_many_rows_takes_less_than_a_second() -> None:
    """np.unique would take about 1 s. A stable sort is fast, because the boundaries of each access are already in order. The additional
    byte makes the last row longer than the other rows."""
    count = 2**18
    before = time.thread_time()
    assert len(Pieces(32 * count + 1, rows_of(count)).first_segments) == 8
    assert time.thread_time() - before < 0.8  # The time is usually 0.15 s.


def test_only_two_of_the_rows_with_the_same_accesses_are_divided() -> None:
    assert Pieces(32 * 2**40, rows_of(2**40)).first_segments == Pieces(32 * 8, rows_of(8)).first_segments


def random_regions(random: Random, step: int, count: int) -> Iterator[ByteBlocks]:
    """Regions of `count` rows of `step` bytes. Some have two parts per row, and some are contiguous."""
    for _ in range(random.randint(1, 5)):
        stride = random.choice([1, step // 2, step])
        first, offset = random.randrange(step * count // stride), random.randrange(stride)
        rows, run = random.randint(1, step * count // stride - first), random.randint(1, stride - offset)
        yield (first * stride + offset, ((rows, stride),), run) if run < stride else (first * stride, (), rows * stride)


def test_a_piece_has_all_bytes_with_the_same_accesses() -> None:
    random = Random(0)
    for _ in range(300):
        step, count = random.choice([2, 4, 8]), random.randint(1, 8)
        regions, firsts = frozenset(random_regions(random, step, count)), dict[frozenset[ByteBlocks], int]()
        bytes_of = {of: {start + at for start in starts_of_runs(*of, np.dtype(int)) for at in range(of[2])} for of in regions}
        for byte in range(step * count):
            firsts.setdefault(frozenset(of for of in regions if byte in bytes_of[of]), byte)
        pieces = Pieces(step * count, regions)
        assert [segment.start for segment in pieces.first_segments] == [*firsts.values()], regions
        for of in regions:
            assert pieces.covered[of] == tuple(piece for piece, accesses in enumerate(firsts) if of in accesses), regions


@pytest.mark.parametrize("scale", [1, 2**59, 2**60, 2**70])
def test_buffers_of_any_size_are_divided(scale: int) -> None:
    """Byte positions may exceed the largest signed integer of 64 bits."""
    left, right, top = (0, ((4, 2 * scale),), scale), (scale, ((4, 2 * scale),), scale), (0, (), 4 * scale)
    pieces = Pieces(8 * scale, frozenset((left, right, top)))
    assert pieces.first_segments == [range(start * scale, (start + 1) * scale) for start in (0, 1, 4, 5)]
    assert [pieces.covered[of] for of in (left, right, top)] == [(0, 2), (1, 3), (0, 1)]


def test_buffers_that_are_accessed_in_the_same_bytes_share_pieces() -> None:
    """The shapes of the views may differ."""
    known: dict[Any, Pieces] = {}
    root = Root(layout(bf16, (4096, 128), (128, 1)), "input")
    for shape, strides in (((4096, 64), (128, 1)), ((1, 4096, 64), (524288, 128, 1)), ((64, 64, 64), (8192, 128, 1))):
        halves = [ByteRegion("x", offset, layout(bf16, shape, strides), 0) for offset in (0, 128)]
        Memory(root, halves, cast(Any, SimpleNamespace(operation=None)), known)
    assert len(known) == 1
