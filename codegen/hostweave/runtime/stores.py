"""Key-value stores through which a group exchanges channel ids, call signatures and progress.

The TCP store has a server in the process of rank 0, and a client in every process. When a client connects, both sides prove that they know
the job's name and token, without sending them. So a rank cannot use the server of another job by mistake.
"""

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from hostweave.base.errors import ExecutionError
from hostweave.base.forks import closed_after_fork


class StoreClosed(ExecutionError):
    """The process that ran the store has ended normally."""


class Store(Protocol):
    """Interface of a store: a map that all ranks of a group share. Several threads may use a store at the same time."""

    def set(self, key: str, value: bytes) -> None:
        """Sets or replaces a value."""

    def get(self, key: str, timeout: float) -> bytes:
        """Waits up to `timeout` seconds until the value is set, and returns the value. Otherwise raises TimeoutError."""


class MemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._failure: str | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self._failure, timeout):
                raise TimeoutError(key)
            if self._failure:
                raise ExecutionError(self._failure)
            return self._values[key]

    def fail(self, reason: str) -> None:
        """Ends all waits. Afterwards every `get` raises ExecutionError, even if the key is set."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()


_GREETING = b"hostweave store 2 "  # next come: nonce of the client; nonce and proof of the server; proof of the client
_NONCE, _PROOF = 16, 32  # bytes of a nonce, and of a proof
_WELCOME = b"+"
_GOODBYE = b"-"
_REQUEST = struct.Struct("!cIId")  # kind, size of the key and of the value in bytes, seconds to wait
_SET, _GET, _WILL = b"s", b"g", b"w"
_REPLY = struct.Struct("!ci")  # _WELCOME or _GOODBYE, and the size of the following value or -1
_RETRY = 0.05  # seconds between attempts to connect
ANSWER_TIMEOUT = 10.0  # seconds; maximum for an answer, and for a client to authenticate
MAX_SECONDS = 1e8  # seconds; longer timeouts exceed the range of clocks
_BACKLOG = 256  # maximum number of connections that wait to be accepted
MAX_UNAUTHENTICATED = 2 * _BACKLOG  # if there are more unauthenticated clients, the oldest is disconnected
_MAX_KEY, _MAX_VALUE = 1 << 12, 1 << 26  # maximum bytes of a key, and of a value

Address = tuple[str, int]


class TcpServer:
    """Server that stores the values. The server runs in a thread."""

    def __init__(self, addresses: Sequence[Address], job: str, token: str = ""):
        """Listens at the first free address. Raises ExecutionError if listening fails at every address."""
        self._secret = _secret(job, token)
        self._values: dict[str, bytes] = {}
        self.waiting: dict[str, set[asyncio.Future[bytes]]] = {}
        self.unauthenticated: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self.socket = closed_after_fork(_listen(addresses))  # a child must not keep the port
        self.port: int = self.socket.getsockname()[1]
        self.loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._linger = 0.0
        self._thread = threading.Thread(target=self._run, name="hostweave store", daemon=True)
        self._thread.start()

    def close(self, linger: float = 0) -> None:
        """Disconnects the clients after at most `linger` seconds, and frees the port."""
        self._linger = linger
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # another thread is closing the server too
                self.loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._serve_client, sock=self.socket, backlog=_BACKLOG)
        await self._closing.wait()
        deadline = self.loop.time() + self._linger
        while (clients := asyncio.all_tasks() - {asyncio.current_task()}) and self.loop.time() < deadline:
            await asyncio.sleep(0.01)
        server.close()
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        last_wills: dict[str, bytes] = {}
        try:
            if not await self._authenticates(reader, writer):
                return
            writer.write(_WELCOME)
            while True:
                request = await reader.readexactly(_REQUEST.size)
                if request[:1] == _GOODBYE:
                    last_wills = {}
                    return
                kind, key_bytes, value_bytes, timeout = _REQUEST.unpack(request)
                if key_bytes > _MAX_KEY or value_bytes > _MAX_VALUE:
                    return
                key = (await reader.readexactly(key_bytes)).decode()
                value = await reader.readexactly(value_bytes)
                if kind == _WILL:
                    last_wills[key] = value
                elif kind == _SET:
                    self.set(key, value)
                answer = await self.get(key, timeout, reader) if kind == _GET else b""
                writer.write(_REPLY.pack(_WELCOME, -1 if answer is None else len(answer)) + (answer or b""))
        except (OSError, asyncio.IncompleteReadError, TimeoutError, UnicodeDecodeError):
            pass  # the client has disconnected, or belongs to another job
        except asyncio.CancelledError:
            writer.write(_REPLY.pack(_GOODBYE, -1))
            last_wills = {}
        finally:
            for key, value in last_wills.items():
                if key not in self._values:  # the first rank that ends is the cause, and other ranks may follow
                    self.set(key, value)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _authenticates(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.unauthenticated[writer] = None
        if len(self.unauthenticated) > MAX_UNAUTHENTICATED:
            first = next(iter(self.unauthenticated))
            del self.unauthenticated[first]
            first.transport.abort()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                if await reader.readexactly(len(_GREETING)) != _GREETING:
                    return False
                nonces = await reader.readexactly(_NONCE) + (nonce := os.urandom(_NONCE))
                writer.write(nonce + _proof(self._secret, b"server", nonces))
                return hmac.compare_digest(await reader.readexactly(_PROOF), _proof(self._secret, b"client", nonces))
        finally:
            self.unauthenticated.pop(writer, None)

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self.waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(value)

    async def get(self, key: str, timeout: float, client: asyncio.StreamReader) -> bytes | None:
        """Waits up to `timeout` seconds for a value. Raises ConnectionError if the client disconnects. A waiting client sends nothing, so
        any input is a disconnect."""
        if key not in self._values and timeout > 0:
            waiter, end = self.loop.create_future(), self.loop.create_task(client.read(1))
            waiters = self.waiting.setdefault(key, set())
            waiters.add(waiter)
            try:
                done, _ = await asyncio.wait((waiter, end), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if end in done and waiter not in done:
                    raise ConnectionError("the client has gone")
            finally:
                end.cancel()
                await asyncio.gather(end, return_exceptions=True)  # the client's next read can begin only after this read has ended
                waiters.discard(waiter)
                if not waiters and self.waiting.get(key) is waiters:
                    del self.waiting[key]
        return self._values.get(key)


class TcpStore:
    """Client of the server. Concurrent requests use separate connections."""

    def __init__(self, addresses: Sequence[Address], job: str, timeout: float, token: str = ""):
        """Tries the addresses one after another until a server of this job answers. Raises ExecutionError after `timeout` seconds."""
        self._secret = _secret(job, token)
        self._lock = threading.Lock()
        self.idle: list[socket.socket] = []
        self.will_connection: socket.socket | None = None
        self._closed = False
        self.answer_timeout = ANSWER_TIMEOUT  # seconds, in addition to the timeout of a request
        self.address, connection = self._connect_to_any(addresses, time.monotonic() + timeout)
        self.idle.append(connection)

    def set(self, key: str, value: bytes) -> None:
        if (size := len(key.encode())) > _MAX_KEY or len(value) > _MAX_VALUE:
            why = f"the store of rank 0 takes keys of at most {_MAX_KEY} and values of at most {_MAX_VALUE} bytes"
            raise ExecutionError(f"{why}, but {key[:80]} has {size} and {len(value)}; send less")
        self._request(_SET, key, value)

    def get(self, key: str, timeout: float) -> bytes:
        answer = self._request(_GET, key, timeout=min(timeout, MAX_SECONDS))
        if answer is None:
            raise TimeoutError(key)
        return answer

    def on_disconnect(self, key: str, value: bytes) -> None:
        """Makes the server set `key` to `value` if this process ends without `close`, unless the key then has a value."""
        if self.will_connection is None:
            # A child must not hide the end of this process.
            self.will_connection = closed_after_fork(self._connect(self.address, self.answer_timeout))
        _send_and_receive(self.will_connection, _WILL, key, value, 0, self.answer_timeout)

    def close(self) -> None:
        with self._lock:
            connections = [*self.idle, *([self.will_connection] if self.will_connection else [])]
            self.idle, self.will_connection, self._closed = [], None, True
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(_REQUEST.pack(_GOODBYE, 0, 0, 0))
            connection.close()

    def _request(self, kind: bytes, key: str, value: bytes = b"", timeout: float = 0) -> bytes | None:
        with self._lock:
            connection = self.idle.pop() if self.idle else None
        try:
            connection = connection or self._connect(self.address, self.answer_timeout)
        except OSError as error:
            raise _no_answer(error) from error
        try:
            answer = _send_and_receive(connection, kind, key, value, timeout, self.answer_timeout)
        except BaseException:  # the connection may be in the middle of an answer
            connection.close()
            raise
        with self._lock:
            if not self._closed:
                self.idle.append(connection)
                return answer
        connection.close()  # another thread has called `close`
        return answer

    def _connect_to_any(self, addresses: Sequence[Address], deadline: float) -> tuple[Address, socket.socket]:
        while True:
            for address in addresses:
                try:
                    return address, self._connect(address, max(_RETRY, min(ANSWER_TIMEOUT, deadline - time.monotonic())))
                except OSError as error:
                    reason = error
            if time.monotonic() > deadline:
                host, port = addresses[0]
                ports = f"port {port}" if len(addresses) == 1 else f"ports {port} to {addresses[-1][1]}"
                raise ExecutionError(f"the store of rank 0 cannot be reached on {host}, {ports} ({reason}); check that rank 0 runs there")
            time.sleep(_RETRY)

    def _connect(self, address: Address, timeout: float) -> socket.socket:
        connection = socket.create_connection(address, timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sendall(_GREETING + (nonce := os.urandom(_NONCE)))
            answer = _receive(connection, _NONCE + _PROOF)
            nonces = nonce + answer[:_NONCE]
            if not hmac.compare_digest(answer[_NONCE:], _proof(self._secret, b"server", nonces)):
                raise ConnectionError("the listener belongs to another job, or has another HOSTWEAVE_TOKEN")
            connection.sendall(_proof(self._secret, b"client", nonces))
            if _receive(connection, 1) != _WELCOME:
                raise ConnectionError("another service listens there")
        except BaseException:
            connection.close()
            raise
        return connection


def _secret(job: str, token: str) -> bytes:
    return hashlib.sha256(f"{job}\0{token}".encode()).digest()


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")


def _listen(addresses: Sequence[Address]) -> socket.socket:
    """Socket at the first free address. The socket listens on all interfaces if the host is "", or a name other than localhost that
    resolves to loopback."""
    for host, port in addresses:
        try:
            family, address = _interface(host)
            is_dual_stack = family == socket.AF_INET6 and not address
            return socket.create_server((address, port), family=family, dualstack_ipv6=is_dual_stack, backlog=_BACKLOG)
        except OSError as error:
            reason = error
    if reason.errno == errno.EADDRNOTAVAIL or isinstance(reason, socket.gaierror):
        host = addresses[0][0]
        raise ExecutionError(
            f"the store of rank 0 cannot listen at {host} ({reason}); set HOSTWEAVE_BIND to an address of its host, or 0.0.0.0"
        )
    ports = f"{addresses[0][1]} to {addresses[-1][1]}"
    raise ExecutionError(f"no port from {ports} is free for the store of rank 0 ({reason}); set another HOSTWEAVE_PORT on all ranks")


def _interface(host: str) -> tuple[socket.AddressFamily, str]:
    if host:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        is_number = ":" in host or host.replace(".", "").isdigit()
        # many /etc/hosts files map this host's name to loopback, although other hosts resolve the name to an interface
        if is_number or host == "localhost" or not ipaddress.ip_address(address).is_loopback:
            return family, str(address)
    return (socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET), ""


def _send_and_receive(
    connection: socket.socket, kind: bytes, key: str, value: bytes, timeout: float, answer_timeout: float
) -> bytes | None:
    name = key.encode()
    connection.settimeout(timeout + answer_timeout)
    try:
        if not _has_input(connection):  # input means that the server has sent goodbye or has closed the connection
            connection.sendall(_REQUEST.pack(kind, len(name), len(value), timeout) + name + value)
        status, count = _REPLY.unpack(_receive(connection, _REPLY.size))
        if status == _GOODBYE:
            raise StoreClosed("the store is closed: the process of rank 0 has ended")
        return None if count < 0 else _receive(connection, count)
    except OSError as error:
        raise _no_answer(error) from error


def _has_input(connection: socket.socket) -> bool:
    poll = select.poll()  # select() supports no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _no_answer(error: OSError) -> ExecutionError:
    return ExecutionError(f"the store in the process of rank 0 does not answer ({error}); check whether that process has ended")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionError("closed")
        data += received
    return data
