"""Programs with a new transport, and with two transports. The transport object defines all behaviour that depends on a transport."""

from __future__ import annotations

from dataclasses import replace

import host_text
import pytest
from fusions_from_files import one_sided_fusions

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.serialize_channels import serialize_channels
from hostweave.pipeline import lower
from hostweave.transports.transport import find_transport
from hostweave.types.machine import H200
from hostweave.types.tensor import bf16

MAIL = replace(
    find_transport("two_sided"), name="mail", carries=frozenset({"send", "recv"}), holds_multiprocessors=False, is_rendezvous=False
)


def by_mail(program: HostProgram, *names: str) -> HostProgram:
    """Returns the program with a new transport, `mail`, on the named channels."""
    changed = [replace(channel, transport=MAIL) if channel.name in names else channel for channel in program.channels]
    return replace(program, channels=tuple(changed))


HEAD = "host @t(%x: f32[4@x, N]) -> (%y: f32[4@x, N]) mesh(x=2) streams(loop[2]) {\n"


def test_a_transport_supports_its_declared_calls() -> None:
    program = host_text.parse(HEAD + "all_reduce sum %x -> %y on x\n}\n")
    verify_host(program)
    with pytest.raises(ProgramError, match=r"all_reduce sum %x -> %y on x: channel x is mail, which supports only recv, send$"):
        verify_host(by_mail(program, "x"))


@pytest.mark.parametrize("name", ["peer", "one_sided"])
def test_no_collective_uses_a_communicator_with_windows(name: str) -> None:
    """In NCCL 2.28 to 2.30.6, a collective on registered windows may read its input too early: before a preceding kernel with a
    programmatic launch ends."""
    assert not find_transport(name).carries & {"collective", "send", "recv"}
    program = HEAD.replace("mesh(x=2)", f"mesh(x=2) channels(x: x {name})") + "all_reduce sum %x -> %y on x\n}\n"
    with pytest.raises(ProgramError, match=f"channel x is {name}, which supports only get, signal, wait_signal"):
        verify_host(host_text.parse(program))


def test_a_channel_uses_the_first_transport_that_supports_its_calls() -> None:
    """If the machine does not support the preferred transport, the next one is used."""
    stated, sizes = one_sided_fusions(ranks=2)["ag_matmul_put"], {"M": 8192, "K": 8192, "N": 4096}
    chosen = hw.fusion(mesh=hw.Mesh(x=2), x=bf16["M@x", "K"], w=bf16["K", "N@x"])(lambda x, w: hw.matmul(x, w))
    for machine, by in ((H200, "peer"), (H200.without("peer", "here"), "one_sided")):
        for fusion in (stated, chosen):
            host = lower(fusion, Options(sizes=sizes if fusion is chosen else {}, machine=machine))
            assert {channel.transport.name for channel in host.channels} == {by}
            check(host)
    host = lower(chosen, Options(sizes=sizes, machine=replace(H200, no_peers="here")))
    assert {channel.transport.name for channel in host.channels} == {"two_sided"}


def test_a_group_has_one_transport() -> None:
    head = "host @t(%x: f32[4, N]) -> (%y: f32[4, N]) mesh(x=2, z=2) {\n"
    program = host_text.parse(head + "group {\nsend %x to 1 - rank.x on x\nrecv %y from 1 - rank.z on z\n}\n}\n")
    verify_host(program)
    with pytest.raises(ProgramError, match=r"group: a group must have one transport, not mail and two_sided: use a group per transport$"):
        verify_host(by_mail(program, "z"))


def test_a_send_without_buffering_waits_for_its_recv() -> None:
    program = host_text.parse(HEAD + "send %x to 1 - rank.x on x\nrecv %y from 1 - rank.x on x\n}\n")
    with pytest.raises(ProgramError, match="none of them can proceed"):
        check(program)
    check(by_mail(program, "x"))


def test_channels_are_ordered_if_both_occupy_multiprocessors() -> None:
    head = "host @t(%x: f32[4, N]) -> (%y: f32[4, N], %z: f32[4, N]) mesh(x=2, dp=2) streams(loop[2]) {\n"
    program = host_text.parse(
        f"""{head}
  fork loop
  stream loop[0] {{
    group {{
      send %x to 1 - rank.x on x
      recv %y from 1 - rank.x on x
    }}
  }}
  stream loop[1] {{
    group {{
      send %x to 1 - rank.dp on dp
      recv %z from 1 - rank.dp on dp
    }}
  }}
  join loop
}}
"""
    )
    with pytest.raises(ProgramError, match="are over different channels, and nothing orders them"):
        check(program)
    assert "wait channels_idle[0]" in str(serialize_channels(program, Options()))
    mailed = by_mail(program, "dp")
    check(mailed)
    assert serialize_channels(mailed, Options()) is mailed
