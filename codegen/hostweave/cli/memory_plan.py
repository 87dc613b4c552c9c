"""`hostweave inspect --memory`: offsets of temporaries at given sizes, the peak, and its lower bound."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.analysis.live_ranges import Begin, CallEvent, End, JoinEvent, MemoryEvents, OnRanks, begins, live_ranges
from hostweave.base.errors import HostweaveError
from hostweave.base.paths import NATIVE
from hostweave.check.run import size_of
from hostweave.check.sizes import default_sizes
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.types.mesh import Mesh, RankSizes, Sizes


@dataclass(frozen=True)
class MemoryRow:
    """A temporary: its offsets in the arena (one, or one per stream), and the lines of its first and last use."""

    name: str
    type: str
    bytes: int
    offsets: tuple[int, ...]
    lines: tuple[int, int]
    streams: tuple[str, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of a program. `peak` is the size of the arena, and `bound` is the maximum number of bytes that are live at one time."""

    rows: tuple[MemoryRow, ...]
    peak: int
    bound: int


def memory_plan(program: ir.HostProgram, sizes: Sizes, rank: int = 0) -> MemoryPlan:
    """Computes the plan of `prepare` on a rank."""
    replay = _Replay(program, RankSizes(sizes, program.mesh, rank), rank)
    layout = replay.events.plan()
    lines, rows = line_numbers(program), []
    for number, body in enumerate((program, *replay.bodies[:-1])):
        uses, of = def_use(body), f" of @{body.name}" if number else ""
        for begin in begins(replay.memory_events[body.name if number else ""]):
            if buffers := replay.buffers.get(begin):
                rows.append(_row(begin, of, layout.bytes[buffers.start], layout.offsets[buffers], uses, lines[number - 1]))
    if replay.workspace:
        used = [numbers[place.number] for body, numbers in zip(replay.bodies, lines, strict=True) for place in _need_workspace(body)]
        bytes, offsets = layout.bytes[0], layout.offsets[replay.workspace]
        rows.insert(0, MemoryRow("workspace of matmuls", "", bytes, offsets, (used[0], used[-1]), (ir.CALLER,)))
    return MemoryPlan(tuple(rows), layout.peak, layout.bound)


# --- the calls of prepare that describe buffers to the arena ----------------------------------------------------------


@dataclass(frozen=True)
class ArenaLayout:
    """Offset and bytes of each buffer, in the order of allocation, and the totals of `MemoryPlan`."""

    offsets: tuple[int, ...]
    bytes: tuple[int, ...]
    peak: int
    bound: int


class ArenaEvents:
    """Records calls of `hw::MemoryPlan`. `plan` makes the recorded calls by `hw_plan_memory`, and returns the layout."""

    def __init__(self) -> None:
        self.count = 0  # number of buffers
        self.events: list[tuple[int, int, int, int, int]] = []
        self.pools: dict[str, int] = {}

    def new(self, count: int = 1) -> slice:
        """Returns the indices of `count` new buffers. Buffers must be allocated in the order of their indices."""
        self.count += count
        return slice(self.count - count, self.count)

    def allocate(self, buffers: slice, bytes: int, pool: str | None = None, in_window: bool = False) -> None:
        """Records an allocation of `bytes` bytes, or of a matmul workspace if `bytes` is -1, for each of `buffers`."""
        self.events.append((3 if in_window else 0, buffers.start, buffers.stop - buffers.start, bytes, self._number(pool) if pool else 0))

    def free(self, buffers: slice) -> None:
        self.events.append((1, buffers.start, buffers.stop - buffers.start, 0, 0))

    def join(self, pool: str) -> None:
        self.events.append((2, 0, 0, 0, self._number(pool)))

    def plan(self) -> ArenaLayout:
        numbers = [number for event in self.events for number in event]
        offsets, bytes, bound = (ctypes.c_uint64 * self.count)(), (ctypes.c_uint64 * self.count)(), ctypes.c_uint64()
        events = (ctypes.c_int64 * len(numbers))(*numbers)
        peak = _library().hw_plan_memory(
            ctypes.c_int64(len(self.events)), events, ctypes.c_int64(self.count), offsets, bytes, ctypes.byref(bound)
        )
        return ArenaLayout(tuple(offsets), tuple(bytes), peak, bound.value)

    def _number(self, pool: str) -> int:
        return self.pools.setdefault(pool, len(self.pools) + 1)


