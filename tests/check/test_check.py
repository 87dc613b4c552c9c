"""The static check reports faults, and accepts correct programs."""

from __future__ import annotations

import host_text
import pytest
from lowered_fusions import NAMES, RANKS, program

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram

HEAD = "host @t(%x: f32[4@x, N]) -> (%y: f32[4@x, N]) mesh(x=2) streams(loop[2]) events(done[2]) {\n"
OTHER = "1 - rank.x on x"  # the peer, if there are two ranks


def parse(body: str) -> HostProgram:
    return host_text.parse(HEAD + body + "\n}\n")


RULES = {
    # --- order of accesses on one rank
    "a read and a write on two streams": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\n}\nstream loop[1] {\ncopy %b -> %y\n}\njoin loop",
        "text:8: rank 0, loop[1]: copy %b -> %y reads %b while rank 0, loop[0]: copy %x -> %b writes it: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    "two writes through different views": (
        "fork loop\nstream loop[0] {\n%y_0 = select %y[0: 0]\nfill %y_0 with 0.0\n}\nstream loop[1] {\ncopy %x -> %y\n}\njoin loop",
        "text:8: rank 0, loop[1]: copy %x -> %y writes %y while rank 0, loop[0]: fill %y_0 with 0.0 writes %y_0, the same bytes: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    "an update after a read": (
        "%b = allocate f32[2, 2]\nfill %b with 1.0\n%z = allocate f32[2, N]\nfill %z with 0.0\nfork loop\n"
        "stream loop[0] {\ncopy %z -> %y\n}\nstream loop[1] {\nmatmul %b, %x accumulate %z -> %z\n}\njoin loop",
        "text:11: rank 0, loop[1]: matmul %b, %x accumulate %z -> %z writes %z while rank 0, loop[0]: copy %z -> %y reads it: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    "a read on the caller's stream before the join": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\n}\ncopy %b -> %y\njoin loop",
        "text:7: rank 0, the caller's stream: copy %b -> %y reads %b while rank 0, loop[0]: copy %x -> %b writes it: "
        "nothing orders them; add join loop between them",
    ),
    "a write on the caller's stream after the fork": (
        "%b = allocate f32[2, N]\nfork loop\ncopy %x -> %b\nstream loop[0] {\ncopy %b -> %y\n}\njoin loop",
        "text:6: rank 0, loop[0]: copy %b -> %y reads %b while rank 0, the caller's stream: copy %x -> %b writes it: "
        "nothing orders them; add fork loop between them",
    ),
    "a record before the write that it must cover": (
        "fork loop\nstream loop[0] {\nrecord done[0]\nfill %y with 0.0\n}\nstream loop[1] {\nwait done[0]\ncopy %x -> %y\n}\njoin loop",
        "text:9: rank 0, loop[1]: copy %x -> %y writes %y while rank 0, loop[0]: fill %y with 0.0 writes it: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    "one communicator does not order streams": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\nall_reduce sum %x -> %b on x\n}\n"
        "stream loop[1] {\nall_reduce sum %b -> %y on x\n}\njoin loop",
        "text:8: rank 0, loop[1]: all_reduce sum %b -> %y on x reads %b while rank 0, loop[0]: all_reduce sum %x -> %b on x writes it: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    # --- before and after the call
    "a read of an input on a stream that is not forked": (
        "stream loop[1] {\ncopy %x -> %y\n}\njoin loop",
        "text:3: rank 0, loop[1]: copy %x -> %y reads %x while the caller may still write it: "
        "nothing orders them; add fork loop between them",
    ),
    "a write of an output on a stream that is not forked": (
        "stream loop[0] {\nfill %y with 0.0\n}\njoin loop",
        "text:3: rank 0, loop[0]: fill %y with 0.0 writes %y while the caller may still read it: "
        "nothing orders them; add fork loop between them",
    ),
    "a write of a temporary on a stream that is not forked": (
        "%b = allocate f32[2, N]\nstream loop[0] {\nfill %b with 0.0\n}\njoin loop\ncopy %x -> %y",
        "text:4: rank 0, loop[0]: fill %b with 0.0 writes %b while rank 0, the caller's stream: %b = allocate f32[2, N] allocates it: "
        "nothing orders them; add fork loop between them",
    ),
    "a read of an input on a stream that is not joined": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\n}\nfill %y with 0.0",
        "text:5: rank 0, loop[0]: copy %x -> %b reads %x, and the caller may write it next: "
        "nothing orders the caller's stream after this operation; add join loop",
    ),
    "a write of an output on a stream that is not joined": (
        "fork loop\nstream loop[0] {\nfill %y with 0.0\n}",
        "text:4: rank 0, loop[0]: fill %y with 0.0 writes %y, and the caller reads it next: "
        "nothing orders the caller's stream after this operation; add join loop",
    ),
    "a write of a temporary on a stream that is not joined": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\nfill %b with 0.0\n}\ncopy %x -> %y",
        "text:5: rank 0, loop[0]: fill %b with 0.0 writes %b, and the next call uses it: "
        "nothing orders the caller's stream after this operation; add join loop",
    ),
    # --- one operation
    "a group that sends what it receives": (
        f"group {{\nrecv %y from {OTHER}\nsend %y to {OTHER}\n}}",
        "text:3: rank 0, the caller's stream: recv %y from 1 - rank.x on x writes %y while, in the same group, "
        "rank 0, the caller's stream: send %y to 1 - rank.x on x reads the same bytes: put the two into separate groups",
    ),
    "a matmul onto its operand": (
        "%b = allocate f32[2, 2]\nfill %b with 1.0\ncopy %x -> %y\nmatmul %b, %y -> %y",
        "text:5: rank 0, the caller's stream: matmul %b, %y -> %y writes %y over the bytes of %y that it reads: give the result separate "
        "memory",
    ),
    # --- memory
    "freed while in use": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\ncopy %b -> %y\n}\ndeallocate %b\njoin loop",
        "text:8: rank 0, the caller's stream: deallocate %b frees %b while rank 0, loop[0]: copy %x -> %b writes it: "
        "nothing orders them; add join loop between them",
    ),
    "freed memory that another stream reuses without a fork": (
        "%a = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %a\ncopy %a -> %y\n}\njoin loop\ndeallocate %a\n"
        "stream loop[1] {\n%b = allocate f32[2, N]\nfill %b with 0.0\n}\njoin loop",
        "text:11: rank 0, loop[1]: %b = allocate f32[2, N] may get bytes of %a, which rank 0, the caller's stream: deallocate %a frees: "
        "nothing orders them; add fork loop between them",
    ),
    "memory that the caller's stream allocates after the fork": (
        "fork loop\nstream loop[0] {\n%a = allocate f32[2, N]\ncopy %x -> %a\ncopy %a -> %y\n}\njoin loop\nfork loop\n"
        "%b = allocate f32[2, N]\nstream loop[1] {\nfill %b with 0.0\n}\njoin loop",
        "text:12: rank 0, loop[1]: fill %b with 0.0 writes %b while rank 0, the caller's stream: %b = allocate f32[2, N] allocates it: "
        "nothing orders them; add fork loop between them",
    ),
    "memory of a stream that the caller's stream reuses in the next iteration": (
        "fork loop\nfor %i in 0..2 {\n%a = allocate f32[2, N]\ncopy %x -> %a\ndeallocate %a\nfork loop\nstream loop[0] {\n"
        "%b = allocate f32[2, N]\ncopy %x -> %b\ncopy %b -> %y\n}\n}\njoin loop",
        "text:4: rank 0, the caller's stream, %i = 1: %a = allocate f32[2, N] may get bytes of %b, which rank 0, loop[0], %i = 0: "
        "deallocate %b frees: nothing orders them; add join loop between them",
    ),
    "memory of a stream that another stream reuses in the next iteration": (
        "for %i in 0..2 {\nfork loop\nstream loop[0] {\n%a = allocate f32[2, N]\ncopy %x -> %a\n}\njoin loop\nfork loop\n"
        "stream loop[%i + 1] {\n%b = allocate f32[2, N]\ncopy %x -> %b\n}\n}\ncopy %x -> %y\njoin loop",
        "text:5: rank 0, loop[0], %i = 1: %a = allocate f32[2, N] may get bytes of %b, which rank 0, loop[1], %i = 0: "
        "deallocate %b frees: nothing orders them; add record/wait or put both on one stream",
    ),
    "memory of a stream, after a free of other memory on the stream": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\n%a = allocate f32[2, N]\ncopy %x -> %a\ndeallocate %a\nrecord done[0]\n"
        "copy %x -> %b\ncopy %b -> %y\ndeallocate %b\n}\njoin loop\n"
        "stream loop[1] {\nwait done[0]\n%c = allocate f32[2, N]\nfill %c with 0.0\n}\njoin loop",
        "text:16: rank 0, loop[1]: %c = allocate f32[2, N] may get bytes of %b, which rank 0, loop[0]: deallocate %b frees: "
        "nothing orders them; add record/wait or put both on one stream",
    ),
    "memory of a stream for which the first join does not wait": (
        "fork loop\nstream loop[1] {\n%a = allocate f32[2, N]\ncopy %x -> %a\ncopy %a -> %y\n}\njoin loop first 1\n"
        "%b = allocate f32[2, N]\nfill %b with 0.0\njoin loop",
        "text:9: rank 0, the caller's stream: %b = allocate f32[2, N] may get bytes of %a, which rank 0, loop[1]: deallocate %a frees: "
        "nothing orders them; add join loop between them",
    ),
    "memory of a stream after an earlier branch freed memory of the same name": (
        "fork loop\nstream loop[0] {\nif rank == 0 {\n%a = allocate f32[2, N]\ndeallocate %a\n}\n%a = allocate f32[2, N]\n"
        "copy %x -> %a\ncopy %a -> %y\nrecord done[0]\n}\nwait done[0]",
        "text:8: rank 0, loop[0]: deallocate %a frees %a, and the next call uses it: "
        "nothing orders the caller's stream after this operation; add join loop",
    ),
    "memory of a stream that a branch reuses in the next iteration": (
        "for %i in 0..2 {\nif %i == 1 {\n%b = allocate f32[2, N]\ncopy %x -> %b\n}\nfork loop\nstream loop[0] {\n"
        "%a = allocate f32[2, N]\ncopy %x -> %a\n}\n}\njoin loop\ncopy %x -> %y",
        "text:4: rank 0, the caller's stream, %i = 1: %b = allocate f32[2, N] may get bytes of %a, which rank 0, loop[0], %i = 0: "
        "deallocate %a frees: nothing orders them; add join loop between them",
    ),
    "memory of a stream that frees other memory in the next iteration": (
        "for %i in 0..2 {\nfork loop\nstream loop[0] {\n%a = allocate f32[2, N]\ncopy %x -> %a\n}\n%b = allocate f32[2, N]\n"
        "copy %x -> %b\ndeallocate %b\nfork loop\nstream loop[0] {\n%c = allocate f32[2, N]\ncopy %x -> %c\n}\n}\njoin loop\n"
        "copy %x -> %y",
        "text:8: rank 0, the caller's stream, %i = 1: %b = allocate f32[2, N] may get bytes of %c, which rank 0, loop[0], %i = 0: "
        "deallocate %c frees: nothing orders them; add join loop between them",
    ),
    "memory of a stream after a join that one rank omits": (
        "fork loop\nstream loop[0] {\n%a = allocate f32[2, N]\ncopy %x -> %a\n}\nif rank == 0 {\njoin loop\n}\n"
        "%b = allocate f32[2, N]\ncopy %x -> %b\njoin loop\ncopy %x -> %y",
        "text:10: rank 1, the caller's stream: %b = allocate f32[2, N] may get bytes of %a, which rank 1, loop[0]: deallocate %a frees: "
        "nothing orders them; add join loop between them",
    ),
    "memory of a stream after a join in a loop without iterations": (
        "fork loop\nstream loop[0] {\n%a = allocate f32[2, N]\ncopy %x -> %a\n}\nfor %i in 0..0 {\njoin loop\n}\n"
        "%b = allocate f32[2, N]\ncopy %x -> %b\njoin loop\ncopy %x -> %y",
        "text:10: rank 0, the caller's stream: %b = allocate f32[2, N] may get bytes of %a, which rank 0, loop[0]: deallocate %a frees: "
        "nothing orders them; add join loop between them",
    ),
    "memory that the previous iteration deallocated": (
        "%b = allocate f32[2, N]\nfor %i in 0..2 {\ncopy %x -> %b\ndeallocate %b\n}\ncopy %x -> %y",
        "text:4: rank 0, the caller's stream, %i = 1: copy %x -> %b writes %b after its deallocate: "
        "move the deallocate behind this use, and out of a loop around it",
    ),
    "memory that was never written": (
        "%b = allocate f32[2, N]\ncopy %b -> %y",
        "text:3: rank 0, the caller's stream: copy %b -> %y reads %b before bytes 0 to 32 of %b are written: "
        "write these bytes first, or remove the read",
    ),
    "memory that only the previous iteration wrote": (
        "for %i in 0..2 {\n%b = allocate f32[2, N]\nif %i == 0 {\ncopy %x -> %b\n}\ncopy %b -> %y\n}",
        "text:7: rank 0, the caller's stream, %i = 1: copy %b -> %y reads %b before bytes 0 to 32 of %b are written: "
        "write these bytes first, or remove the read",
    ),
    "an output that is only partly written": (
        "%y_0 = select %y[0: 0]\nfill %y_0 with 0.0",
        "@t: rank 0: nothing writes bytes 16 to 32 of the output %y: write all of every output",
    ),
    # --- matching
    "a send alone": (
        f"send %x to {OTHER}\ncopy %x -> %y",
        "text:2: rank 0, the caller's stream: send %x to 1 - rank.x on x: rank 1 posts no recv for it: add the recv, or drop this send",
    ),
    "a recv alone": (
        f"recv %y from {OTHER}",
        "text:2: rank 0, the caller's stream: recv %y from 1 - rank.x on x: rank 1 posts no send for it: add the send, or drop this recv",
    ),
    "counts of a send and its recv": (
        f"%x_0 = select %x[0: 0]\ngroup {{\nsend %x_0 to {OTHER}\nrecv %y from {OTHER}\n}}",
        "text:4: rank 0, the caller's stream: send %x_0 to 1 - rank.x on x: sends 4 f32, not the 8 f32 of the matching recv, "
        "rank 1, the caller's stream: recv %y from 1 - rank.x on x: make them equal",
    ),
    "dtypes of a send and its recv": (
        f"%b = allocate i32[2, N]\nfill %b with 1.0\ngroup {{\nsend %b to {OTHER}\nrecv %y from {OTHER}\n}}",
        "text:5: rank 0, the caller's stream: send %b to 1 - rank.x on x: sends 8 i32, not the 8 f32 of the matching recv, "
        "rank 1, the caller's stream: recv %y from 1 - rank.x on x: make them equal",
    ),
    "reductions of one collective": (
        "if rank.x == 0 {\nall_reduce sum %x -> %y on x\n} else {\nall_reduce max %x -> %y on x\n}",
        "text:3: rank 0, the caller's stream: all_reduce sum %x -> %y on x: is collective 1 of its process group, "
        "but another rank calls a different one, "
        "rank 1, the caller's stream: all_reduce max %x -> %y on x: "
        "issue the same collectives in the same order, with equal counts, on every rank",
    ),
    "counts of one collective": (
        "%x_0 = select %x[0: 0]\n%y_0 = select %y[0: 0]\ncopy %x -> %y\n"
        "if rank.x == 0 {\nall_reduce sum %x -> %y on x\n} else {\nall_reduce sum %x_0 -> %y_0 on x\n}",
        "text:6: rank 0, the caller's stream: all_reduce sum %x -> %y on x: is collective 1 of its process group, "
        "but another rank calls a different one, "
        "rank 1, the caller's stream: all_reduce sum %x_0 -> %y_0 on x: "
        "issue the same collectives in the same order, with equal counts, on every rank",
    ),
    "order of collectives": (
        "%b = allocate f32[2, N]\nif rank.x == 0 {\nall_reduce sum %x -> %y on x\n}\nbroadcast %x -> %b from 0 on x\n"
        "if rank.x == 1 {\nall_reduce sum %x -> %y on x\n}",
        "text:4: rank 0, the caller's stream: all_reduce sum %x -> %y on x: is collective 1 of its process group, "
        "but another rank calls a different one, "
        "rank 1, the caller's stream: broadcast %x -> %b from 0 on x: "
        "issue the same collectives in the same order, with equal counts, on every rank",
    ),
    "roots of one broadcast": (
        "broadcast %x -> %y from rank.x on x",
        "text:2: rank 0, the caller's stream: broadcast %x -> %y from rank.x on x: is collective 1 of its process group, "
        "but another rank calls a different one, "
        "rank 1, the caller's stream: broadcast %x -> %y from rank.x on x: "
        "issue the same collectives in the same order, with equal counts, on every rank",
    ),
    "a collective that one rank omits": (
        "copy %x -> %y\nif rank.x == 1 {\nall_reduce sum %x -> %y on x\n}",
        "text:4: rank 1, the caller's stream: all_reduce sum %x -> %y on x: is collective 1 of its process group, and rank 0 has only 0: "
        "issue the same collectives in the same order on every rank",
    ),
    "sources of one collective permute": (
        "%b = allocate f32[2, N]\ncopy %x -> %b\nif rank.x == 0 {\ncollective_permute %b -> %y from [1, none] on x\n} else {\n"
        "collective_permute %b -> %y from [none, 0] on x\n}",
        "text:5: rank 0, the caller's stream: collective_permute %b -> %y from [1, none] on x: is collective 1 of its process group, "
        "but another rank calls a different one, "
        "rank 1, the caller's stream: collective_permute %b -> %y from [none, 0] on x: "
        "issue the same collectives in the same order, with equal counts, on every rank",
    ),
    "a read of a result on a rank that is not the root": (
        "%b = allocate f32[2, N]\nreduce sum %x -> %b to 0 on x\ncopy %b -> %y",
        "text:4: rank 1, the caller's stream: copy %b -> %y reads %b before bytes 0 to 32 of %b are written: "
        "write these bytes first, or remove the read",
    ),
    # --- deadlocks
    "a wait before its record": (
        "wait done[1]\ncopy %x -> %y\nrecord done[1]",
        "text:2: rank 0, the caller's stream: wait done[1]: a wait whose record may not have run: "
        "record done[1] before it in the same call",
    ),
    "two ranks that both send first": (
        f"send %x to {OTHER}\nrecv %y from {OTHER}",
        "text:2: rank 0, the caller's stream: send %x to 1 - rank.x on x meets rank 1, the caller's stream: recv %y from 1 - rank.x on x, "
        "which comes after rank 1, the caller's stream: send %x to 1 - rank.x on x, "
        "which meets rank 0, the caller's stream: recv %y from 1 - rank.x on x, "
        "which comes after rank 0, the caller's stream: send %x to 1 - rank.x on x: "
        "none of them can proceed; post matching communications in one group, or in the same order on every rank",
    ),
    "an event between a recv and its matching send": (
        f"fork loop\nstream loop[0] {{\nrecv %y from {OTHER}\nrecord done[0]\n}}\n"
        f"stream loop[1] {{\nwait done[0]\nsend %x to {OTHER}\n}}\njoin loop",
        "text:4: rank 0, loop[0]: recv %y from 1 - rank.x on x meets rank 1, loop[1]: send %x to 1 - rank.x on x, "
        "which comes after rank 1, loop[1]: wait done[0], which waits for rank 1, loop[0]: record done[0], "
        "which comes after rank 1, loop[0]: recv %y from 1 - rank.x on x, which meets rank 0, loop[1]: send %x to 1 - rank.x on x, "
        "which comes after rank 0, loop[1]: wait done[0], which waits for rank 0, loop[0]: record done[0], "
        "which comes after rank 0, loop[0]: recv %y from 1 - rank.x on x: "
        "none of them can proceed; post matching communications in one group, or in the same order on every rank",
    ),
    "a recv that is posted before the matching send on both ranks": (
        f"fork loop\nstream loop[0] {{\nrecv %y from {OTHER}\n}}\nstream loop[1] {{\nsend %x to {OTHER}\n}}\njoin loop",
        "text:4: rank 0, loop[0]: recv %y from 1 - rank.x on x meets rank 1, loop[1]: send %x to 1 - rank.x on x, "
        "which is posted after rank 1, loop[0]: recv %y from 1 - rank.x on x, which meets rank 0, loop[1]: send %x to 1 - rank.x on x, "
        "which is posted after rank 0, loop[0]: recv %y from 1 - rank.x on x: "
        "none of them can proceed; post matching communications in one group, or in the same order on every rank",
    ),
    # --- ranges
    "an index outside of its dim": (
        "%v = select %x[0: 2]",
        "text:2: rank 0, the caller's stream: %v = select %x[0: 2]: 2 is outside of 0..2: keep the index inside the dim",
    ),
    "a chunk outside of its dim on one rank": (
        "%v = chunk %x[0: rank.x * 2 of 2]",
        "text:2: rank 1, the caller's stream: %v = chunk %x[0: rank.x * 2 of 2]: rank.x * 2 = 2 is outside of 0..2: "
        "keep the index inside the dim",
    ),
    "a slice that begins outside of its dim": (
        "%v = slice %x[0: 1 from rank.x * 2]",
        "text:2: rank 1, the caller's stream: %v = slice %x[0: 1 from rank.x * 2]: indices 2..3 exceed 0..2: keep the slice inside the dim",
    ),
    "a peer outside of its process group": (
        "send %x to rank.x + 1 on x",
        "text:2: rank 1, the caller's stream: send %x to rank.x + 1 on x: rank.x + 1 = 2 is outside of 0..2: "
        "keep it inside the process group",
    ),
    "an event index outside of its range": (
        "for %i in 0..3 {\nrecord done[%i]\n}",
        "text:3: rank 0, the caller's stream, %i = 2: record done[%i]: %i = 2 is outside of 0..2: "
        "declare more of done, or keep the index inside",
    ),
}


