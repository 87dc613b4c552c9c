"""The pass sink_views moves views to their first use, and merges equal views."""

from __future__ import annotations

import pytest

from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.host.sink_views import sink_views

CASES = {
    "to the first use, in the same order": (
        """\
  %a = slice %x[1: 2 from 0]
  %b = slice %a[1: 1 from 1]
  %c = slice %z[1: 1 from 0]
  fill %y with 1.0
  copy %b -> %c
  copy %a -> %h
""",
        """\
  fill %y with 1.0
  %a = slice %x[1: 2 from 0]
  %b = slice %a[1: 1 from 1]
  %c = slice %z[1: 1 from 0]
  copy %b -> %c
  copy %a -> %h
""",
    ),
    "into the only stream block or branch that uses the view": (
        """\
  %a = slice %x[1: 1 from 0]
  %b = slice %z[1: 1 from 0]
  %c = slice %z[1: 1 from 1]
  stream loop[0] {
    if rank.r == 0 {
      copy %a -> %b
    } else {
      copy %a -> %c
    }
  }
""",
        """\
  stream loop[0] {
    %a = slice %x[1: 1 from 0]
    if rank.r == 0 {
      %b = slice %z[1: 1 from 0]
      copy %a -> %b
    } else {
      %c = slice %z[1: 1 from 1]
      copy %a -> %c
    }
  }
""",
    ),
    "not into a loop or a group, and before the fork of a loop's streams": (
        """\
  %a = slice %x[1: 1 from 0]
  %b = slice %z[1: 1 from 0]
  fill %y with 1.0
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      group {
        send %a to (rank.r + 1) % 2 on r
        recv %b from (rank.r + 1) % 2 on r
      }
    }
  }
""",
        """\
  fill %y with 1.0
  %a = slice %x[1: 1 from 0]
  %b = slice %z[1: 1 from 0]
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      group {
        send %a to (rank.r + 1) % 2 on r
        recv %b from (rank.r + 1) % 2 on r
      }
    }
  }
""",
    ),
    "equal views of two stream blocks become one, and a view that is the same in all iterations leaves the loop": (
        """\
  fork loop
  for %i in 0..2 {
    if %i == 1 {
      stream loop[0] {
        %a = slice %x[1: 1 from %i]
        %b = slice %a[1: 1 from 0]
        %c = slice %z[1: 1 from 0]
        copy %b -> %c
      }
    }
    stream loop[%i] {
      %d = slice %x[1: 1 from %i]
      %e = slice %d[1: 1 from 0]
      %f = slice %h[1: 1 from 0]
      copy %e -> %f
    }
  }
""",
        """\
  %f = slice %h[1: 1 from 0]
  fork loop
  for %i in 0..2 {
    %a = slice %x[1: 1 from %i]
    %b = slice %a[1: 1 from 0]
    if %i == 1 {
      stream loop[0] {
        %c = slice %z[1: 1 from 0]
        copy %b -> %c
      }
    }
    stream loop[%i] {
      copy %b -> %f
    }
  }
""",
    ),
    "equal views are not moved out of conditions that keep their index in range": (
        """\
  for %i in 0..2 {
    if %i == 1 {
      %a = slice %x[1: 1 from %i - 1]
      copy %a -> %y
    }
    if %i == 1 {
      %b = slice %x[1: 1 from %i - 1]
      copy %b -> %y
    }
  }
""",
        """\
  for %i in 0..2 {
    if %i == 1 {
      %a = slice %x[1: 1 from %i - 1]
      copy %a -> %y
    }
    if %i == 1 {
      %b = slice %x[1: 1 from %i - 1]
      copy %b -> %y
    }
  }
""",
    ),
    "not into a body on another mesh, if the index uses a coordinate of the outer mesh": (
        """\
  %a = slice %x[1: 1 from rank.r]
  %b = slice %y[1: 1 from 0]
  on mesh(s=2 of ranks 0..2) {
    copy %a -> %b
  }
""",
        """\
  %a = slice %x[1: 1 from rank.r]
  on mesh(s=2 of ranks 0..2) {
    %b = slice %y[1: 1 from 0]
    copy %a -> %b
  }
""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sink_views(case: str) -> None:
    before, after = (
        HostProgram.parse(
            f"host @f(%x: f32[1, 2]) -> (%y: f32[1, 2], %z: f32[1, 2], %h: f32[1, 2]) mesh(r=2) streams(loop[2]) {{\n{body}}}\n"
        )
        for body in CASES[case]
    )
    assert sink_views(before, Options()) == after
