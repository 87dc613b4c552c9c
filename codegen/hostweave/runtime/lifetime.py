"""Prevents programs from running while the interpreter exits, or in a forked child of a process that has run programs.

At exit, Python terminates other threads as soon as they request the GIL, even in the middle of C++ code. Python 3.14 blocks the threads
forever instead. Before Python does so, this module stops all calls and refuses new calls.
"""

import os
import time
from collections.abc import Callable
from threading import get_ident
from types import ModuleType

from hostweave.base.errors import ExecutionError
from hostweave.base.interrupts import POLL_SECONDS, expect_not_interrupted

_GRACE_SECONDS = 0.2  # seconds for calls to end by themselves
_INTERRUPT_TIMEOUT = 15.0  # seconds for calls to stop after an interrupt
_BACKGROUND_TIMEOUT = 2.0  # seconds for background threads to end, such as threads that destroy communicators

_interrupts: list[Callable[[], None]] = []
_used = False  # True after the first call of `expect_own_devices`
_forked = False


class Exiting(ExecutionError):
    """The interpreter is exiting."""


class _Calls:
    """Counts the threads inside the runtime, which enter by `with calls:`."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # thread -> nesting depth; each thread writes only its own entry
        self.ending = False
        self.modules: set[ModuleType] = set()  # modules of programs that ranks have used

    def __enter__(self) -> None:
        thread = get_ident()
        self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            expect_running()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        depth = self._inside.get(thread, 1) - 1
        if depth > 0:
            self._inside[thread] = depth
        else:
            self._inside.pop(thread, None)

    def end(self) -> None:
        """Stops the calls of other threads. Ignores this thread's entry, which may remain after an interrupt."""
        if self.ending:
            return
        self.ending = True
        self._wait(_GRACE_SECONDS)
        for interrupt in _interrupts if self._has_others else ():
            interrupt()
        self._wait(_INTERRUPT_TIMEOUT)

    def finish(self) -> None:
        """Waits a limited time for the runtime's background threads, which may wait for other ranks."""
        deadline = time.monotonic() + _BACKGROUND_TIMEOUT
        for module in self.modules:
            module.finish_background(max(0.0, deadline - time.monotonic()))

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._has_others and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)

    @property
    def _has_others(self) -> bool:
        return bool(self._inside.keys() - {get_ident()})


calls = _Calls()


def expect_running() -> None:
    """Raises Exiting if the interpreter is exiting, and Interrupted if the caller no longer waits. For repeated calls during a wait."""
    if calls.ending:
        raise Exiting("the interpreter is exiting; join threads that run programs before the main thread ends")
    expect_not_interrupted()


def expect_own_devices() -> None:
    """Raises ExecutionError in a forked process whose parent has run programs. Call this function before any import: if another thread was
    importing a module at the fork, an import of that module never ends in the child."""
    global _used
    if _forked:
        raise ExecutionError("programs cannot run in a forked process if they ran before the fork; use spawn")
    _used = True


def on_end(interrupt: Callable[[], None]) -> None:
    """Registers a function for the exit of the interpreter. The function stops calls that do not poll `expect_running`."""
    _interrupts.append(interrupt)


def _after_fork() -> None:
    global _forked
    _forked = _used
    calls.__init__()  # type: ignore[misc]  # the parent's threads do not exist in the child


os.register_at_fork(after_in_child=_after_fork)
