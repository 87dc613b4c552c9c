"""The pass sink_allocations moves an allocation in an `on` body to the `on` body that first uses the buffer."""

from __future__ import annotations

import host_text
from fusions_from_files import all_fusions
from stages_of_passes import changes

from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.sink_allocations import sink_allocations

KERNEL = """\
kernel @exp_h(%x: f32[M, K]) {
  %h: f32[M, K] = exp(%x)
}
"""
HEADER = """\
host @f(%x: f32[M, K] on mesh(x=2 of ranks 0, 1)) -> (%y: f32[M, K] on mesh(x=2 of ranks 0, 1)) mesh(x=4) {
"""
BEFORE = """\
  on mesh(x=2 of ranks 0, 1) {
    %h = allocate f32[M, K]
  }
  on mesh(x=2 of ranks 2, 3) {
    %t = allocate f32[4]
    fill %t with 1.0
  }
  on mesh(x=2 of ranks 0, 1) {
    launch @exp_h %x -> %h
    launch @exp_h %h -> %y
  }
"""
AFTER = """\
  on mesh(x=2 of ranks 2, 3) {
    %t = allocate f32[4]
    fill %t with 1.0
  }
  on mesh(x=2 of ranks 0, 1) {
    %h = allocate f32[M, K]
    launch @exp_h %x -> %h
    launch @exp_h %h -> %y
  }
"""


def test_an_allocation_moves_into_the_body_that_needs_it() -> None:
    program = sink_allocations(host_text.parse(f"{KERNEL}{HEADER}{BEFORE}}}\n"), Options())
    verify_host(program)
    assert program == host_text.parse(f"{KERNEL}{HEADER}{AFTER}}}\n")


def test_programs_on_one_mesh_stay() -> None:
    assert changes(sink_allocations, all_fusions(2, 4)["ag_matmul"]) == ""
