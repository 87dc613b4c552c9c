"""Which buffers an instruction touches, for passes that move instructions past one another."""

from __future__ import annotations

from collections.abc import Iterable

from hostweave.host import ir

CALLS_NOTHING = (ir.Allocate, ir.Let, *ir.VIEWS)  # names for memory and integers


class Touched:
    """The buffers of the views that have been defined so far in a walk over a program, and who shares one."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def define(self, instruction: ir.Instruction) -> None:
        """Notes a view. Bodies side by side may use one name for two of them, so this is done as the walk comes to it."""
        for name in ir.names(instruction, "define"):
            source = ir.names(instruction, "alias")
            self._roots[name] = self._roots.get(source[0], source[0]) if source else name

    def reads(self, instructions: Iterable[ir.Instruction]) -> set[str]:
        return self._named(instructions, "read")

    def writes(self, instructions: Iterable[ir.Instruction]) -> set[str]:
        """Or frees."""
        instructions = tuple(instructions)
        return self._named(instructions, "write") | self._named((i for i in ir.walk(instructions) if isinstance(i, ir.Deallocate)), "alias")

    def conflict(self, some: Iterable[ir.Instruction], others: Iterable[ir.Instruction]) -> bool:
        """Whether the order of the two matters: one writes what the other reads or writes."""
        some, others = tuple(some), tuple(others)
        written, also_written = self.writes(some), self.writes(others)
        return bool(written & (self.reads(others) | also_written) or also_written & self.reads(some))

    def _named(self, instructions: Iterable[ir.Instruction], role: str) -> set[str]:
        """The buffers that they, and what is in their bodies, name in a role."""
        found: set[str] = set()
        for instruction in ir.walk(tuple(instructions)):
            self.define(instruction)
            found.update(self._roots.get(name, name) for name in ir.names(instruction, role))
        return found
