"""Layout of a picture of timelines: one row per rank and stream, with the prediction above the measurement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10

from hostweave.timeline.events import WAITING, Event, Timeline

WIDTH, LEFT, TOP = 1200, 190, 28  # pixels: width of the picture, width of the row names, height of the axis
TRACK, GAP = 18, 10  # pixels: height of a track, and of the gap between ranks
MEMORY_HEIGHT = 48  # pixels: height of the bar of the peak memory
LETTER = 6.2  # width of a character in pixels
MAX_SHOWN_RANKS = 16  # most ranks in a picture
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
MAX_SCALE_RATIO = 4.0  # ratio of lengths above which two timelines get separate scales


@dataclass(frozen=True)
class StreamRow:
    number: int  # index of the timeline
    rank: int
    stream: str
    y: int
    text: str


@dataclass(frozen=True)
class Box:
    """A rectangle: an event, an interval of exposed communication, or an interval of constant memory."""

    number: int  # index of the timeline
    event: int  # index of the event; -1 for a rectangle that is not an event
    start: float  # microseconds
    end: float
    x: float
    y: int
    width: float
    height: int
    kind: str
    text: str = ""
    title: str = ""
    is_critical: bool = False

    @property
    def fits(self) -> bool:
        return bool(self.text) and LETTER * len(self.text) + 4 <= self.width


class Picture:
    """Shapes of one or two timelines of a program, in pixels."""

    width, left, top, track = WIDTH, LEFT, TOP, TRACK

    def __init__(self, timelines: Sequence[Timeline]):
        self.timelines = timelines
        longest = max(timeline.micros for timeline in timelines)
        self.shares_scale = longest <= MAX_SCALE_RATIO * min(timeline.micros for timeline in timelines)
        self.spans = [longest if self.shares_scale else timeline.micros for timeline in timelines]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return self.timelines[0].ranks[:MAX_SHOWN_RANKS]

    @property
    def left_out(self) -> int:
        return len(self.timelines[0].ranks) - len(self.ranks)

    @cached_property
    def tracks(self) -> list[StreamRow]:
        found, y = list[StreamRow](), TOP
        for rank in self.ranks:
            for number, timeline in enumerate(self.timelines):
                basis = f", {timeline.basis.split()[0]}" if len(self.timelines) > 1 else ""
                for stream in timeline.streams:
                    found.append(StreamRow(number, rank, stream, y, f"rank {rank}{basis}, {stream}"))
                    y += TRACK
                y += GAP // 2
            y += GAP
        return found

    @property
    def height(self) -> int:
        return self.memory_top + (MEMORY_HEIGHT + GAP if self.memory else 0)

    @property
    def memory_top(self) -> int:
        return (self.tracks[-1].y if self.tracks else TOP) + TRACK + GAP

    @cached_property
    def memory(self) -> list[Box]:
        """Bars of the predicted memory of the first rank. The heights of the bars are proportional to the bytes."""
        changes = self.timelines[0].memory
        ends = [*(start for start, _ in changes[1:]), self.timelines[0].micros]
        return [self._bar(start, end, held) for (start, held), end in zip(changes, ends, strict=True) if end > start]

    def _bar(self, start: float, end: float, held: int) -> Box:
        height = round(MEMORY_HEIGHT * held / (self.timelines[0].peak_bytes or 1))
        x = self.x(0, start)
        y, width = self.memory_top + MEMORY_HEIGHT - height, round(self.x(0, end) - x, 2)
        return Box(0, -1, round(start, 3), round(end, 3), x, y, width, height, "bytes", title=f"{held:,} bytes")

    @property
    def memory_text(self) -> str:
        return f"rank {self.ranks[0]}: at most {in_units(self.timelines[0].peak_bytes)}"

    def x(self, number: int, micros: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 10) * micros / (self.spans[number] or 1.0), 2)

    @cached_property
    def boxes(self) -> list[Box]:
        y_of = {(track.number, track.rank, track.stream): track.y for track in self.tracks}
        critical = [set(timeline.critical_path) for timeline in self.timelines]
        return [
            self._box(number, at, event, y_of[number, event.rank, event.stream], at in critical[number])
            for number, timeline in enumerate(self.timelines)
            for at, event in enumerate(timeline.events)
            if event.rank in self.ranks
        ]

    def _box(self, number: int, at: int, event: Event, y: int, is_critical: bool) -> Box:
        x = self.x(number, event.start)
        width = round(max(self.x(number, event.end) - x, 0.5), 2)
        inset = 6 if event.kind == WAITING else 2
        title = f"{event.name}: {event.micros:.1f} us from {event.start:.1f}\n{event.instruction}\n{event.source}".strip()
        return Box(
            *(number, at, round(event.start, 3), round(event.end, 3), x, y + inset // 2, width, TRACK - inset),
            *(event.kind, event.name, title, is_critical),
        )

    @cached_property
    def shades(self) -> list[Box]:
        return [
            Box(number, -1, round(start, 3), round(end, 3), x := self.x(number, start), y, self.x(number, end) - x, height, "exposed")
            for number, timeline in enumerate(self.timelines)
            for rank in self.ranks
            for y, height in [self._rows(number, rank)]
            for start, end in timeline.exposed(rank)
        ]

    def _rows(self, number: int, rank: int) -> tuple[int, int]:
        rows = [track.y for track in self.tracks if (track.number, track.rank) == (number, rank)]
        return (rows[0], rows[-1] - rows[0] + TRACK) if rows else (TOP, 0)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(position, text) of each tick on the axis of the first timeline."""
        at = [(self.x(0, micros), f"{micros:g} us") for micros in ticks(self.spans[0])]
        return [(x, text if x + LETTER * len(text) < WIDTH else "") for x, text in at]


def in_units(size: int) -> str:
    """Short text of a number of bytes, such as "67.1 MB"."""
    unit = next((unit for unit, name in UNITS if size >= unit), 1)
    return f"{size / unit:.3g} {dict(UNITS)[unit]}"


def ticks(span: float) -> Iterator[float]:
    """Yields 4 to 9 round numbers from 0 to `span`."""
    if span <= 0:
        return
    power = 10 ** floor(log10(span / 8))
    interval = next(power * times for times in (1, 2, 5, 10) if span / (power * times) <= 8)
    yield from (round(i * interval, 6) for i in range(floor(span / interval) + 1))
