"""What the templates see: the program in strings, every decision taken. `template` names the file that lays a view out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

ROUTES_A_LINE = 8

# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstructionView:
    template: ClassVar[str]


Body = tuple[InstructionView, ...]


@dataclass(frozen=True)
class Select(InstructionView):
    template = "select"
    type: str  # const auto* or auto*
    name: str
    base: str
    offset: str


@dataclass(frozen=True)
class Slice(Select):
    template = "slice"


@dataclass(frozen=True)
class Section(Select):
    template = "section"


@dataclass(frozen=True)
class Strided(Select):
    template = "strided"


@dataclass(frozen=True)
class Allocate(InstructionView):
    """The buffer of the present stream."""

    template = "allocate"
    type: str
    name: str
    base: str
    index: str


@dataclass(frozen=True)
class Matmul(InstructionView):
    template = "matmul"
    plan: str
    a: str
    b: str
    dst: str
    stream: str
    terms: tuple[str, ...]  # what is added to the product


@dataclass(frozen=True)
class Launch(InstructionView):
    template = "launch"
    kernel: str
    grid: str
    stream: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Copy(InstructionView):
    template = "copy"
    dst: str
    src: str
    bytes: str
    stream: str


@dataclass(frozen=True)
class CopyRows(InstructionView):
    template = "copy_rows"
    dst: str
    dst_pitch: str
    src: str
    src_pitch: str
    bytes: str
    rows: str
    stream: str


@dataclass(frozen=True)
class Fill(InstructionView):
    """With zeros."""

    template = "fill"
    dst: str
    bytes: str
    stream: str


@dataclass(frozen=True)
class AllGather(InstructionView):
    template = "all_gather"
    src: str
    dst: str
    count: str
    dtype: str
    team: str
    stream: str


@dataclass(frozen=True)
class AllReduce(AllGather):
    template = "all_reduce"
    op: str


@dataclass(frozen=True)
class ReduceScatter(AllReduce):
    template = "reduce_scatter"


@dataclass(frozen=True)
class Broadcast(AllGather):
    template = "broadcast"
    root: str


@dataclass(frozen=True)
class Spread(Broadcast):
    """A broadcast in place on the root, whose buffer is only read."""

    template = "spread"
    place: str  # of this rank in the team
    kept: str  # the root's buffer, as one that could be written


@dataclass(frozen=True)
class Reduce(AllReduce):
    template = "reduce"
    root: str


@dataclass(frozen=True)
class AllToAll(AllGather):
    """Stands in a group. The block of each `peer` begins `offset` elements into a buffer."""

    template = "all_to_all"
    peer: str
    offset: str


@dataclass(frozen=True)
class Gather(AllToAll):
    template = "gather"
    root: str


@dataclass(frozen=True)
class Scatter(Gather):
    template = "scatter"


@dataclass(frozen=True)
class Exchange(AllGather):
    """Stands in a group."""

    template = "exchange"
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    bytes: str


@dataclass(frozen=True)
class Send(InstructionView):
    template = "send"
    buffer: str
    count: str
    dtype: str
    peer: str
    team: str
    stream: str


@dataclass(frozen=True)
class Recv(Send):
    template = "recv"


@dataclass(frozen=True)
class SendBlocks(InstructionView):
    """Stands in a group."""

    template = "send_blocks"
    buffer: str
    count: str
    dtype: str
    routes: str
    rank: str
    route: str
    sent: str  # how far into the buffer the block of a route begins
    received: str
    team: str
    stream: str


@dataclass(frozen=True)
class RecvBlocks(SendBlocks):
    template = "recv_blocks"


@dataclass(frozen=True)
class Group(InstructionView):
    template = "group"
    body: Body
    braces: bool  # more follows in the same scope


@dataclass(frozen=True)
class OnStream(InstructionView):
    template = "stream"
    pool: str
    index: str
    body: Body
    braces: bool


@dataclass(frozen=True)
class Fork(InstructionView):
    template = "fork"
    pool: str


@dataclass(frozen=True)
class Join(InstructionView):
    template = "join"
    pool: str


@dataclass(frozen=True)
class Record(InstructionView):
    template = "record"
    events: str
    index: str
    stream: str


@dataclass(frozen=True)
class Wait(InstructionView):
    template = "wait"
    events: str
    index: str
    stream: str


@dataclass(frozen=True)
class Let(InstructionView):
    template = "let"
    name: str
    value: str


@dataclass(frozen=True)
class For(InstructionView):
    template = "for"
    index: str
    count: str
    body: Body


@dataclass(frozen=True)
class If(InstructionView):
    template = "if"
    condition: str
    body: Body
    orelse: Body


@dataclass(frozen=True)
class Call(InstructionView):
    template = "call"
    function: str
    arguments: tuple[str, ...]


# --- the plan of the arena --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reserve(InstructionView):
    template = "memory_allocate"
    member: str
    count: str
    pool: str = ""  # of streams that have one each


@dataclass(frozen=True)
class Free(InstructionView):
    template = "memory_free"
    member: str


@dataclass(frozen=True)
class Joined(InstructionView):
    template = "memory_join"
    pool: str


@dataclass(frozen=True)
class MemoryOf(InstructionView):
    """Of a block that is called."""

    template = "memory_call"
    function: str


@dataclass(frozen=True)
class PlannedIf(If):
    """By sizes."""


# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A thread for each element of the results, or for `width` neighbours of them."""

    template: ClassVar[str] = "pointwise"
    name: str
    comments: tuple[str, ...]
    params: tuple[str, ...]
    arguments: tuple[str, ...]  # the names of the parameters
    width: int  # neighbours that a thread takes together
    is_wide: str  # the condition under which it may
    threads: str  # of a block, at most
    row: str  # the declaration of how threads share a row that they hold
    each: str  # the head of the loop over elements
    indices: tuple[str, ...]  # declarations of the indices that its own stands for, and of what threads hold
    body: tuple[str, ...]


