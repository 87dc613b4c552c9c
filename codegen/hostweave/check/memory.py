"""Last accesses to the bytes of each buffer, to find unordered accesses."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostweave.check.happens_before import Clock, Task
from hostweave.check.operations import Access, ByteRegion, Operation, Root
from hostweave.host_ir import tree


@dataclass(slots=True, eq=False)
class TaskAccess:
    """An access by a task. `member` is the task's operation, or one member of the task's group."""

    by: Task
    member: Operation
    access: Access


ByteBlocks = tuple[int, tuple[tuple[int, int], ...], int]  # bytes of a region: offset, rows, and length of a contiguous run


class Pieces:
    """Partition of a buffer's bytes into pieces, which need not be contiguous. Every access covers a piece completely or not at all."""

    def __init__(self, size: int, regions_of_bytes: frozenset[ByteBlocks]):
        kept, row_bytes, fewer = _with_fewer_rows(size, regions_of_bytes)
        kept_size, blocks = len(kept) * row_bytes, {*fewer.values()}
        last = max(kept_size, *(offset + run + sum(count * pitch for count, pitch in rows) for offset, rows, run in blocks))
        integer = np.dtype(np.int64 if last < 2**63 else object)  # Python's integers if 64 bits are too few
        starts = {block: starts_of_runs(*block, integer) for block in blocks}
        ends = {block: first + block[2] for block, first in starts.items()}
        # Two consecutive cuts bound a segment. A stable sort is many times faster than np.unique, because the arrays are sorted already.
        cuts = np.sort(np.concatenate([np.array([0, kept_size], integer), *starts.values(), *ends.values()]), kind="stable")
        cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])]
        piece_of, covers = np.zeros(len(cuts) - 1, np.int64), dict[ByteBlocks, npt.NDArray[np.bool_]]()
        for block in blocks:
            first, end = (np.bincount(np.searchsorted(cuts, of[block]), minlength=len(cuts)) for of in (starts, ends))
            covers[block] = np.cumsum(first - end)[:-1] > 0
            halves = 2 * piece_of + covers[block]  # A piece that the access covers only partly becomes two pieces.
            piece_of = (np.cumsum(np.bincount(halves) > 0) - 1)[halves]
        first_of_piece = np.zeros(piece_of.max(initial=-1) + 1, np.int64)
        first_of_piece[piece_of[::-1]] = np.arange(len(piece_of))[::-1]
        first_of_piece.sort()  # Pieces are numbered in the order of their first segments.

        def position(cut: int) -> int:
            return kept[cut // row_bytes] * row_bytes + cut % row_bytes if cut < kept_size else size

        self.first_segments = [range(position(int(cuts[segment])), position(int(cuts[segment + 1]))) for segment in first_of_piece]
        covered = {block: tuple(np.flatnonzero(of[first_of_piece]).tolist()) for block, of in covers.items()}
        self.covered = {block: covered[fewer[block]] for block in regions_of_bytes}


def _with_fewer_rows(size: int, regions: frozenset[ByteBlocks]) -> tuple[Sequence[int], int, dict[ByteBlocks, ByteBlocks]]:
    """Divides a buffer into rows, and keeps the first two of consecutive rows with the same accesses. The kept rows have the same pieces.

    Returns the numbers of the kept rows, the bytes of a row, and the bytes of each region in the kept rows. If an access does not consist
    of equal parts of rows, the whole buffer is one row.
    """
    row_bytes = max((rows[0][1] for _, rows, _ in regions if rows), default=0)
    in_rows = {region: found for region in regions if row_bytes and (found := _in_rows(region, row_bytes))}
    ends = {0, size // row_bytes if row_bytes else 0}.union(*((first, first + count) for first, count, _ in in_rows.values()))
    if len(in_rows) < len(regions) or size != max(ends) * row_bytes:
        return (0,), size, {region: region for region in regions}
    kept = [row for first, end in pairwise(sorted(ends)) for row in range(first, min(first + 2, end))]
    fewer = dict[ByteBlocks, ByteBlocks]()
    for region, (first, count, (offset, rows, run)) in in_rows.items():
        begin, end = (bisect_left(kept, row) for row in (first, first + count))
        at, number = begin * row_bytes + offset, end - begin
        fewer[region] = (at, (), number * row_bytes) if run == row_bytes else (at, ((number, row_bytes), *rows), run)
    return kept, row_bytes, fewer


def _in_rows(region: ByteBlocks, row_bytes: int) -> tuple[int, int, ByteBlocks] | None:
    """(first row, number of rows, bytes in a row) of a region in rows of `row_bytes` bytes. None if the rows differ."""
    offset, rows, run = region
    if not rows:
        rows, run = (((1, row_bytes),), run) if run % row_bytes else (((run // row_bytes, row_bytes),), row_bytes)
    (count, stride), *inner = rows
    if not stride or row_bytes % stride or count % (row_bytes // stride):
        return None
    if stride < row_bytes:
        inner = [(row_bytes // stride, stride), *inner]
    first, offset = divmod(offset, row_bytes)
    extent = offset + run + sum((number - 1) * length for number, length in inner)
    return (first, count * stride // row_bytes, (offset, tuple(inner), run)) if extent <= row_bytes else None


def starts_of_runs(offset: int, rows: tuple[tuple[int, int], ...], run: int, integer: np.dtype[Any]) -> npt.NDArray[Any]:
    found = np.full(min(run, 1), offset, integer)
    for count, pitch in rows:
        found = np.add.outer(found, np.arange(count).astype(integer) * pitch).ravel()
    return found


def _byte_blocks(region: ByteRegion) -> ByteBlocks:
    return region.offset, region.layout.rows, region.layout.run


class Memory:
    """One buffer of one rank, with the last accesses to each piece.

    Tasks are recorded in an order that respects happens-before. For each piece, these accesses are kept: the last write, and the last read
    of each stream after this write. A task that is ordered after these accesses is also ordered after all earlier accesses.
    """

    def __init__(self, root: Root, regions: list[ByteRegion], caller: Task, known: dict[tuple[int, frozenset[ByteBlocks]], Pieces]):
        """`known` caches the pieces of buffers with equal accesses, such as the same buffer on other ranks."""
        self.root = root
        regions_of_bytes = frozenset([(0, root.layout.rows, root.layout.run), *map(_byte_blocks, regions)])
        if (root.size, regions_of_bytes) not in known:
            known[root.size, regions_of_bytes] = Pieces(root.size, regions_of_bytes)
        self.pieces = known[root.size, regions_of_bytes]
        self.before = TaskAccess(caller, caller.operation, Access("", ByteRegion("", 0, root.layout, 0), reads=False, writes=True))
        count = len(self.pieces.first_segments)
        self.writes = [self.before] * count
        self.reads: dict[int, dict[int, TaskAccess]] = {}  # by piece, then by stream
        # For each piece, the generation of its values, or -1. An input has values from the start.
        self.contents = [0 if root.role == "input" else -1] * count
        self.freed: set[int] = set()  # generations whose memory was freed

    def record(self, touch: TaskAccess, clock: Clock) -> TaskAccess | None:
        """Records an access of a task that starts at `clock`. Returns a conflicting earlier access that may still run, or None."""
        task, access, region = touch.by, touch.access, touch.access.region
        fills = access.writes and not tree.names(touch.member.instruction, "allocate", "free")
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
                    self.contents[piece] = region.generation
            if access.reads:
                self.reads.setdefault(piece, {})[task.stream_id] = touch
        return None

    def unfinished_access(self, clock: Clock) -> TaskAccess | None:
        task_accesses = (touch for piece, write in enumerate(self.writes) for touch in (write, *self.reads.get(piece, {}).values()))
        return next((touch for touch in task_accesses if clock[touch.by.stream_id] < touch.by.number), None)

    def first_uninitialised(self, region: ByteRegion) -> tuple[range, TaskAccess | None] | None:
        """First uninitialised or overwritten bytes of a region, with the write that overwrote them. None if all bytes are valid."""
        for piece in self.covered(region):
            if not region.generation <= (contents := self.contents[piece]) <= region.last:
                return self.pieces.first_segments[piece], self.writes[piece] if contents > region.last else None
        return None

    def overlap(self, a: ByteRegion, b: ByteRegion) -> bool:
        return not set(self.covered(a)).isdisjoint(self.covered(b))

    def covered(self, region: ByteRegion) -> Sequence[int]:
        return self.pieces.covered[_byte_blocks(region)]
