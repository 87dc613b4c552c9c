"""A process and a GPU a rank: started by torchrun, mpirun or anyone, beside torch.distributed, and killed at any moment."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rank_process import program_of
from test_windows import nccl
from whole_programs import compiled, programs_of

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.runtime.launcher import launched

GPUS = len(gpus())
RANKS = max((ranks for ranks in (1, 2, 4, 8) if ranks <= GPUS), default=1)
ALL = len(programs_of(RANKS))
ENDLESS, SIGNALLED, CHOSEN = "matmul_rs_flat", "mlp_put", "chosen"  # programs: of collectives, of puts, and of puts where that can be
SCRIPT = Path(__file__).with_name("rank_process.py")
PATHS = (Path(hw.__file__).parents[1], Path(__file__).parents[1])
KILLED, TRIALS = max(2, min(4, GPUS)), 20  # ranks, and how often one of them is killed
SECONDS = 60  # for the others to notice, and to begin anew

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")


def environment(**more: str) -> dict[str, str]:
    """Of a process that no launcher has started yet."""
    clean = {name: value for name, value in os.environ.items() if not launched({name: value}) and not name.startswith("MASTER_")}
    paths = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**clean, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **more}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def as_rank(rank: int, count: int, port: str) -> dict[str, str]:
    """What a launcher tells one of `count` processes on this host."""
    return {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """What the processes run comes from the cache."""
    build(program_of(name, ranks, "cuda")[1] for name in (ENDLESS, SIGNALLED) for ranks in (KILLED, KILLED - 1))


@pytest.fixture(scope="module")
def all_built() -> None:
    build(compiled(fusion, target="cuda") for fusion in programs_of(RANKS).values())


def build(programs: Iterable[hw.Program]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(hw.Program.build, programs))


# --- how they are started ---------------------------------------------------------------------------------------------


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


def mpirun() -> list[str]:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    is_open = "Open MPI" in version or "OpenRTE" in version
    return ["mpirun", *(["--allow-run-as-root", "--oversubscribe"] if is_open else []), "-n", str(RANKS), sys.executable]


def check_output(process: subprocess.CompletedProcess[str], times: int = 1) -> None:
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    lines = [line for line in process.stdout.splitlines() if "programs are right" in line]
    wanted = [f"rank {rank} of {RANKS}: {ALL} programs are right" for rank in range(RANKS)]
    assert sorted(lines) == sorted(wanted * times), output


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.usefixtures("all_built")
def test_torchrun() -> None:
    check_output(run([*torchrun(), str(SCRIPT), "all", "environment"]))


@pytest.mark.usefixtures("all_built")
def test_torchrun_beside_torch_distributed() -> None:
    check_output(run([*torchrun(), str(SCRIPT), "all", "torch"]), times=2)


@needs_mpi
@pytest.mark.usefixtures("all_built")
@pytest.mark.parametrize("provider", ["environment", "mpi"])
def test_mpirun(provider: str) -> None:
    if provider == "mpi":
        pytest.importorskip("mpi4py")
    check_output(run([*mpirun(), str(SCRIPT), "all", provider]))


@pytest.mark.usefixtures("all_built")
@pytest.mark.parametrize("provider", ["environment", "store"])
def test_no_launcher(provider: str) -> None:
    """Processes that set the variables themselves; with a torch.distributed store alone, without its process group."""
    port = free_port()
    with Ranks([as_rank(rank, RANKS, port) for rank in range(RANKS)], "all", provider) as ranks:
        for rank in range(RANKS):
            assert ranks.line(rank, 500) == f"rank {rank} of {RANKS}: {ALL} programs are right"
            assert ranks.ended(rank) == 0


# --- a rank that is gone ----------------------------------------------------------------------------------------------


class Ranks:
    """Processes, what they say, and the end of them all."""

    def __init__(self, environments: list[dict[str, str]], *arguments: str):
        self._lines: list[queue.Queue[str | None]] = [queue.Queue() for _ in environments]
        self._said: list[list[str]] = [[] for _ in environments]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                env=environment(**one),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for one in environments
        ]
        self._readers = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(len(environments))]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int) -> None:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            self._said[rank].append(line)
            self._lines[rank].put(line.strip())
        self._lines[rank].put(None)

    def line(self, rank: int, seconds: float, *, beginning: str = "") -> str:
        """The next line of a rank with that beginning; other lines are a library's warnings, or the watchdog's report."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines[rank].get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"rank {rank} hangs; it said:\n{''.join(self._said[rank])}")
            if line is None:
                pytest.fail(f"rank {rank} has ended; it said:\n{''.join(self._said[rank])}")
            if line.startswith(beginning or "rank "):
                return line

    def tell(self, rank: int, text: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def ended(self, rank: int) -> int:
        return self.processes[rank].wait(SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.kill()
            process.wait()
            reader.join(SECONDS)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe:
                        pipe.close()


@pytest.fixture
def nothing_left_over() -> Iterator[None]:
    """Shared memory that NCCL and we leave behind."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 10
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.skipif(GPUS < KILLED, reason=f"needs {KILLED} GPUs")
@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_rank_is_killed(trial: int) -> None:
    kill_a_rank(ENDLESS, trial)


needs_windows = pytest.mark.skipif(GPUS < KILLED or nccl() < 22900, reason=f"needs {KILLED} GPUs, and NCCL 2.29")


@needs_windows
@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize("trial", range(TRIALS // 4))
def test_a_rank_is_killed_while_others_wait_for_its_signal(trial: int) -> None:
    kill_a_rank(SIGNALLED, trial)


@needs_windows
@pytest.mark.parametrize("on", ["one host", "two hosts"])
@pytest.mark.parametrize("program", [ENDLESS, SIGNALLED, CHOSEN])
def test_ranks_that_take_each_other_for_other_hosts(program: str, on: str) -> None:
    """Windows are within a host: elsewhere a stated loop of puts is an error, a chosen one is done without, and all else is right."""
    port, apart = free_port(), [{"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"} for rank in range(2)]
    places = [as_rank(rank, 2, port) | (apart[rank] if on == "two hosts" else {}) for rank in range(2)]
    with Ranks(places, f"once:{program}", "environment") as ranks:
        for rank in range(2):
            if program == SIGNALLED and on == "two hosts":
                message = ranks.line(rank, SECONDS, beginning="failed: ")
                assert "one_sided" in message, message
                assert 'compile with transport="two_sided"' in message, message
            else:
                assert ranks.line(rank, SECONDS) == f"rank {rank} of 2 is right"


def kill_a_rank(program: str, trial: int) -> None:
    """The others get an exception, which names the rank, and are a world of their own in the same processes. Rank 0 keeps the store."""
    moment = random.Random(trial)
    victim = moment.randrange(KILLED) if trial else 0
    port, other_port = free_port(), free_port()
    with Ranks([as_rank(rank, KILLED, port) for rank in range(KILLED)], program, "environment") as ranks:
        for rank in range(KILLED):
            ranks.line(rank, 300, beginning="ready")
        time.sleep(moment.uniform(0, 1.5))
        ranks.processes[victim].kill()
        survivors = [rank for rank in range(KILLED) if rank != victim]
        started = time.monotonic()
        for rank in survivors:
            message = ranks.line(rank, SECONDS, beginning="failed: ")
            names = "rank 0" if victim == 0 else f"rank {victim}: its process has ended"
            assert names in message, message
        assert time.monotonic() - started < SECONDS
        for place, rank in enumerate(survivors):
            world = as_rank(place, len(survivors), other_port) | {"LOCAL_RANK": str(rank)}
            ranks.tell(rank, " ".join(f"{name}={value}" for name, value in world.items()))
        for place, rank in enumerate(survivors):
            assert ranks.line(rank, SECONDS) == f"rank {place} of {len(survivors)} is right"
            assert ranks.ended(rank) == 0
