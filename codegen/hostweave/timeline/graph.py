"""Diagram of the values of a fusion and of their uses, and a text diff for each pass that changes the program."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hostweave.fusion_ir.ir import Fusion, Value
from hostweave.fusion_ir.ops import communicates
from hostweave.timeline.events import COMMUNICATION, COMPUTE

ROW_HEIGHT = 18  # pixels
ARCS_WIDTH = 90  # pixels


@dataclass(frozen=True)
class GraphRow:
    """Row of the diagram: a value, or the heading of a function or fusion. A heading has no dims."""

    text: str  # "%y = matmul(%x, %w)"
    kind: str  # "head", "input", or COMMUNICATION or COMPUTE for the result of an op
    dtype: str = ""
    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()  # size of each dim, and the mesh axes that shard the dim
    note: str = ""  # "partial(sum, x)", "async"
    source: str = ""
    operands: tuple[int, ...] = ()  # rows of the operands


@dataclass(frozen=True)
class OpGraph:
    rows: tuple[GraphRow, ...]
    axes: tuple[str, ...]

    line, left = ROW_HEIGHT, ARCS_WIDTH

    @property
    def height(self) -> int:
        return ROW_HEIGHT * len(self.rows)

    @property
    def arcs(self) -> Iterator[tuple[int, int, str]]:
        """(row of the operand, row of the user, SVG path between the rows) for each arc."""
        for user, row in enumerate(self.rows):
            for operand in row.operands:
                y0, y1 = (ROW_HEIGHT * number + ROW_HEIGHT // 2 for number in (operand, user))
                x = max(ARCS_WIDTH - 12 - 5 * (user - operand), 4)
                yield operand, user, f"M{ARCS_WIDTH - 4} {y0} C{x} {y0}, {x} {y1}, {ARCS_WIDTH - 4} {y1}"


def graph_of(fusion: Fusion) -> OpGraph:
    rows: list[GraphRow] = []
    for body in (*fusion.functions, fusion):
        rows.append(GraphRow(f"{'fusion' if body is fusion else 'function'} @{body.name}", "head"))
        number_of: dict[str, int] = {}
        for value in body.inputs:
            number_of[value.name] = len(rows)
            rows.append(_row(replace(value, pinned=False), f"%{value.name}", "input"))  # Input shardings are always fixed.
        for op in body.ops:
            operands = tuple(number_of[name] for name in op.tensors)
            number_of[op.result.name] = len(rows)
            kind = COMMUNICATION if communicates(op) else COMPUTE
            text = f"%{op.result.name} = {str(op).split(' = ', 1)[1]}"
            rows.append(_row(op.result, text, kind, str(op.location or ""), operands))
    return OpGraph(tuple(rows), tuple(name for name, _ in fusion.mesh.axes))


def _row(value: Value, text: str, kind: str, source: str = "", operands: tuple[int, ...] = ()) -> GraphRow:
    type = value.type
    dims = tuple((str(dim.size), tuple(map(str, dim.axes))) for dim in type.dims)
    whole = str(value).removeprefix(f"%{value.name}: ")
    note = whole[whole.index("]") + 1 :].strip() if "]" in whole else ""
    return GraphRow(text, kind, type.dtype.name, dims, note, source, operands)


@dataclass(frozen=True)
class Change:
    """Change that a pass made to the text of a program, as lines of a unified diff."""

    name: str
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines)


def changes_of(stages: Sequence[tuple[str, str]]) -> tuple[Change, ...]:
    found = []
    for (_, old), (name, new) in pairwise(stages):
        lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm=""))[2:]  # The first two lines name files.
        found += [Change(name, tuple(lines))] if lines else []
    return tuple(found)
