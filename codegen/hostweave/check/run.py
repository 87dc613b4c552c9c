"""State of one rank while a program's control flow runs, and evaluation of expressions and sizes."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from hostweave.base.errors import ProgramError
from hostweave.check.operations import ALWAYS, ByteLayout, ByteRegion, Operation, StreamInPool, failure, instruction_text
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import OPERATORS, Binary, Const, Coordinate, Expr, Rank, Symbol, Var
from hostweave.types.mesh import Mesh, Sizes
from hostweave.types.size import Size, bound

Variables = dict[str, int]  # values of loop indices and lets, of "rank", and of the rank's coordinates, such as "rank.x"


def size_of(program: ir.HostProgram, sizes: Sizes, size: Size, instruction: tree.Instruction | None) -> int:
    def error_of(what: str) -> ProgramError:
        where = f"{instruction_text(instruction)}: " if instruction else ""
        return failure(program, f"{where}{what}", instruction)

    try:
        value = size.bind(sizes)
    except ValueError as error:
        raise error_of(f"{error}: choose sizes that divide without a remainder") from None
    except KeyError as error:
        wanted = ", ".join(program.symbols())
        raise failure(program, f"the size {error.args[0]} is not given: give one for each of {wanted}") from None
    if value < 0:
        raise error_of(f"{size} is {value}: choose larger sizes")
    return value


def compiled(expr: Expr, sizes: Sizes) -> Callable[[Variables], int]:
    """Compiles `expr` to a function. Interpretation in every iteration and on every rank would be several times slower."""
    match expr:
        case Const(value):
            return lambda _: value
        case Symbol(size):
            value = bound(size, sizes)
            return lambda _: value
        case Var(name):
            return operator.itemgetter(name)
        case Coordinate(axis):
            return operator.itemgetter(f"rank.{axis}")
        case Rank():
            return operator.itemgetter("rank")
        case Binary(op, left, right):
            function, a, b = OPERATORS[op][1], compiled(left, sizes), compiled(right, sizes)
            return lambda environment: function(a(environment), b(environment))
    raise TypeError(f"not an expression: {expr!r}")


class BufferPosition(NamedTuple):
    """Position of a buffer in its memory, and the generations (versions of the contents) that reads of the buffer may see."""

    root: str
    offset: int  # bytes
    generation: int = 0
    last: int = ALWAYS


@dataclass(slots=True)
class RankRun:
    program: ir.HostProgram
    rank: int
    environment: Variables = field(init=False)
    positions: dict[str, BufferPosition] = field(init=False)
    operations: list[Operation] = field(default_factory=list)
    last: dict[StreamInPool | None, Operation] = field(default_factory=dict)  # last operation on each stream
    records: dict[tuple[str, int], Operation] = field(default_factory=dict)
    generations: dict[str, int] = field(init=False)  # memory -> its latest generation
    freed: dict[StreamInPool | None, Operation] = field(default_factory=dict)  # last deallocate on each stream
    # Like `freed`, for buffers that `stream` blocks allocate, until the streams of the pool join.
    freed_until_join: dict[StreamInPool, Operation] = field(default_factory=dict)
    stream: StreamInPool | None = None
    steps: tuple[tuple[str, int], ...] = ()
    iterations: int = 0

    def __post_init__(self) -> None:
        mesh = self.program.mesh
        self.environment = {"rank": self.rank, **coordinates(mesh, self.rank)}
        parameters = (*self.program.inputs, *self.program.outputs)
        self.generations = {p.memory: 1 for p in parameters if p.memory}
        inputs = {p.name: BufferPosition(p.name, 0, last=0) for p in self.program.inputs}
        positions = inputs | {p.name: BufferPosition(p.memory or p.name, 0, int(bool(p.memory))) for p in self.program.outputs}
        self.positions = {p.name: positions[p.name] for p in parameters if self.rank in p.type.mesh_in(mesh).all_ranks}

    def position(self, name: str, instruction: tree.Instruction) -> BufferPosition:
        if name not in self.positions:
            self.fail(instruction, f"%{name} is not on this rank: use an `on` body of its mesh")
        return self.positions[name]

    def region(self, name: str, layout: ByteLayout, instruction: tree.Instruction, further: int = 0) -> ByteRegion:
        """Bytes of a buffer, from `further` bytes after its start."""
        root, offset, generation, last = self.position(name, instruction)
        return ByteRegion(root, offset + further, layout, generation, last)

    def issue(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        self.last[operation.stream] = operation
        return operation

    def fail(self, instruction: tree.Instruction, message: str) -> NoReturn:
        raise failure(self.program, f"{Operation(instruction, self.rank, self.stream, self.steps)}: {message}", instruction)


def coordinates(mesh: Mesh, rank: int) -> Variables:
    return {f"rank.{axis}": mesh.coordinate(rank, axis) for axis, _ in mesh.axes}
