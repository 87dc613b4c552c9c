"""A loaded program on the ranks of this process."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hostweave.runtime.algorithms import Measured
from hostweave.runtime.call import Call
from hostweave.runtime.cpu import schedule
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.lifetime import expect_own_devices
from hostweave.targets.target import Target

_worlds: dict[tuple[str, int], Any] = {}  # the ranks, by target and number: a thread and a device each, for all programs
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_lock = threading.Lock()


@dataclass(frozen=True)
class Timing:
    """One call on one rank: host time of the program's `run`, and device time from its first to its last work."""

    enqueue_us: float
    total_ms: float


class Session:
    """A program on every rank of a world. Raises ExecutionError where there are too few devices."""

    def __init__(self, module: ModuleType, target: Target, ranks: int, tune: bool = False):
        self._module = module
        with native_calls:
            self._world = _world_of(module, target.name, ranks)
            self._runner = module.Runner(self._world, tune)
        self._measured = Measured(module, target.device_name()) if tune else None
        _sessions.add(self)

    @property
    def broken(self) -> bool:
        """Whether an error has stopped the ranks midway, so that a new session is needed."""
        return self._runner is None or bool(self._world.broken)

    def run(self, calls: Sequence[Call], poison: bool) -> None:
        """Runs calls one after another and waits for the last. Interrupted by Ctrl-C, it stops the ranks."""
        for call in calls:
            call.expect_shapes_of(calls[0])
        with native_calls:
            self._runner.run(self._schedule(), [call.for_glue() for call in calls], poison)
        if self._measured:
            self._measured.keep()

    def measure(self, call: Call, warmups: int, repetitions: int) -> list[list[Timing]]:
        with native_calls:
            times = self._runner.measure(self._schedule(), call.for_glue(), warmups, repetitions)
        if self._measured:
            self._measured.keep()
        return [[Timing(t.enqueue_us, t.total_ms) for t in rank] for rank in times]

    def close(self) -> None:
        """Frees what the program holds on every rank."""
        self._runner = None

    def _schedule(self) -> Any:
        return self._module.Schedule(**vars(schedule()))


def _world_of(module: ModuleType, target: str, ranks: int) -> Any:
    """The world of that size, which any program's module of that target can make for all of them; a broken one is replaced."""
    with _lock:
        expect_own_devices()
        world = _worlds.get((target, ranks))
        if world is None or world.broken:
            world = _worlds[target, ranks] = module.World(ranks)
        return world


def _close_all() -> None:
    for session in list(_sessions):
        session.close()
    _worlds.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _close_all()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    native_calls.end()
    _close_all()
