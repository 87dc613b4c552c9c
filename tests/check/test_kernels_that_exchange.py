"""Collectives inside kernels: errors of the verifier and the check, and a schedule that justifies an error of the check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.check.check import check
from hostweave.host_ir import ir
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.runtime.cpu import seeded

KERNEL = """
kernel @add(%p: f32[4], %x: f32[4]) {
  %s: f32[4] = all_reduce(%p, axes=(tp), reduction=sum)
  %y: f32[4] = add(%s, %x)
}
"""
BODY = "launch_all_reduce @add %p, %x -> %y on tp"


def program(kernel: str = KERNEL, body: str = BODY, more: str = "", outputs: str = "%y: f32[8@tp]") -> HostProgram:
    head = f"host @sums(%p: f32[8@tp], %x: f32[8@tp]) -> ({outputs}) mesh(tp=2) channels(tp: tp two_sided){more}"
    return HostProgram.parse(f"{kernel}{head} {{\n{body}\n}}")


def test_the_verifier() -> None:
    verify_host(program())
    for wrong, message in (
        (
            program(body="launch @add %p, %x -> %y  all_reduce sum %y -> %y on tp"),
            "@add contains the collective all_reduce: use launch_all_reduce",
        ),
        (program(KERNEL.replace("(%s, %x)", "(%s, %p)")), "and no other op may read"),
        (program(KERNEL.replace("all_reduce(%p", "all_reduce(%x")), "must begin with the all_reduce of %p"),
        (
            program(KERNEL.replace("reduction=sum", "reduction=max")),
            "has a max of f32, but kernels only sum f16, bf16, f32: use all_reduce",
        ),
        (program(KERNEL.replace("axes=(tp)", "axes=(dp)")), "is along dp: use a channel along these axes, of at most 8 ranks"),
        (program(body=f"group {{ {BODY} }}"), "a group may contain only communications, no kernels: move the instruction out"),
        (program(body=f"if rank == 0 {{ {BODY} }}"), "a collective is not allowed under `if rank == 0`"),
        (program(body=BODY.replace("%p, %x", "%p")), "@add takes 2 buffers, not 1"),
    ):
        with pytest.raises(ProgramError, match=message.replace("(", r"\(").replace("[", r"\[")):
            verify_host(wrong)


OF_BLOCKS = {
    "reduce_scatter": """
kernel @k(%p: f32[4], %x: f32[4]) {
  %s: f32[4] = reduce_scatter(%p, dim=0, axes=(tp), reduction=sum)
  %y: f32[4] = add(%s, %x)
}
host @blocks(%p: f32[8], %x: f32[8@tp]) -> (%y: f32[8@tp]) mesh(tp=2) channels(tp: tp two_sided) streams(a[1]) {
  launch_reduce_scatter @k %p, %x -> %y on tp
}""",
    "all_gather": """
