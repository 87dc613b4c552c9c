"""Host to host: what the ranges of indices and coordinates decide is no condition, and the others are as simple as they allow.

    for %i in 0..6 {                                          for %i in 0..6 {
      if %i / 2 != 0 {                                          if %i >= 2 {
        wait arrived[%i - 2]                     becomes          wait arrived[%i - 2]
      }                                                         }
      if %i < 6 { ... }                                         ...

On a mesh of one rank all chunks are its own: choices and branches between its own and others', and memory for those, go.
"""

from __future__ import annotations

from dataclasses import replace

from hostweave.host_ir import ir
from hostweave.host_ir.calls import events_of, renamed
from hostweave.host_ir.dead_code import MEMORY, eliminate_dead_code
from hostweave.host_ir.expr import Const, Expr, Range, range_of, simpler
from hostweave.options import Options
from hostweave.types.mesh import Mesh


def fold_conditions(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    folding = _Folding(program.mesh)
    body = folding.body(program.body, program.mesh)
    if body is program.body:
        return program
    body = eliminate_dead_code(renamed(body, folding.chosen), (*MEMORY, ir.Let))
    gone = events_of(program.body) - events_of(body)
    return replace(program, body=body, events=tuple(pool for pool in program.events if pool.name not in gone))


class _Folding:
    def __init__(self, program: Mesh):
        self.program = program
        self.ranges: dict[str, Range] = {}  # of indices
        self.chosen: dict[str, str] = {}  # what choices that are decided stand for

    def body(self, body: ir.Body, mesh: Mesh) -> ir.Body:
        """A body for the ranks of a mesh; itself where nothing changes."""
        result = tuple(new for i in body for new in self.folded(i, mesh))
        return body if len(result) == len(body) and all(new is old for new, old in zip(result, body, strict=True)) else result

    def folded(self, i: ir.Instruction, mesh: Mesh) -> ir.Body:
        if isinstance(i, ir.Let):
            self.ranges[i.out] = range_of(i.value, self.ranges, mesh, self.program)
        elif isinstance(i, ir.For):
            self.ranges[i.out] = 0, int(i.count) - 1 if i.count.is_int else None
        elif isinstance(i, ir.If | ir.Choose):
            condition = self.simpler(i.condition, mesh)
            if isinstance(condition, Const) and isinstance(i, ir.Choose):
                chosen = i.src if condition.value else i.other
                self.chosen[i.out] = self.chosen.get(chosen, chosen)
                return ()
            if isinstance(condition, Const) and isinstance(i, ir.If):
                return self.body(i.body if condition.value else i.orelse, mesh)
            i = i if condition == i.condition else replace(i, condition=condition)
        return (ir.with_bodies(i, lambda inner: self.body(inner, i.mesh if isinstance(i, ir.OnMesh) else mesh)),)

    def simpler(self, condition: Expr, mesh: Mesh) -> Expr:
        return simpler(condition, lambda expr: range_of(expr, self.ranges, mesh, self.program))
