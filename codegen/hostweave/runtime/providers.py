"""Providers give `hw.init` the rank, and a store if the ranks have one. There is one class for each way to start ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from hostweave.base.errors import ArgumentError, ExecutionError, optional
from hostweave.base.forks import reset_after_fork
from hostweave.base.interrupts import POLL_SECONDS, interruptibly
from hostweave.base.shortages import explains_shortages
from hostweave.base.signatures import checked, checked_arguments, with_ints
from hostweave.runtime.coordinator import ThreadTable
from hostweave.runtime.launchers import Environ, LaunchedRank, launched
from hostweave.runtime.rendezvous import this_host
from hostweave.runtime.stores import Address, MemoryStore, Store, TcpServer, TcpStore

T = TypeVar("T")

_servers: dict[str, TcpServer] = {}  # job -> server in this process
_servers_lock = reset_after_fork(threading.Lock())
_JOIN_TIMEOUT = 10.0  # seconds for the threads of ranks to end after an interrupt
MAX_THREADS = 1024


class Provider(Protocol):
    """Gives `hw.init` the rank, and a store for messages between ranks. Applications may implement this interface."""

    def rank_and_count(self, group: str) -> tuple[int, int]:
        """Index of this rank in the group, and the number of ranks."""

    def store(self, group: str, timeout: float) -> Store | None:
        """Returns the store of the group, connected within `timeout` seconds, or None if the ranks have no store.

        A store has `set(key, bytes)` and `get(key, timeout)`. `get` blocks until the key is set, and raises TimeoutError after `timeout`
        seconds. All ranks of a new group call `store`.
        """


def next_item(queue: SimpleQueue[T], check_wait: Callable[[], None] = lambda: None) -> T:
    """Waits for an item. Polls, because a signal that arrives just before a blocking wait would be handled only after the wait. Calls
    `check_wait`, which may raise, between polls."""
    while True:
        try:
            return queue.get(timeout=POLL_SECONDS)
        except Empty:
            check_wait()


class Threads:
    """Ranks that are `count` threads of this process. Call `hw.init` in every thread with the same `hw.Threads`, or let `run` start the
    threads.

    A thread becomes the first free rank. The rank is free again when the thread has ended. Raises ArgumentError if `count` is not an int
    from 1 to 1024.

    Example: `ranks = hw.Threads(8)`, then `ys = ranks.run(rank_main)`, where `rank_main(rank)` calls `hw.init(ranks)` and programs.
    """

    def __init__(self, count: int):
        count = with_ints(count)
        if not isinstance(count, int) or not 1 <= count <= MAX_THREADS:
            raise ArgumentError(f"hw.Threads: count={count!r} is not an int from 1 to {MAX_THREADS}; pass the number of ranks")
        self.count = count
        self.threads: list[threading.Thread | None] = [None] * count  # by rank
        self.tables: dict[str, ThreadTable] = {}  # epoch of a group -> shared state of the group
        self.splits: dict[str, Threads] = {}  # providers of split groups, by the key of `split`
        self.lock = threading.Lock()
        self._store = MemoryStore()

    def rank_and_count(self, group: str) -> tuple[int, int]:
        thread = threading.current_thread()
        with self.lock:
            if thread not in self.threads:
                free = next((rank for rank, thread in enumerate(self.threads) if thread is None or not thread.is_alive()), None)
                if free is None:
                    raise ArgumentError(f"hw.Threads: all {self.count} ranks are taken by other threads; create hw.Threads with more ranks")
                self.threads[free] = thread
            return self.threads.index(thread), self.count

    def store(self, group: str, timeout: float) -> Store:
        return self._store

    def table(self, epoch: str) -> ThreadTable:
        with self.lock:
            return self.tables.setdefault(epoch, ThreadTable(self.threads))

    def split(self, key: str, ranks: Sequence[int]) -> Threads:
        """Returns a provider for `ranks`, in this order. All these ranks pass the same key, and get the same provider."""
        with self.lock:
            if key not in self.splits:
                self.splits[key] = Threads(len(ranks))
                self.splits[key].threads[:] = [self.threads[rank] for rank in ranks]
            return self.splits[key]

    def fail(self, reason: str) -> None:
        """Raises an error in every rank that waits for other ranks."""
        with self.lock:
            self._store.fail(reason)
            for table in self.tables.values():
                table.fail(reason)
            for split in self.splits.values():
                split.fail(reason)

    @explains_shortages
    @checked
    def run(self, function: Callable[[int], T]) -> list[T]:
        """Calls `function(rank)` in a new thread for every rank. Returns a list of the results, by rank.

        If calls raise, waits for all threads and raises the first exception.
        """
        results: list[Any] = [None] * self.count
        failures: list[BaseException] = []
        ended: SimpleQueue[int] = SimpleQueue()

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                failures.append(error)
                self.fail(f"rank {rank}: {type(error).__name__}: {error}")
            finally:
                ended.put(rank)

        threads = [threading.Thread(target=call, args=(rank,), name=f"rank {rank}") for rank in range(self.count)]
        with self.lock:
            self.threads[:] = threads
            self.tables.clear()
            self.splits.clear()
            self._store = MemoryStore()
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                next_item(ended)  # not `join`: after an interrupted join, Python 3.11 treats the thread as ended
        except BaseException as interruption:
            why = f"interrupted by {type(interruption).__name__}"
            interruptibly(lambda: self._end(threads, why))
            raise
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    def _end(self, threads: Sequence[threading.Thread], why: str) -> None:
        self.fail(why)
        deadline = time.monotonic() + _JOIN_TIMEOUT
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)


class KnownRank:
    _rank: int
    _count: int

    def rank_and_count(self, group: str) -> tuple[int, int]:
        return self._rank, self._count


class SplitProvider(KnownRank):
    """Provider for some ranks of another provider, in the given order. The ranks are processes."""

    def __init__(self, provider: Provider, rank: int, ranks: Sequence[int]):
        self._provider, self._rank, self._count = provider, ranks.index(rank), len(ranks)

    def store(self, group: str, timeout: float) -> Store | None:
        return self._provider.store(group, timeout)


@checked_arguments
class Environment(KnownRank):
    """Ranks that are processes started by torchrun, mpirun or srun. For several ranks, rank 0 runs a TCP store.

    The store listens at HOSTWEAVE_BIND, by default at MASTER_ADDR. Without MASTER_ADDR, the store listens at the first node of an srun
    step, or at 127.0.0.1 if all ranks are on one host. The port is HOSTWEAVE_PORT. By default, the port is one of 16 ports that are
    computed from MASTER_PORT or the job's name. MASTER_PORT is not one of the 16 ports. HOSTWEAVE_TOKEN is a shared secret that
    authenticates the ranks. `environ` replaces os.environ. Raises ArgumentError if variables are missing or invalid.

    Example: `hw.init(hw.Environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}))`.
    """

    def __init__(self, environ: Environ | None = None):
        self._launch = LaunchedRank(os.environ if environ is None else environ)
        self._rank, self._count = self._launch.rank, self._launch.count
        self.local_rank = self._launch.local_rank  # index among the ranks on this host, or None if unknown

    def store(self, group: str, timeout: float) -> Store:
        launch = self._launch
        if launch.count == 1:
            return MemoryStore()
        if launch.rank == 0:
            _serve(launch.job, [(launch.bind, port) for port in launch.ports], launch.token)
        return TcpStore([(launch.host, port) for port in launch.ports], launch.job, timeout, launch.token)


@checked_arguments
class TorchStore(KnownRank):
    """Ranks that are processes of torch.distributed. Uses only the store, rank and number of ranks of torch.distributed.

    `store`, `rank` and `count` may replace those of the default process group. Raises ArgumentError if torch.distributed is not initialised
    and one of the three is missing, or if `store` is not a store of torch.distributed. Raises MissingPackage if PyTorch is not installed.

    Example: `hw.init(hw.TorchStore())` after `torch.distributed.init_process_group("nccl")`.
    """

    def __init__(self, store: Any = None, rank: int | None = None, count: int | None = None):
        torch = optional("torch.distributed", "hw.TorchStore")
        if (store is None or rank is None or count is None) and not torch.is_initialized():
            raise ArgumentError(
                "hw.TorchStore: torch.distributed is not initialised; call init_process_group or pass store, rank and count"
            )
        if store is not None and not all(hasattr(store, name) for name in ("set", "get", "check")):
            raise ArgumentError(f"hw.TorchStore: store={store!r} is not a store of torch.distributed; pass a TCPStore, or omit it")
        self._rank = torch.get_rank() if rank is None else rank
        self._count = torch.get_world_size() if count is None else count
        self._store = PolledTorchStore(torch.distributed_c10d._get_default_store() if store is None else store)

    def store(self, group: str, timeout: float) -> Store:
        return self._store


class PolledTorchStore:
    """A store of torch.distributed. Waits by polling, because a blocking call would block the other threads of the process."""

    def __init__(self, store: Any):
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        deadline, pause = time.monotonic() + timeout, 0.0005
        try:
            while not self._store.check([key]):
                if time.monotonic() >= deadline:
                    raise TimeoutError(key)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise ExecutionError(f"torch.distributed's store does not answer ({error}); check whether its process has ended") from error


@checked_arguments
class MPI(KnownRank):
    """Ranks that are processes of an mpi4py communicator, by default MPI.COMM_WORLD.

    For several ranks, rank 0 runs a TCP store. MPI broadcasts the store's address and a random token. Raises MissingPackage if `comm` is
    omitted and mpi4py is not installed. Raises ArgumentError if `comm` is not a communicator.

    Example: `hw.init(hw.MPI())`.
    """

    def __init__(self, comm: Any = None):
        if comm is None:
            comm = optional("mpi4py.MPI", "hw.MPI").COMM_WORLD
        if not hasattr(comm, "Get_rank"):
            raise ArgumentError(f"hw.MPI: comm={comm!r} is not a communicator; pass an mpi4py communicator, or omit it")
        self._comm, self._rank, self._count = comm, comm.Get_rank(), comm.Get_size()
        self._addresses_and_job: tuple[list[Address], str] | None = None

    def store(self, group: str, timeout: float) -> Store:
        if self._count == 1:
            return MemoryStore()
        if self._addresses_and_job is None:
            hosts = set(self._comm.allgather(this_host()))
            if self._rank == 0:
                job = secrets.token_hex()
                listen, names = ("", _own_hosts()) if len(hosts) > 1 else ("127.0.0.1", ["127.0.0.1"])
                server = _serve(job, [(listen, 0)])
                self._addresses_and_job = [(host, server.port) for host in names], job
            self._addresses_and_job = self._comm.bcast(self._addresses_and_job, root=0)
        assert self._addresses_and_job is not None
        addresses, job = self._addresses_and_job
        return TcpStore(addresses, job, timeout)


@checked_arguments
class Communicators(KnownRank):
    """NCCL communicators that the application owns: `{"tp": pointer}`, or `{("dp", "tp"): pointer}` for a channel along two axes.

    A pointer is an ncclComm_t as an int. The communicator must outlive the group. There is no store, so the calls of the ranks are not
    compared. The application must make sure that all ranks call the same programs.

    Example: `hw.init(hw.Communicators({"x": pointer}, rank, count))`.
    """

    def __init__(self, communicators: Mapping[str | tuple[str, ...], int], rank: int, count: int):
        self.communicators = {axes if isinstance(axes, str) else ", ".join(axes): pointer for axes, pointer in communicators.items()}
        self._rank, self._count = rank, count

    def store(self, group: str, timeout: float) -> Store | None:
        return None


def _serve(job: str, addresses: Sequence[Address], token: str = "") -> TcpServer:
    def serve() -> TcpServer:
        with _servers_lock:
            if job not in _servers:
                _servers[job] = TcpServer(addresses, job, token)
            return _servers[job]

    return interruptibly(serve)


def default_provider() -> Provider:
    """Returns a provider for the launcher's environment. Without a launcher, this process is the only rank."""
    return Environment(os.environ if launched(os.environ) else {"RANK": "0", "WORLD_SIZE": "1"})


@atexit.register
def close_servers() -> None:
    """Closes this process's stores at exit. Each store first waits, for up to 5 s, until its clients have disconnected."""
    with _servers_lock:
        for server in _servers.values():
            server.close(linger=5)
        _servers.clear()


os.register_at_fork(after_in_child=_servers.clear)  # the parent's threads do not exist in the child


def _own_hosts() -> list[str]:
    """Names and addresses at which other processes may reach this process."""
    name = socket.gethostname()
    hosts = [name, socket.getfqdn()]
    with contextlib.suppress(OSError):
        hosts += socket.gethostbyname_ex(name)[2]
    return list(dict.fromkeys([*hosts, "127.0.0.1"]))
