"""Live ranges of a host program's temporaries, which determine the layout of the arena.

An `allocate` makes one buffer, or several in a stream block (see `Begin`). A buffer lives until its `deallocate`, or until the end of the
enclosing body. An `on` body does not count as an enclosing body. Buffers that are allocated later in program order may reuse the bytes. If
a buffer belongs to a stream, only buffers of this stream may reuse its bytes until the streams are joined.
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
    """An `allocate`: the live range of its buffers begins. In a stream block, each of the first `slots` streams has one buffer."""

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
class JoinEvent:
    stream: str


@dataclass(frozen=True)
class CallEvent:
    """Call of a function: the live ranges of its temporaries begin and end."""

    function: str


@dataclass(frozen=True)
class OnRanks:
    mesh: Mesh
    events: MemoryEvents


MemoryEvent = Begin | End | JoinEvent | CallEvent | OnRanks
MemoryEvents = tuple[MemoryEvent, ...]


@ir.analysis
def live_ranges(program: ir.HostProgram, is_function: bool = False) -> MemoryEvents:
    """Begins and ends of live ranges, calls of allocating functions, and joins, in program order. Omits ends and joins without effect. At
    the end of a function, ends and joins have an effect, because another call may follow."""
    ranks = frozenset(program.mesh.all_ranks)
    return _needed(_Walk(program).body(program.body, {}, is_nested=is_function), ranks, ranks if is_function else frozenset())


@ir.analysis
def allocating_functions(program: ir.HostProgram) -> set[str]:
    """Names of the functions that allocate memory, directly or in a call."""
    found: set[str] = set()
    for function in program.functions:
        if any(tree.names(i, "allocate") or not found.isdisjoint(tree.names(i, "call")) for i in tree.walk(function.body)):
            found.add(function.name)
    return found


class _Walk:
    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.counts: dict[str, int] = {}  # loop index -> trip count, if known
        self.allocates = iter(def_use(program).lives)  # allocates in program order

    def body(self, body: tree.Body, outer: dict[str, Begin], is_nested: bool = True) -> MemoryEvents:
        known, own = dict(outer), dict[str, Begin]()
        events = self.events(body, known, own)
        return (*events, *map(End, own.values())) if is_nested else events

    def events(self, body: tree.Body, known: dict[str, Begin], own: dict[str, Begin]) -> MemoryEvents:
        """Events of the instructions of a body. `own` collects the buffers that begin in the body or its `on` bodies, and have not
        ended."""
        events: list[MemoryEvent] = []
        for i in body:
            for name in tree.names(i, "allocate"):
                place = next(self.allocates)
                own[name] = known[name] = begin = Begin(place, self.slots(place.stream) if place.stream else 1)
                events.append(begin)
            for name in tree.names(i, "free"):
                own.pop(name, None)
                events.append(End(known[name]))
            events += map(JoinEvent, tree.names(i, "join"))
            events += (CallEvent(name) for name in tree.names(i, "call") if name in allocating_functions(self.program))
            for name in tree.names(i, "index"):
                self.counts.pop(name, None)  # An earlier loop may have the same index name.
                if i.trips is not None and i.trips.is_int:
                    self.counts[name] = int(i.trips)
            if i.ranks:
                events += (OnRanks(i.ranks, self.events(inner, known, own)) for inner in tree.bodies(i))
                continue
            events += (event for inner in tree.bodies(i) for event in self.body(inner, known))
        return tuple(events)

    def slots(self, stream: tree.Slot) -> int:
        """Number n such that a stream block runs only on streams from 0 to n - 1. The size of the pool if no smaller n is known."""
        pool, index = stream
        streams = next(streams.count for streams in self.program.streams if streams.name == pool)
        match index:
            case Const(value):
                return value % streams + 1
            case Var(name):
                return min(streams, self.counts.get(name, streams))
        return streams


def _needed(events: MemoryEvents, ranks: frozenset[int], follows: frozenset[int], pools: frozenset[str] = frozenset()) -> MemoryEvents:
    """Removes ends and joins without effect. `ranks` execute `events`. A live range may begin after `events` on the ranks `follows`.

    An end or join has no effect if no live range begins later on its ranks. An end also has no effect if its pool is joined before the next
    begin. A join also has no effect if its pool has no buffers.
    """
    pools |= {begin.place.stream[0] for begin in begins(events) if begin.place.stream}
    joined: set[str] = set()  # pools that are joined before the next begin
    result: list[MemoryEvent] = []
    for event in reversed(events):
        match event:
            case Begin() | CallEvent():
                follows |= ranks
                joined.clear()
            case OnRanks(mesh, inner):
                own = frozenset(mesh.all_ranks)
                if not (inner := _needed(inner, own, follows & own, pools)):
                    continue
                event = OnRanks(mesh, inner)
                if any(isinstance(one, Begin | CallEvent) for one in flat(inner)):
                    follows |= own
                    joined.clear()
            case End(begin):
                if not follows or (begin.place.stream and begin.place.stream[0] in joined):
                    continue
            case JoinEvent(stream):
                if not follows or stream not in pools:
                    continue
                joined.add(stream)
        result.append(event)
    return tuple(reversed(result))


def flat(events: MemoryEvents) -> Iterator[MemoryEvent]:
    """All events in order. Each `OnRanks` is replaced with its events."""
    for event in events:
        yield from flat(event.events) if isinstance(event, OnRanks) else (event,)


def begins(events: MemoryEvents) -> tuple[Begin, ...]:
    return tuple(event for event in flat(events) if isinstance(event, Begin))
