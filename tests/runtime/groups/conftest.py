"""Stores for tests of groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hostweave.runtime.providers import (
    TorchStore,
    _PolledTorchStore,
)
from hostweave.runtime.stores import MemoryStore, Store, TcpServer, TcpStore


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
        return _PolledTorchStore(FakeTorchStore())
    import torch.distributed as dist

    kept = dist.FileStore(str(tmp_path / "store"), -1) if request.param == "torch file" else dist.HashStore()
    return TorchStore(kept, rank=0, count=1).store("default", 1)