UNEVEN = "host @t(%x: f32[M@x, 2]) -> (%y: f32[M@x, 2]) mesh(x=3) uneven(M) {\n"


def test_shards_that_differ_in_size_are_not_exchanged() -> None:
    with pytest.raises(ProgramError) as caught:
        check(host_text.parse(UNEVEN + "collective_permute %x -> %y from [1, 2, 0] on x\n}\n"), {"M": 5})
    text = "collective_permute %x -> %y from [1, 2, 0] on x"
    assert str(caught.value) == (
        f"text:2: rank 2, the caller's stream: {text}: sends 2 elements to rank 1, which expects 4, "
        f"rank 1, the caller's stream: {text}: make them equal"
    )
    check(host_text.parse(UNEVEN + "collective_permute %x -> %y from [1, 0, 2] on x\n}\n"), {"M": 5})


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 6])
def test_shards_of_any_size_in_place(rows: int) -> None:
    body = """\
%b = allocate f32[M, 2]
%own = slice %b[0: local(M, x) from rank.x * ceil(M/3)]
copy %x -> %own
all_gather %own -> %b along 0 on x
reduce_scatter sum %b along 0 -> %own on x
copy %own -> %y
}
"""
    check(host_text.parse(UNEVEN + body), {"M": rows})
    if rows > 3:  # With offset 0, %own begins at row 0 on all ranks.
        with pytest.raises(ProgramError, match="writes %b over the bytes of %own that it reads"):
            check(host_text.parse(UNEVEN + body.replace("rank.x * ceil(M/3)", "0")), {"M": rows})


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    body, message = RULES[rule]
    with pytest.raises(ProgramError) as caught:
        check(parse(body))
    assert str(caught.value) == message


