"""Happens-before: simulates the operations of all ranks in one legal order. Computes which earlier operations have certainly ended when an
operation starts.

A stream runs its tasks in order. A wait runs after its record or signal. A communication ends only after its senders have started. On a
rendezvous transport, the receivers of the communication must have started too.

Races are found by vector clocks (Fidge 1988, Mattern 1989). A task's clock counts the earlier tasks that have certainly ended because of
streams, events, signals or received data. Deadlocks are found with one more rule: a rank's communications that occupy multiprocessors run
in the order in which the rank posts them, because a device may serialise the kernels of communications.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from hostweave.check.match_collectives import MatchedCommunications
from hostweave.check.operations import Instances, Operation, StreamInPool, failure
from hostweave.host_ir import tree

Clock = list[int]  # vector clock: number of tasks that have certainly ended, for each stream of each rank
COMES_AFTER, WAITS_FOR, IS_POSTED_AFTER = "comes after", "waits for", "is posted after"  # reasons why a task needs the end of another


@dataclass(slots=True, eq=False, repr=False)
class LinkedTask:
    """An operation, and the tasks for which it waits."""

    operation: Operation
    needs_end_of: list[tuple[Self, str]] = field(init=False, default_factory=list)  # tasks that must end before this task starts
    end_needed_by: list[Self] = field(init=False, default_factory=list)
    meets: list[Rendezvous[Self]] = field(init=False, default_factory=list)  # rendezvous that this task awaits after its start
    completes: list[Rendezvous[Self]] = field(init=False, default_factory=list)  # rendezvous that wait for the start of this task
    arrivals: list[Arrival[Self]] = field(init=False, default_factory=list)
    missing_ends: int = field(init=False, default=0)  # number of tasks in `needs_end_of` that have not ended
    missing_starts: int = field(init=False, default=0)  # number of rendezvous in `meets` that are not complete

    def needs(self, earlier: Self, why: str) -> None:
        self.needs_end_of.append((earlier, why))
        self.missing_ends += 1
        earlier.end_needed_by.append(self)


T = TypeVar("T", bound=LinkedTask)


@dataclass(slots=True, eq=False, repr=False)
class Rendezvous(Generic[T]):
    """Tasks that must all start before any task of `awaited_by` proceeds."""

    tasks: list[T]
    awaited_by: list[T]
    missing: int  # number of tasks that have not started


@dataclass(slots=True, eq=False, repr=False)
class Arrival(Generic[T]):
    """Data that a task receives from `sources`. At the end of the task, its clock is merged with the clocks at the starts of `sources`."""

    sources: list[T]
    known: Clock | None = None


@dataclass(slots=True, eq=False, repr=False)
class Task(LinkedTask):
    """Operation `number` of a stream, counted from 1. Task 1 of the caller's stream stands for all work before the call."""

    stream_id: int
    number: int
    started: bool = False
    ended: bool = False
    at_start: Clock = field(default_factory=list)  # clock at the start; empty unless a communication needs the clock
    at_end: Clock = field(default_factory=list)  # clock at the end; empty unless another stream waits for the task


@dataclass(frozen=True)
class Order:
    """Tasks of all ranks, and the current clock of each stream. `run` advances the clocks."""

    instances: Instances
    tasks: list[Task]
    caller_tasks: list[Task]  # for each rank, the task that stands for the work before the call
    clocks: list[Clock]


def linked(instances: Instances, matches: Iterable[MatchedCommunications], make: Callable[[Operation, int], T]) -> dict[Operation, T]:
    """The task of each operation, and of each member of a group. `make` creates the task of an operation of `instances.ranks[number]`."""
    tasks: dict[Operation, T] = {}
    for number, operations in enumerate(instances.ranks):
        latest: dict[StreamInPool | None, T] = {}
        posted: T | None = None  # the rank's last communication that occupies multiprocessors
        for operation in operations:
            task, before = make(operation, number), latest.get(operation.stream)
            tasks.update(dict.fromkeys((operation, *operation.members), task))
            if before:
                task.needs(before, COMES_AFTER)
            for waited in operation.waits:
                task.needs(tasks[waited], WAITS_FOR)
            if operation.may_be_serialised:
                if posted and posted is not before:
                    task.needs(posted, IS_POSTED_AFTER)
                posted = task
            latest[operation.stream] = task
    for matched in matches:
        _add_match(matched, tasks)
    return tasks


