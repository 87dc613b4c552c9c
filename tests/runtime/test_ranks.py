"""Ranks of `Program.run`: groups of several sizes in one process at the same time, and common aborts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import host_text
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.runtime.ranks import Ranks


def test_a_failure_leaves_ranks_of_another_number_as_they_were() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])
    def total(x: hw.Tensor) -> hw.Tensor:
        return hw.sum(x, axis="M")

    alone = host_text.parse("host @alone(%x: f32[M@x]) -> (%y: f32[M@x]) mesh(x=3) { copy %x -> %y  send %x to (rank.x + 1) % 3 on x }")
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    works = hw.compile(total)
    np.testing.assert_array_equal(works.run(x=x), x.sum(axis=0))
    with pytest.raises(ExecutionError, match="deadlock"):
        hw.compile(alone, options=hw.Options(check=False)).run(x=np.zeros(3, np.float32))
    np.testing.assert_array_equal(works.run(x=x), x.sum(axis=0))


class Member:
    """A rank without a device, whose work waits until it is aborted."""

    def __init__(self, *_: object) -> None:
        self.stopped, self.stop = "", threading.Event()

    def abort(self, reason: str) -> None:
        self.stopped = self.stopped or f"rank 0: {reason}"
        self.stop.set()

    def wait(self) -> None:
        assert self.stop.wait(20)
        raise ExecutionError(f"aborted: {self.stopped}")


def turn(member: Any, seconds: float) -> object:
    return member


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(cast(Any, SimpleNamespace(Member=Member)), 3)


def test_each_rank_has_a_thread_of_its_own(ranks: Ranks) -> None:
    found = ranks.each(turn, lambda rank: (rank, threading.current_thread().name))
    assert [rank for rank, _ in found] == [0, 1, 2]
    assert len({name for _, name in found}) == 3
    assert ranks.each(turn, lambda _: threading.current_thread().name) == [name for _, name in found]


def test_an_error_of_one_rank_stops_the_others_and_is_the_one_that_is_raised(ranks: Ranks) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ExecutionError("a mistake")
        ranks.members[rank].wait()

    with pytest.raises(ExecutionError, match=r"^a mistake$"):
        ranks.each(turn, work)
    assert ranks.broken


def test_an_error_of_work_that_ranks_do_alone_stops_nobody(ranks: Ranks) -> None:
    done = []

    def work(rank: int) -> None:
        if rank == 0:
            raise ExecutionError("a mistake")
        done.append(rank)

    with pytest.raises(ExecutionError, match=r"^a mistake$"):
        ranks.each(turn, work, alone=True)
    assert sorted(done) == [1, 2]
    assert not ranks.broken


def test_whoever_waits_can_give_up(ranks: Ranks) -> None:
    def look() -> None:
        raise ExecutionError("no rank has come further")

    with pytest.raises(ExecutionError, match=r"^no rank has come further$"):
        ranks.each(turn, lambda rank: ranks.members[rank].wait(), look=look)
    assert all(member.stopped for member in ranks.members)


def test_threads_end_with_the_ranks(ranks: Ranks) -> None:
    threads = ranks.each(turn, lambda _: threading.current_thread())
    ranks.__del__()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
