"""Lowering from the fusion IR to the host IR: views, in-place results, asynchronous communication, chunk loops, and streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fusion_text import fusion

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import Streams
from hostweave.options import Options
from hostweave.passes.lower.lower_to_host import lower_to_host
from hostweave.pipeline import PASSES, lower

CASES = {
    "a slice is a view, and a matmul writes an operand of a concat to the result of the concat": (
        """\
fusion @f(%x: f32[M, 8], %w: f32[8, 2]) {
  %part: f32[M, 2] = slice(%x, axis=1, start=4, step=1)
  %last: f32[2] = select(%part, axis=0, index=-1)
  %h: f32[M, 2] = matmul(%x, %w)
  %row: f32[1, 2] = expand_dims(%last, axis=(0,))
  %y: f32[(M + 1), 2] = concat(%h, %row, axis=0)
  return %y
}
""",
        """\
  %part = slice %x[1: 2 from 4]
  %last = select %part[0: M - 1]
  %h = slice %y[0: M from 0]
  matmul %x, %w -> %h
  %row = reshape %last to [1, 2]
  %row_part = slice %y[0: 1 from M]
  copy %row -> %row_part
""",
    ),
    "a pad fills the added elements": (
        """\
fusion @f(%x: f32[M, 8]) {
  %h: f32[M, 8] = cumsum(%x, axis=1)
  %y: f32[(M + 3), 9] = pad(%h, low=(1, 0), high=(2, 1), value=1.0)
  return %y
}
""",
        """\
  %y_inside = slice %y[0: M from 1]
  %y_inside_2 = slice %y_inside[1: 8 from 0]
  launch @cumsum_h %x -> %y_inside_2
  %y_before = slice %y[0: 1 from 0]
  fill %y_before with 1.0
  %y_after = slice %y[0: 2 from M + 1]
  fill %y_after with 1.0
  %y_after_2 = slice %y_inside[1: 1 from 8]
  fill %y_after_2 with 1.0
""",
    ),
    "a concat and a pad of pointwise results are kernels": (
        """\
fusion @f(%x: f32[M, 8]) {
  %h: f32[M, 8] = negative(%x)
  %j: f32[M, 16] = concat(%h, %x, axis=1)
  %y: f32[(M + 3), 16] = pad(%j, low=(1, 0), high=(2, 0), value=1.0)
  return %y
}
""",
        """\
  %h = allocate f32[M, 8]
  launch @negative_h %x -> %h
  %j = allocate f32[M, 16]
  launch @concat_j %h, %x -> %j
  launch @pad_y %j -> %y
""",
    ),
    "a slice with a step is a strided view": (
        "fusion @f(%x: f32[M, 8]) {\n  %y: f32[M, 3] = slice(%x, axis=1, start=1, step=3)\n  return %y\n}\n",
        "  %y_2 = strided %x[1: 3 from 1 by 3]\n  copy %y_2 -> %y\n",
    ),
    "a value is stored with dims in the order in which a reshape merges them": (
        """\
fusion @f(%x: f32[4, M, 8]) {
  %h: f32[4, M, 8] = negative(%x)
  %t: f32[M, 4, 8] = permute_dims(%h, axes=(1, 0, 2))
  %r: f32[M, 32] = reshape(%t)
  %y: f32[M, 32] = exp(%r)
  return %y
}
""",
        """\
  %t = allocate f32[M, 4, 8]
  %h = permute %t by [1, 0, 2]
  launch @negative_h %x -> %h
  %r = reshape %t to [M, 32]
  launch @exp_y %r -> %y
""",
    ),
    "an asynchronous communication is awaited before its result is read": (
        """\
