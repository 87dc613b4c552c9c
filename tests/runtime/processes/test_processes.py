"""Ranks that are processes, on both targets. torchrun, mpirun or the test starts the ranks. Some tests use torch.distributed. Some tests
kill a rank at a random moment."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from compiled_fusions import compiled
from processes import SCRIPT, SECONDS, Ranks, as_rank, environment, free_port
from rank_process import program_of, programs_for
from turns import alone

import hostweave as hw
from hostweave.build.cuda import gpus

GPUS = len(gpus())
NOTICED = 4  # Time limit in seconds to notice a lost rank. The documentation says about one second, but other tests slow the machine down.
# Programs with sends and recvs, with puts, and with puts that Options.choices selects.
ENDLESS, SIGNALLED, CHOSEN = "matmul_rs_flat", "mlp_put", "chosen"


@dataclass(frozen=True)
class Place:
    target: str
    programs: str
    ranks: int  # number of ranks that run the programs
    killed: int  # number of ranks in tests that end or stop a rank
    trials: int  # repetitions of test_a_rank_is_killed; some tests run every fourth of these

    @property
    def right(self) -> str:
        return f"{len(programs_for(self.ranks, self.programs))} programs are right"


CPU = Place("cpu", "few", 2, 2, 1)
CUDA = Place("cuda", "all", max((ranks for ranks in (1, 2, 4, 8) if ranks <= GPUS), default=1), max(2, min(4, GPUS)), 20)
PLACES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
TRIALS = [
    pytest.param(place.values[0], trial, id=f"{place.id}-{trial}", marks=place.marks)
    for place in PLACES
    for trial in range(place.values[0].trials)  # type: ignore[union-attr]
]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("processes")]
everywhere = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def built(place: Place) -> None:
    build(program_of(name, ranks, place.target)[1] for name in (ENDLESS, SIGNALLED) for ranks in (place.killed, place.killed - 1))


@pytest.fixture
def all_built(place: Place) -> None:
    build(compiled(fusion, target=place.target) for fusion in programs_for(place.ranks, place.programs).values())


def build(programs: Iterable[hw.Program]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(hw.Program.build, programs))


# --- launchers --------------------------------------------------------------------------------------------------------


def torchrun(place: Place) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.ranks)]


def mpirun(place: Place) -> list[str]:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    is_open = "Open MPI" in version or "OpenRTE" in version
    return ["mpirun", *(["--allow-run-as-root", "--oversubscribe"] if is_open else []), "-n", str(place.ranks), sys.executable]


def check_output(place: Place, process: subprocess.CompletedProcess[str], times: int = 1) -> None:
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    lines = [line for line in process.stdout.splitlines() if "programs are right" in line]
    wanted = [f"rank {rank} of {place.ranks}: {place.right}" for rank in range(place.ranks)]
    assert sorted(lines) == sorted(wanted * times), output


def run(place: Place, command: list[str], provider: str) -> subprocess.CompletedProcess[str]:
    command = [*command, str(SCRIPT), place.programs, provider, place.target]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.usefixtures("all_built")
@pytest.mark.extra("torch")
@pytest.mark.parametrize("place", [pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_torchrun(place: Place) -> None:
    check_output(place, run(place, torchrun(place), "environment"))


@pytest.mark.usefixtures("all_built")
@pytest.mark.extra("torch")
@everywhere
def test_torchrun_with_torch_distributed(place: Place) -> None:
    check_output(place, run(place, torchrun(place), "torch"), times=2)


@pytest.mark.usefixtures("all_built")
@pytest.mark.extra("mpirun")
@everywhere
@pytest.mark.parametrize("provider", ["environment", pytest.param("mpi", marks=pytest.mark.extra("mpi4py"))])
def test_mpirun(place: Place, provider: str) -> None:
    check_output(place, run(place, mpirun(place), provider))


STARTED = [
    pytest.param(Place("cpu", "kinds", 4, 2, 0), "environment", id="cpu-4-environment"),
    pytest.param(Place("cpu", "everything", 4, 2, 0), "environment", id="cpu-4-everything", marks=pytest.mark.slow),
    pytest.param(CUDA, "environment", id="cuda-environment", marks=pytest.mark.gpu),
    pytest.param(CUDA, "store", id="cuda-store", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("place", "provider"), STARTED)
@pytest.mark.usefixtures("all_built", "nothing_left_over")
def test_no_launcher(place: Place, provider: str) -> None:
    """The test sets the environment variables of a launcher, or passes a torch.distributed store without a process group. The interpreters
    have different hash seeds."""
    port = free_port()
    environments = [as_rank(rank, place.ranks, port) for rank in range(place.ranks)]
    with Ranks(environments, place.programs, provider, place.target, start=subprocess.Popen) as ranks:
        for rank in range(place.ranks):
            assert ranks.line(rank, 500) == f"rank {rank} of {place.ranks}: {place.right}"
            assert ranks.ended(rank) == 0


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize("place", [CPU])
def test_ranks_decide_together_to_use_graphs(place: Place) -> None:
    """Without `verify_calls`, a rank has no information about the arrays of other ranks. So ranks decide through the store."""
    port = free_port()
    with Ranks([as_rank(rank, 2, port) for rank in range(2)], "graphs", "environment", place.target) as ranks:
        for rank in range(2):
            assert ranks.line(rank, 500) == f"rank {rank} of 2: calls are graphs"
            assert ranks.ended(rank) == 0


@everywhere
def test_a_graph_outlives_its_group(place: Place) -> None:
    if place.target == "cuda" and GPUS < 2:
        pytest.skip("needs 2 GPUs")
    port = free_port()
    with Ranks([as_rank(rank, 2, port) for rank in range(2)], f"once:captured:{ENDLESS}", "environment", place.target) as ranks:
        for rank in range(2):
            assert ranks.line(rank, SECONDS) == f"rank {rank} of 2 is right"
            assert ranks.ended(rank) == 0


# --- a missing rank ---------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left_over() -> Iterator[None]:
    """Tests that no new shared memory is left. Ignores memory of living processes, such as other tests."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 10
    while (left := set(os.listdir("/dev/shm")) - before - shared_by_living_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def shared_by_living_processes() -> set[str]:
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # The process has ended, or belongs to another user.
            names.update(re.findall(r" /dev/shm/([^/\n]+)$", maps.read_text(), re.MULTILINE))
    return names


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
    """The other ranks get an error, and form a new group. Each rank keeps its graphs until it exits. Until then, NCCL destroys no
    communicator."""
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    kill_a_rank(place, f"captured:{program}", trial, stands_still=program == SIGNALLED)


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(("leaver", "end"), [(0, "exception"), (1, "exception"), (0, "1"), (1, "0")])
@everywhere
def test_a_rank_ends_before_the_others(place: Place, leaver: int, end: str) -> None:
    """The other ranks do not wait for `call_timeout`. This also holds if the store was in the process that ended."""
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    port, others = free_port(), [rank for rank in range(place.killed) if rank != leaver]
    places = [as_rank(rank, place.killed, port) | ({"ENDS": end} if rank == leaver else {}) for rank in range(place.killed)]
    why = "its process has ended by ValueError: a mistake" if end == "exception" else "has left before call 2, in which rank"
    with Ranks(places, ENDLESS, "environment", place.target) as ranks:
        for rank in range(place.killed):
            ranks.line(rank, 300, beginning="ready")
        ranks.tell(leaver, "")
        started = time.monotonic()
        for rank in others:
            message = ranks.line(rank, SECONDS, beginning="failed: ")
            assert re.search(rf"rank {leaver}:? {why}", message), message
        assert time.monotonic() - started < NOTICED
        assert ranks.ended(leaver) == (1 if end == "exception" else int(end))


@everywhere
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_is_stopped(place: Place, stopped: int) -> None:
    """`call_timeout` applies, even if the store is in the process of the stopped rank. The limits are below 10 seconds. After 10 seconds, a
    store that does not answer is a separate error."""
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    port, count = free_port(), place.killed
    limit = 3 if place.target == "cpu" else 7  # NCCL connects in the first call, which takes over 3 s on a busy machine.
    places = [as_rank(rank, count, port) | {"CALL_TIMEOUT": str(limit)} for rank in range(count)]
    alone()  # While other tests run, it takes seconds to connect the ranks and to abort the channels.
    with Ranks(places, ENDLESS, "environment", place.target) as ranks:
        for rank in range(count):
            ranks.line(rank, 300, beginning="ready")
        ranks.processes[stopped].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        for rank in (rank for rank in range(count) if rank != stopped):
            message = ranks.line(rank, SECONDS, beginning="failed: ")
            in_check = stopped == 0 and place.target == "cuda" and "the store in the process of rank 0 does not answer" in message
            assert in_check or f"is not done after {limit} seconds" in message, message
        assert time.monotonic() - started < limit + NOTICED


@pytest.mark.parametrize("place", [CPU])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_rank_is_interrupted_while_it_waits_for_another(place: Place, interrupted: int) -> None:
    port, other = free_port(), 1 - interrupted
    with Ranks([as_rank(rank, 2, port) for rank in range(2)], ENDLESS, "environment", place.target) as ranks:
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


@pytest.mark.parametrize("place", [pytest.param(CUDA, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("on", ["one host", "two hosts"])
@pytest.mark.parametrize("program", [ENDLESS, SIGNALLED, CHOSEN])
def test_ranks_that_seem_to_be_on_different_hosts(place: Place, program: str, on: str) -> None:
    """NCCL may treat ranks of one host as ranks on different hosts. Transport `peer` still works, because it queries the GPUs for peer
    access."""
    if place.target == "cuda" and place.killed > GPUS:
        pytest.skip(f"needs {place.killed} GPUs")
    port, apart = free_port(), [{"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"} for rank in range(2)]
    places = [as_rank(rank, 2, port) | (apart[rank] if on == "two hosts" else {}) for rank in range(2)]
    with Ranks(places, f"once:{program}", "environment", place.target) as ranks:
        for rank in range(2):
            assert ranks.line(rank, SECONDS) == f"rank {rank} of 2 is right"


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
