"""The rendezvous and gathers of ranks."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from launched_ranks import in_threads, soon

from hostweave.base.errors import ExecutionError
from hostweave.runtime.coordinator import Coordinator, Failed, PeerLost, StoreCoordinator, ThreadCoordinator, ThreadTable
from hostweave.runtime.providers import (
    Environment,
)
from hostweave.runtime.rendezvous import World, meet
from hostweave.runtime.stores import MemoryStore, Store


def meet_all(store: Store, count: int, group: str = "default", timeout: float = 10) -> list[Any]:
    return in_threads(count, lambda rank: meet(store, group, rank, count, timeout))


def test_alone() -> None:
    store = Environment({"RANK": "0", "WORLD_SIZE": "1"}).store("default", 1)
    assert isinstance(meet(store, "default", 0, 1, 1), World)


def test_ranks_that_do_not_come() -> None:
    store = MemoryStore()
    errors = in_threads(2, lambda rank: meet(store, "default", rank, 4, 0.3))
    assert [str(error) for error in errors] == [
        f"hw.init: group 'default', rank {rank} of 4: timed out after 0.3 s waiting for ranks 2, 3" for rank in range(2)
    ]
    late = in_threads(1, lambda _: meet(store, "default", 2, 4, 0.1))  # Ranks 0 and 1 have timed out.
    assert str(late[0]) == "hw.init: group 'default', rank 2 of 4: timed out after 0.1 s waiting for rank 3"
    assert all(isinstance(world, World) for world in meet_all(store, 4))


def test_a_rank_that_gave_up_before() -> None:
    store = MemoryStore()
    for rank, other in ((1, "rank 0"), (0, "rank 1, which gave up")):
        with pytest.raises(ExecutionError, match=rf"rank {rank} of 2: timed out after 0\.1 s waiting for {other}$"):
            meet(store, "default", rank, 2, 0.1)


def test_worlds_of_different_sizes() -> None:
    store = MemoryStore()
    errors = in_threads(4, lambda rank: meet(store, "default", rank, 4 if rank == 1 else 2 if rank < 2 else 4, 2 if rank < 2 else 0.5))
    message = "hw.init: group 'default': rank 1 is in a world of 4 ranks, rank 0 in one of 2; start all ranks with the same world size"
    assert [str(error) for error in errors[:2]] == [message] * 2
    assert all(isinstance(error, ExecutionError) for error in errors)


def test_two_processes_of_one_rank() -> None:
    store = MemoryStore()
    errors = in_threads(3, lambda thread: meet(store, "default", min(thread, 1), 2, 0.5))
    assert sum(isinstance(one, World) for one in errors) == 2
    (refused,) = [str(error) for error in errors if isinstance(error, Exception)]
    assert refused.startswith("hw.init: group 'default', rank")


# --- gathers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["store", "threads"])
def seats(request: pytest.FixtureRequest) -> list[Coordinator]:
    if request.param == "store":
        store = MemoryStore()
        return [StoreCoordinator(store, "prefix", rank, 3) for rank in range(3)]
    table = ThreadTable([None] * 3)
    return [ThreadCoordinator(table, rank) for rank in range(3)]


def test_gather_returns_the_records_of_all_ranks(seats: list[Coordinator]) -> None:
    def rank(rank: int) -> list[list[str]]:
        return [seats[rank].gather(f"{rank} in {number}", 10) for number in range(20)]

    assert in_threads(3, rank) == [[[f"{rank} in {number}" for rank in range(3)] for number in range(20)]] * 3


def test_a_rank_that_does_not_come(seats: list[Coordinator]) -> None:
    errors = in_threads(2, lambda rank: seats[rank].gather("", 0.3))
    assert [type(error) for error in errors] == [PeerLost] * 2
    assert [error.ranks for error in errors] == [(2,)] * 2


def test_a_failure_ends_the_waiting(seats: list[Coordinator]) -> None:
    started = time.monotonic()
    with soon(seats[2].fail, "rank 2: no data"):
        errors = in_threads(2, lambda rank: seats[rank].gather("", 30))
    assert time.monotonic() - started < 5
    assert [(type(error), str(error)) for error in errors] == [(Failed, "rank 2: no data")] * 2
    seats[0].fail("another")
    assert [seat.failure() for seat in seats] == ["rank 2: no data"] * 3


def test_a_thread_that_has_ended() -> None:
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    table = ThreadTable([None, None, gone])
    errors = in_threads(2, lambda rank: ThreadCoordinator(table, rank).gather("", 30))
    assert [str(error) for error in errors] == ["rank 2: its thread has ended"] * 2


def test_positions(seats: list[Coordinator]) -> None:
    seats[1].publish_position("at call 3")
    assert seats[0].gather_positions() == [None, "at call 3", None]
