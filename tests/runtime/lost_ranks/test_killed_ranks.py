"""Tests that kill one of several rank processes at a random moment."""

from __future__ import annotations

import random
import signal
import time

import pytest
from processes import SECONDS, Ranks, as_rank, free_port
from rank_setups import ENDLESS, GPUS, NOTICED, SETUPS, SIGNALLED, RankSetup

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("built")]
TRIALS = [
    pytest.param(setup.values[0], trial, id=f"{setup.id}-{trial}", marks=setup.marks)
    for setup in SETUPS
    for trial in range(setup.values[0].trials)  # type: ignore[union-attr]
]


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("setup", "trial"), TRIALS)
def test_a_rank_is_killed(setup: RankSetup, trial: int) -> None:
    if setup.target == "cuda" and setup.killed > GPUS:
        pytest.skip(f"needs {setup.killed} GPUs")
    kill_a_rank(setup, ENDLESS, trial)


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("setup", "trial"), TRIALS[::4])
def test_a_rank_is_killed_while_others_wait_for_its_signal(setup: RankSetup, trial: int) -> None:
    if setup.target == "cuda" and setup.killed > GPUS:
        pytest.skip(f"needs {setup.killed} GPUs")
    kill_a_rank(setup, SIGNALLED, trial, stands_still=True)


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("setup", "trial"), TRIALS[::4])
@pytest.mark.parametrize("program", [ENDLESS, SIGNALLED])
def test_a_rank_is_killed_while_others_launch_a_graph(setup: RankSetup, trial: int, program: str) -> None:
    """The other ranks get an error, and form a new group. Each rank keeps its graphs until the rank exits. Until then, NCCL destroys no
    communicator."""
    if setup.target == "cuda" and setup.killed > GPUS:
        pytest.skip(f"needs {setup.killed} GPUs")
    kill_a_rank(setup, f"captured:{program}", trial, stands_still=program == SIGNALLED)


def kill_a_rank(setup: RankSetup, program: str, trial: int, stands_still: bool = False) -> None:
    """Kills a rank. The other ranks get an exception that names the killed rank, and form a new group in the same processes. The store is
    in rank 0."""
    moment, count = random.Random(trial), setup.killed
    victim = moment.randrange(count) if trial else 0
    port, other_port = free_port(), free_port()
    with Ranks([as_rank(rank, count, port) for rank in range(count)], program, "environment", setup.target) as ranks:
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
        for number, rank in enumerate(survivors):
            world = as_rank(number, len(survivors), other_port) | {"LOCAL_RANK": str(rank)}
            ranks.tell(rank, " ".join(f"{name}={value}" for name, value in world.items()))
        for number, rank in enumerate(survivors):
            assert ranks.line(rank, SECONDS, beginning=f"rank {number} of") == f"rank {number} of {len(survivors)} is right"
            assert ranks.ended(rank) == 0
