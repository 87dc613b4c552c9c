"""Stores of a group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_ranks import in_threads, soon
from processes import free_port

from hostweave.base.errors import ExecutionError
from hostweave.runtime import stores
from hostweave.runtime.providers import PolledTorchStore, TorchStore
from hostweave.runtime.rendezvous import World, meet
from hostweave.runtime.stores import MemoryStore, Store, StoreClosed, TcpServer, TcpStore


class FakeTorchStore:
    """Imitates a torch.distributed store without torch."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


@pytest.fixture
def server() -> Iterator[TcpServer]:
    server = TcpServer([("127.0.0.1", 0)], "job")
    yield server
    server.close()


@pytest.fixture
def tcp_store(server: TcpServer) -> Iterator[TcpStore]:
    store = TcpStore([("127.0.0.1", server.port)], "job", 5)
    yield store
    store.close()


OF_TORCH = [pytest.param(kind, marks=pytest.mark.extra("torch")) for kind in ("torch file", "torch hash")]


@pytest.fixture(params=["memory", "tcp", "torch fake", *OF_TORCH])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "tcp":
        found: Store = request.getfixturevalue("tcp_store")
        return found
    if request.param == "torch fake":
        return PolledTorchStore(FakeTorchStore())
    import torch.distributed as dist

    kept = dist.FileStore(str(tmp_path / "store"), -1) if request.param == "torch file" else dist.HashStore()
    return TorchStore(kept, rank=0, count=1).store("default", 1)


def test_a_value_stays_until_it_is_replaced(store: Store) -> None:
    store.set("key", b"one\0\xff")
    assert store.get("key", 0) == b"one\0\xff"
    store.set("key", b"")
    assert store.get("key", 0) == b""
    assert store.get("key", 5) == b""


def test_get_waits_and_gives_up(store: Store) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        store.get("never", 0.2)
    assert 0.2 <= time.monotonic() - started < 2
    with pytest.raises(TimeoutError):
        store.get("never", 0)
    with soon(store.set, "late", b"value"):
        assert store.get("late", 10) == b"value"


def test_threads_wait_concurrently(store: Store) -> None:
    def exchange(rank: int) -> bytes:
        if rank == 3:
            time.sleep(0.1)
        store.set(f"from {rank}", bytes([rank]))
        return b"".join(store.get(f"from {other}", 10) for other in range(4))

    assert in_threads(4, exchange) == [b"\0\1\2\3"] * 4


def test_a_closed_store_has_no_connection(server: TcpServer) -> None:
    store = TcpStore([("127.0.0.1", server.port)], "job", 5)
    with soon(store.get, "late", 10):
        while "late" not in server.waiting:
            time.sleep(0.01)
        store.close()
        other = TcpStore([("127.0.0.1", server.port)], "job", 5)
        other.set("late", b"value")
        other.close()
    assert store.idle == []


def test_the_first_process_that_ends_is_named(server: TcpServer, tcp_store: TcpStore) -> None:
    """The end of the first process may have caused the end of the other processes."""
    ranks = [TcpStore([("127.0.0.1", server.port)], "job", 5) for _ in range(3)]
    for rank, store in enumerate(ranks):
        store.on_disconnect("failed", f"rank {rank}".encode())
        store.on_disconnect(f"ended/{rank}", b"")
    for rank in (1, 2):
        will = ranks[rank].will_connection
        assert will
        will.close()
        tcp_store.get(f"ended/{rank}", 5)
    ranks[0].close()
    assert tcp_store.get("failed", 0) == b"rank 1"
    with pytest.raises(TimeoutError):
        tcp_store.get("ended/0", 0)
    for store in ranks:
        store.close()


def test_a_large_value_over_tcp(tcp_store: TcpStore) -> None:
    value = os.urandom(3_000_000)
    tcp_store.set("large", value)
    assert tcp_store.get("large", 1) == value


def test_the_port_of_another_job_is_skipped(server: TcpServer) -> None:
    ours = TcpServer([("127.0.0.1", 0)], "ours")
    store = TcpStore([("127.0.0.1", server.port), ("127.0.0.1", ours.port)], "ours", 5)
    store.set("key", b"ours")
    stranger = TcpStore([("127.0.0.1", server.port)], "job", 5)
    with pytest.raises(TimeoutError):
        stranger.get("key", 0)
    for one in (store, stranger, ours):
        one.close()


def test_a_port_in_use_is_skipped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = rf"no port from {port} to {port} is free for the store of rank 0 .*; set another HOSTWEAVE_PORT on all ranks"
        with pytest.raises(ExecutionError, match=free):
            TcpServer([("127.0.0.1", port)], "job")
        server = TcpServer([("127.0.0.1", port), ("127.0.0.1", 0)], "job")
        server.close()


def test_no_server_to_reach() -> None:
    port = int(free_port())
    unreachable = rf"the store of rank 0 cannot be reached on 127.0.0.1, port {port} \(.*\); check that rank 0 runs there"
    with pytest.raises(ExecutionError, match=unreachable):
        TcpStore([("127.0.0.1", port)], "job", 0.2)


