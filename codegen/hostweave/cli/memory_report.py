"""The table that `hostweave inspect --memory` prints."""

from __future__ import annotations

from collections.abc import Mapping

from hostweave.base.errors import HostweaveError
from hostweave.check.sizes import usual_sizes
from hostweave.cli.memory_plan import MemoryPlan, Row, memory_plan
from hostweave.host_ir import ir
from hostweave.host_ir.calls import bodies
from hostweave.types.mesh import Mesh


def memory_report(program: ir.HostProgram, sizes: Mapping[str, int]) -> str:
    """The program with its lines numbered, and where its memory lies. Sizes that are not given are 4096, or what can be divided.

    Raises HostweaveError for names that the program does not have.
    """
    if unknown := sizes.keys() - set(program.symbols()):
        known = ", ".join(program.symbols()) or "none"
        raise HostweaveError(f"{program.name}: --sizes: no size named {', '.join(sorted(unknown))}; the sizes of the program: {known}")
    bound = usual_sizes(program, sizes)
    numbered = [f"{number:4}  {line}" for number, line in enumerate(str(program).splitlines(), 1)]
    at = ", ".join(f"{name}={size}" for name, size in bound.items())
    title = f"memory of @{program.name}" + (f" at {at}" if at else "")
    tables = [
        ["", title + (f", rank {rank}" if program.mesh.size > 1 else ""), *_table(memory_plan(program, bound, rank))]
        for rank in _ranks_that_differ(program)
    ]
    return "\n".join([*numbered, *(line for table in tables for line in table)]) + "\n"


def _ranks_that_differ(program: ir.HostProgram) -> tuple[int, ...]:
    """The first rank, and the first of those that are on other meshes."""
    meshes = {i.ranks for body in bodies(program) for i in ir.walk(body.body) if i.ranks}
    first: dict[frozenset[Mesh], int] = {}
    for rank in program.mesh.all_ranks:
        first.setdefault(frozenset(mesh for mesh in meshes if rank in mesh.all_ranks), rank)
    return tuple(first.values())


def _table(plan: MemoryPlan) -> list[str]:
    if not plan.rows:
        return ["no temporaries"]
    rows = [("buffer", "type", "bytes", "offset", "lines", "streams"), *map(_cells, plan.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ratio = plan.peak / plan.bound if plan.bound else 1.0
    return [*lines, f"peak {plan.peak:,} bytes, lower bound {plan.bound:,}, ratio {ratio:.3f}"]


def _cells(row: Row) -> tuple[str, ...]:
    each = f"{len(row.offsets)} x " if len(row.offsets) > 1 else ""
    first, last = row.lines
    return row.name, row.type, f"{each}{row.bytes:,}", " ".join(f"{at:,}" for at in row.offsets), f"{first}-{last}", ", ".join(row.streams)
