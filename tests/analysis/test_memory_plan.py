"""Where temporaries lie: nothing that is in use at once overlaps, and the peak is near the least that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from example_programs import all_fusions, more_fusions
from larger_programs import PROGRAMS

import hostweave as hw
from hostweave.check.sizes import minimal_sizes
from hostweave.cli.memory_plan import ALIGNMENT, FOREVER, Buffer, Use, line_numbers, lower_bound, memory_plan, place
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.text import print_instruction
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.rank_sizes import Sizes
from hostweave.types.tensor import DType

MOST = 1.05  # times the lower bound
SHAPES = [
    dict(zip("SEF", sizes, strict=True))
    for sizes in [(8, 16, 32), (128, 4096, 512), (2048, 4096, 14336), (8192, 8192, 1024), (4099, 64, 96)]
]


def seeds() -> Iterator[tuple[Fusion, dict[str, int]]]:
    for ranks in (1, 4, 8):
        for fusion in {**all_fusions(ranks, 3), **more_fusions(ranks)}.values():
            least = minimal_sizes(lower(fusion, Options()))
            yield from ((fusion, {name: size * times for name, size in least.items()}) for times in (1, 7, 500))


def test_peaks_of_the_examples() -> None:
    for fusion, sizes in seeds():
        plan = memory_plan(lower(fusion, Options()), sizes)
        assert plan.bound <= plan.peak <= MOST * plan.bound, fusion.name


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_peaks_of_larger_programs(make: Callable[[int, DType], Fusion], ranks: int) -> None:
    host = lower(make(ranks, hw.bf16), Options())
    for sizes in SHAPES:
        for rank in range(ranks):
            plan = memory_plan(host, sizes, rank)
            assert plan.bound <= plan.peak <= MOST * plan.bound


def test_the_bytes_of_a_layer() -> None:
    """What a layer holds at once does not grow with the number of layers, and is less than half of all its temporaries."""
    sizes = {"S": 2048, "E": 4096, "F": 14336}
    one, four = (memory_plan(lower(PROGRAMS[2](8, hw.bf16, count), Options()), sizes) for count in (1, 4))
    assert one.peak <= four.peak <= 1.2 * one.peak
    assert one.peak < sum(row.bytes for row in one.rows) / 2 + (32 << 20)


# --- the solver -------------------------------------------------------------------------------------------------------


def buffers_of(*rows: tuple[int, int, int]) -> list[Buffer]:
    return [Buffer(bytes, [Use(first, last)]) for bytes, first, last in rows]


def may_share(a: Buffer, b: Buffer) -> bool:
    pairs = (((one, a, other), (other, b, one)) for one in a.uses for other in b.uses)
    ordered = (pair[0] if pair[0][0].first <= pair[1][0].first else pair[1] for pair in pairs)
    return all(use.last <= later.first and (of.lane is None or a.lane == b.lane or use.joined <= later.first) for use, of, later in ordered)


def test_no_two_in_use_at_once_overlap() -> None:
    lanes = [None, None, ("ring", 0), ("ring", 1), ("comm", 0)]
    for seed in range(200):
        draw = iter(range(seed * 7919, 10**9, 104729 + seed))
        buffers = []
        for _ in range(12):
            first, length, bytes, lane = next(draw) % 20, 1 + next(draw) % 6, next(draw) % 5000, lanes[next(draw) % len(lanes)]
            joined = first + length + 3 if lane else FOREVER
            buffers.append(Buffer(bytes, [Use(first, first + length, joined), Use(first + 40, first + 40 + length)], lane))
        offsets, peak = place(buffers)
        assert lower_bound(buffers) <= peak
        for (a, at), (b, then) in combinations(zip(buffers, offsets, strict=True), 2):
            assert may_share(a, b) or at + a.bytes <= then or then + b.bytes <= at
            assert at % ALIGNMENT == then % ALIGNMENT == 0
            assert max(at + a.bytes, then + b.bytes) <= peak


def test_a_gap_is_filled() -> None:
    offsets, peak = place(buffers_of((1024, 0, 9), (2048, 1, 3), (1024, 2, 9), (2048, 4, 9)))
    assert peak == 4096
    assert offsets[1] == offsets[3]


def test_streams_keep_apart_until_they_are_joined() -> None:
    ring = [("ring", 0), ("ring", 1)]
    first = [Buffer(512, [Use(0, 1, 4)], lane) for lane in ring]
    second = [Buffer(1024, [Use(2, 4, 4)], lane) for lane in ring]
    after = [Buffer(2048, [Use(5)])]
    offsets, peak = place([*first, *second, *after])
    assert peak == 2048
    assert offsets[:2] == offsets[2:4]


def test_a_buffer_that_comes_again_lends_its_bytes_in_between() -> None:
    again, between = Buffer(1024, [Use(0, 1), Use(4, 5)]), Buffer(1024, [Use(2, 3)])
    assert place([again, between]) == ([0, 0], 1024)
    between.uses.append(Use(4))
    assert place([again, between])[1] == 2048


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_lines(make: Callable[[int, DType], Fusion]) -> None:
    host = lower(make(2, hw.f32), Options())
    lines, text = line_numbers(host), str(host).splitlines()
    for i in ir.walk(host.body):
        assert text[lines[id(i)] - 1].strip() == print_instruction(i)[0]


def test_rows() -> None:
    text = """host @t(%x: f32[M, N]) -> (%y: f32[M, N]) mesh() streams(ring[2]) {
  %a = allocate f32[M, N]
  copy %x -> %a
  fork ring
  for %i in 0..4 {
    stream ring[%i] {
      %b = allocate f32[M/4, N]
      %a_i = chunk %a[0: %i of 4]
      copy %a_i -> %b
      %y_i = chunk %y[0: %i of 4]
      copy %b -> %y_i
    }
  }
  join ring
  deallocate %a
  %c = allocate f32[2*M, N]
  fill %c with 0.0
}
"""
    sizes: Sizes = {"M": 64, "N": 16}
    plan = memory_plan(HostProgram.parse(text), sizes)
    assert [(row.name, row.bytes, row.offsets, row.lines, row.streams) for row in plan.rows] == [
        ("%a", 4096, (0,), (3, 9), ("caller", "ring")),
        ("%b", 1024, (4096, 5120), (9, 11), ("ring",)),
        ("%c", 8192, (0,), (17, 17), ("caller",)),
    ]
    assert (plan.peak, plan.bound) == (8192, 8192)


def test_rows_of_one_name() -> None:
    """Bodies side by side may use one name for two buffers, and need not use what they allocate."""
    program = HostProgram.parse("""\
host @f(%x: f32[M, 8]) -> (%y: f32[M, 8], %z: f32[M, 8]) mesh(x=1) streams(a[1], b[1]) {
  fork a
  fork b
  stream a[0] {
    %t = allocate f32[M, 8]
    copy %x -> %t
    copy %t -> %y
  }
  stream b[0] {
    %t = allocate f32[M, 8]
    %u = allocate f32[M, 8]
    copy %x -> %t
    copy %t -> %z
  }
  join a
  join b
}
""")
    rows = [(row.name, row.lines, row.streams) for row in memory_plan(program, {"M": 4}).rows]
    assert rows == [("%t", (6, 7), ("a",)), ("%t", (12, 13), ("b",)), ("%u", (11, 11), ("b",))]