# Rank 1 answers a message of rank 0. The answer orders the copy on loop[1] of rank 0 after the copy on loop[0].
ROUND_TRIP = """\
%b = allocate f32[2, N]
%c = allocate f32[2, N]
fork loop
stream loop[0] {
  if rank.x == 0 {
    copy %x -> %b
    send %x to 1 on x
  } else {
    recv %c from 0 on x
    send %x to 0 on x
  }
}
stream loop[1] {
  if rank.x == 0 {
    recv %c from 1 on x
    copy %b -> %y
  } else {
    copy %x -> %y
  }
}
join loop"""

FINE = {
    "an answer of another rank orders two streams": ROUND_TRIP,
    "events order streams": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\nrecord done[0]\n}\n"
        "stream loop[1] {\nwait done[0]\ncopy %b -> %y\n}\njoin loop"
    ),
    "a scatter of data of the root": "%b = allocate f32[4, N]\nif rank.x == 0 {\nfill %b with 1.0\n}\nscatter %b -> %y from 0 on x",
    "a wait binds to the last record": (
        "fork loop\nstream loop[0] {\nrecord done[0]\nfill %y with 0.0\nrecord done[0]\n}\n"
        "stream loop[1] {\nwait done[0]\ncopy %x -> %y\n}\njoin loop"
    ),
    "a wait on the stream of its record": ("fork loop\nstream loop[0] {\nrecord done[0]\nwait done[0]\ncopy %x -> %y\n}\njoin loop"),
    "disjoint columns": (
        "fork loop\nfor %i in 0..2 {\nstream loop[%i] {\n%x_i = chunk %x[1: %i of 2]\n"
        "%y_i = chunk %y[1: %i of 2]\ncopy %x_i -> %y_i\n}\n}\njoin loop"
    ),
    "concurrent reads": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\n}\nstream loop[1] {\ncopy %x -> %y\n}\njoin loop"
    ),
    "reductions and gathers in place": (
        "copy %x -> %y\nall_reduce sum %y -> %y on x\n%b = allocate f32[4, N]\n%own = chunk %b[0: rank.x of 2]\ncopy %x -> %own\n"
        "all_gather %own -> %b on x\nreduce_scatter sum %b -> %own on x\nbroadcast %y -> %y from 1 on x"
    ),
    "allocated and freed in every iteration": ("for %i in 0..2 {\n%b = allocate f32[2, N]\ncopy %x -> %b\ncopy %b -> %y\ndeallocate %b\n}"),
    "buffers of a loop that are allocated on different streams": (
        "fork loop\nfor %i in 0..5 {\nstream loop[%i] {\n%a = allocate f32[2, N]\ncopy %x -> %a\ndeallocate %a\n%b = allocate f32[2, N]\n"
        "copy %x -> %b\n}\n}\njoin loop\n%c = allocate f32[2, N]\ncopy %x -> %c\ncopy %c -> %y"
    ),
    "buffers per stream in a nested loop": (
        "for %i in 0..2 {\nfork loop\nfor %j in 0..4 {\nstream loop[%j] {\n%a = allocate f32[2, N]\ncopy %x -> %a\n}\n}\njoin loop\n"
        "%b = allocate f32[2, N]\ncopy %x -> %b\n}\ncopy %x -> %y"
    ),
    "a deallocate after the join": (
        "%b = allocate f32[2, N]\nfork loop\nstream loop[0] {\ncopy %x -> %b\ncopy %b -> %y\n}\njoin loop\ndeallocate %b"
    ),
    "a send to the same rank in a group": "group {\nsend %x to rank.x on x\nrecv %y from rank.x on x\n}",
}


