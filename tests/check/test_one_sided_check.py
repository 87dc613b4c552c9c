"""Messages of the verifier and the check about windows, puts and signals."""

from __future__ import annotations

import random
import re

import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.pipeline import lower

HEAD = "host @t(%x: f32[M@x, 4]) -> (%y: f32[M@x, 4]) mesh(x=2) channels(x: x one_sided) streams(a[1], b[1]) "
PEER = "1 - rank.x"

EXCHANGE = f"""\
  %w = allocate_window f32[M/2, 4]
  fork a
  stream a[0] {{
    signal 0 at {PEER} that %w is free on x
    wait_signal 0 from {PEER} until %w is free on x
    put %x -> %w at {PEER} signal 0 on x
    wait_signal 0 from {PEER} until %w is free on x
  }}
  join a
  copy %w -> %y
"""


def given(number: int) -> str:
    return f"    signal {number} at {PEER} that %w is free on x\n"


def awaited(number: int) -> str:
    return f"    wait_signal {number} from {PEER} until %w is free on x\n"


def on_two_streams(one: str, other: str) -> str:
    begin = "  %w = allocate_window f32[M/2, 4]\n  fork a\n  fork b\n"
    return f"{begin}  stream a[0] {{\n{one}  }}\n  stream b[0] {{\n{other}  }}\n  join a\n  join b\n  copy %x -> %y\n"


def parsed(body: str, head: str = HEAD) -> HostProgram:
    return HostProgram.parse(f"{head}{{\n{body}}}\n")


def fault(body: str, head: str = HEAD) -> str:
    def find() -> None:
        verify_host(parsed(body, head))
        check(parsed(body, head))

    with pytest.raises(ProgramError) as caught:
        find()
    return str(caught.value)


def test_an_exchange() -> None:
    verify_host(parsed(EXCHANGE))
    check(parsed(EXCHANGE))


VERIFIED = {
    "no window": (
        EXCHANGE.replace("allocate_window", "allocate"),
        "%w is not in a window, so peers cannot reach it: use allocate_window",
    ),
    "number": (EXCHANGE.replace("signal 0 on", "signal 64 on"), "signal 64: the largest signal number is 63"),
    "state": (
        EXCHANGE.replace("is free", "is here"),
        "a signal cannot say that a buffer is 'here': write one of free, ready, read, written",
    ),
    "count": (
        EXCHANGE.replace("f32[M/2, 4]", "f32[M, 4]"),
        "%w must hold 1 x %x, but has 4*M elements, not 2*M",
    ),
}


@pytest.mark.parametrize("case", VERIFIED)
def test_verifier(case: str) -> None:
    body, message = VERIFIED[case]
    assert message in fault(body)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_join_waits_for_copies_of_local_shards(ranks: int) -> None:
    """In a gather, a rank may copy its local block on stream `copies`. A join of stream `comm` does not wait for this copy. So a wait for
    the event of the copy follows the join."""
    fusion = Fusion.parse(f"""\
fusion @f(%w: f32[7@x, M], %x: f32[K, N@x], %z: f32[K, K]) mesh(x={ranks}) {{
  %wg: f32[7, M] async = reshard(%w)
  %xg: f32[K, N] async = reshard(%x)
  %zz: f32[K, K] = matmul(%z, %z)
  %part: f32[K, (N - 1)] = slice(%xg, axis=1, start=0, step=1)
  %packed: f32[K*(N - 1)] = reshape(%part)
  %flat: f32[7*M] = reshape(%wg)
  %y: f32[7*M] = negative(%flat)
  return %packed, %y, %zz
}}
""")
    host = lower(fusion, Options(transport="one_sided"))
    check(host, fusion=fusion)
    if any(pool.name == "copies" for pool in host.streams):
        assert re.search(r"join comm\n  wait wg_ready\[0\]\n", str(host))


def test_all_ranks_have_a_window() -> None:
    other = "  on mesh(x=1 of ranks 1) {\n    %z = allocate f32[4, 4]\n    fill %z with 0.0\n  }\n"
    check(parsed(other + EXCHANGE))
    assert "allocates the window, so its offset would differ between ranks: allocate it on all ranks" in fault(
        other.replace("allocate", "allocate_window") + EXCHANGE
    )
    uneven = EXCHANGE.replace("M/2", "local(M, x)")
    assert "the size of %w may differ between ranks, so the window's offset would differ: use sizes that the ranks split evenly" in fault(
        uneven, HEAD + "uneven(M) "
    )