def test_a_closing_server_informs_its_clients(server: TcpServer) -> None:
    store = TcpStore([("127.0.0.1", server.port)], "job", 5)
    store.set("key", b"value")
    with soon(server.close), pytest.raises(StoreClosed):
        store.get("never", 30)
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # The bind succeeds, because the port is free again.
    store.close()


def test_a_value_for_a_disconnect_is_set_only_if_the_process_dies(server: TcpServer, tcp_store: TcpStore) -> None:
    script = f"""
import os
from hostweave.runtime.stores import TcpStore
store = TcpStore([("127.0.0.1", {server.port})], "job", 5)
for name in ("will", "last word"):
    store.on_disconnect(f"{{name}} of {{os.environ['WHO']}}", b"died")
if os.environ["WHO"] == "one":
    os.kill(os.getpid(), 9)
store.close()
"""
    clean = dict(os.environ)
    for who, status in (("one", -9), ("two", 0)):
        assert subprocess.run([sys.executable, "-c", script], env=clean | {"WHO": who}).returncode == status
    assert tcp_store.get("will of one", 5) == tcp_store.get("last word of one", 5) == b"died"
    with pytest.raises(TimeoutError):
        tcp_store.get("will of two", 0.3)


def test_a_death_is_noticed_while_a_forked_child_lives(server: TcpServer, tcp_store: TcpStore) -> None:
    script = f"""
import os
from hostweave.runtime.stores import TcpStore
store = TcpStore([("127.0.0.1", {server.port})], "job", 5)
store.on_disconnect("will", b"died")
if os.fork():
    os.kill(os.getpid(), 9)
os.read(0, 1)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE):  # the child ends when its stdin is closed
        assert tcp_store.get("will", 10) == b"died"


@pytest.mark.parametrize("timeout", [100.0, float("inf")])
def test_the_server_removes_a_client_that_dies_while_it_waits(server: TcpServer, tcp_store: TcpStore, timeout: float) -> None:
    script = f"""
from hostweave.runtime.stores import TcpStore
TcpStore([("127.0.0.1", {server.port})], "job", 5).get("never", float("{timeout}"))
"""
    with subprocess.Popen([sys.executable, "-c", script]) as client:
        deadline = time.monotonic() + 30
        while "never" not in server.waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server.waiting["never"]) == 1
        client.kill()
    while server.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.waiting == {}
    tcp_store.set("key", b"value")
    assert tcp_store.get("key", timeout) == b"value"


def test_a_dead_server_is_an_error() -> None:
    script = """
