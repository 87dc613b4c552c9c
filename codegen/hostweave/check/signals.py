"""What is done one after the other on a channel with windows: a rank's puts and signals, and its waits for the same signals.

A signal is a count that the sender raises, so that one which overtook another would be taken for it, and counts that are on their
way lie in memory that all streams of a rank share.
"""

from __future__ import annotations

from collections.abc import Iterator

from hostweave.check.happens_before import Clock, Task
from hostweave.check.match_collectives import channel_of
from hostweave.check.operations import Operation
from hostweave.host_ir import ir


class InTurn:
    """What each rank has posted last of those that take turns."""

    def __init__(self) -> None:
        self._last: dict[object, tuple[Task, Operation]] = {}

    def unordered(self, task: Task, clock: Clock) -> Iterator[tuple[Operation, Operation]]:
        """Notes what a task posts that starts when `clock` is known. Gives what may still run, with the earlier one."""
        for part in task.operation.communications:
            if not isinstance(part.instruction, ir.Signalled):
                continue
            key: tuple[object, ...] = (part.rank, channel_of(part))
            if part.instruction.posts != "signal":
                key = (*key, part.peer, part.instruction.signal)
            if key in self._last:
                last, earlier = self._last[key]
                if clock[last.stream_id] < last.number:
                    yield part, earlier
            self._last[key] = task, part
