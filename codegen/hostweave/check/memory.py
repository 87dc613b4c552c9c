"""Keeps the last accesses to the bytes of each buffer, to find unordered accesses."""

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.check.happens_before import Clock, Task
from hostweave.check.operations import Access, ByteRegion, Operation, Root, starts
from hostweave.host_ir import tree


@dataclass(slots=True, eq=False)
class TaskAccess:
    """An access by a task. `part` is the task's operation, or one operation of its group."""

    by: Task
    part: Operation
    access: Access


ByteBlocks = tuple[int, tuple[tuple[int, int], ...], int]  # bytes of a region: offset, rows, and length of a contiguous run


class Pieces:
    """Partition of a buffer into pieces. Two bytes are in one piece if every access covers both or neither, even if they are not adjacent.
    So every access covers whole pieces."""

    def __init__(self, size: int, places: frozenset[ByteBlocks]):
        runs = {place: [(place[0] + start, place[0] + start + place[2]) for start in starts(*place[1:])] for place in places}
        cuts = sorted({0, size}.union(*(cut for of in runs.values() for cut in of)))
        number_of = {cut: number for number, cut in enumerate(cuts)}  # byte position of a cut -> number of the segment that begins there
        segments = {place: [i for start, end in of for i in range(number_of[start], number_of[end])] for place, of in runs.items()}
        piece_of, count = [0] * (len(cuts) - 1), 1
        for covered in segments.values():
            inside: dict[int, int] = {}  # old piece -> new piece, for those of its bytes that this access covers
            for segment in dict.fromkeys(covered):
                before = piece_of[segment]
                if before not in inside:
                    inside[before], count = count, count + 1
                piece_of[segment] = inside[before]
        number: dict[int, int] = {}  # numbers the pieces in the order of their first segments
        self.first_segments: list[range] = []
        for segment, piece in enumerate(piece_of):
            if piece not in number:
                number[piece] = len(number)
                self.first_segments.append(range(cuts[segment], cuts[segment + 1]))
        self.covered = {place: tuple(sorted({number[piece_of[segment]] for segment in covered})) for place, covered in segments.items()}


def _place(region: ByteRegion) -> ByteBlocks:
    return region.offset, region.layout.rows, region.layout.run


class Memory:
    """One buffer of one rank, with the last accesses to each piece.

    Tasks must be added in an order that respects happens-before. Each piece keeps its last write, and for each stream the last read after
    that write. A task that is ordered after these accesses is also ordered after all earlier ones.
    """

    def __init__(self, root: Root, regions: list[ByteRegion], caller: Task, known: dict[tuple[int, frozenset[ByteBlocks]], Pieces]):
        """`known` caches the pieces of buffers with equal accesses, such as the same buffer on other ranks or in other layers."""
        self.root = root
        places = frozenset([(0, root.layout.rows, root.layout.run), *map(_place, regions)])
        if (root.size, places) not in known:
            known[root.size, places] = Pieces(root.size, places)
        self.pieces = known[root.size, places]
        self.before = TaskAccess(caller, caller.operation, Access("", ByteRegion("", 0, root.layout, 0), reads=False, writes=True))
        count = len(self.pieces.first_segments)
        self.writes = [self.before] * count
        self.reads: dict[int, dict[int, TaskAccess]] = {}  # by piece, then by stream
        # For each piece, the generation whose values it holds, or -1. An input holds values from the start.
        self.filled = [0 if root.role == "input" else -1] * count
        self.freed: set[int] = set()  # generations whose memory was freed

    def touch(self, touch: TaskAccess, clock: Clock) -> TaskAccess | None:
        """Records an access of a task that starts at `clock`. Returns an earlier conflicting access that may still run, or None."""
        task, access, region = touch.by, touch.access, touch.access.region
        fills = access.writes and not tree.names(touch.part.instruction, "allocate", "free")
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
                if fills:
                    self.filled[piece] = region.generation
            if access.reads:
                self.reads.setdefault(piece, {})[task.stream_id] = touch
        return None

    def unfinished(self, clock: Clock) -> TaskAccess | None:
        """An access that is not known to have ended at `clock`, or None."""
        touches = (touch for piece, write in enumerate(self.writes) for touch in (write, *self.reads.get(piece, {}).values()))
        return next((touch for touch in touches if clock[touch.by.stream_id] < touch.by.number), None)

    def first_empty(self, region: ByteRegion) -> tuple[range, TaskAccess | None] | None:
        """First bytes of a region that do not hold its values, and the write that overwrote these values or None."""
        for piece in self.covered(region):
            if not region.generation <= (filled := self.filled[piece]) <= region.last:
                return self.pieces.first_segments[piece], self.writes[piece] if filled > region.last else None
        return None

    def overlap(self, a: ByteRegion, b: ByteRegion) -> bool:
        return not set(self.covered(a)).isdisjoint(self.covered(b))

    def covered(self, region: ByteRegion) -> Sequence[int]:
        return self.pieces.covered[_place(region)]
