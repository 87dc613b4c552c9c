"""The passes serialize_channels and software_pipeline: which communications are ordered, where waits and records are, and programs that do
not change."""

from __future__ import annotations

from dataclasses import replace

import host_text
import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check import channel_order
from hostweave.check.check import check
from hostweave.check.happens_before import Task, order, run
from hostweave.check.match_collectives import match_communications
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import minimal_sizes
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.serialize_channels import serialize_channels
from hostweave.passes.host.software_pipeline import software_pipeline
from hostweave.pipeline import lower

HEADER = "(%x: f32[4@dp, N], %v: f32[4@tp, N]) -> (%y: f32[4@dp, N], %z: f32[4@tp, N]) mesh(dp=2, tp=2) streams(loop[2])"


def host(body: str, header: str = HEADER) -> HostProgram:
    return host_text.parse(f"host @f{header} {{\n{body}\n}}\n")


def in_turn(program: HostProgram) -> HostProgram:
    """The program after both passes."""
    return serialize_channels(software_pipeline(program, Options()), Options())


def ordered(program: HostProgram) -> str:
    """Text of the body after both passes. The new program must pass the check."""
    result = in_turn(program)
    verify_host(result)
    check(result)
    assert HostProgram.parse(str(result)) == result
    assert serialize_channels(result, Options()) is result
    return str(result).partition("{\n")[2].removesuffix("}\n")


def unordered(program: HostProgram) -> str:
    with pytest.raises(ProgramError) as caught:
        check(program)
    return str(caught.value)


LOOP = """\
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      %x_i = chunk %x[0: %i of 2]
      %y_i = chunk %y[0: %i of 2]
      all_reduce sum %x_i -> %y_i on tp
      %v_i = chunk %v[0: %i of 2]
      %z_i = chunk %z[0: %i of 2]
      all_reduce sum %v_i -> %z_i on dp
    }
  }
  join loop"""


