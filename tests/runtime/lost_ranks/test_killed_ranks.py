"""Tests that kill one of several rank processes at a random moment."""

from __future__ import annotations

import random
import signal
import time

import pytest
from places import ENDLESS, GPUS, NOTICED, PLACES, SIGNALLED, Place
from processes import SECONDS, Ranks, as_rank, free_port

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("built")]
TRIALS = [
    pytest.param(place.values[0], trial, id=f"{place.id}-{trial}", marks=place.marks)
    for place in PLACES
    for trial in range(place.values[0].trials)  # type: ignore[union-attr]
]


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("place", "trial"), TRIALS)
def test_a_rank_is_killed(place: Place, trial: int) -> None:
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    kill_a_rank(place, ENDLESS, trial)


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("place", "trial"), TRIALS[::4])
def test_a_rank_is_killed_while_others_wait_for_its_signal(place: Place, trial: int) -> None:
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    kill_a_rank(place, SIGNALLED, trial, stands_still=True)


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("place", "trial"), TRIALS[::4])
@pytest.mark.parametrize("program", [ENDLESS, SIGNALLED])
def test_a_rank_is_killed_while_others_launch_a_graph(place: Place, trial: int, program: str) -> None:
    """The other ranks get an error, and form a new group. Each rank keeps its graphs until the rank exits. Until then, NCCL destroys no
    communicator."""
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    kill_a_rank(place, f"captured:{program}", trial, stands_still=program == SIGNALLED)


def kill_a_rank(place: Place, program: str, trial: int, stands_still: bool = False) -> None:
    """Kills a rank. The other ranks get an exception that names the killed rank, and form a new group in the same processes. The store is
    in rank 0."""
    moment, count = random.Random(trial), place.killed
    victim = moment.randrange(count) if trial else 0
    port, other_port = free_port(), free_port()
    with Ranks([as_rank(rank, count, port) for rank in range(count)], program, "environment", place.target) as ranks:
        for rank in range(count):
            ranks.line(rank, 300, beginning="ready")
        time.sleep(moment.uniform(0, 1.5))
        if stands_still:  # The other ranks wait for the stopped rank before it is killed.
            ranks.processes[victim].send_signal(signal.SIGSTOP)
            time.sleep(1)
        ranks.processes[victim].kill()
        survivors = [rank for rank in range(count) if rank != victim]
        started = time.monotonic()
        for rank in survivors:
            message = ranks.line(rank, SECONDS, beginning="failed: ")
            names = "rank 0" if victim == 0 else f"rank {victim}: its process has ended"
            assert names in message, message
        assert time.monotonic() - started < NOTICED
        for place, rank in enumerate(survivors):
            world = as_rank(place, len(survivors), other_port) | {"LOCAL_RANK": str(rank)}
            ranks.tell(rank, " ".join(f"{name}={value}" for name, value in world.items()))
        for place, rank in enumerate(survivors):
            assert ranks.line(rank, SECONDS, beginning=f"rank {place} of") == f"rank {place} of {len(survivors)} is right"
            assert ranks.ended(rank) == 0
