"""Sizes and expressions of a program, bound to given sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable

from hostweave.base.errors import ProgramError
from hostweave.check.operations import failure, instruction_text
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import OPERATORS, Binary, Const, Coordinate, Expr, Rank, Symbol, Var
from hostweave.types.rank_sizes import Sizes
from hostweave.types.size import Size, bound

Environment = dict[str, int]  # values of loop indices and lets, and the rank's coordinates as "rank.x"


def size_of(program: ir.HostProgram, sizes: Sizes, size: Size, instruction: tree.Instruction | None) -> int:
    def wrong(what: str) -> ProgramError:
        where = f"{instruction_text(instruction)}: " if instruction else ""
        return failure(program, f"{where}{what}", instruction)

    try:
        value = size.bind(sizes)
    except ValueError as error:
        raise wrong(f"{error}: choose sizes that it divides") from None
    except KeyError as error:
        wanted = ", ".join(program.symbols())
        raise failure(program, f"the size {error.args[0]} is not given: give one for each of {wanted}") from None
    if value < 0:
        raise wrong(f"{size} is {value}: choose sizes that leave room for it")
    return value


def compiled(expr: Expr, sizes: Sizes) -> Callable[[Environment], int]:
    """A function that evaluates `expr`, several times faster than walking it again for every step of every rank."""
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
            meaning, a, b = OPERATORS[op][1], compiled(left, sizes), compiled(right, sizes)
            return lambda environment: meaning(a(environment), b(environment))
    raise TypeError(f"not an expression: {expr!r}")
