"""A program as the templates see it: what its class has, and what its functions do."""

from __future__ import annotations

from dataclasses import dataclass

from hostweave.emit import kernel_views

ROUTES_A_LINE = 8


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
class Channel:
    member: str
    axes: str
    size: int
    mesh: Submesh | None = None  # None: the program's

    @property
    def lookup(self) -> str:
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
    body: str
    plan: str  # the name of the function that tells the arena what it allocates
    memory: str
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
    channels: tuple[Channel, ...]
    streams: tuple[Pool, ...]
    events: tuple[Pool, ...]
    plans: tuple[Plan, ...]
    temporaries: tuple[Temporary, ...]
    memory: str  # what prepare tells the arena
    kernels: tuple[kernel_views.Kernel, ...]
    sources: tuple[kernel_views.Source, ...]
    functions: tuple[Function, ...]
    body: str
    requirements: tuple[str, ...]  # calls that check sizes once all are known
    headers: tuple[str, ...]  # of program.h
    source_headers: tuple[str, ...]  # of program.cpp

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """What is launched."""
        return (*(kernel.name for kernel in self.kernels), *(source.name for source in self.sources))

    @property
    def texts(self) -> tuple[kernel_views.Source, ...]:
        """One source for each text: several functions may stand in one."""
        return tuple({(source.text, source.cpu): source for source in self.sources}.values())

    # --- lists, as C++ writes them ---

    @property
    def initializers(self) -> tuple[str, ...]:
        """Of the constructor."""
        return (
            "rank_(rank.expect_world(kWorld))",
            *(f"{flag.member}({flag.value.replace('rank_', 'rank')})" for flag in self.flags),
            *(f"{channel.member}({channel.lookup})" for channel in self.channels),
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
    def own_channels(self) -> tuple[Channel, ...]:
        """Those along axes of the program's mesh."""
        return tuple(channel for channel in self.channels if not channel.mesh)

    @property
    def submesh_channels(self) -> tuple[Channel, ...]:
        return tuple(channel for channel in self.channels if channel.mesh)

    @property
    def channel_rows(self) -> tuple[str, ...]:
        return tuple(f'"{channel.axes}"' for channel in self.own_channels)

    @property
    def prepares_with_sizes(self) -> bool:
        return bool(self.sizes and (self.plans or self.memory))

    @property
    def has_arrays(self) -> bool:
        return any(buffer.pool for buffer in self.temporaries)
