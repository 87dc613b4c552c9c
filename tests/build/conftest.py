"""Fixtures for tests of builds."""

from pathlib import Path

import pytest


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