fusion @f(%x: f32[K, 4@x], %w: f32[4@x, N], %v: f32[4@x, N], %z: f32[K, N]) mesh(x=2) {
  %g: f32[K, N] async = matmul(%x, %w)
  %a: f32[K, N] = negative(%z)
  %h: f32[K, N] async = matmul(%x, %v)
  %b: f32[K, N] = exp(%a)
  %t: f32[N, K] = permute_dims(%g, axes=(1, 0))
  %y: f32[N, K] = negative(%t)
  return %y, %b, %h
}
""",
        """\
  %g_partial = allocate f32[K, N]
  matmul %x, %w -> %g_partial
  %g = allocate f32[K, N]
  fork comm
  stream comm[0] {
    all_reduce sum %g_partial -> %g on x
    record g_ready[0]
  }
  %a = allocate f32[K, N]
  launch @negative_a %z -> %a
  %h_partial = allocate f32[K, N]
  matmul %x, %v -> %h_partial
  fork comm
  stream comm[0] {
    all_reduce sum %h_partial -> %h on x
  }
  launch @exp_b %a -> %b
  %t = permute %g by [1, 0]
  wait g_ready[0]
  launch @negative_y %t -> %y
  join comm
""",
    ),
    "a second loop over gathered chunks has no rotation": (
        """\
fusion @f(%x: f32[M@x, 8]) mesh(x=2) {
  %h: f32[M, 8] stream(M, 2) = negative(%x)
  %v: f32[M, 8, 1] = expand_dims(%h, axis=(2,))
  %y: f32[M, 8] stream(M, 2) = exp(%h)
  return %y, %v
}
""",
        """\
  %x_gathered = allocate f32[M, 8]
  %h = allocate f32[M, 8]
  fork loop
  for %i in 0..2 {
    %p = (rank.x + %i) % 2
    stream loop[%i] {
      %x_gathered_i = chunk %x_gathered[0: %p of 2]
      if %i == 0 {
        copy %x -> %x_gathered_i
      } else {
        group {
          recv %x_gathered_i from %p on x
          send %x to (rank.x - %i) % 2 on x
        }
      }
      %h_i = chunk %h[0: %p of 2]
      launch @negative_h %x_gathered_i -> %h_i
    }
  }
  join loop
  %v_2 = reshape %h to [M, 8, 1]
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      %h_i_2 = chunk %h[0: %i of 2]
      %y_i = chunk %y[0: %i of 2]
      launch @exp_y %h_i_2 -> %y_i
    }
  }
  join loop
  copy %v_2 -> %v
""",
    ),
    "an asynchronous value without communication needs no stream": (
        "fusion @f(%x: f32[M]) {\n  %y: f32[M] async = negative(%x)\n  return %y\n}\n",
        "  launch @negative_y %x -> %y\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_lower_to_host(case: str) -> None:
    given, wanted = CASES[case]
    stage = Fusion.parse(given)
    assert str(stage) == given
    for apply in PASSES[: PASSES.index(lower_to_host) + 1]:
        stage = apply(stage, Options())
    lines = str(stage).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("host")) + 1
    assert "\n".join(lines[first:-1]) + "\n" == wanted


@pytest.mark.parametrize(("chunks", "streams"), [((2, 3), 3), ((3, 2), 3), ((2, 8), 4), ((1, 1), 1)])
def test_no_more_streams_than_iterations_of_the_longest_loop(chunks: tuple[int, int], streams: int) -> None:
    """The number of streams is at most the number of iterations of the longest loop in functions and their callers."""
    inner, outer = (f"stream(M, {count})" for count in chunks)
    stage = Fusion.parse(f"""\
function @b(%x: f32[M]) {{
  %y: f32[M] {inner} = negative(%x)
  return %y
}}
fusion @f(%x: f32[M]) {{
  %h: f32[M] = call @b(%x)
  %y: f32[M] {outer} = exp(%h)
  return %y
}}
""")
    assert lower(stage, Options()).streams == (Streams("loop", streams),)


def test_a_short_loop_forks_the_streams_that_it_uses() -> None:
    """A loop with few iterations forks and joins only the streams that it uses. The check detects a missing fork or join."""
    short = fusion("%x: f32[M, N]", "%h: f32[M, N] stream(M, 2) = negative(%x)\n%y: f32[M, N] stream(M, 6) = exp(%h)", "x=4")
    host = lower(short, Options())
    assert [i.first for i in host.body if isinstance(i, ir.Fork | ir.Join)] == [2, 2, None, None]
    check(host)
    for kind in (ir.Fork, ir.Join):
        fewer = tree.rewrite(host.body, lambda i, kind=kind: replace(i, first=1) if isinstance(i, kind) and i.first else None)  # type: ignore[misc]
        with pytest.raises(ProgramError):
            check(replace(host, body=fewer))