def test_memory_freed_on_a_stream_stays_with_the_stream_until_the_join() -> None:
    """Other streams can reuse the memory only after the join. So a concurrent loop on other streams needs no wait."""
    body = "for %i in 0..5 {\nstream loop[%i] {\n%b = allocate f32[4]\ncopy %x -> %b\n}\n}\n"
    own = "stream comm[0] {\n%a = allocate f32[4]\ncopy %x -> %a\n}\n"
    head = "host @t(%x: f32[4]) -> (%y: f32[4]) mesh() streams(loop[2], comm[1]) {\nfork loop\nfork comm\n"
    check(host_text.parse(f"{head}{own}{body}join loop\njoin comm\ncopy %x -> %y\n}}\n"))


def test_a_get_in_a_group_that_waits_forever() -> None:
    head = "host @t(%x: f32[M@x, 4] in window) -> (%y: f32[M@x, 4]) mesh(x=2) channels(x: x one_sided) {\n"
    group = "group {\nget %x at 1 - rank.x -> %y on x\nwait_signal 0 from 1 - rank.x until %x is read on x\n}\n"
    program = host_text.parse(f"{head}{group}signal 0 at 1 - rank.x that %x is read on x\n}}\n")
    with pytest.raises(ProgramError, match="waits forever"):
        check(program)