@dataclass(frozen=True)
class Pass:
    """One walk over what is reduced, which some reductions need."""

    before: tuple[str, ...]
    starts: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Reduction(Kernel):
    """A thread or a block for each element of what is kept, or a block for a tile of them, which walks what is reduced to it.

    Neighbouring threads read side by side: those of elements, or those that share the innermost loop.
    """

    template = "reduction"
    inner: tuple[str, ...]  # the heads of the loops over what is reduced
    passes: tuple[Pass, ...]
    once: str  # the condition under which a thread stores what several have reduced
    stores: tuple[str, ...]  # of results that have the kept dims alone
    last: tuple[str, ...]  # a last walk, for results of every element


@dataclass(frozen=True)
class Text:
    """C++ of the user, and where it stands: lines to include before it, and the others as they are, each at its place."""

    includes: tuple[str, ...]
    lines: tuple[str, ...]
    line: int
    file: str


@dataclass(frozen=True)
class Source:
    """A function of the user, and the one that the CPU target has in its place."""

    name: str
    declaration: str
    text: Text
    cpu: Text | None


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A symbolic size, and what must divide it: 1 where its value already is a multiple."""

    label: str  # the user's name
    name: str
    value: str
    divisor: int
    parts: tuple[Part, ...]  # what follows from it


@dataclass(frozen=True)
class Part:
    """The block of a size that ranks share, or what this rank holds of it."""

    name: str
    value: str


@dataclass(frozen=True)
class Argument:
    name: str  # the user's
    field: str
    type: str  # of what one rank holds: bf16[M/8, K]
    dtype: str
    cpp: str
    shape: str
    pattern: str  # the shape as far as it is known before this argument tells its sizes
    sizes: tuple[Size, ...]
    again: bool  # dims to check once its sizes are known
    used: bool
    on: str = ""  # the condition that this rank has it


@dataclass(frozen=True)
class Pool:
    member: str
    name: str
    count: int


@dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclass(frozen=True)
class Submesh:
    """A mesh of some of the ranks."""

    text: str
    flag: str  # the member that says whether this rank is in it
    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]

    @property
    def axis_rows(self) -> tuple[str, ...]:
        return tuple(f'{{"{axis.name}", {axis.size}}}' for axis in self.axes)

    @property
    def rank_rows(self) -> tuple[str, ...]:
        return tuple(map(str, self.ranks))


@dataclass(frozen=True)
class Team:
    member: str
    axes: str
    size: int
    mesh: Submesh | None = None  # None: the program's

    @property
    def channel(self) -> str:
        """What the constructor takes for it."""
        if not self.mesh:
            return f'rank.channel(kMesh, "{self.axes}", {self.size})'
        return f'{self.mesh.flag} ? rank.channel("{self.mesh.text}", "{self.axes}", {self.size}) : hw::kNoChannel'

    @property
    def where(self) -> str:
        return f"{self.axes} of {self.mesh.text}" if self.mesh else self.axes


@dataclass(frozen=True)
class Coordinate:
    name: str
    value: str


@dataclass(frozen=True)
class Flag:
    """Whether this rank is in a mesh."""

    member: str
    value: str
    mesh: str


@dataclass(frozen=True)
class Routes:
    """Which rank sends which block to which."""

    name: str
    rows: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """Of the table, so many rows each."""
        return tuple(", ".join(self.rows[i : i + ROUTES_A_LINE]) + "," for i in range(0, len(self.rows), ROUTES_A_LINE))


@dataclass(frozen=True)
class Plan:
    member: str
    operands: str  # dtypes
    result: str
    ends: tuple[str, ...]  # the epilogue, then the compute type, where they are not the default ones
    a: str
    b: str
    c: str
    comment: str
    on: str = ""  # the condition that this rank needs it


@dataclass(frozen=True)
class Temporary:
    declaration: str
    member: str
    count: str
    comment: str
    pool: str = ""  # of streams that have one each


@dataclass(frozen=True)
class Function:
    """A block: a member function that enqueues."""

    name: str
    comment: str
    params: tuple[str, ...]
    sizes: tuple[str, ...]  # all of the program's, or none where it names none
    coordinates: tuple[Coordinate, ...]
    body: Body
    plan: str  # the name of the function that tells the arena what it allocates
    memory: Body
    memory_sizes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    name: str
    namespace: str
    title: str
    text: tuple[str, ...]  # the host IR
    mesh: str
    axes: tuple[Axis, ...]
    world: int
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    sizes: tuple[str, ...]
    parts: tuple[Part, ...]  # of dims that are ints
    flags: tuple[Flag, ...]
    coordinates: tuple[Coordinate, ...]
    routes: tuple[Routes, ...]
    teams: tuple[Team, ...]
    streams: tuple[Pool, ...]
    events: tuple[Pool, ...]
    plans: tuple[Plan, ...]
    temporaries: tuple[Temporary, ...]
    memory: Body  # what prepare tells the arena
    kernels: tuple[Kernel, ...]
    sources: tuple[Source, ...]
    functions: tuple[Function, ...]
    body: Body
    requirements: tuple[str, ...]  # calls that check sizes once all are known
    headers: tuple[str, ...]  # of program.h
    source_headers: tuple[str, ...]  # of program.cpp

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """What is launched."""
        return (*(kernel.name for kernel in self.kernels), *(source.name for source in self.sources))

    @property
    def texts(self) -> tuple[Source, ...]:
        """One source for each text: several functions may stand in one."""
        return tuple({(source.text, source.cpu): source for source in self.sources}.values())

    # --- lists, as C++ writes them ---

    @property
    def initializers(self) -> tuple[str, ...]:
        """Of the constructor."""
        return (
            "rank_(rank.expect_world(kWorld))",
            *(f"{flag.member}({flag.value.replace('rank_', 'rank')})" for flag in self.flags),
            *(f"{team.member}({team.channel})" for team in self.teams),
            *(f'{pool.member}(rank, "{pool.name}", {pool.count})' for pool in self.streams),
            *(f"{pool.member}({pool.count})" for pool in self.events),
            *(f"{plan.member}({', '.join(('rank', plan.operands, plan.result, *plan.ends))})" for plan in self.plans),
        )

    @property
    def output_shapes(self) -> tuple[str, ...]:
        return tuple(f".{y.field} = {y.shape}" for y in self.outputs)

    @property
    def axis_rows(self) -> tuple[str, ...]:
        return tuple(f'{{"{axis.name}", {axis.size}}}' for axis in self.axes)

    @property
    def own_teams(self) -> tuple[Team, ...]:
        """Those along axes of the program's mesh."""
        return tuple(team for team in self.teams if not team.mesh)

    @property
    def submesh_teams(self) -> tuple[Team, ...]:
        return tuple(team for team in self.teams if team.mesh)

    @property
    def team_rows(self) -> tuple[str, ...]:
        return tuple(f'"{team.axes}"' for team in self.own_teams)

    @property
    def prepares_with_sizes(self) -> bool:
        return bool(self.sizes and (self.plans or self.memory))

    @property
    def has_arrays(self) -> bool:
        return any(buffer.pool for buffer in self.temporaries)
