"""Where a host program touches its memory. Names are unique in programs that passes see."""

from __future__ import annotations

from dataclasses import dataclass

from hostweave.host import ir


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


class Uses:
    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.types = ir.buffer_types(program)
        self.views: dict[str, Place] = {}
        self.allocates: dict[str, Place] = {}
        self.indices: dict[str, Place] = {}  # lets and loops, by the index that they define
        self.touches: dict[str, list[Place]] = {}  # of a parameter or allocation: what reads or writes it, or a view of it
        self.viewed: dict[str, list[Place]] = {}  # the views of it
        self.places: list[Place] = []
        self._visit(program.body, ())

    def _visit(self, body: ir.Body, around: tuple[ir.Instruction, ...]) -> None:
        for index, statement in enumerate(body):
            for i in statement.body if isinstance(statement, ir.Group) else (statement,):
                self._place(Place(i, len(self.places), body, index, around, statement))

    def _place(self, place: Place) -> None:
        i = place.instruction
        self.places.append(place)
        if isinstance(i, ir.VIEWS):
            self.views[i.out] = place
            self.viewed.setdefault(self.root(i.out), []).append(place)
        elif isinstance(i, ir.Allocate):
            self.allocates[i.out] = place
        elif isinstance(i, ir.Let | ir.For):
            self.indices[i.out] = place
        for name in dict.fromkeys(map(self.root, ir.names(i, "read", "write"))):
            self.touches.setdefault(name, []).append(place)
        for inner in ir.bodies(i):
            self._visit(inner, (*place.around, i))

    def source(self, view: str) -> str:
        (source,) = ir.names(self.views[view].instruction, "alias")
        return source

    def root(self, name: str) -> str:
        """The parameter or allocation that a buffer is, or is a view of."""
        while name in self.views:
            name = self.source(name)
        return name

    def is_whole(self, name: str) -> bool:
        """Whether a buffer is all of a parameter or allocation, its elements in order."""
        while name in self.views:
            if not isinstance(self.views[name].instruction, ir.Reshape):
                return False
            name = self.source(name)
        return self.types[name].strides is None
