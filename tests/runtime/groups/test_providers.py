"""Launchers and providers: threads, processes over TCP, torch.distributed, MPI."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from launched_ranks import in_threads, run_processes
from processes import free_port

from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.runtime.coordinator import StoreCoordinator
from hostweave.runtime.launchers import LaunchedRank, first_node, launched
from hostweave.runtime.providers import MPI, Communicators, Environment, Threads, TorchStore, close_servers, default_provider
from hostweave.runtime.rendezvous import meet
from hostweave.runtime.stores import TcpStore

# --- launchers --------------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_torchrun() -> None:
    launch = LaunchedRank(TORCHRUN | {"TORCHELASTIC_RUN_ID": "run"})
    assert (launch.rank, launch.count, launch.local_rank, launch.host) == (3, 8, 1, "node0")
    assert launch.ports == tuple(range(32500, 32516))
    assert launch.job == "run 29500"


def test_the_store_is_never_on_the_port_of_torch_distributed() -> None:
    for port in ("1024", "29500", "61000", "65000", "65535"):
        ports = LaunchedRank(TORCHRUN | {"MASTER_PORT": port}).ports
        assert int(port) not in ports
        assert 1024 <= min(ports) <= max(ports) < 65536
    for job in range(1000):  # Without MASTER_PORT, the ports depend on the job's name.
        ports = LaunchedRank({"PMI_SIZE": "2", "PMI_RANK": "1", "MASTER_ADDR": "node0", "SLURM_JOB_ID": f"{job}"}).ports
        assert 1024 <= min(ports) <= max(ports) < 29500
    assert LaunchedRank(TORCHRUN | {"HOSTWEAVE_PORT": "7000"}).ports == (7000,)


def test_open_mpi() -> None:
    launch = LaunchedRank(
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "PMIX_NAMESPACE": "prterun-1",
        }
    )
    assert (launch.rank, launch.count, launch.local_rank, launch.host, launch.job) == (2, 4, 2, "127.0.0.1", "prterun-1")


def test_mpich() -> None:
    launch = LaunchedRank({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (launch.rank, launch.count, launch.local_rank, launch.host) == (1, 2, 1, "127.0.0.1")
    assert launch.job == f"parent {os.getppid()}"


def test_slurm() -> None:
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "5", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    launch = LaunchedRank(step | {"SLURM_STEP_NODELIST": "gpu[03-04]"})
    assert (launch.rank, launch.count, launch.local_rank, launch.host, launch.job) == (5, 16, 5, "gpu03", "77 0")
    # A batch script that runs without srun has these variables.
    assert not launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "77"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],login1", "gpu03"), ("a1,a2", "a1"), ("host", "host"), ("rack[1-2]node[4,7]", "rack1node4"), ("n[7]-ib", "n7-ib")],
)
def test_the_first_node_of_slurm(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            TORCHRUN | {"MASTER_PORT": "99999"},
            "hw.Environment: MASTER_PORT=99999: a port must be from 1 to 65535; set the same port on all ranks",
        ),
        (
            {},
            "hw.Environment: none of WORLD_SIZE, OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_STEP_ID is set; "
            "start the script with torchrun, mpirun or srun",
        ),
        ({"WORLD_SIZE": "2"}, "hw.Environment: RANK is not set; start the script with a launcher"),
        ({"WORLD_SIZE": "2", "RANK": "one"}, "hw.Environment: RANK='one' is not a number; start the script with a launcher"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "hw.Environment: RANK=2 and WORLD_SIZE=2: the rank must be from 0 to 1"),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "hw.Environment: the host of rank 0 is unknown; set MASTER_ADDR to its name on all ranks, or use hw.MPI()",
        ),
    ],
)
def test_an_incomplete_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Environment(environ)
    assert str(caught.value) == message


def test_the_default_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if launched({name: ""})]:
        monkeypatch.delenv(name)
    assert default_provider().rank_and_count("default") == (0, 1)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert default_provider().rank_and_count("default") == (3, 8)


# --- providers --------------------------------------------------------------------------------------------------------


def test_ranks_of_threads_are_assigned_and_released() -> None:
    provider = Threads(2)
    assert provider.rank_and_count("a") == provider.rank_and_count("b") == (0, 2)
    assert in_threads(1, lambda _: provider.rank_and_count("a")) == [(1, 2)]
    assert in_threads(1, lambda _: provider.rank_and_count("a")) == [(1, 2)]
    is_held, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=lambda: (provider.rank_and_count("a"), is_held.set(), done.wait()))
    holder.start()
    assert is_held.wait(60)
    (refused,) = in_threads(1, lambda _: provider.rank_and_count("a"))
    assert str(refused) == "hw.Threads: all 2 ranks are taken by other threads; create hw.Threads with more ranks"
    done.set()
    holder.join()


def test_threads_run() -> None:
    provider = Threads(3)
    assert provider.run(lambda rank: (rank, provider.rank_and_count("g"))) == [(rank, (rank, 3)) for rank in range(3)]
    with pytest.raises(ArgumentError, match=r"^hw\.Threads: count=0 is not an int from 1 to"):
        Threads(0)


def test_a_thread_that_raises_ends_the_waiting_of_the_others() -> None:
    provider = Threads(3)
    waited: list[str] = []

    def rank(rank: int) -> None:
        if rank == 1:
            raise ValueError("no data")
        try:
            meet(provider.store("default", 60), "default", rank, 3, 60)
        except ExecutionError as error:
            waited.append(str(error))
            raise

    with pytest.raises(ValueError, match="no data"):
        provider.run(rank)
    assert waited == ["rank 1: ValueError: no data"] * 2
    assert provider.run(lambda rank: len(meet(provider.store("default", 60), "default", rank, 3, 60).entries)) == [3] * 3


def test_rendezvous_of_processes_over_tcp() -> None:
    script = """
