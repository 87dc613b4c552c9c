"""The pass sink_waits: where the caller's stream waits for a loop, and which instructions can run before this wait."""

from __future__ import annotations

import pytest

from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.sink_waits import sink_waits

HEADER = "(%x: f32[8], %v: f32[8]) -> (%y: f32[8], %z: f32[8]) mesh(x=1) streams(loop[2], other[1])"
LOOP = """\
fork loop
for %i in 0..2 {
  stream loop[%i] {
    %x_i = chunk %x[0: %i of 2]
    %y_i = chunk %y[0: %i of 2]
    copy %x_i -> %y_i
  }
}
"""


def host(body: str) -> HostProgram:
    return HostProgram.parse(f"host @f{HEADER} {{\n{body}\n}}\n")


def sunk(body: str) -> str:
    """Runs the pass. Returns the text after the last loop or stream block."""
    result = sink_waits(host(body), Options())
    verify_host(result)
    check(result)
    assert sink_waits(result, Options()) == result
    return str(result).rpartition("\n  }\n")[2].removesuffix("}\n")


def test_independent_instructions_move_before_the_join() -> None:
    assert sunk(LOOP + "join loop\n%t = allocate f32[8]\ncopy %v -> %t\n%u = reshape %y to [2, 4]\ncopy %t -> %z") == (
        "  %t = allocate f32[8]\n  copy %v -> %t\n  %u = reshape %y to [2, 4]\n  copy %t -> %z\n  join loop\n"
    )


def test_the_join_moves_to_the_first_use() -> None:
    assert sunk(LOOP + "join loop\n%t = allocate f32[8]\ncopy %v -> %t\n%u = reshape %y to [8]\ncopy %u -> %z") == (
        "  %t = allocate f32[8]\n  copy %v -> %t\n  join loop\n  %u = reshape %y to [8]\n  copy %u -> %z\n"
    )


def test_two_joins() -> None:
    body = LOOP + "fork other\nstream other[0] {\n  fill %z with 0.0\n}\njoin loop\njoin other\n%t = allocate f32[8]\n"
    tail = sunk(body + "copy %v -> %t\ncopy %t -> %z").splitlines()
    assert tail == ["  %t = allocate f32[8]", "  copy %v -> %t", "  join loop", "  join other", "  copy %t -> %z"]


@pytest.mark.parametrize(
    "body",
    [
        LOOP + "join loop\ncopy %y -> %z",  # This reads a result of the loop.
        LOOP + "join loop\nfill %y with 0.0\ncopy %v -> %z",  # This overwrites a result of the loop.
        LOOP + "join loop\n" + LOOP.replace("%i", "%j").replace("%y", "%z").replace("_i", "_j") + "join loop",
        LOOP + "join loop\nfork other\nstream other[0] {\n  copy %y -> %z\n}\njoin other",  # A fork orders streams.
        LOOP + "join loop\n%t = allocate f32[8]\ncopy %y -> %z",  # An allocation takes no time, so a later wait has no gain.
    ],
)
def test_programs_that_the_pass_does_not_change(body: str) -> None:
    program = host(body)
    check(program)
    assert sink_waits(program, Options()) == program