CHECKED = {
    "itself": (
        EXCHANGE.replace(f"put %x -> %w at {PEER}", "put %x -> %w at rank.x"),
        "rank.x = 0 is this rank itself: exclude this rank by a condition",
    ),
    "no credit": (
        "".join(line for number, line in enumerate(EXCHANGE.splitlines(keepends=True)) if number not in (3, 4)),
        "add a signal after the operation of rank 1, and wait for it before the operation of rank 0",
    ),
    "one queue": (
        on_two_streams(awaited(0), given(0)),
        "waits forever if a device runs all streams of a rank as one queue (CUDA_DEVICE_MAX_CONNECTIONS=1); "
        "before it, issue the operations that rank 1 waits for",
    ),
    "two streams": (
        on_two_streams(given(0), given(1) + awaited(0) + awaited(1)),
        "can occur at the same time, and a wait cannot tell signals apart; add record/wait or put both on one stream",
    ),
    "a wait that may start before the signal of its rank": (  # In a graph, both ranks may start with the wait.
        on_two_streams(given(0), awaited(0)),
        "can occur at the same time, and a wait cannot tell signals apart; add record/wait or put both on one stream",
    ),
    "two signals before a wait": (
        EXCHANGE.replace(f"    put %x -> %w at {PEER} signal 0 on x\n", f"    put %x -> %w at {PEER} signal 0 on x\n" * 2).replace(
            "  }\n", f"    wait_signal 0 from {PEER} until %w is free on x\n  }}\n"
        ),
        "is sent again before rank 1 has waited for the previous signal, so that a CUDA graph waits forever; "
        "add that wait first, or use another signal number",
    ),
    "a wait without a signal": (
        EXCHANGE.replace("  }\n", f"    wait_signal 1 from {PEER} until %w is free on x\n  }}\n"),
        "rank 1 sends no such signal: add the signal, or drop this wait",
    ),
    "a signal without a wait": (
        EXCHANGE.replace("  }\n", f"    signal 1 at {PEER} that %w is free on x\n  }}\n"),
        "rank 1 does not wait for it, so its next wait would match this signal: add the wait",
    ),
}


@pytest.mark.parametrize("case", CHECKED)
def test_check(case: str) -> None:
    body, message = CHECKED[case]
    assert message in fault(body)


def test_a_collective_before_a_signal_in_one_queue() -> None:
    """Before the collective, rank 1 waits for the signal of rank 0. After the collective, rank 0 signals."""
    wait = f"  if rank.x == 1 {{\n    stream b[0] {{\n{awaited(0)}    }}\n  }}\n"
    signal = f"  if rank.x == 0 {{\n    stream b[0] {{\n{given(0)}    }}\n  }}\n"
    collective = "  stream a[0] {\n    all_reduce sum %x -> %y on c\n  }\n"
    body = f"  %w = allocate_window f32[M/2, 4]\n  fork a\n  fork b\n{wait}{collective}{signal}  join a\n  join b\n"
    assert "rank 0, a[0]: all_reduce sum %x -> %y on c: waits forever" in (
        message := fault(body, HEAD.replace("x one_sided", "x one_sided, c: x two_sided"))
    )
    assert message.endswith("before it, issue the operations that rank 1 waits for")


def permutes(ranks: int, *directions: int) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", 4])
    def permutes(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        results = [x]
        for direction in directions:
            results.append(hw.collective_permute(results[-1], "M", [(rank - direction) % ranks for rank in range(ranks)]))
        return tuple(results[1:])

    return permutes


@pytest.mark.parametrize("transport", ["peer", "one_sided"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_permutes_in_any_direction(ranks: int, transport: str) -> None:
    """On more than two ranks, a permute in another direction must not signal a peer again before this peer has waited for the previous
    signal."""
    draw = random.Random(ranks)
    for _ in range(2):
        fusion = permutes(ranks, *draw.choices([1, -1, 2], k=3))
        check(lower(fusion, Options(transport=transport, check=False)), fusion=fusion)


def test_a_permute_that_begins_before_the_readers_of_the_last_one_are_done() -> None:
    """Each rank waits only after it has signalled one neighbour twice. In a CUDA graph, all ranks wait for each other."""
    lines = str(lower(permutes(3, 1, -1), Options(transport="one_sided"))).splitlines()
    wait = next(number for number, line in enumerate(lines) if "wait_signal" in line and "is read on" in line)
    begin = [number for number, line in enumerate(lines) if " signal " in line and "is ready on" in line][1]
    # The wait and a deallocate move.
    moved = [*lines[:wait], *lines[wait + 2 : begin + 1], *lines[wait : wait + 2], *lines[begin + 1 :]]
    with pytest.raises(ProgramError, match=r"is sent again before rank . has waited for the previous signal"):
        check(HostProgram.parse("\n".join(moved)))


def test_memory_that_a_peer_reads_is_in_use() -> None:
    body = f"""\
  %w = allocate_window f32[M/2, 4]
  copy %x -> %w
  fork a
  stream a[0] {{
    signal 0 at {PEER} that %w is free on x
    wait_signal 0 from {PEER} until %w is free on x
    get %w at {PEER} -> %y on x
  }}
  join a
"""
    told = f"    signal 0 at {PEER} that %w is free on x\n    wait_signal 0 from {PEER} until %w is free on x\n  }}\n"
    check(parsed(body.replace("  }\n", told)))
    assert "nothing orders them" in fault(body) or "may still access the memory of rank" in fault(body)