def _add_match(matched: MatchedCommunications, tasks: dict[Operation, T]) -> None:
    if matched.is_signal:
        signal, wait = matched.operations
        tasks[wait].needs(tasks[signal], WAITS_FOR)
        return
    meetings: dict[tuple[Operation, ...], Rendezvous[T]] = {}  # Tasks that wait for the same operations share one object.
    arrivals: dict[tuple[Operation, ...], Arrival[T]] = {}
    for operation in matched.operations:
        task, awaited, sources = tasks[operation], matched.awaited(operation), matched.sources(operation)
        if awaited not in meetings:
            others = list(dict.fromkeys(tasks[other] for other in awaited))
            meetings[awaited] = Rendezvous(others, [], len(others))
            for other in others:
                other.completes.append(meetings[awaited])
        meetings[awaited].awaited_by.append(task)
        task.meets.append(meetings[awaited])
        task.missing_starts += bool(awaited)
        # A recv proves nothing to the sender: a small message may be sent before the receiver starts.
        if any(tasks[source] is not task for source in sources):
            if sources not in arrivals:
                arrivals[sources] = Arrival([tasks[source] for source in sources])
            task.arrivals.append(arrivals[sources])


def order(instances: Instances, matches: list[MatchedCommunications]) -> Order:
    program = instances.program
    streams: list[StreamInPool | None] = [None, *((pool.name, k) for pool in program.streams for k in range(pool.count))]
    number_of = {stream: k for k, stream in enumerate(streams)}
    stream_ids = len(streams) * len(instances.ranks)
    last, clocks = [0] * stream_ids, [[0] * stream_ids for _ in range(stream_ids)]
    caller_tasks = []
    for rank, first in enumerate(range(0, stream_ids, len(streams))):
        last[first] = clocks[first][first] = 1
        caller_tasks.append(Task(Operation(tree.Instruction(), rank, None, ()), first, 1))

    def make(operation: Operation, number: int) -> Task:
        stream_id = number * len(streams) + number_of[operation.stream]
        last[stream_id] += 1
        return Task(operation, stream_id, last[stream_id])

    tasks = linked(instances, matches, make)
    return Order(instances, list(dict.fromkeys(tasks.values())), caller_tasks, clocks)


def run(order: Order) -> Iterator[tuple[Task, Clock]]:
    """Yields each task and its clock when the task starts. Raises ProgramError if tasks wait for each other."""
    ready = deque(task for task in order.tasks if not task.missing_ends)
    while ready:
        task = ready.popleft()
        clock = order.clocks[task.stream_id]
        for waited, why in task.needs_end_of:
            if why == WAITS_FOR and waited.stream_id != task.stream_id:
                clock[:] = map(max, clock, waited.at_end)
        yield task, clock
        task.started = True
        if task.completes:
            task.at_start = clock.copy()
        for rendezvous in task.completes:
            rendezvous.missing -= 1
            for other in rendezvous.awaited_by if not rendezvous.missing else ():
                other.missing_starts -= 1
                if other is not task and other.started and not other.missing_starts:
                    _end(other, order, ready)
        if not task.missing_starts:
            _end(task, order, ready)
    stuck = [task for task in order.tasks if not task.ended]
    if stuck:
        raise _deadlock(order, stuck[0])


def _end(task: Task, order: Order, ready: deque[Task]) -> None:
    task.ended = True
    clock = order.clocks[task.stream_id]
    for arrival in task.arrivals:
        if arrival.known is None:
            known = [source.at_start for source in arrival.sources]
            arrival.known = list(map(max, *known)) if len(known) > 1 else known[0]
        clock[:] = map(max, clock, arrival.known)
    clock[task.stream_id] = task.number
    for follower in task.end_needed_by:
        if follower.stream_id != task.stream_id and not task.at_end:
            task.at_end = clock.copy()
        follower.missing_ends -= 1
        if not follower.missing_ends:
            ready.append(follower)
    # Empty lists break reference cycles.
    for links in (task.needs_end_of, task.end_needed_by, task.meets, task.completes, task.arrivals):
        links.clear()


def _deadlock(order: Order, task: Task) -> Exception:
    path: list[tuple[Task, str]] = []
    seen: dict[Task, int] = {}
    while task not in seen:
        seen[task] = len(path)
        if task.started:
            successor, why = next(other for one in task.meets for other in one.tasks if not other.started), "meets"
        else:
            successor, why = next((other, why) for other, why in task.needs_end_of if not other.ended)
        path.append((task, why))
        task = successor
    cycle = path[seen[task] :]
    first = cycle[0][0].operation
    links = ", which ".join(f"{why} {cycle[(i + 1) % len(cycle)][0].operation}" for i, (_, why) in enumerate(cycle))
    message = f"{first} {links}: none of them can proceed; post matching communications in one group, or in the same order on every rank"
    return failure(order.instances.program, message, first.instruction)
