"""Ranks that torchrun, mpirun or the test starts as processes, on both targets. Some tests use torch.distributed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import CHOSEN, CPU, CUDA, ENDLESS, GPUS, SIGNALLED, Place, everywhere
from processes import SCRIPT, SECONDS, Ranks, as_rank, environment, free_port

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("built")]


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