from hostweave.runtime.providers import Environment
from hostweave.runtime.rendezvous import meet
provider = Environment()
rank, count = provider.rank_and_count("default")
store = provider.store("default", 20)
worlds = [meet(store, group, rank, count, 20) for group in ("default", "other", "default")]
print(provider.local_rank, [w.local_rank(rank) for w in worlds], *[w.prefix for w in worlds])
from hostweave.runtime.coordinator import StoreCoordinator
StoreCoordinator(store, worlds[0].prefix, rank, count).gather("done", 20)
store.close()
"""
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    outputs = run_processes(script, [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)])
    prefixes = outputs[0].split()[-3:]
    assert len(set(prefixes)) == 3
    assert outputs == [" ".join([str(rank), str([rank] * 3), *prefixes]) for rank in range(3)]


@pytest.mark.extra("torch")
def test_torch_distributed_with_the_same_environment() -> None:
    """Ranks can meet before and after torch.distributed is initialised with the same MASTER_PORT. Ranks can also meet through the default
    store of torch.distributed."""
    script = """
import os
import torch.distributed as dist
from hostweave.runtime.coordinator import StoreCoordinator
from hostweave.runtime.providers import Environment, TorchStore
from hostweave.runtime.rendezvous import meet
rank = int(os.environ["RANK"])
def world(provider):
    store = provider.store("default", 20)
    found = meet(store, "default", *provider.rank_and_count("default"), 20)
    return StoreCoordinator(store, found.prefix, rank, 2).gather(f"from {rank}", 20)
before = world(Environment())
dist.init_process_group("gloo")
print(before, world(Environment()), world(TorchStore()))
dist.barrier()
dist.destroy_process_group()
"""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    outputs = run_processes(script, [common | {"RANK": str(rank)} for rank in range(2)])
    assert outputs == [" ".join(["['from 0', 'from 1']"] * 3)] * 2


@pytest.mark.extra("torch")
def test_torch_store_of_tcp() -> None:
    import torch.distributed as dist

    port, done = int(free_port()), threading.Barrier(2)

    def rank(rank: int) -> list[str]:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=20))
        provider = TorchStore(store, rank, 2)
        ours = provider.store("default", 20)
        world = meet(ours, "default", *provider.rank_and_count("default"), 20)
        records = StoreCoordinator(ours, world.prefix, rank, 2).gather(str(rank), 20)
        done.wait()
        return records

    assert in_threads(2, rank) == [["0", "1"]] * 2


@pytest.mark.extra("torch")
def test_torch_store_needs_torch_distributed() -> None:
    with pytest.raises(ArgumentError) as caught:
        TorchStore()
    message = "hw.TorchStore: torch.distributed is not initialised; call init_process_group or pass store, rank and count"
    assert str(caught.value) == message


class FakeComm:
    """The methods of an mpi4py communicator that MPI() uses. Ranks are threads."""

    def __init__(self, rank: int, shared: SimpleNamespace):
        self._rank, self.shared = rank, shared

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return int(self.shared.count)

    def bcast(self, value: Any, root: int) -> Any:
        if self._rank == root:
            self.shared.value = value
        self.shared.barrier.wait()
        return self.shared.value

    def allgather(self, value: Any) -> list[Any]:
        self.shared.values[self._rank] = f"{value} {self._rank}" if self.shared.spread else value
        self.shared.barrier.wait()
        return list(self.shared.values)


@pytest.mark.parametrize("spread", [False, True], ids=["one host", "several"])
def test_mpi(spread: bool) -> None:
    shared = SimpleNamespace(count=3, barrier=threading.Barrier(3), value=None, values=[None] * 3, spread=spread)

    def rank(rank: int) -> tuple[str, list[str]]:
        provider = MPI(FakeComm(rank, shared))
        store = provider.store("default", 20)
        world = meet(store, "default", *provider.rank_and_count("default"), 20)
        again = provider.store("default", 20)  # This call makes no collective of MPI.
        records = StoreCoordinator(again, world.prefix, rank, 3).gather(str(rank), 20)
        for one in (store, again):
            assert isinstance(one, TcpStore)
            one.close()
        return world.prefix, records

    results = in_threads(3, rank)
    hosts = {host for host, _ in shared.value[0]}
    assert (hosts != {"127.0.0.1"}) == spread
    close_servers()
    assert results == [(results[0][0], ["0", "1", "2"])] * 3


def test_communicators_name_their_axes() -> None:
    provider = Communicators({"tp": 1, ("dp", "tp"): 2}, rank=3, count=8)
    assert provider.communicators == {"tp": 1, "dp, tp": 2}
    assert provider.rank_and_count("default") == (3, 8)
    assert provider.store("default", 1) is None