def test_an_index_of_a_rank_into_a_parameter_group() -> None:
    head = "host @t(%w: f32[depth, 4] as w_0 to w_3 of layers) -> (%y: f32[4]) mesh(x=2) {\n"
    check(host_text.parse(head + "%w_r = select %w[0: rank.x]\ncopy %w_r -> %y\n}\n"))


IN_PLACE = """kernel @add_row(%a: f32[4, 4], %r: f32[1, 4]) {
  %y: f32[4, 4] = add(%a, %r)
}
kernel @add_turned(%a: f32[4, 4]) {
  %t: f32[4, 4] = permute_dims(%a, axes=(1, 0))
  %y: f32[4, 4] = add(%t, 1.0)
}
"""


def test_a_launch_in_place() -> None:
    """A kernel may write over an input only if element i of the result depends on no element of the input except element i."""
    head = IN_PLACE + "host @t(%x: f32[4, 4], %r: f32[1, 4]) -> (%y: f32[4, 4]) mesh() {\ncopy %x -> %y\n"
    check(host_text.parse(head + "launch @add_row %y, %r -> %y\n}\n"))
    with pytest.raises(ProgramError) as caught:
        check(host_text.parse(head + "launch @add_turned %y -> %y\n}\n"))
    message = "launch @add_turned %y -> %y writes %y over the bytes of %y that it reads: give the result separate memory"
    assert str(caught.value) == f"text:10: rank 0, the caller's stream: {message}"


