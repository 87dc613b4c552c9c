"""Live ranges of the temporaries of a host program, for the arena that `prepare` lays out and for reports.

An allocate in a stream block is one buffer for each of the streams, anywhere else it is one buffer. It lives until its
deallocate, else to the end of the body that it stands in, and what a function allocates does so in each of its calls. What begins
after that, in the order of the text, may have its bytes; while streams are not joined, those of a stream's own buffer are for
what the same stream allocates next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hostweave.analysis.def_use import Place, def_use
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const, Var
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import BufferType


@dataclass(frozen=True, eq=False)
class Begin:
    """Of an allocate: `slots` buffers, one for each of the first streams of the pool that its block runs on, or one outside of blocks."""

    place: Place
    slots: int = 1

    @property
    def name(self) -> str:
        return tree.names(self.place.instruction, "allocate")[0]

    @property
    def type(self) -> BufferType:
        return self.place.instruction.defined({})[self.name]


@dataclass(frozen=True)
class End:
    of: Begin


@dataclass(frozen=True)
class Joined:
    stream: str


@dataclass(frozen=True)
class Called:
    """A function, with all that it allocates."""

    function: str


@dataclass(frozen=True)
class OnRanks:
    """Of the ranks of a mesh alone."""

    mesh: Mesh
    steps: Steps


Step = Begin | End | Joined | Called | OnRanks
Steps = tuple[Step, ...]


@ir.analysis
def live_ranges(program: ir.HostProgram, is_function: bool = False) -> Steps:
    """Every temporary's begin and, where another one begins after it, its end; of a function always, because another call may follow."""
    return _needed(_Walk(program).body(program.body, {}, is_nested=is_function), follows=is_function)


@ir.analysis
def allocating_functions(program: ir.HostProgram) -> set[str]:
    """The functions that allocate, or call such."""
    found: set[str] = set()
    for function in program.functions:
        if any(tree.names(i, "allocate") or not found.isdisjoint(tree.names(i, "call")) for i in tree.walk(function.body)):
            found.add(function.name)
    return found


class _Walk:
    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.counts: dict[str, int] = {}  # of the steps of loops, where known
        self.allocates = iter(def_use(program).lives)  # in the order of the text

    def body(self, body: tree.Body, outer: dict[str, Begin], is_nested: bool = True) -> Steps:
        known, own = dict(outer), dict[str, Begin]()
        steps = self.steps(body, known, own)
        return (*steps, *map(End, own.values())) if is_nested else steps

    def steps(self, body: tree.Body, known: dict[str, Begin], own: dict[str, Begin]) -> Steps:
        """Of the instructions of a body; `own` is what has begun in it, and stays where that was on some of the ranks."""
        steps: list[Step] = []
        for i in body:
            for name in tree.names(i, "allocate"):
                place = next(self.allocates)
                own[name] = known[name] = begin = Begin(place, self.slots(place.stream) if place.stream else 1)
                steps.append(begin)
            for name in tree.names(i, "free"):
                own.pop(name, None)
                steps.append(End(known[name]))
            steps += map(Joined, tree.names(i, "join"))
            steps += (Called(name) for name in tree.names(i, "call") if name in allocating_functions(self.program))
            if i.trips is not None and i.trips.is_int:
                self.counts.update(dict.fromkeys(tree.names(i, "index"), int(i.trips)))
            if i.ranks:
                steps += (OnRanks(i.ranks, self.steps(inner, known, own)) for inner in tree.bodies(i))
                continue
            steps += (step for inner in tree.bodies(i) for step in self.body(inner, known))
        return tuple(steps)

    def slots(self, stream: tree.Slot) -> int:
        """How many of the first streams of its pool a block may run on."""
        pool, index = stream
        streams = next(streams.count for streams in self.program.streams if streams.name == pool)
        match index:
            case Const(value):
                return value % streams + 1
            case Var(name):
                return min(streams, self.counts.get(name, streams))
        return streams


def _needed(steps: Steps, follows: bool, pools: frozenset[str] = frozenset()) -> Steps:
    """Without ends that nothing begins after, or that a join says again, and joins of streams that have nothing of their own."""
    pools |= {begin.place.stream[0] for begin in begins(steps) if begin.place.stream}
    joined: set[str] = set()  # before anything begins
    result: list[Step] = []
    for step in reversed(steps):
        match step:
            case Begin() | Called():
                follows = True
                joined.clear()
            case OnRanks(mesh, inner):
                if not (inner := _needed(inner, follows, pools)):
                    continue
                step = OnRanks(mesh, inner)
                if any(isinstance(one, Begin | Called) for one in flat(inner)):
                    follows = True
                    joined.clear()
            case End(begin):
                if not follows or (begin.place.stream and begin.place.stream[0] in joined):
                    continue
            case Joined(stream):
                if not follows or stream not in pools:
                    continue
                joined.add(stream)
        result.append(step)
    return tuple(reversed(result))


def flat(steps: Steps) -> Iterator[Step]:
    """With those of some of the ranks in their places."""
    for step in steps:
        yield from flat(step.steps) if isinstance(step, OnRanks) else (step,)


def begins(steps: Steps) -> tuple[Begin, ...]:
    return tuple(step for step in flat(steps) if isinstance(step, Begin))
