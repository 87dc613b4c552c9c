"""Timelines: the operations of every rank over time, and totals of computation, exposed communication and idle time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

COMPUTE, COMMUNICATION, WAITING = KINDS = ("compute", "communication", "waiting")
MAX_LINES = 16  # most ranks that the text lists


@dataclass(frozen=True)
class Event:
    """One execution of an instruction on one rank. Times are in microseconds since the start of the call.

    `after` has the indices of events that must end before this event starts. `meets` has the indices of events that must start before this
    event proceeds, such as the events of the same collective on all ranks.
    """

    rank: int
    stream: str  # "caller", or "loop[1]"
    name: str  # with the user's names: "matmul y_i"
    kind: str  # one of KINDS
    start: float
    end: float
    sent: int = 0  # bytes to other ranks
    instruction: str = ""  # instruction of the host IR, with the indices of the enclosing loops
    source: str = ""  # the user's line, "mlp.py:12"
    after: tuple[int, ...] = ()
    meets: tuple[int, ...] = ()

    @property
    def micros(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Totals:
    """Totals of one rank in a call, in microseconds, and the bytes that the rank sends to other ranks."""

    rank: int
    busy: float  # time in which the rank computes
    communication: float  # time in which the rank communicates
    exposed: float  # time in which the rank communicates and does not compute
    idle: float  # time in which the rank does neither
    sent: int


Interval = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks in a call. `basis` states where the times come from.

    Example: `print(hw.compile(f).predict(sizes={"M": 8192, "K": 8192, "N": 7168}))`.
    """

    program: str
    mesh: str
    sizes: Mapping[str, int]
    basis: str  # "predicted from the figures of NVIDIA H200", "measured on ..."
    events: tuple[Event, ...]
    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    memory: tuple[tuple[float, int], ...] = ()  # memory of the first rank as (time, bytes from then on); empty if measured

    @cached_property
    def micros(self) -> float:
        """Time of the call on the slowest rank, in microseconds."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the first rank in bytes: inputs, outputs and temporaries. 0 if the timeline is measured."""
        return max((held for _, held in self.memory), default=0)

    @property
    def totals(self) -> tuple[Totals, ...]:
        return tuple(self._totals(rank) for rank in self.ranks)

    def _totals(self, rank: int) -> Totals:
        events_of_rank = self.of_rank(rank)
        computes, communicates = (union(e for e in events_of_rank if e.kind == kind) for kind in (COMPUTE, COMMUNICATION))
        exposed = without(communicates, computes)
        busy = length(computes)
        idle, sent = self.micros - busy - length(exposed), sum(event.sent for event in events_of_rank)
        return Totals(rank, busy, length(communicates), length(exposed), idle, sent)

    def of_rank(self, rank: int) -> tuple[Event, ...]:
        return self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Event, ...]]:
        found: dict[int, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.rank, []).append(event)
        return {rank: tuple(events) for rank, events in found.items()}

    def exposed(self, rank: int) -> list[Interval]:
        """Intervals in which the rank communicates and does not compute."""
        events_of_rank = self.of_rank(rank)
        return without(union(e for e in events_of_rank if e.kind == COMMUNICATION), union(e for e in events_of_rank if e.kind == COMPUTE))

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Indices of the events on the critical path, in order. Each event is the one for which the next event waits longest."""
        if not self.events:
            return ()
        path = [max(range(len(self.events)), key=lambda number: self.events[number].end)]
        while awaited := self._needed(path[-1], set(path)):
            rank = self.events[path[-1]].rank  # If several events end at once, one on the same rank wins.
            path.append(max(awaited, key=lambda number: (self.events[number].end, self.events[number].rank == rank)))
        return tuple(reversed(path))

    def _needed(self, number: int, seen: set[int]) -> list[int]:
        """Indices of the events for which an event waits. Includes events on other ranks that delayed the event's collective or signal."""
        event = self.events[number]
        awaited = {*event.after, *(earlier for other in event.meets for earlier in self.events[other].after)}
        return [earlier for earlier in awaited - seen if self.events[earlier].end <= event.end]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        head = f"{self.program} on {self.mesh}{f' at {sizes}' if sizes else ''}: {self.micros:.1f} us, {self.basis}"
        lines = [
            f"  rank {t.rank}: busy {t.busy:.1f} us, exposed {t.exposed:.1f} us, idle {t.idle:.1f} us, {t.sent:,} bytes sent"
            for t in self.totals[:MAX_LINES]
        ]
        lines += [f"  and {len(self.ranks) - MAX_LINES} more ranks"] if len(self.ranks) > MAX_LINES else []
        path = [self.events[number] for number in self.critical_path]
        memory = [f"  memory of rank {self.ranks[0]}: {self.peak_bytes:,} bytes at most"] if self.memory else []
        on = ", ".join(f"{event.name} {event.micros:.1f} us" for event in path if event.kind != WAITING)
        return "\n".join([head, *lines, *memory, f"  critical path: {on or 'nothing'}"])


def union(events: Iterable[Event]) -> list[Interval]:
    spans: list[Interval] = []
    for start, end in sorted((event.start, event.end) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def without(spans: list[Interval], others: list[Interval]) -> list[Interval]:
    """Parts of the spans that no span of `others` covers. Spans of a list are sorted, and do not overlap."""
    left: list[Interval] = []
    for start, end in spans:
        for other_start, other_end in others:
            if other_end <= start or other_start >= end:
                continue
            left += [(start, other_start)] if other_start > start else []
            start = max(start, other_end)
        left += [(start, end)] if end > start else []
    return left


def length(spans: list[Interval]) -> float:
    return sum(end - start for start, end in spans)
