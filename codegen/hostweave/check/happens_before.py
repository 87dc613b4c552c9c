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
from collections.abc import Iterator
from dataclasses import dataclass, field

from hostweave.check.match_collectives import MatchedCommunications
from hostweave.check.operations import Instances, Operation, StreamInPool, failure
from hostweave.host_ir import tree

Clock = list[int]  # vector clock: number of tasks that have certainly ended, for each stream of each rank


@dataclass(slots=True, eq=False, repr=False)
class Arrival:
    """Data that a task receives from `sources`. At the end of the task, its clock is merged with the clocks at the starts of `sources`."""

    sources: list[Task]
    known: Clock | None = None


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """Operation `number` of a stream, counted from 1. Task 1 of the caller's stream stands for all work before the call."""

    operation: Operation
    stream_id: int
    number: int
    needs_end_of: list[tuple[Task, str]] = field(default_factory=list)  # tasks that must end before this task starts, each with the reason
    waits: list[Task] = field(default_factory=list)  # tasks on other streams that a fork, join, event or signal orders before this task
    needs_start_of: list[Task] = field(default_factory=list)  # tasks that must start before this task ends
    start_needed_by: list[Task] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    end_needed_by: list[Task] = field(default_factory=list)
    missing_ends: int = 0  # number of tasks in `needs_end_of` that have not ended
    missing_starts: int = 0  # number of tasks in `needs_start_of` that have not started
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


def order(instances: Instances, matches: list[MatchedCommunications]) -> Order:
    program = instances.program
    streams: list[StreamInPool | None] = [None, *((pool.name, k) for pool in program.streams for k in range(pool.count))]
    number_of = {stream: k for k, stream in enumerate(streams)}
    stream_ids = len(streams) * len(instances.ranks)
    clocks = [[0] * stream_ids for _ in range(stream_ids)]
    tasks: dict[Operation, Task] = {}
    caller_tasks = []
    for rank, operations in enumerate(instances.ranks):
        first = rank * len(streams)
        last = [0] * len(streams)
        last[0] = clocks[first][first] = 1
        caller_tasks.append(Task(Operation(tree.Instruction(), rank, None, ()), first, 1))
        latest: dict[int, Task] = {}
        posted: Task | None = None  # the rank's last communication that occupies multiprocessors
        for operation in operations:
            k = number_of[operation.stream]
            last[k] += 1
            task = tasks[operation] = Task(operation, first + k, last[k])
            if k in latest:
                _after(task, latest[k], "comes after")
            for waited in operation.waits:
                _after(task, tasks[waited], "waits for")
                if tasks[waited].stream_id != task.stream_id:
                    task.waits.append(tasks[waited])
            for member in operation.members:
                tasks[member] = task
            if operation.may_be_serialised:
                if posted is not None and posted is not latest.get(k):
                    _after(task, posted, "is posted after")
                posted = task
            latest[k] = task
    for matched in matches:
        _add_match(matched, tasks)
    return Order(instances, list(dict.fromkeys(tasks.values())), caller_tasks, clocks)


def _after(task: Task, earlier: Task, why: str) -> None:
    task.needs_end_of.append((earlier, why))
    task.missing_ends += 1
    earlier.end_needed_by.append(task)


def _add_match(matched: MatchedCommunications, tasks: dict[Operation, Task]) -> None:
    if matched.is_signal:
        signal, wait = (tasks[part] for part in matched.parts)
        _after(wait, signal, "waits for")
        wait.waits.append(signal)
        return
    arrivals: dict[tuple[Operation, ...], Arrival] = {}
    parts = [tasks[part] for part in matched.parts]
    for part, task in zip(matched.parts, parts, strict=True):
        # A recv proves nothing to the sender: a small message may be sent before the receiver starts.
        sources = matched.sources(part)
        if any(tasks[source] is not task for source in sources):
            arrivals.setdefault(sources, Arrival([tasks[source] for source in sources]))
            task.arrivals.append(arrivals[sources])
        others = [tasks[other] for other in matched.awaited(part) if tasks[other] is not task]
        task.needs_start_of.extend(others)
        task.missing_starts += len(others)
        for other in others:
            other.start_needed_by.append(task)


def run(order: Order) -> Iterator[tuple[Task, Clock]]:
    """Yields each task and its clock when the task starts. Raises ProgramError if tasks wait for each other."""
    ready = deque(task for task in order.tasks if not task.missing_ends)
    while ready:
        task = ready.popleft()
        clock = order.clocks[task.stream_id]
        for waited in task.waits:
            clock[:] = map(max, clock, waited.at_end)
        yield task, clock
        task.started = True
        if task.start_needed_by:
            task.at_start = clock.copy()
        for other in (*task.start_needed_by, task):
            other.missing_starts -= other is not task
            if other.started and not other.missing_starts and not other.ended:
                _end(other, order, ready)
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
    for links in (task.needs_end_of, task.needs_start_of, task.start_needed_by, task.end_needed_by, task.arrivals):
        links.clear()


def _deadlock(order: Order, task: Task) -> Exception:
    path: list[tuple[Task, str]] = []
    seen: dict[Task, int] = {}
    while task not in seen:
        seen[task] = len(path)
        if task.started:
            successor, why = next(other for other in task.needs_start_of if not other.started), "meets"
        else:
            successor, why = next((other, why) for other, why in task.needs_end_of if not other.ended)
        path.append((task, why))
        task = successor
    cycle = path[seen[task] :]
    first = cycle[0][0].operation
    links = ", which ".join(f"{why} {cycle[(i + 1) % len(cycle)][0].operation}" for i, (_, why) in enumerate(cycle))
    message = f"{first} {links}: none of them can proceed; post matching communications in one group, or in the same order on every rank"
    return failure(order.instances.program, message, first.instruction)
