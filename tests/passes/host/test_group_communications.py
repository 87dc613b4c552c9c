"""The pass group_communications: which communications form a group, which instructions move, and where a group ends."""

from __future__ import annotations

from dataclasses import replace

import host_text
import numpy as np
import pytest

import hostweave as hw
from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.group_communications import group_communications
from hostweave.pipeline import lower
from hostweave.transports.transport import find_transport

HEADER = (
    "(%a: f32[8@x, 2@y], %b: f32[8@x, 2@y]) -> (%p: f32[8@x, 2@y], %q: f32[8@x, 2@y], %r: f32[8@x, 2@y]) mesh(x=2, y=2) streams(loop[2])"
)
KERNEL = """\
kernel @negative_n(%b: f32[4, 1]) {
  %n: f32[4, 1] = negative(%b)
}
"""


def host(body: str, header: str = HEADER) -> HostProgram:
    kernel = KERNEL if "launch" in body else ""
    return host_text.parse(f"{kernel}host @f{header} {{\n{body}\n}}\n")


def grouped(program: HostProgram) -> str:
    result = group_communications(program, Options())
    verify_host(result)
    assert HostProgram.parse(str(result)) == result
    assert group_communications(result, Options()) == result
    return str(result).partition("host")[2].partition("{\n")[2].removesuffix("}\n")


def test_two_all_reduces_of_one_channel() -> None:
    assert (
        grouped(host("all_reduce sum %a -> %p on x\nall_reduce max %b -> %q on x\nfill %r with 0.0"))
        == """\
  group {
    all_reduce sum %a -> %p on x
    all_reduce max %b -> %q on x
  }
  fill %r with 0.0
"""
    )


def test_groups_of_any_kinds_and_existing_groups() -> None:
    assert (
        grouped(
            host(
                "%big = allocate f32[8, 1]\nall_gather %a -> %big on x\n"
                "group {\n send %b to 1 - rank.x on x\n recv %q from 1 - rank.x on x\n}\n"
                "collective_permute %b -> %p from [none, 0] on x\ncopy %a -> %r"
            )
        )
        == """\
  %big = allocate f32[8, 1]
  group {
    all_gather %a -> %big on x
    send %b to 1 - rank.x on x
    recv %q from 1 - rank.x on x
    collective_permute %b -> %p from [none, 0] on x
  }
  copy %a -> %r
"""
    )


def test_ops_between_two_communications_move_before_the_group() -> None:
    assert (
        grouped(
            host(
                "all_reduce sum %a -> %p on x\n%n = allocate f32[4, 1]\nlaunch @negative_n %b -> %n\n%m = reshape %n to [2, 2]\n"
                "%q_m = reshape %q to [2, 2]\nall_reduce sum %m -> %q_m on x\n%t = reshape %r to [2, 2]\ncopy %m -> %t"
            )
        )
        == """\
  %n = allocate f32[4, 1]
  launch @negative_n %b -> %n
  %m = reshape %n to [2, 2]
  %q_m = reshape %q to [2, 2]
  group {
    all_reduce sum %a -> %p on x
    all_reduce sum %m -> %q_m on x
  }
  %t = reshape %r to [2, 2]
  copy %m -> %t
"""
    )


@pytest.mark.parametrize(
    "body",
    [
        "all_reduce sum %a -> %p on x\nall_reduce sum %b -> %q on y",  # The channels differ.
        "all_reduce sum %a -> %p on x\nall_reduce sum %p -> %q on x",  # The second all_reduce reads the result of the first.
        "all_reduce sum %a -> %p on x\n%v = reshape %p to [2, 2]\n%w = reshape %q to [2, 2]\nall_reduce sum %v -> %w on x",
        "all_reduce sum %a -> %p on x\nall_reduce sum %b -> %p on x",  # Both write to the same buffer.
        "copy %a -> %p\nall_reduce sum %p -> %q on x\nall_reduce sum %b -> %p on x",  # The second all_reduce writes what the first reads.
        "all_reduce sum %a -> %p on x\nlaunch @negative_n %p -> %r\nall_reduce sum %b -> %q on x",  # The kernel reads received data.
        # The kernel overwrites data that is sent.
        "copy %a -> %p\nall_reduce sum %p -> %q on x\nlaunch @negative_n %b -> %p\nall_reduce sum %b -> %r on x",
        "%t = allocate f32[1]\nfill %t with 0.0\nall_reduce sum %a -> %p on x\nbarrier %t on x\nall_reduce sum %b -> %q on x",
        "fork loop\nstream loop[0] {\n  all_reduce sum %a -> %p on x\n}\nstream loop[1] {\n  all_reduce sum %b -> %q on x\n}\njoin loop",
        "if rank.x == 0 {\n  send %a to 1 on x\n} else {\n  recv %p from 0 on x\n}\n"
        "if rank.x == 0 {\n  send %b to 1 on x\n} else {\n  recv %q from 0 on x\n}",  # Sends and receives run on different ranks.
    ],
)
def test_communications_that_are_not_grouped(body: str) -> None:
    program = host(body)
    assert group_communications(program, Options()) == program


