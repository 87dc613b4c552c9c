"""Ranks that end, or are stopped or interrupted, while other rank processes wait for them."""

from __future__ import annotations

import re
import signal
import time

import pytest
from processes import SECONDS, Ranks, as_rank, free_port
from rank_setups import CPU, ENDLESS, GPUS, NOTICED, RankSetup, everywhere
from turns import alone

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("built")]


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("leaver", "end"), [(0, "exception"), (1, "exception"), (0, "1"), (1, "0")])
@everywhere
def test_a_rank_ends_before_the_others(setup: RankSetup, leaver: int, end: str) -> None:
    """The other ranks do not wait for `call_timeout`. This also holds if the store was in the process that ended."""
    if setup.target == "cuda" and setup.killed > GPUS:
        pytest.skip(f"needs {setup.killed} GPUs")
    port, others = free_port(), [rank for rank in range(setup.killed) if rank != leaver]
    environments = [as_rank(rank, setup.killed, port) | ({"ENDS": end} if rank == leaver else {}) for rank in range(setup.killed)]
    why = "its process has ended by ValueError: a mistake" if end == "exception" else "has left before call 2, in which rank"
    with Ranks(environments, ENDLESS, "environment", setup.target) as ranks:
        for rank in range(setup.killed):
            ranks.line(rank, 300, beginning="ready")
        ranks.tell(leaver, "")
        started = time.monotonic()
        for rank in others:
            message = ranks.line(rank, SECONDS, beginning="failed: ")
            assert re.search(rf"rank {leaver}:? {why}", message), message
        assert time.monotonic() - started < NOTICED
        for rank in others:
            ranks.processes[rank].kill()  # Rank 0, which has the store, waits up to 5 s for the other ranks.
        assert ranks.ended(leaver) == (1 if end == "exception" else int(end))


@everywhere
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_is_stopped(setup: RankSetup, stopped: int) -> None:
    """`call_timeout` applies, even if the store is in the process of the stopped rank. The limits are below 10 seconds. After 10 seconds, a
    store that does not answer is a separate error."""
    if setup.target == "cuda" and setup.killed > GPUS:
        pytest.skip(f"needs {setup.killed} GPUs")
    port, count = free_port(), setup.killed
    limit = 3 if setup.target == "cpu" else 7  # NCCL connects in the first call, which takes over 3 s on a busy machine.
    environments = [as_rank(rank, count, port) | {"CALL_TIMEOUT": str(limit)} for rank in range(count)]
    alone()  # While other tests run, it takes seconds to connect the ranks and to abort the channels.
    with Ranks(environments, ENDLESS, "environment", setup.target) as ranks:
        for rank in range(count):
            ranks.line(rank, 300, beginning="ready")
        ranks.processes[stopped].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        for rank in (rank for rank in range(count) if rank != stopped):
            message = ranks.line(rank, SECONDS, beginning="failed: ")
            in_check = stopped == 0 and setup.target == "cuda" and "the store in the process of rank 0 does not answer" in message
            assert in_check or f"is not done after {limit} seconds" in message, message
        assert time.monotonic() - started < limit + NOTICED


@pytest.mark.parametrize("setup", [CPU])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_rank_is_interrupted_while_it_waits_for_another(setup: RankSetup, interrupted: int) -> None:
    port, other = free_port(), 1 - interrupted
    with Ranks([as_rank(rank, 2, port) for rank in range(2)], ENDLESS, "environment", setup.target) as ranks:
        for rank in range(2):
            ranks.line(rank, 300, beginning="ready")
        ranks.processes[other].send_signal(signal.SIGSTOP)
        time.sleep(1)  # Rank `interrupted` then waits for the stopped rank.
        ranks.processes[interrupted].send_signal(signal.SIGINT)
        why = f"group 'default': rank {interrupted}: KeyboardInterrupt"
        assert ranks.line(interrupted, NOTICED, beginning="interrupted: ") == f"interrupted: {why}"
        ranks.processes[other].send_signal(signal.SIGCONT)
        assert why in ranks.line(other, NOTICED, beginning="failed: ")
        port = free_port()
        for rank in range(2):
            ranks.tell(rank, " ".join(f"{name}={value}" for name, value in as_rank(rank, 2, port).items()))
        for rank in range(2):
            assert ranks.line(rank, SECONDS, beginning=f"rank {rank} of") == f"rank {rank} of 2 is right"
            assert ranks.ended(rank) == 0
