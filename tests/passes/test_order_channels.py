"""Which communications take turns, where the waits and records of that stand, and what is left as it is."""

from __future__ import annotations

import pytest

from hostweave.analysis.check import check
from hostweave.errors import ProgramError
from hostweave.host.ir import HostProgram
from hostweave.host.verify import verify_host
from hostweave.options import Options
from hostweave.passes.order_channels import order_channels

HEADER = "(%x: f32[4@dp, N], %v: f32[4@tp, N]) -> (%y: f32[4@dp, N], %z: f32[4@tp, N]) mesh(dp=2, tp=2) streams(ring[2])"


def host(body: str, header: str = HEADER) -> HostProgram:
    return HostProgram.parse(f"host @f{header} {{\n{body}\n}}\n")


def ordered(program: HostProgram) -> str:
    """The body after the pass."""
    result = order_channels(program, Options())
    verify_host(result)
    check(result)
    assert HostProgram.parse(str(result)) == result
    assert order_channels(result, Options()) is result
    return str(result).partition("{\n")[2].removesuffix("}\n")


def unordered(program: HostProgram) -> str:
    with pytest.raises(ProgramError) as caught:
        check(program)
    return str(caught.value)


LOOP = """\
  fork ring
  for %i in 0..2 {
    stream ring[%i] {
      %x_i = slice %x[0: %i of 2]
      %y_i = slice %y[0: %i of 2]
      all_reduce sum %x_i -> %y_i on tp
      %v_i = slice %v[0: %i of 2]
      %z_i = slice %z[0: %i of 2]
      all_reduce sum %v_i -> %z_i on dp
    }
  }
  join ring"""


def test_a_loop() -> None:
    assert unordered(host(LOOP)) == (
        "text:7: rank 0, ring[1], %i = 1: all_reduce sum %x_i -> %y_i on tp and rank 0, ring[0], %i = 0: all_reduce sum %v_i -> %z_i on dp "
        "are over different channels, and nothing orders them on the rank, which can deadlock; add record/wait or put both on one stream"
    )
    assert (
        ordered(host(LOOP))
        == """\
  fork ring
  record turn[0]
  for %i in 0..2 {
    stream ring[%i] {
      %x_i = slice %x[0: %i of 2]
      %y_i = slice %y[0: %i of 2]
      wait turn[0]
      all_reduce sum %x_i -> %y_i on tp
      %v_i = slice %v[0: %i of 2]
      %z_i = slice %z[0: %i of 2]
      all_reduce sum %v_i -> %z_i on dp
      record turn[0]
    }
  }
  join ring
"""
    )


def test_a_branch_that_communicates_nothing_does_not_wait() -> None:
    body = """\
  fork ring
  for %i in 0..2 {
    stream ring[%i] {
      %x_i = slice %x[0: %i of 2]
      %y_i = slice %y[0: %i of 2]
      if %i == 0 {
        copy %x_i -> %y_i
      } else {
        group {
          recv %y_i from 1 - rank.dp on dp
          send %x_i to 1 - rank.dp on dp
        }
      }
    }
  }
  all_reduce sum %v -> %z on tp
  join ring"""
    assert unordered(host(body)) == (
        "text:17: rank 0, the caller's stream: all_reduce sum %v -> %z on tp and rank 0, ring[1], %i = 1: recv %y_i from 1 - rank.dp on dp "
        "are over different channels, and nothing orders them on the rank, which can deadlock; add join ring between them"
    )
    assert (
        ordered(host(body))
        == """\
  fork ring
  record turn[0]
  for %i in 0..2 {
    stream ring[%i] {
      %x_i = slice %x[0: %i of 2]
      %y_i = slice %y[0: %i of 2]
      if %i == 0 {
        copy %x_i -> %y_i
      } else {
        wait turn[0]
        group {
          recv %y_i from 1 - rank.dp on dp
          send %x_i to 1 - rank.dp on dp
        }
        record turn[0]
      }
    }
  }
  wait turn[0]
  all_reduce sum %v -> %z on tp
  record turn[0]
  join ring
"""
    )


def test_only_what_is_unordered_takes_turns() -> None:
    before = """\
  %s = allocate f32[2, N]
  all_reduce sum %x -> %s on tp
  %t = allocate f32[2, N]
  all_reduce sum %s -> %t on dp
"""
    program = host(before + LOOP.replace("%x_i = slice %x", "%x_i = slice %t"))
    text = ordered(program)
    assert text.startswith(before + "  fork ring\n  record turn[0]\n")
    assert (text.count("wait turn"), text.count("record turn")) == (1, 2)


@pytest.mark.parametrize(
    "program",
    [
        host(LOOP.replace("dp", "tp"), HEADER.replace("4@dp", "4@tp")),  # one channel
        host(LOOP, HEADER.replace("tp=2", "tp=1")),  # one of a single rank
        host(LOOP, HEADER.replace("ring[2]", "ring[1]")),  # one stream
        host(LOOP.replace("ring[%i]", "ring[%i / 2]")),
        host("all_reduce sum %x -> %y on tp\nall_reduce sum %v -> %z on dp"),
        host("fork ring\nstream ring[0] {\nall_reduce sum %x -> %y on tp\n}\njoin ring\nall_reduce sum %v -> %z on dp"),
        host("all_reduce sum %v -> %z on dp\nfork ring\nstream ring[0] {\nall_reduce sum %x -> %y on tp\n}\njoin ring"),
        host(  # an event that is there already
            "fork ring\nstream ring[0] {\nall_reduce sum %x -> %y on tp\nrecord done[0]\n}\n"
            "stream ring[1] {\nwait done[0]\nall_reduce sum %v -> %z on dp\n}\njoin ring",
            HEADER + " events(done[1])",
        ),
    ],
)
def test_what_is_ordered_stays_as_it_is(program: HostProgram) -> None:
    check(program)
    assert order_channels(program, Options()) is program


def test_names_that_are_taken() -> None:
    program = order_channels(host(LOOP.replace("ring", "turn"), HEADER.replace("ring", "turn")), Options())
    assert [(events.name, events.count) for events in program.events] == [("turn_2", 1)]


def test_a_communication_of_uneven_sizes_alone() -> None:
    body = """\
  fork ring
  stream ring[0] {
    if M % 2 == 0 {
      copy %x -> %y
    } else {
      all_reduce sum %x -> %y on tp
    }
  }
  stream ring[1] {
    all_reduce sum %v -> %z on dp
  }
  join ring"""
    header = HEADER.replace("4@dp", "M@dp") + " uneven(M)"
    assert (
        ordered(host(body, header))
        == """\
  fork ring
  record turn[0]
  stream ring[0] {
    if M % 2 == 0 {
      copy %x -> %y
    } else {
      wait turn[0]
      all_reduce sum %x -> %y on tp
      record turn[0]
    }
  }
  stream ring[1] {
    wait turn[0]
    all_reduce sum %v -> %z on dp
    record turn[0]
  }
  join ring
"""
    )


def test_nested_loops() -> None:
    body = LOOP.replace("  for %i", "  for %j in 0..2 {\n  for %i").replace("\n  join", "\n  }\n  join")
    text = ordered(host(body))
    assert text.index("record turn[0]") < text.index("for %j")
