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


class Memory:
    """One buffer of one rank, in units: the greatest piece of which every access covers a whole number.

    Tasks must come in an order that keeps every known before and after. The last write of a unit and, for each stream,
    the last read since then are enough: a task that comes after those comes after all earlier ones.
    """

    def __init__(self, root: Root, regions: list[Region], caller: Task):
        self.root = root
        self.unit = gcd(root.size, *(gcd(region.offset, region.layout.unit) for region in regions)) or 1
        units = root.size // self.unit
        self.before = TaskAccess(caller, caller.operation, Access("", Region("", 0, root.layout, 0), reads=False, writes=True))
        self.writes = [self.before] * units
        self.reads: dict[int, dict[int, TaskAccess]] = {}  # by unit, then by stream
        # Which execution of its allocate a unit was filled in; an input is filled from the start.
        self.filled = [0 if root.role == "input" else -1] * units
        self.freed: set[int] = set()  # executions of the allocate
        self._patterns: dict[Layout, tuple[int, ...]] = {}

    def touch(self, touch: TaskAccess, clock: Clock) -> TaskAccess | None:
        """Notes an access of a task that starts when `clock` is known. Returns an earlier conflicting one that may still run."""
        task, access, region = touch.by, touch.access, touch.access.region
        is_claim = bool(tree.names(touch.part.instruction, "allocate", "free"))
        for unit in self.units(region):
            write = self.writes[unit]
            if clock[write.by.stream_id] < write.by.number and write.by is not task:
                return write
            if access.writes:
                if reads := self.reads.pop(unit, None):
                    for read in reads.values():
                        if clock[read.by.stream_id] < read.by.number and read.by is not task:
                            return read
                self.writes[unit] = touch
                if not is_claim:
                    self.filled[unit] = region.generation
            if access.reads:
                self.reads.setdefault(unit, {})[task.stream_id] = touch
        return None

    def unfinished(self, clock: Clock) -> TaskAccess | None:
        """An access that may still run when `clock` is known."""
        touches = (touch for unit, write in enumerate(self.writes) for touch in (write, *self.reads.get(unit, {}).values()))
        return next((touch for touch in touches if clock[touch.by.stream_id] < touch.by.number), None)

    def first_empty(self, region: Region) -> range | None:
        """The bytes of the first unit of a region that nothing has filled since its allocate."""
        empty = (unit for unit in self.units(region) if self.filled[unit] != region.generation)
        return next((range(unit * self.unit, (unit + 1) * self.unit) for unit in empty), None)

    def overlap(self, a: Region, b: Region) -> bool:
        return not set(self.units(a)).isdisjoint(self.units(b))

    def units(self, region: Region) -> Sequence[int]:
        layout, first = region.layout, region.offset // self.unit
        if layout not in self._patterns:  # as if it started at 0: all steps share their layouts, so this is worked out once for each
            run = layout.run // self.unit
            self._patterns[layout] = tuple(start // self.unit + i for start in layout.starts() for i in range(run))
        return [first + unit for unit in self._patterns[layout]] if first else self._patterns[layout]