from hostweave.runtime.stores import TcpServer
server = TcpServer([("127.0.0.1", 0)], "job")
print(server.port, flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    store = TcpStore([("127.0.0.1", int(process.stdout.readline()))], "job", 5)
    process.kill()
    process.communicate()
    with pytest.raises(
        ExecutionError, match=r"the store in the process of rank 0 does not answer \(.*\); check whether that process has ended"
    ):
        store.get("key", 5)
    store.close()


def test_more_descriptors_than_select_supports(tcp_store: TcpStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2000), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        tcp_store.set("key", b"value")
        store = TcpStore([tcp_store.address], "job", 5)
        assert store.idle[0].fileno() > 1023
        assert store.get("key", 0) == b"value"
        store.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("turns", range(8))
def test_a_value_that_is_set_while_its_reader_times_out(server: TcpServer, turns: int) -> None:
    """In any order of events, the reader gets the value or None, without an error."""

    async def race() -> bytes | None:
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(server.get("key", 0.01, asyncio.StreamReader()))
        await asyncio.sleep(0)

        def set_after(more: int) -> None:
            if more:
                loop.call_soon(set_after, more - 1)
            else:
                server.set("key", b"value")

        loop.call_later(0.0101, set_after, turns)
        time.sleep(0.03)  # The value and the time-out come at the same time.
        return await reader

    assert asyncio.run_coroutine_threadsafe(race(), server.loop).result(10) in (b"value", None)
    assert server.waiting == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_the_store_listens_only_at_the_given_address(host: str) -> None:
    server = TcpServer([(host, 0)], "job")
    try:
        assert server.socket.getsockname()[0] in ({"127.0.0.1", "::1"} if host == "localhost" else {host})
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", server.port), 5)
        store = TcpStore([(host, server.port)], "job", 5)
        store.close()
    finally:
        server.close()


def test_a_name_that_resolves_to_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"node0": "127.0.0.5", "own": "127.0.1.1", "far": "192.0.2.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(socket.AF_INET, 1, 6, "", (names[host], 0))])
    monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", property(lambda address: str(address) == "127.0.1.1"))
    for host, bound in (("node0", {"127.0.0.5"}), ("own", {"::", "0.0.0.0"})):
        server = TcpServer([(host, 0)], "job")
        assert server.socket.getsockname()[0] in bound
        server.close()
    message = r"^the store of rank 0 cannot listen at far \(.*\); set HOSTWEAVE_BIND to an address of its host, or 0\.0\.0\.0$"
    with pytest.raises(ExecutionError, match=message):
        TcpServer([("far", 0)], "job")


def test_names_of_jobs_and_tokens_are_compared_completely() -> None:
    name = "j" * 100
    server = TcpServer([("127.0.0.1", 0)], name + "a", "token")
    for job, token in ((name + "b", "token"), (name + "a", ""), (name + "a", "tokem"), (name + "atoken", "")):
        with pytest.raises(ExecutionError, match="belongs to another job, or has another HOSTWEAVE_TOKEN"):
            TcpStore([("127.0.0.1", server.port)], job, 0.1, token)
    TcpStore([("127.0.0.1", server.port)], name + "a", 5, "token").close()
    server.close()


def said_to(server: TcpServer, request: bytes) -> bytes:
    """Returns the response of the server to a request of an authenticated client."""
    store = TcpStore([("127.0.0.1", server.port)], "job", 5)
    connection = store.idle[0]
    connection.settimeout(0.5)
    connection.sendall(request)
    try:
        return connection.recv(100)
    finally:
        store.close()


def test_a_listener_cannot_reuse_a_clients_messages(server: TcpServer) -> None:
    """A process that listens on a port of the job cannot use received messages to authenticate to the server of the job."""
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = threading.Thread(target=lambda: in_threads(1, lambda _: TcpStore([listener.getsockname()], "job", 0.1)))
        client.start()
        connection, _ = listener.accept()
        with connection:
            heard = connection.recv(1000)
            with socket.create_connection(("127.0.0.1", server.port)) as relay:
                relay.sendall(heard)
                proof = relay.recv(100)
                connection.sendall(bytes(len(proof)))  # an invalid proof
                assert connection.recv(1000) == b""
                relay.sendall(heard[-16:] * 2)
                relay.settimeout(5)
                assert relay.recv(100) == b""
    client.join()


@pytest.mark.parametrize("sizes", [(2**32 - 1, 0), (0, 2**32 - 1), (5000, 0)])
def test_lengths_are_bounded(server: TcpServer, tcp_store: TcpStore, sizes: tuple[int, int]) -> None:
    assert said_to(server, struct.pack("!cIId", b"s", *sizes, 0)) == b""
    tcp_store.set("key", b"still here")
    with pytest.raises(ExecutionError, match="values of at most 67108864 bytes, but large has 5 and 67108865; send less"):
        tcp_store.set("large", bytes(2**26 + 1))
    with pytest.raises(ExecutionError, match=r"takes keys of at most 4096 .*, but k+ has 5000 and 0; send less"):
        tcp_store.set("k" * 5000, b"")


def test_a_key_that_is_no_text(server: TcpServer, tcp_store: TcpStore) -> None:
    assert said_to(server, struct.pack("!cIId", b"s", 2, 0, 0) + b"\xff\xff") == b""
    tcp_store.set("key", b"still here")


def test_unauthenticated_idle_connections_are_closed(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_UNAUTHENTICATED", 20)
    unauthenticated = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(50)]
    store = TcpStore([("127.0.0.1", server.port)], "job", 5)
    assert len(server.unauthenticated) <= 20
    assert unauthenticated[0].recv(1) == b""
    store.set("key", b"value")
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT", 0.1)
    late = socket.create_connection(("127.0.0.1", server.port), 5)
    late.sendall(b"hostweave store")
    assert late.recv(1) == b""
    for one in (*unauthenticated, late):
        one.close()
    store.close()


def test_a_client_that_stalls_in_a_request_delays_no_other_client(server: TcpServer, tcp_store: TcpStore) -> None:
    stalled = [TcpStore([("127.0.0.1", server.port)], "job", 5) for _ in range(8)]
    for store in stalled:
        os.write(store.idle[0].fileno(), b"\0\0\0")  # A request has more bytes.
    time.sleep(0.1)
    started = time.monotonic()
    tcp_store.set("key", b"value")
    assert tcp_store.get("key", 0) == b"value"
    assert time.monotonic() - started < 2
    for store in stalled:
        store.close()


@pytest.mark.parametrize("first", [b"hostweave store 1 ", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_client_of_another_protocol_is_disconnected(server: TcpServer, tcp_store: TcpStore, first: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(first + bytes(16))
        assert stranger.recv(100) == b""
    tcp_store.set("key", b"still here")


def test_many_clients_connect_and_wait_at_the_same_time(server: TcpServer) -> None:
    def exchange(rank: int) -> bytes:
        store = TcpStore([("127.0.0.1", server.port)], "job", 10)
        store.set(f"from {rank}", bytes([rank]))
        found = b"".join(store.get(f"from {other}", 20) for other in range(64))
        store.close()
        return found

    assert in_threads(64, exchange) == [bytes(range(64))] * 64


def test_a_rendezvous_can_be_repeated(store: Store) -> None:
    prefixes = set()
    for group in ("default", "default", "other", "a/b", "a"):
        worlds: list[World] = in_threads(3, lambda rank, group=group: meet(store, group, rank, 3, 10))
        assert worlds == [worlds[0]] * 3
        assert [entry.rank for entry in worlds[0].entries] == [0, 1, 2]
        assert [worlds[0].local_rank(rank) for rank in range(3)] == [0, 1, 2]
        prefixes.add(worlds[0].prefix)
    assert len(prefixes) == 5
