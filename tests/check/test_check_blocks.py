"""The static check covers the bodies of blocks, and the memory that consecutive calls share."""

from __future__ import annotations

import pytest

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram

LAYER = """\
function @layer(%a: f32[M@x, E]) -> (%b: f32[M@x, E]) {
  %t = allocate f32[M/2, E]
  fork loop
  stream loop[0] {
    copy %a -> %t
    record done[0]
  }
  stream loop[1] {
    wait done[0]
    copy %t -> %b
  }
  join loop
}
"""
PROGRAM = """\
host @f(%x: f32[M@x, E]) -> (%y: f32[M@x, E]) mesh(x=2) streams(loop[2]) events(done[1]) {
  %h = allocate f32[M/2, E]
  call @layer %x -> %h
  call @layer %h -> %y
}
"""

RACES = {
    "inside a block": (
        "    wait done[0]\n",
        "text:9: rank 0, loop[1]: copy %layer_t -> %h reads %layer_t while rank 0, loop[0]: copy %x -> %layer_t writes it: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    "before a block": (
        "  fork loop\n",
        "text:4: rank 0, loop[0]: copy %x -> %layer_t reads %x while the caller may still write it: "
        "nothing orders them; add fork loop between them",
    ),
    "from one call to the next": (
        "  join loop\n",
        "text:2: rank 0, the caller's stream: deallocate %layer_t frees %layer_t while rank 0, loop[0]: copy %x -> %layer_t writes it: "
        "nothing orders them; add join loop between them",
    ),
}


def test_a_program_without_races() -> None:
    check(HostProgram.parse(LAYER + PROGRAM))


@pytest.mark.parametrize("case", RACES)
def test_races(case: str) -> None:
    dropped, message = RACES[case]
    assert LAYER.count(dropped) == 1
    with pytest.raises(ProgramError) as caught:
        check(HostProgram.parse(LAYER.replace(dropped, "") + PROGRAM))
    assert str(caught.value) == message


def test_calls_share_the_memory_of_a_block() -> None:
    """The memory of a block is free after the call. If the block does not join a stream, the next call may overwrite data that the stream
    still reads."""
    layer = """\
function @layer(%a: f32[M@x, E]) -> (%b: f32[M@x, E]) {
  %t = allocate f32[M/2, E]
  %u = allocate f32[M/2, E]
  copy %a -> %t
  fork loop
  stream loop[0] {
    copy %t -> %u
  }
  copy %a -> %b
}
"""
    with pytest.raises(ProgramError) as caught:
        check(HostProgram.parse(layer + PROGRAM.replace("events(done[1]) ", "")))
    assert str(caught.value) == (
        "text:2: rank 0, the caller's stream: deallocate %layer_t frees %layer_t while rank 0, loop[0]: copy %layer_t -> %layer_u "
        "reads it: nothing orders them; add join loop between them"
    )
