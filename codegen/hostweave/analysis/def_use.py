"""Def-use of a host program: which instructions read and write each buffer, and on which stream.

Names are unique in programs that passes see. If sibling bodies use one name for two buffers, a lookup finds the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Expr
from hostweave.types.size import Size


@dataclass(frozen=True, eq=False)
class Place:
    """An instruction, its number in `tree.walk`, its body and index there, and the instructions around it, outermost first.

    `statement` is the number of the group that posts the instruction. Outside of groups it is the instruction's own number.
    """

    instruction: tree.Instruction
    number: int
    body: tree.Body
    index: int
    around: tuple[Place, ...]
    statement: int

    @property
    def block(self) -> Place | None:
        """The stream block that contains it, or None."""
        return next((place for place in self.around if place.on_stream), None)

    @property
    def loop(self) -> Place | None:
        """The innermost loop that contains it, or None."""
        return next((place for place in reversed(self.around) if place.instruction.trips is not None), None)

    @property
    def mesh_body(self) -> Place | None:
        """The `on` body that contains it, or None."""
        return next((place for place in self.around if place.instruction.ranks), None)

    @property
    def on_stream(self) -> tree.Slot | None:
        """Stream of the instruction's body; None if it has none."""
        return tree.slot(self.instruction, "stream")

    @property
    def stream(self) -> tree.Slot | None:
        """The stream on which it runs. None is the caller's stream."""
        return self.block.on_stream if self.block else None


class DefUse:
    """Def-use information of a program. Use `def_use`, which caches it."""

    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.types = ir.buffer_types(program)
        self.roots = tree.AliasRoots()
        self.views: dict[str, Place] = {}
        self.allocates: dict[str, Place] = {}
        self.indices: dict[str, Place] = {}  # lets and loops, by the index that they define
        self.touches: dict[str, list[Place]] = {}  # for each parameter or allocation, the instructions that access it or one of its views
        self.viewed: dict[str, list[Place]] = {}  # for each parameter or allocation, its views
        self.places: list[Place] = []  # all places, by number
        self.lives: dict[Place, list[Place]] = {}  # for each allocate, the instructions that access its memory, in program order
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
        """Alias root of a buffer: the parameter or allocation that holds its elements."""
        return self.roots.of(name)

    def roots_of(self, i: tree.Instruction, *roles: str) -> dict[str, None]:
        """Alias roots of all buffers that an instruction names in these roles."""
        return dict.fromkeys(root for name in tree.names(i, *roles) for root in self.roots.all_of(name))

    def is_whole(self, name: str) -> bool:
        """True if a buffer covers all of a parameter or allocation, with its elements in order."""
        while (source := self.roots.source(name)) and name in self.views:  # an output in donated memory covers all of it
            if self.views[name].instruction.shows != "in order":
                return False
            name = source
        return self.types[name].strides is None

    def chunk(self, view: Place) -> tuple[int, Expr, Size] | None:
        """Dim, chunk index and number of chunks, for a view of one of several equal chunks. None for other views."""
        source, *_ = tree.names(view.instruction, "alias")
        return view.instruction.chunk_of(self.types[source])

    def edited(self, gone: set[int], before: Mapping[int, tree.Body]) -> tree.Body:
        """The program's body without the instructions numbered in `gone`, and with new instructions before those numbered in `before`."""
        kept = {number: () if number in gone else (self.places[number].instruction,) for number in gone | before.keys()}
        return tree.edited(self.program.body, {number: (*before.get(number, ()), *own) for number, own in kept.items()})

    # --- accesses of instructions, including their bodies ---

    def reads(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        return {root for i in tree.walk(tuple(instructions)) for root in self.roots_of(i, "read")}

    def writes(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        """Alias roots that instructions and their bodies write or free."""
        return {root for i in tree.walk(tuple(instructions)) for root in self.roots_of(i, "write", "free")}

    def conflict(self, some: Iterable[tree.Instruction], others: Iterable[tree.Instruction]) -> bool:
        """True if the order matters: one side writes what the other reads or writes."""
        some, others = tuple(some), tuple(others)
        written, also_written = self.writes(some), self.writes(others)
        return bool(written & (self.reads(others) | also_written) or also_written & self.reads(some))


@ir.analysis
def def_use(program: ir.HostProgram) -> DefUse:
    """Def-use information of a program, computed once and cached."""
    return DefUse(program)
