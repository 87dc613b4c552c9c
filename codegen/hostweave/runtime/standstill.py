"""Report of a hang: for each rank and stream, the last finished line, the first unfinished line, and the ranks for which the unfinished
line waits.

A rank's position is a list of `RankPosition`, one per program. `describe` combines the positions of all ranks.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from hostweave.runtime.lines import with_source_lines

_OTHER_EDGES = {
    "call_before": "waits for the previous call",
    "unknown": "or a later line is not done (graphs report progress only with HOSTWEAVE_GRAPH_PROGRESS=1)",
    "none": "is not done",
}
_MAX_CHARACTERS = 48  # the report shows only the first argument of a longer call

Line = tuple[int, str]  # (line number in program.cpp or 0, the call on that line)


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank in a program: calls made and done, and the streams of the first unfinished call."""

    program: str
    made: int
    done: int
    call: int = 0  # the first unfinished call, or 0
    is_graph: bool = False
    is_enqueuing: bool = False
    enqueued: str = ""  # last line that the host has enqueued
    streams: list[dict[str, Any]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # names of streams without unfinished work
    begun: list[tuple[str, list[int], int]] = field(default_factory=list)  # (channel, ranks of the group, begun collectives)

    def has_reached(self, rank: int, call: int, stream: dict[str, Any]) -> bool:
        if self.call != call:
            return self.done >= call
        if stream["edge"] == "collective":
            counts = [count for channel, ranks, count in self.begun if (channel, ranks) == (stream["channel"], stream["ranks"])]
            return bool(counts) and counts[0] >= stream["nth"]
        return stream["edge"] == "transfer" and any(
            at_peer["edge"] == "transfer" and at_peer["channel"] == stream["channel"] and rank in at_peer["ranks"]
            for at_peer in self.streams
        )


def marks_graphs() -> bool:
    """True if CUDA graphs record their progress for the report. On the CPU target, graphs always do."""
    return bool(os.environ.get("HOSTWEAVE_GRAPH_PROGRESS"))


def position_of(name: str, progress: tuple[int, int, float], native: dict[str, Any], module: ModuleType) -> RankPosition:
    def with_source(line: Line) -> str:
        number, call = line
        text = call if len(call) <= _MAX_CHARACTERS else f"{call.partition(',')[0]}, ...)"
        return with_source_lines(f"{text} (program.cpp:{number})", module) if number else ""

    line_fields = ("done", "next", "source")
    streams = [
        {key: with_source(value) if key in line_fields else value for key, value in stream.items()} for stream in native.pop("streams")
    ]
    return RankPosition(name, *progress[:2], **{**native, "enqueued": with_source(native["enqueued"])}, streams=streams)


def to_json(positions: Sequence[RankPosition]) -> str:
    return json.dumps([asdict(position) for position in positions])


def from_json(text: str) -> list[RankPosition]:
    return [RankPosition(**{**position, "begun": [tuple(one) for one in position["begun"]]}) for position in json.loads(text)]


def describe(ranks: Sequence[list[RankPosition] | None]) -> list[str]:
    """Lines of the report. In `ranks`, None stands for a rank that does not answer."""
    lines = []
    for rank, positions in enumerate(ranks):
        if positions is None:
            lines.append(f"  rank {rank}: does not answer")
            continue
        calls = "; ".join(f"{position.program}: {position.made} calls, {position.done} done" for position in positions)
        lines.append(f"  rank {rank}: {calls or 'no call'}")
        lines += [f"    {line}" for position in positions for line in _lines_of(position, rank, ranks)]
    return lines


def _lines_of(position: RankPosition, rank: int, ranks: Sequence[list[RankPosition] | None]) -> Iterator[str]:
    if not position.call:
        return
    if position.is_enqueuing:
        yield f"host: enqueued up to {position.enqueued}" if position.enqueued else "host: has enqueued nothing of the call"
    elif not position.streams:
        yield "all lines are done except for the end of the call"
    if position.finished:
        yield f"{', '.join(position.finished)}: done"
    for stream in position.streams:
        done = f"done up to {stream['done']}" if stream["done"] else "nothing done"
        behind = f"; {stream['behind']} more operation{'s' * (stream['behind'] > 1)} queued" if stream["behind"] else ""
        yield f"{stream['name']}: {stream['next']} {_edge(position, stream, rank, ranks)}; {done}{behind}"


def _edge(position: RankPosition, stream: dict[str, Any], rank: int, ranks: Sequence[list[RankPosition] | None]) -> str:
    """State of an unfinished line, such as the event or the ranks for which the line waits."""
    edge, channel = stream["edge"], stream["channel"]
    if edge == "event":
        at_peer = stream["source"] == stream["next"]
        return f"waits for {stream['source_stream']}" + ("" if at_peer else f", for the event of {stream['source']}")
    if edge in _OTHER_EDGES:
        return _OTHER_EDGES[edge]
    late_ranks = ", ".join(_late_ranks(position, stream, rank, ranks))
    if not late_ranks:
        return f"has begun on {channel}, and so have all ranks that it waits for"
    if edge == "signal":
        return f"waits on {channel} for signal {stream['number']} of {late_ranks}"
    if edge == "credit":
        return f"waits on {channel} for the credit of signal {stream['number']} from {late_ranks}"
    return f"waits on {channel} for {late_ranks}"


def _late_ranks(position: RankPosition, stream: dict[str, Any], rank: int, ranks: Sequence[list[RankPosition] | None]) -> Iterator[str]:
    for peer in stream["ranks"]:
        if peer == rank:
            continue
        positions = ranks[peer] if peer < len(ranks) else None
        at_peer = next((one for one in positions or () if one.program == position.program), None)
        if positions is None:
            yield f"rank {peer}, which does not answer"
        elif at_peer is None:
            yield f"rank {peer}"
        elif at_peer.made < position.call:
            yield f"rank {peer}, which has not made call {position.call}"
        elif stream["edge"] in ("signal", "credit") and at_peer.done >= position.call:
            yield f"rank {peer}, which is done with call {position.call}"
        elif not at_peer.has_reached(rank, position.call, stream):
            yield f"rank {peer}"


def print_report(report: str) -> None:
    """Writes a report to stderr in one piece, because several ranks share a terminal. print would write the newline separately."""
    sys.stderr.write(f"hostweave: {report}\n")
    sys.stderr.flush()
