"""Def-use of a host program: the instructions that read and write each buffer, and their streams.

In programs that passes transform, all names are unique. In other programs, two bodies may use one name for different buffers; a lookup of
the name then finds the last buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Expr
from hostweave.types.size import Size

Kind = TypeVar("Kind", bound=tree.Instruction)


@dataclass(frozen=True, eq=False)
class Place:
    """An instruction and its position: its number in `tree.walk`, its body, and the enclosing instructions, outermost first.

    `statement` is the number of the enclosing group, because the host enqueues the members of a group together. Outside of groups,
    `statement` is the instruction's own number.
    """

    instruction: tree.Instruction
    number: int
    body: tree.Body
    index: int
    around: tuple[Place, ...]
    statement: int

    @property
    def block(self) -> Place | None:
        """The enclosing stream block, or None."""
        return next((place for place in self.around if place.on_stream), None)

    @property
    def loop(self) -> Place | None:
        """The innermost enclosing loop, or None."""
        return next((place for place in reversed(self.around) if place.instruction.trips is not None), None)

    @property
    def mesh_body(self) -> Place | None:
        """The enclosing `on` body, or None."""
        return next((place for place in self.around if place.instruction.ranks), None)

    @property
    def on_stream(self) -> tree.Slot | None:
        """If the instruction is a stream block, its stream. None otherwise."""
        return tree.slot(self.instruction, "stream")

    @property
    def stream(self) -> tree.Slot | None:
        """The stream on which the instruction runs. None is the caller's stream."""
        return self.block.on_stream if self.block else None


class DefUse:
    """Def-use information of a program. The function `def_use` caches it."""

    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.types = ir.buffer_types(program)
        self.roots = tree.AliasRoots()
        self.views: dict[str, Place] = {}
        self.allocates: dict[str, Place] = {}
        self.indices: dict[str, Place] = {}  # maps an index variable to the `let` or loop that defines it
        self.touches: dict[str, list[Place]] = {}  # for each parameter or allocation: instructions that access it, also through a view
        self.viewed: dict[str, list[Place]] = {}  # for each parameter or allocation: its views
        self.places: list[Place] = []  # all places, in the order of `tree.walk`
        self.lives: dict[Place, list[Place]] = {}  # for each allocate: the instructions that access its memory, in program order
        for parameter in program.outputs:
            if parameter.memory:
                self.roots.put(parameter.name, parameter.memory)
        self._visit(program.body, ())

    def _visit(self, body: tree.Body, around: tuple[Place, ...]) -> None:
        for index, i in enumerate(body):
            number = len(self.places)
            place = self._place(Place(i, number, body, index, around, number))
            for inner in tree.bodies(i):
                if i.grouped:
                    for member in inner:
                        self._place(Place(member, len(self.places), body, index, around, number))
                else:
                    self._visit(inner, (*around, place))

    def _place(self, place: Place) -> Place:
        i = place.instruction
        self.places.append(place)
        self.roots.define(i)
        self.indices.update(dict.fromkeys(tree.names(i, "index"), place))
        for name in tree.names(i, "allocate"):
            self.allocates[name], self.touches[name] = place, []
            self.lives[place] = self.touches[name]
        for name in tree.names(i, "view"):
            self.views[name] = place
            for root in self.roots.all_of(name):
                self.viewed.setdefault(root, []).append(place)
        for name in self.roots_of(i, "read", "write"):
            self.touches.setdefault(name, []).append(place)
        return place

    def root(self, name: str) -> str:
        """Alias root of a buffer or view: the parameter or allocation whose memory it names."""
        return self.roots.of(name)

    def roots_of(self, i: tree.Instruction, *roles: str) -> dict[str, None]:
        """Alias roots of all buffers that an instruction uses in one of these roles."""
        return dict.fromkeys(root for name in tree.names(i, *roles) for root in self.roots.all_of(name))

    def is_whole(self, name: str) -> bool:
        """True if a buffer covers all of its parameter or allocation, with the elements in order."""
        while (source := self.roots.source(name)) and name in self.views:  # an output covers all of its donated input
            if self.views[name].instruction.shows != "in order":
                return False
            name = source
        return self.types[name].strides is None

    def instructions(self, kind: type[Kind]) -> list[tuple[Place, Kind]]:
        return [(place, i) for place in self.places if isinstance(i := place.instruction, kind)]

    def chunk(self, view: Place) -> tuple[int, Expr, Size] | None:
        """If the view shows one of several equal chunks: the dim, the chunk's index and the number of chunks. None otherwise."""
        source, *_ = tree.names(view.instruction, "alias")
        return view.instruction.chunk_of(self.types[source])

    def edited(self, gone: set[int], before: Mapping[int, tree.Body]) -> tree.Body:
        """The program's body without the instructions whose numbers are in `gone`. `before` maps the number of an instruction to the
        instructions to insert before it."""
        kept = {number: () if number in gone else (self.places[number].instruction,) for number in gone | before.keys()}
        return tree.edited(self.program.body, {number: (*before.get(number, ()), *own) for number, own in kept.items()})

    # --- accesses of instructions, including their bodies ---

    def reads(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        return {root for i in tree.walk(tuple(instructions)) for root in self.roots_of(i, "read")}

    def writes(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        """Alias roots that the instructions, and those in their bodies, write or free."""
        return {root for i in tree.walk(tuple(instructions)) for root in self.roots_of(i, "write", "free")}

    def conflict(self, some: Iterable[tree.Instruction], others: Iterable[tree.Instruction]) -> bool:
        """True if the order of two sets of instructions matters, because one set writes memory that the other set reads or writes."""
        some, others = tuple(some), tuple(others)
        written, also_written = self.writes(some), self.writes(others)
        return bool(written & (self.reads(others) | also_written) or also_written & self.reads(some))


@ir.analysis
def def_use(program: ir.HostProgram) -> DefUse:
    """Def-use information of a program, computed once and cached."""
    return DefUse(program)
