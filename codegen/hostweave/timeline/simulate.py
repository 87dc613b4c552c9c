"""Simulates when the operations of all ranks start and end on a machine. Concurrent operations slow each other down.

A stream executes one operation after another. A wait for an event or a signal ends when the event or signal has occurred. A communication
proceeds after the operations that it awaits have started. A collective awaits the same collective on all ranks. Operations of one rank
share multiprocessors in proportion to their occupancy, and links evenly. Computation is slower while kernels or copy engines communicate,
by the factors in `communication/cost.py`. Kernels that communicate are slower while the rank computes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hostweave.check.happens_before import LinkedTask, linked
from hostweave.check.match_collectives import MatchedCommunications
from hostweave.check.operations import Instances
from hostweave.communication.cost import MATMUL_SLOWDOWN_BY_COPIES, MATMUL_SLOWDOWN_BY_KERNELS, communication_slowdown
from hostweave.host_ir import tree
from hostweave.host_ir.ir import Kernel
from hostweave.timeline.cost import FIRST_ARRIVAL, Work, with_kernel, work_behind
from hostweave.timeline.events import COMMUNICATION
from hostweave.types.machine import Machine
from hostweave.types.mesh import Sizes


@dataclass(slots=True, eq=False)
class SimulatedTask(LinkedTask):
    work: Work = field(init=False)
    start: float = -1.0
    end: float = -1.0
    remaining: float = 0.0  # seconds that the rest of the task would take alone
    rate: float = 0.0  # seconds of work done per second
    since: float = 0.0  # time at which `remaining` was computed

    @property
    def is_done(self) -> bool:
        return self.end >= 0


def tasks_of(instances: Instances, matches: Iterable[MatchedCommunications], machine: Machine) -> list[list[SimulatedTask]]:
    """Tasks of each rank, in the order of issue."""
    kernels = {kernel.name: kernel for kernel in instances.program.kernels}
    task_of = linked(instances, matches, lambda operation, _: SimulatedTask(operation))
    ranks = [[task_of[operation] for operation in operations] for operations in instances.ranks]
    for tasks, sizes in zip(ranks, instances.sizes, strict=True):
        _set_work(tasks, machine, kernels, sizes)
    return ranks


def simulate(ranks: list[list[SimulatedTask]]) -> None:
    _Simulator(ranks).run()
    for task in (task for tasks in ranks for task in tasks):
        if task.operation.instruction.posts == "wait_signal":  # The wait starts when the stream reaches the wait.
            ends = (earlier.end for earlier, _ in task.needs_end_of if earlier.operation.rank == task.operation.rank)
            task.start = max(ends, default=0.0)


def _set_work(tasks: Sequence[SimulatedTask], machine: Machine, kernels: Mapping[str, Kernel], sizes: Sizes) -> None:
    engine: dict[object, str] = {}  # stream -> last engine that the stream used
    has_met = False
    for task in tasks:
        stream = task.operation.stream
        work = work_behind(task.operation, machine, engine.get(stream, ""))
        for name in tree.names(task.operation.instruction, "launch"):
            work = with_kernel(work, kernels[name], sizes, machine) if name in kernels else work  # A user kernel is not in `kernels`.
        if work.kind == COMMUNICATION and not has_met:
            late = 0.0 if any(engine.values()) else FIRST_ARRIVAL
            work, has_met = replace(work, seconds=work.seconds + late), True
        task.work = work
        engine[stream] = work.engine or engine.get(stream, "")


class _Simulator:
    """Simulated clock, and running tasks of every rank."""

    def __init__(self, ranks: list[list[SimulatedTask]]):
        self.ranks = ranks
        self.now = 0.0
        self.running: dict[int, list[SimulatedTask]] = defaultdict(list)
        self.ends: list[tuple[float, int, SimulatedTask, float]] = []  # heap of (end at `rate`, serial number, task, rate)
        self.pushed = 0

    def run(self) -> None:
        self.start([task for tasks in self.ranks for task in tasks if not task.missing_ends])
        while self.ends:
            end, _, task, rate = heapq.heappop(self.ends)
            if task.is_done or task.rate != rate or end < task.since:
                continue
            if (new_end := task.since + task.remaining / task.rate) > end + 1e-15:  # The task was slower in the meantime.
                self.push(new_end, task)
                continue
            self.now = end
            self.finish(task)

    def start(self, ready: list[SimulatedTask]) -> None:
        """Starts tasks. If a task takes no time, also starts the tasks that wait for its end."""
        while ready:
            task = ready.pop()
            task.start = self.now
            to_begin = [task] if not task.missing_starts else []
            for rendezvous in task.completes:
                rendezvous.missing -= 1
                for other in rendezvous.awaited_by if not rendezvous.missing else ():
                    other.missing_starts -= 1
                    to_begin += [other] if other.start >= 0 and not other.missing_starts else []
            for each in to_begin:
                each.remaining, each.since = each.work.seconds, self.now
                if each.remaining <= 0:
                    ready += self.done(each)
                else:
                    self.running[each.operation.rank].append(each)
                    self.share(each.operation.rank)

    def finish(self, task: SimulatedTask) -> None:
        rank = task.operation.rank
        self.running[rank].remove(task)
        ready = self.done(task)
        self.share(rank)
        self.start(ready)

    def done(self, task: SimulatedTask) -> list[SimulatedTask]:
        """Ends a task, and returns the tasks that may start now."""
        task.end = self.now
        for follower in task.end_needed_by:
            follower.missing_ends -= 1
        return [follower for follower in task.end_needed_by if not follower.missing_ends and follower.start < 0]

    def share(self, rank: int) -> None:
        """Sets the rates of a rank's running tasks."""
        running = self.running[rank]
        on = {engine: [t for t in running if t.work.engine == engine] for engine in ("multiprocessors", "kernels", "copies")}
        occupancy = max(1.0, sum(t.work.share for t in on["multiprocessors"]))
        slowdown = max(MATMUL_SLOWDOWN_BY_KERNELS if on["kernels"] else 1.0, MATMUL_SLOWDOWN_BY_COPIES if on["copies"] else 1.0)
        for task in running:
            rate = 1.0
            if task.work.engine == "multiprocessors":
                rate = 1 / (occupancy * (1 + (slowdown - 1) * task.work.share))  # Kernels and copies slow down a small task less.
            elif task.work.engine == "kernels":
                ranks = max(1, *(len(operation.process_group) for operation in (task.operation, *task.operation.members)))
                rate = 1 / (len(on["kernels"]) * (communication_slowdown(ranks) if on["multiprocessors"] else 1.0))
            elif task.work.engine == "copies":
                rate = 1 / len(on["copies"])
            if rate != task.rate:
                task.remaining -= (self.now - task.since) * task.rate
                task.since, task.rate = self.now, rate
                self.push(self.now + max(task.remaining, 0.0) / rate, task)

    def push(self, end: float, task: SimulatedTask) -> None:
        self.pushed += 1
        heapq.heappush(self.ends, (end, self.pushed, task, task.rate))