def test_a_matmul_adds_in_place() -> None:
    """The result of a matmul may be in the memory of the operand that is added to the product, but must not overlap a factor."""
    head = "host @t(%x: f32[4, 4]) -> (%y: f32[4, 4]) mesh() {\ncopy %x -> %y\n"
    check(host_text.parse(head + "matmul %x, %x accumulate %y -> %y\n}\n"))
    with pytest.raises(ProgramError, match="accumulate %y -> %y reads %y before bytes 0 to 64 of %y are written"):
        check(host_text.parse(head.replace("copy %x -> %y\n", "") + "matmul %x, %x accumulate %y -> %y\n}\n"))
    for body in ("matmul %y, %x accumulate %y -> %y", "%t = permute %y by [1, 0]\nmatmul %x, %t accumulate %y -> %y"):
        with pytest.raises(ProgramError, match=r"over the bytes of %[ty] that it reads: give the result separate memory"):
            check(host_text.parse(f"{head}{body}\n}}\n"))


@pytest.mark.parametrize("name", FINE)
def test_nothing_to_report(name: str) -> None:
    check(parse(FINE[name]))


@pytest.mark.parametrize("ranks", [*RANKS, 16])
@pytest.mark.parametrize("name", NAMES)
def test_golden_programs_pass(name: str, ranks: int) -> None:
    check(program(name, ranks))
