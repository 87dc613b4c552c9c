"""Host programs with functions. Calls are inlined, and a program is split into bodies and joined again."""

from __future__ import annotations

from hostweave.host_ir.calls import bodies, inlined, joined
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host

CPU_DEVICE = """\
kernel @negative_h(%x: f32[M/2, E]) {
  %h: f32[M/2, E] = negative(%x)
}
function @layer(%x: f32[M@x, E], %w: f32[E, E]) -> (%y: f32[M@x, E]) {
  %h = allocate f32[M/2, E]
  if M % 4 == 0 {
    launch @negative_h %x -> %h
  } else {
    %h_2 = allocate f32[M/2, E]
    launch @negative_h %x -> %h_2
    copy %h_2 -> %h
  }
  fork loop
  for %i in 0..2 {
    %p = (rank.x + %i) % 2
    stream loop[%p] {
      %y_i = chunk %y[1: %p of 2]
      %w_i = chunk %w[1: %p of 2]
      matmul %h, %w_i -> %y_i
    }
  }
  join loop
}
function @twice(%x: f32[M@x, E], %w: f32[E, E]) -> (%y: f32[M@x, E]) {
  %h = allocate f32[M/2, E]
  call @layer %x, %w -> %h
  call @layer %h, %w -> %y
}
host @f(%x: f32[M@x, E], %w: f32[E, E]) -> (%y: f32[M@x, E]) mesh(x=2) streams(loop[2]) {
  call @twice %x, %w -> %y
}
"""

INLINED = """\
kernel @negative_h(%x: f32[M/2, E]) {
  %h: f32[M/2, E] = negative(%x)
}
host @f(%x: f32[M@x, E], %w: f32[E, E]) -> (%y: f32[M@x, E]) mesh(x=2) streams(loop[2]) {
  %twice_h = allocate f32[M/2, E]
  %layer_h = allocate f32[M/2, E]
  if M % 4 == 0 {
    launch @negative_h %x -> %layer_h
  } else {
    %layer_h_2 = allocate f32[M/2, E]
    launch @negative_h %x -> %layer_h_2
    copy %layer_h_2 -> %layer_h
  }
  fork loop
  for %layer_i in 0..2 {
    %layer_p = (rank.x + %layer_i) % 2
    stream loop[%layer_p] {
      %layer_y_i = chunk %twice_h[1: %layer_p of 2]
      %layer_w_i = chunk %w[1: %layer_p of 2]
      matmul %layer_h, %layer_w_i -> %layer_y_i
    }
  }
  join loop
  deallocate %layer_h
  %layer_h_3 = allocate f32[M/2, E]
  if M % 4 == 0 {
    launch @negative_h %twice_h -> %layer_h_3
  } else {
    %layer_h_4 = allocate f32[M/2, E]
    launch @negative_h %twice_h -> %layer_h_4
    copy %layer_h_4 -> %layer_h_3
  }
  fork loop
  for %layer_i_2 in 0..2 {
    %layer_p_2 = (rank.x + %layer_i_2) % 2
    stream loop[%layer_p_2] {
      %layer_y_i_2 = chunk %y[1: %layer_p_2 of 2]
      %layer_w_i_2 = chunk %w[1: %layer_p_2 of 2]
      matmul %layer_h_3, %layer_w_i_2 -> %layer_y_i_2
    }
  }
  join loop
  deallocate %layer_h_3
  deallocate %twice_h
}
"""


def test_inlined() -> None:
    """Each inlined call has separate buffers. Top-level buffers of the function are deallocated after the call, so that the next call can
    reuse the memory of the buffers."""
    host = HostProgram.parse(CPU_DEVICE)
    verify_host(host)
    flat = inlined(host)
    assert str(flat) == INLINED
    verify_host(flat)


def test_donated_arguments() -> None:
    """A donated argument and the result in its memory are different values, so their names stay separate."""
    text = """function @fn(%x: f32[4], %u: f32[4]) -> (%y: f32[4] in %x) {
  copy %u -> %y
}
host @f(%c: f32[4], %u: f32[4]) -> (%y: f32[4] in %c) mesh() {
  call @fn %c, %u -> %y
}
"""
    lines = [line for i in inlined(HostProgram.parse(text)).body for line in i.lines()]
    assert lines == [
        "%fn_x = as_given %c",
        "%fn_u = as_given %u",
        "%fn_y = take_over %y",
        "copy %fn_u -> %fn_y",
        "returned %fn_y",
    ]


def test_bodies_join_again() -> None:
    host = HostProgram.parse(CPU_DEVICE)
    assert [part.name for part in bodies(host)] == ["layer", "twice", "f"]
    assert joined(bodies(host)) == host
