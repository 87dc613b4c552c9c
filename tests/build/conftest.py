"""Fixtures for tests of builds."""

from pathlib import Path

import pytest

from hostweave.build.toolchain import Toolchain


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles kernels as a separate file, as users do. Without GPUs, most other tests compile kernels with the rest of a program."""
    monkeypatch.setattr("hostweave.targets.cpu.Toolchain", Toolchain)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HOSTWEAVE_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"
