"""The last accesses to the bytes of one buffer, to find accesses that are not ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from hostweave.check.happens_before import Clock, Task
from hostweave.check.operations import Access, Layout, Operation, Region, Root
from hostweave.host_ir import tree


@dataclass(slots=True, eq=False)
class TaskAccess:
    """An access by a task, of which `part` is one member of a group, or all of it."""

    by: Task
    part: Operation
    access: Access


Place = tuple[int, Layout]  # of a region: its offset, and how it lies


class Pieces:
    """A buffer, cut so that every access covers whole pieces: the bytes that are always accessed together are one, wherever they lie."""

    def __init__(self, size: int, places: frozenset[Place]):
        self.unit = gcd(size, *(gcd(offset, layout.unit) for offset, layout in places)) or 1
        units = {place: self._units(*place) for place in places}
        piece_of, count = [0] * (size // self.unit), 1
        for covered in units.values():
            inside: dict[int, int] = {}  # of each piece so far the part that this access covers
            for unit in covered:
                before = piece_of[unit]
                if before not in inside:
                    inside[before], count = count, count + 1
                piece_of[unit] = inside[before]
        number: dict[int, int] = {}  # in order of their first units
        self.first_units: list[int] = []
        for unit, piece in enumerate(piece_of):
            if piece not in number:
                number[piece] = len(number)
                self.first_units.append(unit)
        self.covered = {place: tuple(sorted({number[piece_of[unit]] for unit in covered})) for place, covered in units.items()}

    def _units(self, offset: int, layout: Layout) -> dict[int, None]:
        first, run = offset // self.unit, layout.run // self.unit
        return dict.fromkeys(first + start // self.unit + i for start in layout.starts() for i in range(run))


class Memory:
    """One buffer of one rank, in pieces.

    Tasks must come in an order that keeps every known before and after. The last write of a piece and, for each stream,
    the last read since then are enough: a task that comes after those comes after all earlier ones.
    """

    def __init__(self, root: Root, regions: list[Region], caller: Task, known: dict[tuple[int, frozenset[Place]], Pieces]):
        """`known` has the pieces of buffers that are accessed in the same places, as those of other ranks and layers are."""
        self.root = root
        places = frozenset([(0, root.layout), *((region.offset, region.layout) for region in regions)])
        if (root.size, places) not in known:
            known[root.size, places] = Pieces(root.size, places)
        self.pieces = known[root.size, places]
        self.before = TaskAccess(caller, caller.operation, Access("", Region("", 0, root.layout, 0), reads=False, writes=True))
        count = len(self.pieces.first_units)
        self.writes = [self.before] * count
        self.reads: dict[int, dict[int, TaskAccess]] = {}  # by piece, then by stream
        # Which execution of its allocate a piece was filled in; an input is filled from the start.
        self.filled = [0 if root.role == "input" else -1] * count
        self.freed: set[int] = set()  # executions of the allocate

    def touch(self, touch: TaskAccess, clock: Clock) -> TaskAccess | None:
        """Notes an access of a task that starts when `clock` is known. Returns an earlier conflicting one that may still run."""
        task, access, region = touch.by, touch.access, touch.access.region
        is_claim = bool(tree.names(touch.part.instruction, "allocate", "free"))
        for piece in self.covered(region):
            write = self.writes[piece]
            if clock[write.by.stream_id] < write.by.number and write.by is not task:
                return write
            if access.writes:
                if reads := self.reads.pop(piece, None):
                    for read in reads.values():
                        if clock[read.by.stream_id] < read.by.number and read.by is not task:
                            return read
                self.writes[piece] = touch
                if not is_claim:
                    self.filled[piece] = region.generation
            if access.reads:
                self.reads.setdefault(piece, {})[task.stream_id] = touch
        return None

    def unfinished(self, clock: Clock) -> TaskAccess | None:
        """An access that may still run when `clock` is known."""
        touches = (touch for piece, write in enumerate(self.writes) for touch in (write, *self.reads.get(piece, {}).values()))
        return next((touch for touch in touches if clock[touch.by.stream_id] < touch.by.number), None)

    def first_empty(self, region: Region) -> range | None:
        """The bytes of the first unit of a region that nothing has filled since its allocate."""
        empty = (self.pieces.first_units[piece] for piece in self.covered(region) if self.filled[piece] != region.generation)
        return next((range(unit * self.pieces.unit, (unit + 1) * self.pieces.unit) for unit in empty), None)

    def overlap(self, a: Region, b: Region) -> bool:
        return not set(self.covered(a)).isdisjoint(self.covered(b))

    def covered(self, region: Region) -> Sequence[int]:
        return self.pieces.covered[region.offset, region.layout]
