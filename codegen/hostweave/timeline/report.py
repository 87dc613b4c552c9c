"""Reports of a predicted timeline, and of a measured one if there is one: HTML pages, Perfetto traces and pictures."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hostweave.base.errors import ArgumentError
from hostweave.base.paths import TEMPLATES
from hostweave.base.signatures import checked
from hostweave.timeline.events import WAITING, Event, Timeline
from hostweave.timeline.graph import Change, OpGraph
from hostweave.timeline.picture import MAX_SHOWN_RANKS, Picture


@dataclass(frozen=True)
class Comparison:
    """Mean predicted and measured time of an instruction over its executions, in microseconds."""

    name: str
    kind: str
    instruction: str
    count: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Error of the prediction as a fraction of the measured time. Negative if the prediction is too short. 0 if the measured time is
        0."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class Report:
    """Predicted timeline of a program, and measured timeline if there is one. `str` shows the totals, and the `differences` if there are
    any. Notebooks show a picture.

    Example: `hw.compile(f).timeline(x, w).save("f.html")`.
    """

    predicted: Timeline
    measured: Timeline | None = None
    graph: OpGraph | None = field(default=None, repr=False)  # graph of the fusion after the last fusion pass
    changes: tuple[Change, ...] = field(default=(), repr=False)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        return (self.predicted, self.measured) if self.measured else (self.predicted,)

    @property
    def error(self) -> float:
        """Error of the prediction as a fraction of the measured time of the call. 0 if the measured time is 0. Raises ArgumentError if
        nothing was measured."""
        if self.measured is None:
            raise ArgumentError(f"{self.predicted.program}: nothing was measured; pass arrays to timeline(...)")
        return self.predicted.micros / self.measured.micros - 1 if self.measured.micros else 0.0

    @cached_property
    def differences(self) -> tuple[Comparison, ...]:
        """Mean predicted and measured times of each instruction that computes or communicates, over all ranks and loop iterations. Empty if
        nothing was measured."""
        found: dict[tuple[str, str], list[tuple[Event, Event]]] = {}
        measured = self.measured.events if self.measured else ()
        for one, other in zip(self.predicted.events, measured, strict=False):
            if one.kind != WAITING:
                found.setdefault((one.name, one.source), []).append((one, other))
        return tuple(
            Comparison(
                *(name, pairs[0][0].kind, pairs[0][0].instruction, len(pairs)),
                *(fmean(event.micros for event in events) for events in zip(*pairs, strict=True)),
            )
            for (name, _), pairs in found.items()
        )

    def __str__(self) -> str:
        lines = [str(timeline) for timeline in self.timelines]
        if self.measured:
            lines.append(f"predicted / measured: {1 + self.error:.3g}")
            lines += [
                f"  {d.name}: predicted {d.predicted:.1f} us, measured {d.measured:.1f} us, {d.error:+.0%}"
                + (f", {d.count} times" if d.count > 1 else "")
                for d in self.differences
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.svg()

    @checked
    def save(self, path: str | Path) -> None:
        """Writes the report to a file. The ending of `path` selects the format: `.html` (a page that needs no network), `.json` (for
        Perfetto) or `.svg`. Raises ArgumentError for another ending, or if the file cannot be written."""
        path, kinds = Path(path), {".html": self.html, ".json": self.perfetto, ".svg": self.svg}
        if path.suffix not in kinds:
            raise ArgumentError(f"{path}: a timeline cannot be saved in this format; use one of the endings {', '.join(kinds)}")
        try:
            path.write_text(kinds[path.suffix](), "utf-8")
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}; choose a writable file") from None

    def html(self) -> str:
        ranks = set(self.predicted.ranks[:MAX_SHOWN_RANKS])
        data = {"timelines": [{"basis": t.basis, "events": _told(t, ranks)} for t in self.timelines]}
        return _laid_out("timeline.html.j2", report=self, picture=Picture(self.timelines), data=data)

    def svg(self) -> str:
        return _laid_out("timeline.svg.j2", picture=Picture(self.timelines))

    def perfetto(self) -> str:
        """The report in Chrome's JSON trace format, which ui.perfetto.dev opens. A rank is a process, and a stream is a thread."""
        events = [event for number, timeline in enumerate(self.timelines) for event in _traced(number, timeline)]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"program": self.predicted.program}})


def _told(timeline: Timeline, ranks: set[int]) -> dict[int, dict[str, Any]]:
    """Events of `ranks` by index, without dependencies on events of other ranks."""
    known = {number: event for number, event in enumerate(timeline.events) if event.rank in ranks}
    met = {event.meets: [number for number in event.meets if number in known] for event in known.values()}
    return {
        number: {**vars(event), "after": [other for other in event.after if other in known], "meets": met[event.meets]}
        for number, event in known.items()
    }


def _laid_out(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def _traced(number: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    threads = {stream: at for at, stream in enumerate(timeline.streams)}
    offset = number * (max(timeline.ranks) + 1)
    for rank in timeline.ranks:
        name = f"rank {rank}, {timeline.basis.split()[0]}"
        yield {"ph": "M", "name": "process_name", "pid": offset + rank, "args": {"name": name}}
        for stream, at in threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": offset + rank, "tid": at, "args": {"name": stream}}
    for at, event in enumerate(timeline.events):
        of = {"pid": offset + event.rank, "tid": threads[event.stream]}
        details = {"instruction": event.instruction, "source": event.source, "sent_bytes": event.sent}
        yield {**of, "ph": "X", "name": event.name, "cat": event.kind, "ts": event.start, "dur": event.micros, "args": details}
        for earlier in (timeline.events[before] for before in event.after):
            if (earlier.rank, earlier.stream) != (event.rank, event.stream):
                arrow = {"cat": "dependency", "name": "after", "id": f"{number}.{at}.{earlier.rank}.{earlier.stream}"}
                yield {**arrow, "ph": "s", "pid": offset + earlier.rank, "tid": threads[earlier.stream], "ts": earlier.end}
                yield {**arrow, **of, "ph": "f", "bp": "e", "ts": event.start}
