"""Host programs for any number of ranks, golden texts of these programs, and an evaluator of expressions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fusions_from_files import all_fusions, more_fusions

from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.expr import OPERATORS, Binary, Const, Coordinate, Expr, Symbol, Var
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import PASSES, lower
from hostweave.types.size import bound

GOLDEN = Path(__file__).parent / "golden"
STAGES = ("input", *(apply.__name__ for apply in PASSES))
RANKS = (1, 2, 3, 4, 8)
CHUNKS = 3  # replaces the constant S of examples/seeds.py and examples/single_device.py


def _fusions(ranks: int) -> dict[str, Fusion]:
    return {**all_fusions(ranks, CHUNKS), "ag_matmul_flat_chunked": more_fusions(ranks)["ag_matmul_flat_chunked"]}


NAMES = tuple(sorted(_fusions(4)))


def golden(name: str, stage: str) -> str:
    """Golden text of a program for 4 ranks after a pass. A pass that changes nothing has no file; the text is then the text after the
    previous pass."""
    until = STAGES[: STAGES.index(stage) + 1]
    return next(path for before in reversed(until) if (path := GOLDEN / name / f"{before}.hw").is_file()).read_text()


def text(name: str) -> str:
    return golden(name, STAGES[-1])


@cache
def program(name: str, ranks: int = 4) -> HostProgram:
    return lower(_fusions(ranks)[name], Options())


def evaluate(expr: Expr, variables: Mapping[str, int], coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Evaluates an expression recursively. Raises KeyError for an unknown name, and ZeroDivisionError for a division by zero."""
    match expr:
        case Const(value):
            return value
        case Var(name):
            return variables[name]
        case Coordinate(axis):
            return coordinates[axis]
        case Symbol(size):
            return bound(size, sizes)
        case Binary(op, left, right):
            a, b = (evaluate(side, variables, coordinates, sizes) for side in (left, right))
            return int(OPERATORS[op][1](a, b))
    raise TypeError(f"not an expression: {expr!r}")