def posting(program: HostProgram, most: int) -> HostProgram:
    """Limits the number of calls per group that the transport accepts."""
    transport = replace(find_transport("two_sided"), posts_in_group=most)
    return replace(program, channels=tuple(replace(channel, transport=transport) for channel in program.channels))


def test_collectives_of_uneven_shards_share_a_group() -> None:
    header = "(%a: f32[M@x, 2], %b: f32[M@x, 2]) -> (%p: f32[M, 2], %q: f32[M, 2]) mesh(x=2) uneven(M)"
    program = host("  all_gather %a -> %p along 0 on x\n  %t = allocate f32[M, 2]\n  all_gather %b -> %q along 0 on x", header)
    assert (
        grouped(program)
        == """\
  %t = allocate f32[M, 2]
  group {
    all_gather %a -> %p along 0 on x
    all_gather %b -> %q along 0 on x
  }
"""
    )
    program = posting(program, 3)  # Each communication posts two broadcasts.
    assert group_communications(program, Options()) == program


def test_a_group_has_at_most_the_calls_that_its_transport_accepts() -> None:
    program = host("all_to_all %a -> %p on x\nall_to_all %b -> %q on x\nall_to_all %b -> %r on x")
    text = str(group_communications(posting(program, 8), Options()))  # An all_to_all between two ranks posts 4 calls.
    assert text.count("group {") == 1
    assert text.endswith("  }\n  all_to_all %b -> %r on x\n}\n")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_program_with_groups(ranks: int) -> None:
    """Two all-reduces, a reduce-scatter and two gathers are in one group. Results of all ranks are compared, for even and uneven sizes."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), u=hw.f32["M@x", "K"], v=hw.f32["M@x", "L"])
    def shared(u, v):
        scattered = hw.reshard(hw.sum(u, axis=0), "K@x")
        return hw.sum(u, axis=0), hw.sum(v, axis=0), scattered, hw.reshard(u, "M", "K"), hw.reshard(v, "M", "L")

    if ranks > 1:
        assert [line for line in str(lower(shared, Options())).splitlines() if line.startswith(("  group", "  all_", "  reduce_"))] == [
            "  group {"
        ]
    program = hw.compile(shared)
    random = np.random.default_rng(0)
    for rows in (4 * ranks, 4 * ranks + 1, 1):
        u, v = (random.integers(-4, 5, (rows, columns)).astype(np.float32) for columns in (12, 5))
        for rank, local in enumerate(program.run(u=u, v=v, ranks=True)):
            wanted = u.sum(0), v.sum(0), np.array_split(u.sum(0), ranks)[rank], u, v
            for got, want in zip(local, wanted, strict=True):
                np.testing.assert_array_equal(got, want)
    check(lower(shared, Options()))
    program.close()


def test_an_unpack_moves_behind_the_next_communication() -> None:
    """A copy that unpacks received data moves after the next communication, unless this communication reads or overwrites the copied
    data."""
    laid = "%c = allocate f32[4, 1]\nall_reduce sum %a -> %c on x\ncopy %c -> %p\n"
    assert (
        grouped(host(f"{laid}all_reduce sum %b -> %q on x\nlaunch @negative_n %c -> %r"))
        == """\
  %c = allocate f32[4, 1]
  group {
    all_reduce sum %a -> %c on x
    all_reduce sum %b -> %q on x
  }
  copy %c -> %p
  launch @negative_n %c -> %r
"""
    )
    for next_one in ("%p -> %q", "%b -> %p"):
        assert "group" not in grouped(host(f"{laid}all_reduce sum {next_one} on x\nfill %r with 0.0"))
    computed = laid.replace("copy %c", "launch @negative_n %c")
    assert "group" not in grouped(host(f"{computed}all_reduce sum %b -> %q on x\nfill %r with 0.0"))