class _Replay:
    """Records the calls that `prepare` makes, and keeps the buffers of each allocation."""

    def __init__(self, program: ir.HostProgram, sizes: Mapping[str, int], rank: int):
        self.program, self.sizes, self.rank = program, sizes, rank
        self.bodies = bodies(program)
        self.memory_events = {body.name: live_ranges(body, is_function=True) for body in self.bodies[:-1]}
        self.memory_events[""] = live_ranges(program)
        self.buffers: dict[Begin, slice] = {}
        self.events = ArenaEvents()
        self.workspace = self.events.new() if any(map(_need_workspace, self.bodies)) else None
        if self.workspace:
            self.events.allocate(self.workspace, -1)
        self.replay(self.memory_events[""])

    def replay(self, events: MemoryEvents) -> None:
        for event in events:
            match event:
                case OnRanks(mesh, inner) if self.rank in mesh.all_ranks:
                    self.replay(inner)
                case CallEvent(function):
                    self.replay(self.memory_events[function])
                case Begin(place, slots):
                    if event not in self.buffers:
                        self.buffers[event] = self.events.new(slots)
                    shape = [size_of(self.program, self.sizes, size, place.instruction) for size in event.type.shape]
                    bytes = prod(shape) * event.type.dtype.itemsize
                    pool = place.stream[0] if place.stream else None
                    self.events.allocate(self.buffers[event], bytes, pool, place.instruction.in_window)
                case End(begin) if buffers := self.buffers.get(begin):
                    self.events.free(buffers)
                case JoinEvent(stream):
                    self.events.join(stream)


def _need_workspace(body: ir.HostProgram) -> list[Place]:
    """Matmuls on the caller's stream. The caller's stream has no workspace, but each stream of the program has one."""
    return [place for place in def_use(body).places if isinstance(place.instruction, ir.Matmul) and place.stream is None]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so"))
    library.hw_plan_memory.restype = ctypes.c_uint64
    return library


def _row(begin: Begin, of: str, bytes: int, offsets: tuple[int, ...], uses: DefUse, lines: Sequence[int]) -> MemoryRow:
    uses_of_buffer = uses.lives[begin.place] or [begin.place]
    streams = dict.fromkeys(place.stream[0] if place.stream else ir.CALLER for place in uses_of_buffer)
    first_and_last = lines[uses_of_buffer[0].number], lines[uses_of_buffer[-1].number]
    return MemoryRow(f"%{begin.name}{of}", str(begin.type), bytes, offsets, first_and_last, tuple(streams))


def line_numbers(program: ir.HostProgram) -> list[list[int]]:
    """For each body, the lines of its instructions in the program's text, in the order of `tree.walk`."""
    lines: list[list[int]] = []

    def number(body: tree.Body, line: int) -> int:
        for i in body:
            lines[-1].append(line)
            line += 1
            for k, inner in enumerate(tree.bodies(i)):
                if k == 0 or inner:
                    line = number(inner, line) + 1
        return line

    first_lines = [k for k, line in enumerate(str(program).splitlines(), 1) if line.startswith(("function @", "host @"))]
    for first_line, body in zip(first_lines, (*(function.body for function in program.functions), program.body), strict=True):
        lines.append([])
        number(body, first_line + 1)
    return lines


def memory_report(program: ir.HostProgram, sizes: Mapping[str, int]) -> str:
    """The program with numbered lines, and the offsets of its buffers. Sizes that are not given have the values of `default_sizes`."""
    if unknown := sizes.keys() - set(program.given_sizes()):
        named, known = ", ".join(sorted(unknown)), ", ".join(program.given_sizes()) or "none"
        raise HostweaveError(f"{program.name}: --sizes: there is no size named {named}; the sizes of the program: {known}")
    bound = default_sizes(program, sizes)
    numbered = [f"{number:4}  {line}" for number, line in enumerate(str(program).splitlines(), 1)]
    at = ", ".join(f"{name}={size}" for name, size in bound.items())
    title = f"memory of @{program.name}" + (f" at {at}" if at else "")
    tables = [
        ["", title + (f", rank {rank}" if program.mesh.size > 1 else ""), *_table(memory_plan(program, bound, rank))]
        for rank in _ranks_that_differ(program)
    ]
    return "\n".join([*numbered, *(line for table in tables for line in table)]) + "\n"


def _ranks_that_differ(program: ir.HostProgram) -> tuple[int, ...]:
    """The first rank of each set of ranks that are in the same meshes."""
    meshes = {i.ranks for i in program.instructions() if i.ranks}
    first: dict[frozenset[Mesh], int] = {}
    for rank in program.mesh.all_ranks:
        first.setdefault(frozenset(mesh for mesh in meshes if rank in mesh.all_ranks), rank)
    return tuple(first.values())


def _table(plan: MemoryPlan) -> list[str]:
    if not plan.rows:
        return ["no temporaries"]
    rows = [("buffer", "type", "bytes", "offset", "lines", "streams"), *map(_cells, plan.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ratio = plan.peak / plan.bound if plan.bound else 1.0
    return [*lines, f"peak {plan.peak:,} bytes, lower bound {plan.bound:,}, ratio {ratio:.3f}"]


def _cells(row: MemoryRow) -> tuple[str, ...]:
    each = f"{len(row.offsets)} x " if len(row.offsets) > 1 else ""
    first, last = row.lines
    return row.name, row.type, f"{each}{row.bytes:,}", " ".join(f"{at:,}" for at in row.offsets), f"{first}-{last}", ", ".join(row.streams)
