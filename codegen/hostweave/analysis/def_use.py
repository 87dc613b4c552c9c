"""Def-use of a host program: which instructions read and write each buffer, and on which stream.

Names are unique in programs that passes see. Where bodies side by side use one name for two buffers, what is looked up by it is the
last one's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hostweave.host_ir import ir
from hostweave.host_ir.aliases import AliasRoots


@dataclass(frozen=True, eq=False)
class Place:
    """An instruction, where it comes in the text, the body it stands in and where, and the instructions around it, outermost first.

    What is posted in a group stands where the group does, which is its `statement`; that of others is the instruction itself.
    """

    instruction: ir.Instruction
    number: int
    body: ir.Body
    index: int
    around: tuple[ir.Instruction, ...]
    statement: ir.Instruction

    @property
    def block(self) -> ir.OnStream | None:
        """The stream block around it."""
        return next((i for i in self.around if isinstance(i, ir.OnStream)), None)

    @property
    def loop(self) -> ir.For | None:
        """The innermost loop around it."""
        return next((i for i in reversed(self.around) if isinstance(i, ir.For)), None)


class DefUse:
    """Made by `def_use`, once a program."""

    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.types = ir.buffer_types(program)
        self.roots = AliasRoots()
        self.views: dict[str, Place] = {}
        self.allocates: dict[str, Place] = {}
        self.indices: dict[str, Place] = {}  # lets and loops, by the index that they define
        self.touches: dict[str, list[Place]] = {}  # of a parameter or allocation: what reads or writes it, or a view of it
        self.viewed: dict[str, list[Place]] = {}  # the views of it
        self.places: list[Place] = []
        self._lives: dict[int, tuple[Place, list[Place]]] = {}  # the id of an allocate -> its place, and what touches its memory
        self._visit(program.body, ())

    def _visit(self, body: ir.Body, around: tuple[ir.Instruction, ...]) -> None:
        for index, statement in enumerate(body):
            for i in statement.body if isinstance(statement, ir.Group) else (statement,):
                self._place(Place(i, len(self.places), body, index, around, statement))

    def _place(self, place: Place) -> None:
        i = place.instruction
        self.places.append(place)
        self.roots.define(i)
        if isinstance(i, ir.View):
            self.views[i.out] = place
            for root in self.roots.all_of(i.out):
                self.viewed.setdefault(root, []).append(place)
        elif isinstance(i, ir.Allocate):
            self.allocates[i.out] = place
            self.touches[i.out] = []
            self._lives[id(i)] = place, self.touches[i.out]
        elif isinstance(i, ir.Let | ir.For):
            self.indices[i.out] = place
        for name in self._roots(i, "read", "write"):
            self.touches.setdefault(name, []).append(place)
        for inner in ir.bodies(i):
            self._visit(inner, (*place.around, i))

    def root(self, name: str) -> str:
        """The parameter or allocation that a buffer is, or is a view of."""
        return self.roots.of(name)

    def _roots(self, i: ir.Instruction, *roles: str) -> dict[str, None]:
        """All that an instruction may touch by the names of these roles."""
        return dict.fromkeys(root for name in ir.names(i, *roles) for root in self.roots.all_of(name))

    def life(self, allocate: ir.Allocate) -> list[Place]:
        """What touches the memory of an allocate, in order; the allocate itself where nothing does."""
        place, touches = self._lives[id(allocate)]
        return touches or [place]

    def is_whole(self, name: str) -> bool:
        """Whether a buffer is all of a parameter or allocation, its elements in order."""
        while source := self.roots.source(name):
            if not isinstance(self.views[name].instruction, ir.Reshape):
                return False
            name = source
        return self.types[name].strides is None

    # --- what instructions touch, with all that is in their bodies ---

    def reads(self, instructions: Iterable[ir.Instruction]) -> set[str]:
        return {root for i in ir.walk(tuple(instructions)) for root in self._roots(i, "read")}

    def writes(self, instructions: Iterable[ir.Instruction]) -> set[str]:
        """Or frees."""
        roles = ((i, "alias" if isinstance(i, ir.Deallocate) else "write") for i in ir.walk(tuple(instructions)))
        return {root for i, role in roles for root in self._roots(i, role)}

    def conflict(self, some: Iterable[ir.Instruction], others: Iterable[ir.Instruction]) -> bool:
        """Whether the order of the two matters: one writes what the other reads or writes."""
        some, others = tuple(some), tuple(others)
        written, also_written = self.writes(some), self.writes(others)
        return bool(written & (self.reads(others) | also_written) or also_written & self.reads(some))


@ir.analysis
def def_use(program: ir.HostProgram) -> DefUse:
    """The program's uses, found once."""
    return DefUse(program)
