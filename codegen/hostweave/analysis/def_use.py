"""Def-use of a host program: which instructions read and write each buffer, and on which stream.

Names are unique in programs that passes see. Where bodies side by side use one name for two buffers, what is looked up by it is the
last one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Expr
from hostweave.types.size import Size


@dataclass(frozen=True, eq=False)
class Place:
    """An instruction, its number in `tree.walk`, the body it stands in and where, and what is around it, outermost first.

    What is posted in a group stands where the group does, the number of which is its `statement`; that of others is their own.
    """

    instruction: tree.Instruction
    number: int
    body: tree.Body
    index: int
    around: tuple[Place, ...]
    statement: int

    @property
    def block(self) -> Place | None:
        """The stream block around it."""
        return next((place for place in self.around if place.on_stream), None)

    @property
    def loop(self) -> Place | None:
        """The innermost loop around it."""
        return next((place for place in reversed(self.around) if place.instruction.trips is not None), None)

    @property
    def mesh_body(self) -> Place | None:
        """The `on` body around it."""
        return next((place for place in self.around if place.instruction.ranks), None)

    @property
    def on_stream(self) -> tree.Slot | None:
        """The stream that its body runs on."""
        return tree.slot(self.instruction, "stream")

    @property
    def stream(self) -> tree.Slot | None:
        """The stream that it runs on; None: the caller's."""
        return self.block.on_stream if self.block else None


class DefUse:
    """Made by `def_use`, once a program."""

    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.types = ir.buffer_types(program)
        self.roots = tree.AliasRoots()
        self.views: dict[str, Place] = {}
        self.allocates: dict[str, Place] = {}
        self.indices: dict[str, Place] = {}  # lets and loops, by the index that they define
        self.touches: dict[str, list[Place]] = {}  # of a parameter or allocation: what reads or writes it, or a view of it
        self.viewed: dict[str, list[Place]] = {}  # the views of it
        self.places: list[Place] = []  # by number
        self.lives: dict[Place, list[Place]] = {}  # of each allocate: what touches its memory, in order
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
        for name in self._roots(i, "read", "write"):
            self.touches.setdefault(name, []).append(place)
        return place

    def root(self, name: str) -> str:
        """The parameter or allocation that a buffer is, or is a view of."""
        return self.roots.of(name)

    def _roots(self, i: tree.Instruction, *roles: str) -> dict[str, None]:
        """All that an instruction may touch by the names of these roles."""
        return dict.fromkeys(root for name in tree.names(i, *roles) for root in self.roots.all_of(name))

    def is_whole(self, name: str) -> bool:
        """Whether a buffer is all of a parameter or allocation, its elements in order."""
        while (source := self.roots.source(name)) and name in self.views:  # an output in donated memory is all of it
            if self.views[name].instruction.shows != "in order":
                return False
            name = source
        return self.types[name].strides is None

    def chunk(self, view: Place) -> tuple[int, Expr, Size] | None:
        """Of a view of one of equal chunks: the dim, the number of the chunk, and how many there are."""
        source, *_ = tree.names(view.instruction, "alias")
        return view.instruction.chunk_of(self.types[source])

    def edited(self, gone: set[int], before: Mapping[int, tree.Body]) -> tree.Body:
        """The program's body without the instructions of some numbers, and with others before those of some."""
        kept = {number: () if number in gone else (self.places[number].instruction,) for number in gone | before.keys()}
        return tree.edited(self.program.body, {number: (*before.get(number, ()), *own) for number, own in kept.items()})

    # --- what instructions touch, with all that is in their bodies ---

    def reads(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        return {root for i in tree.walk(tuple(instructions)) for root in self._roots(i, "read")}

    def writes(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        """Or frees."""
        return {root for i in tree.walk(tuple(instructions)) for root in self._roots(i, "write", "free")}

    def conflict(self, some: Iterable[tree.Instruction], others: Iterable[tree.Instruction]) -> bool:
        """Whether the order of the two matters: one writes what the other reads or writes."""
        some, others = tuple(some), tuple(others)
        written, also_written = self.writes(some), self.writes(others)
        return bool(written & (self.reads(others) | also_written) or also_written & self.reads(some))


@ir.analysis
def def_use(program: ir.HostProgram) -> DefUse:
    """The program's uses, found once."""
    return DefUse(program)
