"""The memory plan: live buffers do not overlap, and the peak is close to the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

import pytest
from fusions_from_files import all_fusions, more_fusions
from parts_of_transformers import PROGRAMS

import hostweave as hw
from hostweave.check.sizes import minimal_sizes
from hostweave.cli.memory_plan import ArenaEvents, line_numbers, memory_plan
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import tree
from hostweave.host_ir.calls import bodies
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.mesh import Sizes
from hostweave.types.tensor import DType

MOST = 1.05  # largest allowed ratio of the peak to the lower bound
SHAPES = [
    dict(zip("SEF", sizes, strict=True))
    for sizes in [(8, 16, 32), (128, 4096, 512), (2048, 4096, 14336), (8192, 8192, 1024), (4099, 64, 96)]
]


def seeds() -> Iterator[tuple[HostProgram, dict[str, int]]]:
    for ranks in (1, 4, 8):
        for fusion in {**all_fusions(ranks, 3), **more_fusions(ranks)}.values():
            host = lower(fusion, Options())
            least = minimal_sizes(host)
            yield from ((host, {name: size * times for name, size in least.items()}) for times in (1, 7, 500))


def test_peaks_of_the_examples() -> None:
    for host, sizes in seeds():
        plan = memory_plan(host, sizes)
        assert plan.bound <= plan.peak <= MOST * plan.bound, host.name


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_peaks_of_larger_programs(make: Callable[[int, DType], Fusion], ranks: int) -> None:
    host = lower(make(ranks, hw.bf16), Options())
    for sizes in SHAPES:
        for rank in range(ranks):
            plan = memory_plan(host, sizes, rank)
            assert plan.bound <= plan.peak <= MOST * plan.bound


def test_the_bytes_of_a_layer() -> None:
    """The peak memory of four layers is at most 1.2 times the peak of one layer. The peak of one layer is less than 32 MiB
    plus half of the bytes of its temporaries."""
    sizes = {"S": 2048, "E": 4096, "F": 14336}
    one, four = (memory_plan(lower(PROGRAMS[2](8, hw.bf16, count), Options()), sizes) for count in (1, 4))
    assert one.peak <= four.peak <= 1.2 * one.peak
    assert one.peak < sum(row.bytes for row in one.rows) / 2 + (32 << 20)


# --- the planner ------------------------------------------------------------------------------------------------------

ALIGNMENT = 256  # bytes
FOREVER = 10**9


@dataclass
class Buffer:
    """A buffer and its live ranges. Each range has a first event, an end, and the event after which other streams may reuse the bytes."""

    bytes: int
    owner: tuple[str, int] | None = None  # stream that owns the buffer
    uses: list[list[int]] = field(default_factory=list)

    def end(self, now: int, joined: int = FOREVER) -> None:
        for use in self.uses:
            use[1:] = min(use[1], now), min(use[2], joined)


def may_share(a: Buffer, b: Buffer) -> bool:
    pairs = (((one, a, other), (other, b, one)) for one in a.uses for other in b.uses)
    ordered = (pair[0] if pair[0][0][0] <= pair[1][0][0] else pair[1] for pair in pairs)
    return all(use[1] <= later[0] and (of.owner is None or a.owner == b.owner or use[2] <= later[0]) for use, of, later in ordered)


def lower_bound(buffers: Sequence[Buffer]) -> int:
    rounded = [(buffer.uses, -(-buffer.bytes // ALIGNMENT) * ALIGNMENT) for buffer in buffers]
    moments = {use[0] for buffer in buffers for use in buffer.uses}
    return max(sum(bytes for uses, bytes in rounded if any(use[0] <= now < use[1] for use in uses)) for now in moments)


def test_a_buffer_without_a_gap_is_placed_first() -> None:
    """For these sizes, no placement in order of size, area or time reaches the lower bound. So the planner moves the buffer
    that ends at the highest address to the front of the order, and places the buffers again."""
    events, before = ArenaEvents(), None
    sizes = (256, 512, 448, 224, 512, 256)
    for size in sizes:
        events.allocate(own := events.new(), size * ALIGNMENT)
        if before:
            events.free(before)
        before = own
    placed = events.plan()
    assert placed.peak == placed.bound == (512 + 448) * ALIGNMENT


def test_no_two_in_use_at_once_overlap() -> None:
    """The events are random sequences of allocate, free, reallocate and join. The planner's lower bound is the largest number of live
    bytes, where the size of each buffer is rounded up to a multiple of 256."""
    for seed in range(200):
        random = Random(seed)
        events, buffers, groups = ArenaEvents(), list[Buffer](), list[tuple[slice, str | None]]()
        for now in range(40):
            kind = random.choice(("allocate", "allocate", "free", "join"))
            if kind == "allocate" and (not groups or random.random() < 0.6):
                pool = random.choice((None, None, "loop", "comm"))
                own, bytes = events.new(random.randint(1, 3) if pool else 1), random.randrange(1, 5000)
                groups.append((own, pool))
                buffers += [Buffer(bytes, (pool, k) if pool else None) for k in range(own.stop - own.start)]
            elif groups:
                own, pool = random.choice(groups)
            else:
                continue
            if kind == "join":
                events.join(pool or "loop")
                for buffer in buffers:
                    if buffer.owner and buffer.owner[0] == (pool or "loop"):
                        buffer.end(now, now)
            elif kind == "free":
                events.free(own)
                for buffer in buffers[own]:
                    buffer.end(now)
            else:
                events.free(own)  # no effect before the first allocation of the buffer
                events.allocate(own, buffers[own.start].bytes, pool)
                for buffer in buffers[own]:
                    buffer.end(now)
                    buffer.uses.append([now, FOREVER, FOREVER])
        placed = events.plan()
        assert placed.bound == lower_bound(buffers) <= placed.peak
        assert placed.bytes == tuple(buffer.bytes for buffer in buffers)
        for (a, at), (b, then) in combinations(zip(buffers, placed.offsets, strict=True), 2):
            assert may_share(a, b) or at + a.bytes <= then or then + b.bytes <= at
            assert at % ALIGNMENT == then % ALIGNMENT == 0
            assert max(at + a.bytes, then + b.bytes) <= placed.peak


def test_a_gap_is_filled() -> None:
    events = ArenaEvents()
    first, low, high, again = (events.new() for _ in range(4))
    for own, bytes in ((first, 1024), (low, 2048), (high, 1024)):
        events.allocate(own, bytes)
    events.free(low)
    events.allocate(again, 2048)
    placed = events.plan()
    assert placed.peak == 4096
    assert placed.offsets[1] == placed.offsets[3]


def test_streams_share_no_bytes_until_they_are_joined() -> None:
    events = ArenaEvents()
    first, second, after = events.new(2), events.new(2), events.new()
    events.allocate(first, 512, "loop")
    events.free(first)
    events.allocate(second, 1024, "loop")
    events.join("loop")
    events.allocate(after, 2048)
    placed = events.plan()
    assert placed.peak == 2048
    assert placed.offsets[:2] == placed.offsets[2:4]


def test_bytes_of_a_reallocated_buffer_are_reused_in_between() -> None:
    events = ArenaEvents()
    again, between = events.new(), events.new()
    events.allocate(again, 1024)
    events.free(again)
    events.allocate(between, 1024)
    events.free(between)
    events.allocate(again, 1024)
    placed = events.plan()
    assert (placed.offsets, placed.peak) == ((0, 0), 1024)
    events.allocate(between, 1024)
    assert events.plan().peak == 2048


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_lines(make: Callable[[int, DType], Fusion]) -> None:
    host = lower(make(2, hw.f32), Options())
    lines, text = line_numbers(host), str(host).splitlines()
    for body, own in zip(bodies(host), lines, strict=True):
        for i, line in zip(tree.walk(body.body), own, strict=True):
            assert text[line - 1].strip() == i.lines()[0]


def test_rows() -> None:
    text = """host @t(%x: f32[M, N]) -> (%y: f32[M, N]) mesh() streams(loop[2]) {
  %a = allocate f32[M, N]
  copy %x -> %a
  fork loop
  for %i in 0..4 {
    stream loop[%i] {
      %b = allocate f32[M/4, N]
      %a_i = chunk %a[0: %i of 4]
      copy %a_i -> %b
      %y_i = chunk %y[0: %i of 4]
      copy %b -> %y_i
    }
  }
  join loop
  deallocate %a
  %c = allocate f32[2*M, N]
  fill %c with 0.0
}
"""
    sizes: Sizes = {"M": 64, "N": 16}
    plan = memory_plan(HostProgram.parse(text), sizes)
    assert [(row.name, row.bytes, row.offsets, row.lines, row.streams) for row in plan.rows] == [
        ("%a", 4096, (0,), (3, 9), ("caller", "loop")),
        ("%b", 1024, (4096, 5120), (9, 11), ("loop",)),
        ("%c", 8192, (0,), (17, 17), ("caller",)),
    ]
    assert (plan.peak, plan.bound) == (8192, 8192)


def test_rows_of_one_name() -> None:
    """Two stream blocks may each allocate a buffer named %t. A block may allocate a buffer that it does not use."""
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


def test_a_block_has_memory_for_the_streams_that_it_may_run_on() -> None:
    """If the stream index is always 0, a block has a buffer for one of the four streams. In a loop of two iterations, the block has buffers
    for two streams."""
    block = "stream loop[{index}] {{\n%t = allocate f32[M]\ncopy %x -> %t\ncopy %t -> %y\n}}\n"
    for loop, index, slots in (("{}", "0", 1), ("for %i in 0..2 {{{}}}\n", "%i", 2), ("for %i in 0..9 {{{}}}\n", "%i", 4)):
        body = loop.format(block.format(index=index))
        host = HostProgram.parse(f"host @f(%x: f32[M]) -> (%y: f32[M]) mesh() streams(loop[4]) {{\nfork loop\n{body}join loop\n}}\n")
        (row,) = memory_plan(host, {"M": 8}).rows
        assert len(row.offsets) == slots
