"""Finds communications that must be ordered on a rank and are not: on different channels, or signals that are counted in turn.

A device may start them as it likes, on every rank in another order, and where a transport holds multiprocessors each keeps part of the
device while it waits for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hostweave.check.happens_before import Clock, Task, order, run
from hostweave.check.match_collectives import Channel, channel_of
from hostweave.check.operations import Instances, Operation
from hostweave.check.signals import turns_of
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import sizes_to_check
from hostweave.host_ir import ir, tree


class Posted:
    """The communications that each rank has posted so far: of each channel the last one of each stream, which comes after the others."""

    def __init__(self) -> None:
        self._last: dict[int, dict[tuple[int, Channel], Task]] = defaultdict(dict)  # by rank

    def unordered(self, task: Task, clock: Clock) -> list[Operation]:
        """Notes what a task posts that starts when `clock` is known. Returns earlier posts of other channels that may still run."""
        channels = {channel_of(part) for part in task.operation.communications if part.takes_turns}
        if not channels:
            return []
        last = self._last[task.operation.rank]
        found = [
            earlier.operation
            for (stream_id, channel), earlier in last.items()
            if clock[stream_id] < earlier.number and channels != {channel}
        ]
        last.update({(task.stream_id, channel): task for channel in channels})
        return found


def unordered(instances: Instances) -> Iterator[tuple[Operation, Operation]]:
    """Pairs of communications that neither streams nor events of their rank order, and have to: the earlier one, the later one."""
    for operations in instances.ranks:  # each alone: a clock has as many parts as there are streams on the ranks together
        posted, started = Posted(), dict[Operation, tuple[Task, Clock]]()
        for task, clock in run(order(replace(instances, ranks=(operations,)), [])):
            if turns_of(task.operation):
                started[task.operation] = task, clock.copy()
            for earlier in posted.unordered(task, clock):
                yield earlier, task.operation
        yield from _signals_unordered(operations, started)


def _signals_unordered(
    operations: Sequence[Operation], started: Mapping[Operation, tuple[Task, Clock]]
) -> Iterator[tuple[Operation, Operation]]:
    """Neighbours, in the order of issue, of those that take turns."""
    last: dict[tuple[object, ...], Operation] = {}
    for part in (operation for operation in operations if turns_of(operation)):
        turns, (_, clock) = turns_of(part), started[part]
        assert turns is not None
        if turns in last and clock[(earlier := started[last[turns]][0]).stream_id] < earlier.number:
            yield last[turns], part
        last[turns] = part


@ir.analysis
def unordered_instructions(program: ir.HostProgram) -> set[tree.Instruction]:
    """The communications, and groups of them, that some rank may run at the same time as one with which they take turns."""
    used = [program.channel(name) for name in {i.channel for i in tree.walk(program.body) if isinstance(i, ir.Communication)}]
    if sum(channel.takes_turns for channel in used) < 2 and not any(channel.transport.has_windows for channel in used):
        return set()
    shorter = replace(program, body=tuple(_without_repeated_calls(program.body)))
    pairs = (pair for sizes in sizes_to_check(program) for pair in unordered(instantiate(shorter, sizes)))
    found = {operation.instruction for pair in pairs for operation in pair}
    return found.intersection(tree.walk(program.body))  # a function that it calls orders those of its own


def _without_repeated_calls(body: tree.Body) -> Iterator[tree.Instruction]:
    """Of calls in a row of one function the first: a call has joined its streams when it ends, so that the next one, such as that of the
    next layer, finds and leaves everything in the same order."""
    called: set[str] = set()
    for i in body:
        names = tree.names(i, "call")
        if not names and (i.orders or tree.bodies(i) or isinstance(i, ir.Communication)):
            called.clear()
        if not names or called.isdisjoint(names):
            yield i
        called.update(names)
