"""A fusion as a picture: a row per value, arcs from operands to their users, and the mesh axes that split each dim.

Also the changes of each pass, as differences of texts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import communicates
from hostweave.timeline.events import COMMUNICATION, COMPUTE

LINE = 18  # pixels of a row
ARCS = 90  # also the width of the arcs next to the rows


@dataclass(frozen=True)
class GraphRow:
    """A value, or the head of a function or program, which has no dims."""

    text: str  # "%y = matmul(%x, %w)"
    kind: str  # "head", "input", or one of an event
    dtype: str = ""
    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()  # sizes, and the mesh axes that split each
    note: str = ""  # "partial(sum, x)", "async"
    source: str = ""
    operands: tuple[int, ...] = ()  # numbers of rows


@dataclass(frozen=True)
class OpGraph:
    """The rows of a fusion and of the functions that it calls."""

    rows: tuple[GraphRow, ...]
    axes: tuple[str, ...]

    line, left = LINE, ARCS

    @property
    def height(self) -> int:
        return LINE * len(self.rows)

    @property
    def arcs(self) -> Iterator[tuple[int, int, str]]:
        """The numbers of an operand's row and of its user's, and the path between them."""
        for user, row in enumerate(self.rows):
            for operand in row.operands:
                y0, y1 = (LINE * number + LINE // 2 for number in (operand, user))
                x = max(ARCS - 12 - 5 * (user - operand), 4)
                yield operand, user, f"M{ARCS - 4} {y0} C{x} {y0}, {x} {y1}, {ARCS - 4} {y1}"


def graph_of(fusion: Fusion) -> OpGraph:
    """The rows of all bodies, functions first."""
    rows: list[GraphRow] = []
    for body in (*fusion.functions, fusion):
        rows.append(GraphRow(f"{'fusion' if body is fusion else 'function'} @{body.name}", "head"))
        number_of: dict[str, int] = {}
        for value in body.inputs:
            number_of[value.name] = len(rows)
            rows.append(_row(replace(value, pinned=False), f"%{value.name}", "input"))  # like all inputs
        for op in body.ops:
            operands = tuple(number_of[name] for name in op.tensors)
            number_of[op.result.name] = len(rows)
            kind = COMMUNICATION if communicates(op) else COMPUTE
            rows.append(_row(op.result, _text(op), kind, str(op.location or ""), operands))
    return OpGraph(tuple(rows), tuple(name for name, _ in fusion.mesh.axes))


def _row(value: Value, text: str, kind: str, source: str = "", operands: tuple[int, ...] = ()) -> GraphRow:
    type = value.type
    dims = tuple((str(dim.size), tuple(map(str, dim.axes))) for dim in type.dims)
    whole = str(value).removeprefix(f"%{value.name}: ")
    note = whole[whole.index("]") + 1 :].strip() if "]" in whole else ""
    return GraphRow(text, kind, type.dtype.name, dims, note, source, operands)


def _text(op: Op) -> str:
    """The op without the type of its result."""
    return f"%{op.result.name} = {str(op).split(' = ', 1)[1]}"


@dataclass(frozen=True)
class Change:
    """Change of a program's text by a pass: lines of a unified diff, each with its first character."""

    name: str
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines)


def changes_of(stages: Sequence[tuple[str, str]]) -> tuple[Change, ...]:
    """Returns the change of each pass that changed the text."""
    found = []
    for (_, old), (name, new) in pairwise(stages):
        lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm=""))[2:]  # without the names of files
        found += [Change(name, tuple(lines))] if lines else []
    return tuple(found)
