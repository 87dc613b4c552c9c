"""Report of a hang. For each rank and stream it has the last finished line, the first unfinished line, and the ranks that this line waits
for.

Each rank describes its position as a list of `Stand`, one per program, in JSON. `describe` combines the positions of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from hostweave.runtime.lines import with_users_lines

_OTHER_EDGES = {
    "call_before": "waits for the previous call",
    "unknown": "or a later line is not done (graphs report progress only with HOSTWEAVE_GRAPH_PROGRESS=1)",
    "none": "is not done",
}
_MOST_CHARACTERS = 48  # a longer call is shown without its arguments

Line = tuple[int, str]  # (line number in program.cpp or 0, the call on that line)


@dataclass(frozen=True)
class Stand:
    """Position of a rank in a program: the numbers of calls made and done, and the streams of the first unfinished call."""

    program: str
    made: int
    done: int
    call: int = 0  # number of the first unfinished call; 0 if all calls are done
    is_graph: bool = False
    is_enqueuing: bool = False
    enqueued: str = ""  # last line that the host has enqueued
    streams: list[dict[str, Any]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # names of streams without unfinished work
    begun: list[tuple[str, list[int], int]] = field(default_factory=list)  # (channel, ranks of the group, begun collectives)

    def has_come(self, rank: int, call: int, stream: dict[str, Any]) -> bool:
        """True if this rank has reached the communication for which a stream of `rank` waits, in the same call."""
        if self.call != call:
            return self.done >= call
        if stream["edge"] == "collective":
            counts = [count for channel, ranks, count in self.begun if (channel, ranks) == (stream["channel"], stream["ranks"])]
            return bool(counts) and counts[0] >= stream["nth"]
        return stream["edge"] == "transfer" and any(
            own["edge"] == "transfer" and own["channel"] == stream["channel"] and rank in own["ranks"] for own in self.streams
        )


def marks_graphs() -> bool:
    """True if CUDA graphs record their progress for the report. On the CPU target they always do."""
    return bool(os.environ.get("HOSTWEAVE_GRAPH_PROGRESS"))


def stand_of(name: str, progress: tuple[int, int, float], seen: dict[str, Any], module: ModuleType) -> Stand:
    """Position that the native program reports, with the user's source lines."""

    def placed(line: Line) -> str:
        number, call = line
        text = call if len(call) <= _MOST_CHARACTERS else f"{call.partition(',')[0]}, ...)"
        return with_users_lines(f"{text} (program.cpp:{number})", module) if number else ""

    places = ("done", "next", "source")
    streams = [{key: placed(value) if key in places else value for key, value in stream.items()} for stream in seen.pop("streams")]
    begun = [(channel, list(ranks), count) for channel, ranks, count in seen.pop("begun")]
    return Stand(name, *progress[:2], **{**seen, "enqueued": placed(seen["enqueued"])}, streams=streams, begun=begun)


def to_note(stands: Sequence[Stand]) -> str:
    return json.dumps([asdict(stand) for stand in stands])


def from_note(note: str) -> list[Stand]:
    stands = [Stand(**stand) for stand in json.loads(note)]
    return [Stand(**{**vars(stand), "begun": [tuple(one) for one in stand.begun]}) for stand in stands]


def describe(ranks: Sequence[list[Stand] | None]) -> list[str]:
    """Lines of the report for the positions of all ranks, indexed by rank. None stands for a rank that does not answer."""
    lines = []
    for rank, stands in enumerate(ranks):
        if stands is None:
            lines.append(f"  rank {rank}: does not answer")
            continue
        calls = "; ".join(f"{stand.program}: {stand.made} calls, {stand.done} done" for stand in stands)
        lines.append(f"  rank {rank}: {calls or 'no call'}")
        lines += [f"    {line}" for stand in stands for line in _lines_of(stand, rank, ranks)]
    return lines


def _lines_of(stand: Stand, rank: int, ranks: Sequence[list[Stand] | None]) -> Iterator[str]:
    if not stand.call:
        return
    if stand.is_enqueuing:
        yield f"host: enqueued up to {stand.enqueued}" if stand.enqueued else "host: has enqueued nothing of the call"
    elif not stand.streams:
        yield "all lines are done except for the end of the call"
    if stand.finished:
        yield f"{', '.join(stand.finished)}: done"
    for stream in stand.streams:
        done = f"done up to {stream['done']}" if stream["done"] else "nothing done"
        behind = f"; {stream['behind']} more operation{'s' * (stream['behind'] > 1)} queued" if stream["behind"] else ""
        yield f"{stream['name']}: {stream['next']} {_edge(stand, stream, rank, ranks)}; {done}{behind}"


def _edge(stand: Stand, stream: dict[str, Any], rank: int, ranks: Sequence[list[Stand] | None]) -> str:
    """Describes what an unfinished line waits for: an event, or other ranks."""
    edge, channel = stream["edge"], stream["channel"]
    if edge == "event":
        own = stream["source"] == stream["next"]
        return f"waits for {stream['source_stream']}" + ("" if own else f", for the event of {stream['source']}")
    if edge in _OTHER_EDGES:
        return _OTHER_EDGES[edge]
    owed = ", ".join(_owed(stand, stream, rank, ranks))
    if not owed:
        return f"has begun on {channel}, and so have all ranks that it waits for"
    if edge == "signal":
        return f"waits on {channel} for signal {stream['number']} of {owed}"
    if edge == "credit":
        return f"waits on {channel} for the credit of signal {stream['number']}, which is owed by {owed}"
    return f"waits on {channel} for {owed}"


def _owed(stand: Stand, stream: dict[str, Any], rank: int, ranks: Sequence[list[Stand] | None]) -> Iterator[str]:
    """Text for each rank that has not arrived at the communication, with its known state."""
    for peer in stream["ranks"]:
        if peer == rank:
            continue
        said = ranks[peer] if peer < len(ranks) else None
        own = next((one for one in said or () if one.program == stand.program), None)
        if said is None:
            yield f"rank {peer}, which does not answer"
        elif own is None:
            yield f"rank {peer}"
        elif own.made < stand.call:
            yield f"rank {peer}, which has not made call {stand.call}"
        elif stream["edge"] in ("signal", "credit") and own.done >= stand.call:
            yield f"rank {peer}, which is done with call {stand.call}"
        elif not own.has_come(rank, stand.call, stream):
            yield f"rank {peer}"


def say(report: str) -> None:
    """Writes a report to stderr in one piece. print would write the newline separately, and several ranks share a terminal."""
    sys.stderr.write(f"hostweave: {report}\n")
    sys.stderr.flush()