def test_a_loop() -> None:
    assert unordered(host(LOOP)) == (
        "text:7: rank 0, loop[1], %i = 1: all_reduce sum %x_i -> %y_i on tp and rank 0, loop[0], %i = 0: all_reduce sum %v_i -> %z_i on dp "
        "are over different channels, and nothing orders them on the rank: they can deadlock; add record/wait or put both on one stream"
    )
    assert (
        ordered(host(LOOP))
        == """\
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      %x_i = chunk %x[0: %i of 2]
      %y_i = chunk %y[0: %i of 2]
      if %i != 0 {
        wait channels_idle[0]
      }
      all_reduce sum %x_i -> %y_i on tp
      %v_i = chunk %v[0: %i of 2]
      %z_i = chunk %z[0: %i of 2]
      all_reduce sum %v_i -> %z_i on dp
      record channels_idle[0]
    }
  }
  join loop
"""
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_a_group_of_two_channels(is_first: bool) -> None:
    """An earlier communication is on tp. The error names the communication of the group that is not on tp."""
    parts = ["all_reduce sum %x -> %y on tp", "all_reduce sum %v -> %z on dp"]
    group = "\n".join(parts if is_first else reversed(parts))
    body = f"fork loop\nstream loop[0] {{\nall_reduce sum %u -> %w on tp\n}}\ngroup {{\n{group}\n}}\njoin loop"
    header = HEADER.replace("%x", "%u: f32[8], %x").replace("%y", "%w: f32[8], %y")
    assert "all_reduce sum %v -> %z on dp and rank 0, loop[0]: all_reduce sum %u -> %w on tp are over different" in unordered(
        host(body, header)
    )


def test_a_branch_that_communicates_nothing_does_not_wait() -> None:
    body = """\
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      %x_i = chunk %x[0: %i of 2]
      %y_i = chunk %y[0: %i of 2]
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
  join loop"""
    assert unordered(host(body)) == (
        "text:17: rank 0, the caller's stream: all_reduce sum %v -> %z on tp and rank 0, loop[1], %i = 1: recv %y_i from 1 - rank.dp on dp "
        "are over different channels, and nothing orders them on the rank: they can deadlock; add join loop between them"
    )
    assert (
        ordered(host(body))
        == """\
  fork loop
  record channels_idle[0]
  for %i in 0..2 {
    stream loop[%i] {
      %x_i = chunk %x[0: %i of 2]
      %y_i = chunk %y[0: %i of 2]
      if %i == 0 {
        copy %x_i -> %y_i
      } else {
        wait channels_idle[0]
        group {
          recv %y_i from 1 - rank.dp on dp
          send %x_i to 1 - rank.dp on dp
        }
        record channels_idle[0]
      }
    }
  }
  wait channels_idle[0]
  all_reduce sum %v -> %z on tp
  join loop
"""
    )


def test_only_unordered_communications_are_ordered() -> None:
    before = """\
  %s = allocate f32[2, N]
  all_reduce sum %x -> %s on tp
  %t = allocate f32[2, N]
  all_reduce sum %s -> %t on dp
"""
    program = host(before + LOOP.replace("%x_i = chunk %x", "%x_i = chunk %t"))
    text = ordered(program)
    assert text.startswith(before + "  fork loop\n  for %i in 0..2 {\n")
    assert (text.count("wait channels_idle"), text.count("record channels_idle")) == (1, 1)


@pytest.mark.parametrize(
    "program",
    [
        host(LOOP.replace("dp", "tp"), HEADER.replace("4@dp", "4@tp")),  # There is only one channel.
        host(LOOP, HEADER.replace("tp=2", "tp=1")),  # One of the channels has a single rank.
        host(LOOP, HEADER.replace("loop[2]", "loop[1]")),  # There is only one stream.
        host(LOOP.replace("loop[%i]", "loop[%i / 2]")),
        host("all_reduce sum %x -> %y on tp\nall_reduce sum %v -> %z on dp"),
        host("fork loop\nstream loop[0] {\nall_reduce sum %x -> %y on tp\n}\njoin loop\nall_reduce sum %v -> %z on dp"),
        host("all_reduce sum %v -> %z on dp\nfork loop\nstream loop[0] {\nall_reduce sum %x -> %y on tp\n}\njoin loop"),
        host(  # An event of the program already orders the communications.
            "fork loop\nstream loop[0] {\nall_reduce sum %x -> %y on tp\nrecord done[0]\n}\n"
            "stream loop[1] {\nwait done[0]\nall_reduce sum %v -> %z on dp\n}\njoin loop",
            HEADER + " events(done[1])",
        ),
    ],
)
def test_ordered_communications_are_not_changed(program: HostProgram) -> None:
    check(program)
    assert serialize_channels(program, Options()) is program


def test_names_that_are_already_used() -> None:
    program = in_turn(host(LOOP.replace("loop", "channels_idle"), HEADER.replace("loop", "channels_idle")))
    assert [(events.name, events.count) for events in program.events] == [("channels_idle_2", 1)]


def test_a_communication_only_in_the_branch_for_uneven_sizes() -> None:
    body = """\
  fork loop
  stream loop[0] {
    if M % 2 == 0 {
      copy %x -> %y
    } else {
      all_reduce sum %x -> %y on tp
    }
  }
  stream loop[1] {
    all_reduce sum %v -> %z on dp
  }
  join loop"""
    header = HEADER.replace("4@dp", "M@dp") + " uneven(M)"
    assert (
        ordered(host(body, header))
        == """\
  fork loop
  record channels_idle[0]
  stream loop[0] {
    if M % 2 == 0 {
      copy %x -> %y
    } else {
      wait channels_idle[0]
      all_reduce sum %x -> %y on tp
      record channels_idle[0]
    }
  }
  stream loop[1] {
    wait channels_idle[0]
    all_reduce sum %v -> %z on dp
  }
  join loop
"""
    )


def test_no_wait_before_the_first_and_no_record_after_the_last_communication() -> None:
    body = """\
  fork loop
  stream loop[0] {
    all_reduce sum %x -> %y on tp
  }
  stream loop[1] {
    all_reduce sum %v -> %z on dp
  }
  join loop"""
    assert (
        ordered(host(body))
        == """\
  fork loop
  stream loop[0] {
    all_reduce sum %x -> %y on tp
    record channels_idle[0]
  }
  stream loop[1] {
    wait channels_idle[0]
    all_reduce sum %v -> %z on dp
  }
  join loop
"""
    )


def test_nested_loops() -> None:
    body = LOOP.replace("  for %i", "  for %j in 0..2 {\n  for %i").replace("\n  join", "\n  }\n  join")
    text = ordered(host(body))
    assert text.index("record channels_idle[0]") < text.index("for %j")


# --- communications issued one iteration early ------------------------------------------------------------------------

STEPS = """\
  %g = allocate f32[2, 2, N]
  %h = allocate f32[2, 2, N]
  fork loop
  for %i in 0..2 {
    %p = (rank.dp + %i) % 2
    stream loop[%i] {
      %x_i = chunk %x[0: %p of 2]
      %g_i = select %g[0: %p]
      all_gather %x_i -> %g_i on dp
      %h_i = select %h[0: %p]
      launch @negative_h %g_i -> %h_i
      %y_i = select %y[0: %p]
      all_reduce sum %h_i -> %y_i on tp
    }
  }
  join loop"""
STEPS_HEADER = "(%x: f32[4@dp, N]) -> (%y: f32[2, 2, N]) mesh(dp=2, tp=2) streams(loop[2])"
NEG = "kernel @negative_h(%a: f32[2, N]) {\n  %b: f32[2, N] = negative(%a)\n}\n"


def steps(body: str, header: str = STEPS_HEADER) -> HostProgram:
    return host_text.parse(f"{NEG}host @f{header} {{\n{body}\n}}\n")


def test_the_first_communication_of_an_iteration_is_issued_early() -> None:
    result = in_turn(steps(STEPS))
    verify_host(result)
    check(result)
    assert HostProgram.parse(str(result)) == result
    assert serialize_channels(result, Options()) is result
    assert (
        str(result).partition("fork loop\n")[2]
        == """\
  %p_first = rank.dp % 2
  stream loop[0] {
    %x_first = chunk %x[0: %p_first of 2]
    %g_first = select %g[0: %p_first]
    all_gather %x_first -> %g_first on dp
    record channels_idle[0]
  }
  for %i in 0..2 {
    if %i < 1 {
      %p_next = (rank.dp + (%i + 1)) % 2
      stream loop[%i + 1] {
        %x_next = chunk %x[0: %p_next of 2]
        %g_next = select %g[0: %p_next]
        wait channels_idle[0]
        all_gather %x_next -> %g_next on dp
        record channels_idle[0]
      }
    }
    %p = (rank.dp + %i) % 2
    stream loop[%i] {
      %g_i = select %g[0: %p]
      %h_i = select %h[0: %p]
      launch @negative_h %g_i -> %h_i
      %y_i = select %y[0: %p]
      wait channels_idle[0]
      all_reduce sum %h_i -> %y_i on tp
      record channels_idle[0]
    }
  }
  join loop
}
"""
    )


def known_of_step_before(program: HostProgram, first: type[tree.Instruction], last: type[tree.Instruction]) -> tuple[set[bool], set[bool]]:
    """Two sets of answers, over all ranks and all iterations except the first. Is `last` of the previous iteration ordered before `first`?
    Is the launch of the previous iteration ordered before `first`?"""
    instances = instantiate(program, minimal_sizes(program))
    found: tuple[set[bool], set[bool]] = (set(), set())
    done: dict[tuple[int, type[tree.Instruction]], list[Task]] = {}
    for task, clock in run(order(instances, match_communications(instances))):
        kind, rank = type(task.operation.instruction), task.operation.rank
        done.setdefault((rank, kind), []).append(task)
        if kind is first and (number := len(done[rank, kind])) > 1:
            for before, answers in zip((last, ir.Launch), found, strict=True):
                tasks = done.get((rank, before), [])
                answers.add(len(tasks) > number - 2 and clock[tasks[number - 2].stream_id] >= tasks[number - 2].number)
    return found


def test_the_first_communication_does_not_wait_for_computation() -> None:
    assert known_of_step_before(in_turn(steps(STEPS)), ir.AllGather, ir.AllReduce) == ({False}, {False})


@pytest.mark.parametrize(
    ("body", "header"),
    [
        (STEPS.replace("launch @negative_h", "copy"), STEPS_HEADER),  # No computation is between the communications.
        (STEPS.replace("loop[%i]", "loop[%i + 1]"), STEPS_HEADER),
        (STEPS.replace("      launch", "      record done[%i]\n      wait done[%i]\n      launch"), STEPS_HEADER + " events(done[2])"),
        (STEPS.replace("0..2", "0..N / 4"), STEPS_HEADER),  # The number of iterations is unknown.
        (STEPS.replace("      launch", "      %t = allocate f32[2, N]\n      launch").replace("%g_i -> %h_i", "%g_i -> %t"), STEPS_HEADER),
    ],
)
def test_loops_that_the_pass_does_not_change(body: str, header: str) -> None:
    text = str(in_turn(steps(body, header)))
    assert "for %i in" in text
    assert text.count("wait channels_idle[0]") == 1


TWICE = STEPS.replace("all_reduce sum %h_i -> %y_i on tp", "all_reduce sum %h_i -> %y_i on tp\n      all_gather %x_i -> %g_i on dp")


def test_a_channel_keeps_its_order() -> None:
    """An iteration has two collectives on one channel. The order of these two collectives must not change."""
    assert "stream loop[0]" not in str(in_turn(steps(TWICE)))  # Nothing is issued before the loop.


PING_PONG = """\
  on mesh(x=2 of ranks 0, 1) {
    %g = allocate f32[4, N]
    %h = allocate f32[4, N]
    %s = allocate f32[4, N]
  }
  on mesh(x=2 of ranks 2, 3) {
    %back = allocate f32[4, N]
  }
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      on mesh(x=2 of ranks 0, 1) {
        %g_i = chunk %g[0: %i of 2]
        recv %g_i from rank + 2 on x
        %h_i = chunk %h[0: %i of 2]
        launch @negative_h %g_i -> %h_i
        %s_i = chunk %s[0: %i of 2]
        all_reduce sum %h_i -> %s_i on x_of_ranks_0_1
        send %s_i to rank + 2 on x
      }
      on mesh(x=2 of ranks 2, 3) {
        %v_i = chunk %v[0: %i of 2]
        %back_i = chunk %back[0: %i of 2]
        send %v_i to rank - 2 on x
        recv %back_i from rank - 2 on x
        %y_i = chunk %y[0: %i of 2]
        all_reduce sum %back_i -> %y_i on x_of_ranks_2_3
      }
    }
  }
  join loop"""
PING_PONG_HEADER = "(%v: f32[4, N] on mesh(x=2 of ranks 2, 3)) -> (%y: f32[4, N] on mesh(x=2 of ranks 2, 3)) mesh(x=4) streams(loop[2])"


def test_ranks_that_depend_on_each_other_keep_program_order() -> None:
    """A rank computes an answer from received data. The peer sends more data only after it receives the answer. So the next recv cannot
    precede the send of the answer."""
    result = in_turn(steps(PING_PONG, PING_PONG_HEADER))
    assert "stream loop[0]" not in str(result)  # Nothing is issued before the loop.
    assert known_of_step_before(result, ir.Recv, ir.AllReduce)[0] == {True}
    check(result)


def test_recvs_of_a_pipeline_are_issued_early() -> None:
    there = PING_PONG.replace("        send %s_i to rank + 2 on x\n", "").replace("        recv %back_i from rank - 2 on x\n", "")
    there = there.replace("sum %back_i", "sum %v_i")
    result = in_turn(steps(there, PING_PONG_HEADER))
    check(result)
    assert known_of_step_before(result, ir.Recv, ir.AllReduce) == ({False}, {False})
    assert "if %i < 1" in str(result)


def test_work_is_unordered_with_all_calls_that_it_may_overlap() -> None:
    types = {"h": hw.f32["M", "K"], "w": hw.f32["K", "K@tp"], "v": hw.f32["K@tp", "K"]}

    @hw.block(**types)
    def layer(h, w, v):  # type: ignore[no-untyped-def]
        return hw.reshard(hw.matmul(hw.relu(hw.matmul(h, w)), v), "M", "K")

    weights = {f"{name}_{i}": types[name] for i in range(6) for name in "wv"}

    @hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.f32["M", "K"], k=hw.f32["K", "K"], g=hw.f32["K@dp", "K"], **weights)
    def model(x, k, g, **weights):  # type: ignore[no-untyped-def]
        weights = {name: hw.relu(weight) for name, weight in weights.items()}  # Otherwise, the calls would become a repeat.
        whole = hw.reshard(g, "K", "K")  # The gather is asynchronous until its use.
        h = hw.matmul(x, k)
        for i in range(3):
            h = layer(h, weights[f"w_{i}"], weights[f"v_{i}"])
        h = h + hw.matmul(h, whole)
        for i in range(3, 6):
            h = layer(h, weights[f"w_{i}"], weights[f"v_{i}"])
        return h

    stages = {}
    options = Options(sizes={"M": 8192, "K": 8192}, transport="two_sided")
    lower(model, options, lambda name, stage: stages.setdefault(name, stage))
    program = stages["sink_waits"]
    (join,) = (i for i in program.body if isinstance(i, ir.Join))
    in_flight = replace(program, body=(*(i for i in program.body if i != join), join))  # The gather overlaps with all calls.

    def found(one: HostProgram) -> set[tree.Instruction]:
        pairs = channel_order.unordered(instantiate(one, minimal_sizes(program)))
        return {operation.instruction for pair in pairs for operation in pair}.intersection(tree.walk(program.body))

    assert found(program) == set()
    assert {type(i) for i in found(in_flight)} == {ir.AllGather}