kernel @k(%p: f32[8], %x: f32[8]) {
  %s: f32[8] = all_gather(%p, dim=0, axes=(tp))
  %y: f32[8] = add(%s, %x)
}
host @blocks(%p: f32[8@tp], %x: f32[8]) -> (%y: f32[8]) mesh(tp=2) channels(tp: tp two_sided) streams(a[1]) {
  launch_all_gather @k %p, %x -> %y on tp
}""",
}


@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_the_verifier_of_blocks(kind: str) -> None:
    text = OF_BLOCKS[kind]
    verify_host(HostProgram.parse(text))
    for right, wrong, message in (
        ("@blocks(%p: f32[8", "@blocks(%p: f32[24", "give a rank equal blocks of the same dtype"),
        ("(%p, dim", "(%x, dim", f"must begin with the {kind} of %p"),
        (f"launch_{kind}", "launch_all_reduce", "must begin with the all_reduce of %p"),
        ("axes=(tp)", "axes=(dp)", "is along dp: use a channel along these axes"),
    ):
        with pytest.raises(ProgramError, match=message):
            verify_host(HostProgram.parse(text.replace(right, wrong)))
    if kind == "reduce_scatter":
        for right, wrong in (("reduction=sum", "reduction=max"), ("f32", "i32")):
            with pytest.raises(ProgramError, match="but kernels only sum f16, bf16, f32: use reduce_scatter"):
                verify_host(HostProgram.parse(text.replace(right, wrong)))


def test_the_verifier_of_sent_blocks() -> None:
    """Only instructions that enqueue no work may separate the launch that sends a result from the reduce-scatter of this result."""
    head, body = OF_BLOCKS["reduce_scatter"].rstrip("}").rsplit("{", 1)
    head = f"kernel @half(%p: f32[8]) {{ %h: f32[8] = multiply(%p, 0.5) }} {head}"
    sent = f"%h = allocate f32[8]  launch @half %p -> %h sent on tp  %z = allocate f32[4]  {body.replace('%p', '%h')}"
    check(HostProgram.parse(f"{head}{{ {sent} }}"))
    for right, wrong in (
        ("sent on tp", "sent on other"),
        ("%h, %x", "%p, %x"),
        ("sent on tp", "sent on tp  launch @half %p -> %h"),
        ("%z = allocate f32[4]", "%z = allocate f32[8]  copy %h -> %z"),
        ("launch_reduce_scatter", "launch_all_reduce"),
    ):
        assert right in sent
        with pytest.raises(ProgramError, match=r"a launch_reduce_scatter on .* of the result of a generated kernel must follow"):
            verify_host(HostProgram.parse(f"{head}{{ {sent.replace(right, wrong)} }}"))


@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_mutations_of_blocks(kind: str) -> None:
    """The check detects a missing launch and two unordered exchanges. It also detects a result in the memory of the sent block, and a
    concurrent write to this block."""
    head, body = OF_BLOCKS[kind].rstrip("}").rsplit("{", 1)
    sent, got = (8, 4) if kind == "reduce_scatter" else (4, 8)
    copied = f"%t = allocate f32[{sent}]  copy %p -> %t"
    check(HostProgram.parse(f"{head}{{ {copied}  {body.replace('%p', '%t')} }}"))
    over = f"%a = allocate f32[8]  %t = slice %a[0: {sent} from 0]  %u = slice %a[0: {got} from 0]  copy %p -> %t"
    for wrong, message in (
        ("", "nothing writes bytes"),
        (f"{over}  {body.replace('%p', '%t').replace('%y', '%u')}  copy %u -> %y", "writes %u over the bytes of %t that it reads"),
        (f"%t = allocate f32[{sent}]  fork a  stream a[0] {{ copy %p -> %t }}  {body.replace('%p', '%t')}  join a", "nothing orders them"),
        (
            f"%z = allocate f32[{got}]  fork a  stream a[0] {{ {body} }}  {body.replace('%y', '%z')}  join a",
            "nothing orders them on the rank",
        ),
    ):
        with pytest.raises(ProgramError, match=message):
            check(HostProgram.parse(f"{head}{{ {wrong} }}"))


STREAMS = " streams(a[1], b[1])"
TWO = """
fork a  fork b
stream a[0] { launch_all_reduce @add %p, %x -> %y on tp }
stream b[0] { SECOND }
join a  join b
"""
KERNELS = {
    "another kernel": "launch_all_reduce @add %p, %x -> %z on tp",
    "a collective of the library": "all_reduce sum %p -> %z on tp",
}


@pytest.mark.parametrize("second", KERNELS)
def test_kernels_with_exchanges_are_ordered(second: str) -> None:
    """Exchanges in kernels must be ordered with other exchanges, and with NCCL's collectives on the same channel. NCCL orders only its own
    collectives."""
    apart = program(body=TWO.replace("SECOND", KERNELS[second]), more=STREAMS, outputs="%y: f32[8@tp], %z: f32[8@tp]")
    with pytest.raises(
        ProgramError,
        match=r"on one channel, but a kernel does one of them \(the library orders only its own communications\), and nothing orders",
    ):
        check(apart)
    in_turn = [i for i in apart.body if not isinstance(i, ir.Fork) or i.stream == "a"]
    at = next(number for number, i in enumerate(in_turn) if isinstance(i, ir.OnStream) and i.stream == "b")
    check(replace(apart, body=(*in_turn[:at], ir.Join("a"), ir.Fork("b"), *in_turn[at:])))


def test_a_schedule_shows_two_kernels_at_once() -> None:
    apart = program(body=TWO.replace("SECOND", KERNELS["another kernel"]), more=STREAMS, outputs="%y: f32[8@tp], %z: f32[8@tp]")
    built = hw.compile(apart, options=Options(check=False))
    p, x = np.arange(8, dtype=np.float32), np.ones(8, np.float32)

    def fails(seed: int) -> bool:
        with seeded(seed):
            try:
                return not all(np.array_equal(y, np.tile(p[:4] + p[4:], 2) + 1) for y in built.run(p, x))
            except ExecutionError:
                return True

    assert any(fails(seed) for seed in range(20))


def test_mutations() -> None:
    """The check detects a missing launch, a result that overlaps its term, and a concurrent write to the term."""
    host = program()
    check(host)
    with pytest.raises(ProgramError, match="nothing writes bytes 0 to 16 of the output %y"):
        check(replace(host, body=()))
    text = "%t = allocate f32[4]  copy %p -> %t  %u = reshape %t to [4]  launch_all_reduce @add %t, %x -> %u on tp  copy %u -> %y"
    with pytest.raises(ProgramError, match="writes %u over the bytes of %t that it reads: give the result separate memory"):
        check(program(body=text))
    text = f"%t = allocate f32[4]  fork a  stream a[0] {{ copy %p -> %t }}  {BODY.replace('%p', '%t')}  join a"
    with pytest.raises(ProgramError, match=r"reads %t while .* writes it: nothing orders them; add join a between them"):
        check(program(body=text, more=" streams(a[1])"))
