"""Moves allocations for a mesh of some ranks into the `on` body that first needs them.

    on mesh(x=2 of ranks 0, 1) {                  on mesh(x=2 of ranks 2, 3) {
      %h = allocate f32[M, K]                       recv %t from rank - 2 on x
    }                                             }
    on mesh(x=2 of ranks 2, 3) {        becomes   on mesh(x=2 of ranks 0, 1) {
      recv %t from rank - 2 on x                    %h = allocate f32[M, K]
    }                                               launch @exp_h %x -> %h
    on mesh(x=2 of ranks 0, 1) {                  }
      launch @exp_h %x -> %h
    }

The later pass `reuse_in_place` requires that all uses of a buffer on a mesh of some ranks are in one `on` body.
"""

from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.passes.host.plan_memory import Planner


def sink_allocations(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    if not any(i.ranks for i in tree.walk(program.body)):
        return program
    planned = Planner(program).body(program.body, on_caller=True)
    return replaced(program, body=tree.rewrite(planned, lambda i: () if tree.names(i, "free") else None))
