"""Fixtures of tests whose ranks are processes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compiled_fusions import compiled
from rank_process import program_of, programs_for
from rank_setups import ENDLESS, SIGNALLED, RankSetup

import hostweave as hw


@pytest.fixture
def built(setup: RankSetup) -> None:
    build(program_of(name, ranks, setup.target)[1] for name in (ENDLESS, SIGNALLED) for ranks in (setup.killed, setup.killed - 1))


@pytest.fixture
def all_built(setup: RankSetup) -> None:
    build(compiled(fusion, target=setup.target) for fusion in programs_for(setup.ranks, setup.programs).values())


def build(programs: Iterable[hw.Program]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(hw.Program.build, programs))


@pytest.fixture
def nothing_left_over() -> Iterator[None]:
    """Tests that no new shared memory is left. Ignores memory of living processes, such as other tests."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 10
    while (left := set(os.listdir("/dev/shm")) - before - shared_by_living_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def shared_by_living_processes() -> set[str]:
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # The process has ended, or belongs to another user.
            names.update(re.findall(r" /dev/shm/([^/\n]+)$", maps.read_text(), re.MULTILINE))
    return names
