"""Whether a program ends if each device runs the streams of its rank as one queue, in the order in which the host issues.

A wait for a signal holds up the hardware queue that its stream shares with others: of as many as CUDA_DEVICE_MAX_CONNECTIONS says,
which may be 1.
"""

from __future__ import annotations

from hostweave.check.match_collectives import Meeting
from hostweave.check.operations import Instances, Operation, failure


def expect_end_in_one_queue(instances: Instances, met: list[Meeting]) -> None:
    """Raises ProgramError for a program with signals in which ranks then wait for one another."""
    if not any(meeting.is_signal for meeting in met):
        return
    meeting_of = {part: meeting for meeting in met for part in meeting.parts}
    reached: set[Operation] = set()
    places = [0] * len(instances.ranks)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, operations in enumerate(instances.ranks):
            while places[rank] < len(operations):
                parts = operations[places[rank]].communications
                # What posts something has been reached; a wait for a signal lets nothing behind it start before that is given.
                met_here = [(part, meeting_of[part]) for part in parts if part in meeting_of]
                reached.update(part for part, meeting in met_here if not meeting.is_signal)
                if any(other not in reached for part, meeting in met_here for other in meeting.awaited(part)):
                    break
                reached.update(parts)
                places[rank] += 1
                has_moved = True
    stuck = [operations[place] for place, operations in zip(places, instances.ranks, strict=True) if place < len(operations)]
    if stuck:
        first = stuck[0]
        why = "waits for ever where a device runs all streams of a rank as one queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        raise failure(instances.program, f"{first}: {why}; issue what rank {first.peer} waits for before it", first.instruction)
