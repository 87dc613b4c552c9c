"""Teams: groups of threads that are the ranks of `Program.run`. A process may have several teams, and a rank may fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import host_text
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.runtime.coordinator import CallSignature
from hostweave.runtime.team import Team


def test_a_failure_does_not_affect_other_teams() -> None:
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


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(3)
    yield made
    made.close()


def wait(team: Team, rank: int) -> None:
    team.groups[rank].agree(CallSignature("f", "mesh(x=3)", ""), "", 60)


def test_each_rank_has_a_thread_and_a_rank_number(team: Team) -> None:
    found = team.each(lambda rank: (team.groups[rank].rank, threading.current_thread().name))
    assert [rank for rank, _ in found] == [0, 1, 2]
    assert len({name for _, name in found}) == 3
    assert team.each(lambda _: threading.current_thread().name) == [name for _, name in found]


def test_a_failure_of_one_rank_stops_the_others_and_is_the_one_that_is_raised(team: Team) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            with team.groups[rank].failing():
                raise ExecutionError("a mistake")
        wait(team, rank)

    with pytest.raises(ExecutionError, match=r"^a mistake$"):
        team.each(work)
    assert team.broken


def test_an_error_before_a_collective_stops_no_rank(team: Team) -> None:
    done = []

    def work(rank: int) -> None:
        if rank == 0:
            raise ExecutionError("a mistake")
        done.append(rank)

    with pytest.raises(ExecutionError, match=r"^a mistake$"):
        team.each(work)
    assert sorted(done) == [1, 2]
    assert not team.broken


def test_ranks_are_stopped_if_they_make_no_progress(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> None:
        raise ExecutionError("call 2 is not done")

    monkeypatch.setattr("hostweave.runtime.team.expect_running", look)
    with pytest.raises(ExecutionError, match=r"^call 2 is not done$"):
        team.each(lambda rank: wait(team, rank) if rank else None)
    assert [group.failure for group in team.groups] == ["call 2 is not done"] * 3


def test_threads_end_with_the_team(team: Team) -> None:
    threads = team.each(lambda _: threading.current_thread())
    team.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
