"""Where the temporaries of a host program lie at given sizes, and how near that comes to the least bytes that would do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.analysis.live_ranges import Begin, Branch, Called, End, Joined, OnRanks, Steps, begins, live_ranges
from hostweave.base.paths import NATIVE
from hostweave.check.bindings import compiled, size_of
from hostweave.host_ir import ir
from hostweave.host_ir.calls import bodies
from hostweave.types.rank_sizes import RankSizes, Sizes

ALIGNMENT = 256  # bytes, of every buffer
WORKSPACE = 32 << 20  # bytes, of the matmuls on the caller's stream
FOREVER = 2**63 - 1


@dataclass(frozen=True)
class Row:
    """A temporary: its offsets, one for each stream that has one; the lines of the host IR from its first to its last use."""

    name: str
    type: str
    bytes: int
    offsets: tuple[int, ...]
    lines: tuple[int, int]
    streams: tuple[str, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """`peak` is what the arena takes, `bound` the most bytes that are in use at one moment: less will never do."""

    rows: tuple[Row, ...]
    peak: int
    bound: int


@dataclass
class Use:
    """From when to when, in numbers of the steps that the plan is told in; `joined` says when other streams know."""

    first: int
    last: int = FOREVER
    joined: int = FOREVER


@dataclass
class Buffer:
    """What `hw::Lifetime` says of one buffer."""

    bytes: int
    uses: list[Use] = field(default_factory=list)
    lane: tuple[str, int] | None = None  # of the stream that it belongs to


def memory_plan(program: ir.HostProgram, sizes: Sizes, rank: int = 0) -> MemoryPlan:
    """The plan that `prepare` makes on a rank, by the same solver. Raises ProgramError where a size does not divide."""
    replay = _Replay(program, RankSizes(sizes, program.mesh, rank), rank)
    buffers = [buffer for own in replay.buffers.values() for buffer in own]
    places, peak = place(buffers)
    offsets = {id(buffer): offset for buffer, offset in zip(buffers, places, strict=True)}
    lines, rows = line_numbers(program), []
    for number, body in enumerate((program, *replay.bodies[:-1])):
        uses, of = def_use(body), f" of @{body.name}" if number else ""
        for begin in begins(replay.steps[body.name if number else ""]):
            if own := replay.buffers.get(id(begin)):
                rows.append(_row(begin, of, own[0].bytes, tuple(offsets[id(buffer)] for buffer in own), uses, lines))
    if workspace := replay.buffers.get(0):
        rows.insert(0, _workspace_row(workspace[0], offsets[id(workspace[0])], replay.bodies, lines))
    return MemoryPlan(tuple(rows), peak, lower_bound(buffers))


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """The most bytes that the order of the text has in use at one moment; whole multiples of the alignment, as any arena has them."""
    moments = dict.fromkeys((use.first for buffer in buffers for use in buffer.uses), 0)
    for buffer in buffers:
        for use in buffer.uses:
            for moment in moments:
                if use.first <= moment < use.last:
                    moments[moment] += -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
    return max(moments.values(), default=0)


# --- what the generated prepare tells the arena -----------------------------------------------------------------------


class _Replay:
    """The buffers of each begin, by its id, and the workspace by 0, as `hw::MemoryPlan` comes to know them."""

    def __init__(self, program: ir.HostProgram, sizes: Mapping[str, int], rank: int):
        self.program, self.sizes, self.rank = program, sizes, rank
        self.bodies = bodies(program)
        self.steps = {body.name: live_ranges(body, is_block=True) for body in self.bodies[:-1]}
        self.steps[""] = live_ranges(program)
        self.buffers: dict[int, list[Buffer]] = {}
        self.now = 0
        if any(_needs_workspace(body.body) for body in self.bodies):
            self.buffers[0] = [Buffer(WORKSPACE, [Use(0)])]
            self.now = 1
        self.replay(self.steps[""])

    def replay(self, steps: Steps) -> None:
        for step in self.taken(steps):
            match step:
                case Called(block):
                    self.replay(self.steps[block])
                    continue
                case Begin():
                    if id(step) not in self.buffers:
                        self.buffers[id(step)] = self.made(step)
                    for buffer in self.buffers[id(step)]:
                        buffer.uses.append(Use(self.now))
                case End(begin):
                    for buffer in self.buffers.get(id(begin), ()):
                        buffer.uses[-1].last = min(buffer.uses[-1].last, self.now)
                case Joined(stream):
                    for use in (use for own in self.buffers.values() for b in own if b.lane and b.lane[0] == stream for use in b.uses):
                        use.last, use.joined = min(use.last, self.now), min(use.joined, self.now)
            self.now += 1

    def made(self, begin: Begin) -> list[Buffer]:
        allocate, block = begin.allocate, begin.block
        shape = [size_of(self.program, self.sizes, extent, allocate) for extent in allocate.type.shape]
        bytes = prod(shape) * allocate.type.dtype.itemsize
        return [Buffer(bytes, lane=(block.stream, k)) for k in range(begin.slots)] if block else [Buffer(bytes)]

    def taken(self, steps: Steps) -> Iterator[Begin | End | Joined | Called]:
        """The steps on the sides of branches that these sizes take, and of meshes that the rank is in."""
        for step in steps:
            match step:
                case Branch(condition, then, otherwise):
                    yield from self.taken(then if compiled(condition, self.sizes)({}) else otherwise)
                case OnRanks(mesh, inner):
                    yield from self.taken(inner) if self.rank in mesh.all_ranks else ()
                case _:
                    yield step


def _needs_workspace(body: ir.Body) -> bool:
    """Whether a matmul runs on the caller's stream, which brings no workspace of its own."""
    inner = (nested for i in body if not isinstance(i, ir.OnStream) for nested in ir.bodies(i))
    return any(isinstance(i, ir.Matmul) for i in body) or any(map(_needs_workspace, inner))


