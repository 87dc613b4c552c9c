"""Adds marks to a host program, and makes a timeline of the measured times of the marks. Marks surround instructions that compute or
communicate.

matmul %x, %w -> %y     ->     mark
                               matmul %x, %w -> %y
                               mark
"""

from collections.abc import Sequence
from dataclasses import replace

from hostweave.check.match_collectives import match_communications
from hostweave.check.simulate import instantiate
from hostweave.host_ir import ir, tree
from hostweave.timeline.events import Timeline
from hostweave.timeline.predict import timeline_of
from hostweave.timeline.simulate import SimulatedTask, tasks_of
from hostweave.types.machine import Machine
from hostweave.types.mesh import Sizes


def marked(program: ir.HostProgram) -> ir.HostProgram:
    functions = tuple(replace(function, body=_marked(function.body)) for function in program.functions)
    return replace(program, body=_marked(program.body), functions=functions)


def _marked(body: tree.Body) -> tree.Body:
    found: list[tree.Instruction] = []
    for i in body:
        if i.work or i.posts or i.grouped:  # The members of a group are posted together, so a group has one pair of marks.
            mark = ir.Mark(location=i.location)
            found += [mark, i, mark]
        else:
            found.append(tree.with_bodies(i, _marked))
    return tuple(found)


def measured(program: ir.HostProgram, sizes: Sizes, machine: Machine, basis: str, marks_ms: Sequence[Sequence[float]]) -> Timeline:
    """Timeline of a call of `marked(program)`. `marks_ms` has the times of each rank's marks."""
    instances = instantiate(marked(program), sizes)
    ranks = tasks_of(instances, match_communications(instances), machine)
    for tasks, times in zip(ranks, marks_ms, strict=True):
        _take_times(tasks, times)
    _align(ranks)
    return _in_order(timeline_of(program, sizes, basis, ranks))


def _in_order(timeline: Timeline) -> Timeline:
    """Makes every event end no later than the events that wait for its end, and start no later than the end of the events that wait for
    its start. An interrupted host thread may record an end too late."""
    starts, ends = [event.start for event in timeline.events], [event.end for event in timeline.events]
    is_changed = True
    while is_changed:
        before = (*starts, *ends)
        for number, event in reversed([*enumerate(timeline.events)]):
            for earlier in event.after:
                ends[earlier] = min(ends[earlier], ends[number])
            for other in event.meets:
                starts[other] = min(starts[other], ends[number])
            starts[number] = min(starts[number], ends[number])
        is_changed = before != (*starts, *ends)
    found = zip(timeline.events, starts, ends, strict=True)
    return replace(timeline, events=tuple(replace(event, start=start, end=end) for event, start, end in found))


def _take_times(tasks: list[SimulatedTask], times: Sequence[float]) -> None:
    """Assigns the times of each pair of marks to the tasks between the two marks."""
    passed = 0  # number of marks before the task
    for task in tasks:
        if task.operation.instruction.marks:
            passed += 1
        elif passed % 2:
            task.start, task.end = times[passed - 1] / 1e3, times[passed] / 1e3


def _align(ranks: list[list[SimulatedTask]]) -> None:
    """Shifts the clocks of the ranks by the smallest amounts for which all data arrives after it was sent."""
    timed = [task for tasks in ranks for task in tasks if task.is_done]
    behind = [(task, other, other.end) for task in timed for other, _ in task.needs_end_of] + [
        (task, other, other.start) for task in timed for rendezvous in task.meets for other in rendezvous.tasks
    ]
    least = [
        (task.operation.rank, other.operation.rank, at - task.end)
        for task, other, at in behind
        if other.is_done and task.operation.rank != other.operation.rank
    ]
    late = [0.0] * len(ranks)
    for _ in ranks:  # A shift of one rank may require a shift of another.
        for rank, other, seconds in least:
            late[rank] = max(late[rank], late[other] + seconds)
    for task in timed:
        task.start += late[task.operation.rank]
        task.end += late[task.operation.rank]
