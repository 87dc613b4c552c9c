"""State of one rank while a program's control flow runs, and evaluation of expressions and sizes."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import NoReturn

from hostweave.base.errors import ProgramError
from hostweave.check.operations import ByteLayout, ByteRegion, Operation, StreamInPool, failure, instruction_text
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


@dataclass(slots=True)
class RankRun:
    program: ir.HostProgram
    rank: int
    layouts: InitVar[Mapping[str, ByteLayout]]  # layouts of the inputs and outputs
    environment: Variables = field(init=False)
    regions: dict[str, ByteRegion] = field(init=False)  # bytes of each buffer, with the generations that reads of the buffer may see
    operations: list[Operation] = field(default_factory=list)
    last: dict[StreamInPool | None, Operation] = field(default_factory=dict)  # last operation on each stream
    records: dict[tuple[str, int], Operation] = field(default_factory=dict)
    generations: dict[str, int] = field(init=False)  # memory -> its latest generation
    freed: dict[StreamInPool | None, Operation] = field(default_factory=dict)  # last deallocate on each stream
    # Last deallocates of buffers that `stream` blocks allocate, until the streams of the pool join. The keys have the number of the
    # allocate, and the order is that of the deallocates.
    freed_until_join: dict[tuple[StreamInPool, int], Operation] = field(default_factory=dict)
    stream: StreamInPool | None = None
    iteration: tuple[tuple[str, int], ...] = ()
    iterations: int = 0

    def __post_init__(self, layouts: Mapping[str, ByteLayout]) -> None:
        mesh = self.program.mesh
        self.environment = {"rank": self.rank, **coordinates(mesh, self.rank)}
        parameters = (*self.program.inputs, *self.program.outputs)
        self.generations = {p.memory: 1 for p in parameters if p.memory}
        regions = {p.name: ByteRegion(p.name, 0, layouts[p.name], 0, last=0) for p in self.program.inputs}
        regions |= {p.name: ByteRegion(p.memory or p.name, 0, layouts[p.name], int(bool(p.memory))) for p in self.program.outputs}
        self.regions = {p.name: regions[p.name] for p in parameters if self.rank in p.type.mesh_in(mesh).all_ranks}

    def region(self, name: str, instruction: tree.Instruction, layout: ByteLayout | None = None, further: int = 0) -> ByteRegion:
        """Bytes of a buffer. With `layout`, bytes from `further` bytes after its start."""
        if name not in self.regions:
            self.fail(instruction, f"%{name} is not on this rank: use an `on` body of its mesh")
        whole = self.regions[name]
        return whole._replace(offset=whole.offset + further, layout=layout) if layout else whole

    def issue(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        self.last[operation.stream] = operation
        return operation

    def free_at_join(self, stream: StreamInPool | None) -> None:
        """Lets other streams reuse the memory that the stream has freed."""
        for key in [key for key in self.freed_until_join if key[0] == stream]:
            self.freed[stream] = self.freed_until_join.pop(key)

    def fail(self, instruction: tree.Instruction, message: str) -> NoReturn:
        raise failure(self.program, f"{Operation(instruction, self.rank, self.stream, self.iteration)}: {message}", instruction)


def coordinates(mesh: Mesh, rank: int) -> Variables:
    return {f"rank.{axis}": mesh.coordinate(rank, axis) for axis, _ in mesh.axes}