def place(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Offsets and the bytes that they take together: `hw::place` of runtime_cpp/src/memory_plan.cpp."""
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(buffer.lane for buffer in buffers if buffer.lane), 1)}
    uses = [(number, use) for number, buffer in enumerate(buffers) for use in buffer.uses]
    offsets = (ctypes.c_uint64 * len(buffers))()
    peak = _library().hw_place_buffers(
        ctypes.c_int64(len(buffers)),
        _column([buffer.bytes for buffer in buffers]),
        _column([lanes[buffer.lane] if buffer.lane else 0 for buffer in buffers]),
        ctypes.c_int64(len(uses)),
        _column([number for number, _ in uses]),
        _column([use.first for _, use in uses]),
        _column([use.last for _, use in uses]),
        _column([use.joined for _, use in uses]),
        offsets,
    )
    return list(offsets), peak


def _column(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so"))
    library.hw_place_buffers.restype = ctypes.c_uint64
    return library


# --- rows -------------------------------------------------------------------------------------------------------------


def _row(begin: Begin, of: str, bytes: int, offsets: tuple[int, ...], uses: DefUse, lines: Mapping[int, int]) -> Row:
    allocate, life = begin.allocate, uses.life(begin.allocate)
    return Row(f"%{allocate.out}{of}", str(allocate.type), bytes, offsets, _lines(life, lines), tuple(dict.fromkeys(map(_stream, life))))


def _workspace_row(buffer: Buffer, offset: int, parts: Sequence[ir.HostProgram], lines: Mapping[int, int]) -> Row:
    places = [place for part in parts for place in def_use(part).places]
    matmuls = [p for p in places if isinstance(p.instruction, ir.Matmul) and p.block is None]
    return Row("workspace of matmuls", "", buffer.bytes, (offset,), _lines(matmuls, lines), ("caller",))


def _lines(touches: Sequence[Place], lines: Mapping[int, int]) -> tuple[int, int]:
    return lines[id(touches[0].instruction)], lines[id(touches[-1].instruction)]


def _stream(touch: Place) -> str:
    return touch.block.stream if touch.block else "caller"


def line_numbers(program: ir.HostProgram) -> dict[int, int]:
    """The line of the text that each instruction begins on, by its id."""
    lines: dict[int, int] = {}

    def number(body: ir.Body, line: int) -> int:
        for i in body:
            lines[id(i)] = line
            line += 1
            for k, inner in enumerate(ir.bodies(i)):
                if k == 0 or inner:
                    line = number(inner, line) + 1
        return line

    heads = [k for k, line in enumerate(str(program).splitlines(), 1) if line.startswith(("block @", "host @"))]
    for head, body in zip(heads, (*(block.body for block in program.blocks), program.body), strict=True):
        number(body, head + 1)
    return lines
