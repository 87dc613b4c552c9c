"""Def-use of a host program: the instructions that access each buffer, and the streams of the instructions. A name may denote different
buffers in two bodies. The buffer of the last body then counts."""

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
    """An instruction and its position in the program.

    `number` is its number in `tree.walk`. `body` is the enclosing body, and `index` the index in that body. `around` has the enclosing
    instructions, outermost first. Members of a group have the `body`, `index` and `around` of the group, because the host enqueues them
    together. `statement` is the number of the enclosing group, or of the instruction itself.
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
        """Stream of a stream block. None for other instructions."""
        return tree.slot(self.instruction, "stream")

    @property
    def stream(self) -> tree.Slot | None:
        """Stream on which the instruction runs. None is the caller's stream."""
        return self.block.on_stream if self.block else None


class DefUse:
    """Def-use of a program. The function `def_use` caches objects of this class."""

    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.types = ir.buffer_types(program)
        self.roots = tree.AliasRoots()
        self.root = self.roots.of
        self.views: dict[str, Place] = {}
        self.allocates: dict[str, Place] = {}
        self.indices: dict[str, Place] = {}  # index -> the `let` or loop that defines it
        self.touches: dict[str, list[Place]] = {}  # parameter or allocation -> instructions that access it, directly or through a view
        self.viewed: dict[str, list[Place]] = {}  # parameter or allocation -> its views
        self.places: list[Place] = []  # in the order of `tree.walk`
        self.lives: dict[Place, list[Place]] = {}  # allocate -> instructions that access its memory, in program order
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

    def roots_of(self, i: tree.Instruction, *roles: str) -> dict[str, None]:
        """Alias roots of all buffers that an instruction uses in `roles`, as an ordered set."""
        return dict.fromkeys(root for name in tree.names(i, *roles) for root in self.roots.all_of(name))

    def is_whole(self, name: str) -> bool:
        """True if a name covers all elements of its alias root, in order, and the root is contiguous."""
        while (source := self.roots.source(name)) and name in self.views:  # An output covers the whole donated input.
            if self.views[name].instruction.shows != "in order":
                return False
            name = source
        return self.types[name].strides is None

    def instructions(self, kind: type[Kind]) -> list[tuple[Place, Kind]]:
        return [(place, i) for place in self.places if isinstance(i := place.instruction, kind)]

    def chunk(self, view: Place) -> tuple[int, Expr, Size] | None:
        source, *_ = tree.names(view.instruction, "alias")
        return view.instruction.chunk_of(self.types[source])

    def edited(self, gone: set[int], before: Mapping[int, tree.Body]) -> tree.Body:
        """Body of the program without the instructions whose numbers are in `gone`. Inserts `before[n]` before instruction n."""
        kept = {number: () if number in gone else (self.places[number].instruction,) for number in gone | before.keys()}
        return tree.edited(self.program.body, {number: (*before.get(number, ()), *own) for number, own in kept.items()})

    def reads(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        return {root for i in tree.walk(tuple(instructions)) for root in self.roots_of(i, "read")}

    def writes(self, instructions: Iterable[tree.Instruction]) -> set[str]:
        """Alias roots that the instructions write or free."""
        return {root for i in tree.walk(tuple(instructions)) for root in self.roots_of(i, "write", "free")}

    def conflict(self, some: Iterable[tree.Instruction], others: Iterable[tree.Instruction]) -> bool:
        """True if one set of instructions writes or frees memory that the other set reads, writes or frees."""
        some, others = tuple(some), tuple(others)
        written, also_written = self.writes(some), self.writes(others)
        return bool(written & (self.reads(others) | also_written) or also_written & self.reads(some))


@ir.analysis
def def_use(program: ir.HostProgram) -> DefUse:
    return DefUse(program)
