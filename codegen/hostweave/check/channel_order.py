"""Finds communications on different channels that are not ordered on a rank.

A device may start them as it likes, on every rank in another order, and where a transport holds multiprocessors each keeps part of the
device while it waits for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from hostweave.check.happens_before import Clock, Task, order, run
from hostweave.check.match_collectives import Channel, channel_of
from hostweave.check.operations import Instances, Operation
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
    """Pairs of communications of different channels that neither streams nor events of their rank order: the earlier one, the later one."""
    for operations in instances.ranks:  # each alone: a clock has as many parts as there are streams on the ranks together
        posted = Posted()
        for task, clock in run(order(replace(instances, ranks=(operations,)), [])):
            for earlier in posted.unordered(task, clock):
                yield earlier, task.operation


@ir.analysis
def unordered_instructions(program: ir.HostProgram) -> set[tree.Instruction]:
    """The communications, and groups of them, that some rank may run at the same time as one of another channel."""
    used = {i.channel for i in tree.walk(program.body) if isinstance(i, ir.Communication)}
    if sum(program.channel(name).takes_turns for name in used) < 2:
        return set()
    pairs = (pair for sizes in sizes_to_check(program) for pair in unordered(instantiate(program, sizes)))
    found = {operation.instruction for pair in pairs for operation in pair}
    return found.intersection(tree.walk(program.body))  # a function that it calls orders those of its own
