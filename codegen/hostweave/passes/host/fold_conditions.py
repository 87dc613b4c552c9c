"""Removes conditions with a value that follows from the ranges of indices and coordinates. Simplifies all other expressions.

    for %i in 0..6 {                                          for %i in 0..6 {
      if %i / 2 != 0 {                                          if %i >= 2 {
        wait arrived[%i - 2]                     becomes          wait arrived[%i - 2]
      }                                                         }
      if %i < 6 { ... }                                         ...

Also replaces loops of one iteration by their bodies, and `choose` views with known conditions by the chosen buffers. Removes views,
buffers, indices, events and channels that are then unused. Merges consecutive bodies with the same condition or on the same stream.
"""

from dataclasses import replace

from hostweave.base.unchanged import is_same
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import events_of, renamed, without_unused_channels
from hostweave.host_ir.expr import Const, Expr, Range, range_of, simpler
from hostweave.options import Options
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size


def fold_conditions(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    folding = _Folding()
    body = folding.body(program.body, program.mesh)
    if is_same(program.body, body):
        return program
    body = tree.eliminate_dead_code(renamed(body, folding.chosen), ("allocate", "view", "index"))
    gone = events_of(program.body) - events_of(body)
    return without_unused_channels(replace(program, body=body, events=tuple(pool for pool in program.events if pool.name not in gone)))


class _Folding:
    def __init__(self) -> None:
        self.ranges: dict[str, Range] = {}
        self.chosen: dict[str, str] = {}  # `choose` view with a known condition -> the chosen buffer

    def body(self, body: tree.Body, mesh: Mesh) -> tree.Body:
        folded = (new for i in body for new in self.folded(i, mesh))
        return tree.together(folded, of=lambda i: i.condition_of_body or tree.slot(i, "stream"))

    def folded(self, i: tree.Instruction, mesh: Mesh) -> tree.Body:
        def values(expr: Expr) -> Range:
            return range_of(expr, self.ranges, mesh)

        i = tree.with_expressions(i, lambda expr: simpler(expr, values))
        for name in tree.names(i, "index"):
            self.ranges[name] = values(*tree.expressions(i)) if i.trips is None else (0, int(i.trips) - 1 if i.trips.is_int else None)
        match i.condition_of_body, i.chosen_by:
            case Const(value), None:
                return self.body(tree.bodies(i)[0 if value else 1], mesh)
            case None, Const(value):
                ((name,), chosen) = tree.names(i, "view"), tree.names(i, "alias")[0 if value else 1]
                self.chosen[name] = self.chosen.get(chosen, chosen)
                return ()
        if i.trips == Size():
            return self.body(tree.bodies(i)[0], mesh)
        return (tree.with_bodies(i, lambda inner: self.body(inner, i.ranks or mesh)),)
