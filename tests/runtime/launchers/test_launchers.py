"""Ranks that torchrun, mpirun or the test starts as processes, on both targets. Some tests use torch.distributed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import SCRIPT, SECONDS, Ranks, as_rank, environment, free_port
from rank_setups import CHOSEN, CPU, CUDA, ENDLESS, GPUS, SIGNALLED, RankSetup, everywhere

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("built")]


def torchrun(setup: RankSetup) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(setup.ranks)]


def mpirun(setup: RankSetup) -> list[str]:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    is_open = "Open MPI" in version or "OpenRTE" in version
    return ["mpirun", *(["--allow-run-as-root", "--oversubscribe"] if is_open else []), "-n", str(setup.ranks), sys.executable]


def check_output(setup: RankSetup, process: subprocess.CompletedProcess[str], times: int = 1) -> None:
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    lines = [line for line in process.stdout.splitlines() if "programs are right" in line]
    wanted = [f"rank {rank} of {setup.ranks}: {setup.right}" for rank in range(setup.ranks)]
    assert sorted(lines) == sorted(wanted * times), output


def run(setup: RankSetup, command: list[str], provider: str) -> subprocess.CompletedProcess[str]:
    command = [*command, str(SCRIPT), setup.programs, provider, setup.target]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.usefixtures("all_built")
@pytest.mark.extra("torch")
@pytest.mark.parametrize("setup", [pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_torchrun(setup: RankSetup) -> None:
    check_output(setup, run(setup, torchrun(setup), "environment"))


@pytest.mark.usefixtures("all_built")
@pytest.mark.extra("torch")
@everywhere
def test_torchrun_with_torch_distributed(setup: RankSetup) -> None:
    check_output(setup, run(setup, torchrun(setup), "torch"), times=2)


@pytest.mark.usefixtures("all_built")
@pytest.mark.extra("mpirun")
@everywhere
@pytest.mark.parametrize("provider", ["environment", pytest.param("mpi", marks=pytest.mark.extra("mpi4py"))])
def test_mpirun(setup: RankSetup, provider: str) -> None:
    check_output(setup, run(setup, mpirun(setup), provider))


STARTED = [
    pytest.param(RankSetup("cpu", "kinds", 2, 2, 0), "environment", id="cpu-2-environment"),
    pytest.param(RankSetup("cpu", "kinds", 4, 2, 0), "environment", id="cpu-4-environment", marks=pytest.mark.more),
    pytest.param(RankSetup("cpu", "everything", 4, 2, 0), "environment", id="cpu-4-everything", marks=pytest.mark.slow),
    pytest.param(CUDA, "environment", id="cuda-environment", marks=pytest.mark.gpu),
    pytest.param(CUDA, "store", id="cuda-store", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("setup", "provider"), STARTED)
@pytest.mark.usefixtures("all_built", "nothing_left_over")
def test_no_launcher(setup: RankSetup, provider: str) -> None:
    """The test sets the environment variables of a launcher, or passes a torch.distributed store without a process group. The interpreters
    have different hash seeds."""
    port = free_port()
    environments = [as_rank(rank, setup.ranks, port) for rank in range(setup.ranks)]
    with Ranks(environments, setup.programs, provider, setup.target, start=subprocess.Popen) as ranks:
        for rank in range(setup.ranks):
            assert ranks.line(rank, 500) == f"rank {rank} of {setup.ranks}: {setup.right}"
            assert ranks.ended(rank) == 0


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize("setup", [CPU])
def test_ranks_decide_together_to_use_graphs(setup: RankSetup) -> None:
    """Without `verify_calls`, a rank has no information about the arrays of other ranks. So ranks decide through the store."""
    port = free_port()
    with Ranks([as_rank(rank, 2, port) for rank in range(2)], "graphs", "environment", setup.target) as ranks:
        for rank in range(2):
            assert ranks.line(rank, 500) == f"rank {rank} of 2: calls are graphs"
            assert ranks.ended(rank) == 0


@everywhere
def test_a_graph_outlives_its_group(setup: RankSetup) -> None:
    if setup.target == "cuda" and GPUS < 2:
        pytest.skip("needs 2 GPUs")
    port = free_port()
    with Ranks([as_rank(rank, 2, port) for rank in range(2)], f"once:captured:{ENDLESS}", "environment", setup.target) as ranks:
        for rank in range(2):
            assert ranks.line(rank, SECONDS) == f"rank {rank} of 2 is right"
            assert ranks.ended(rank) == 0


@pytest.mark.parametrize("setup", [pytest.param(CUDA, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("on", ["one host", "two hosts"])
@pytest.mark.parametrize("program", [ENDLESS, SIGNALLED, CHOSEN])
def test_ranks_that_seem_to_be_on_different_hosts(setup: RankSetup, program: str, on: str) -> None:
    """NCCL may treat ranks of one host as ranks on different hosts. Transport `peer` still works, because it queries the GPUs for peer
    access."""
    if setup.target == "cuda" and setup.killed > GPUS:
        pytest.skip(f"needs {setup.killed} GPUs")
    port, apart = free_port(), [{"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"} for rank in range(2)]
    environments = [as_rank(rank, 2, port) | (apart[rank] if on == "two hosts" else {}) for rank in range(2)]
    with Ranks(environments, f"once:{program}", "environment", setup.target) as ranks:
        for rank in range(2):
            assert ranks.line(rank, SECONDS) == f"rank {rank} of 2 is right"
