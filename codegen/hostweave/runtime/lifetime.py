"""Prevents programs from running while the interpreter exits, or in a forked child of a process that ran programs.

When the interpreter exits, Python terminates other threads as soon as they request the GIL, even in the middle of C++ code. Before that,
this module stops all running calls and refuses new calls.
"""

import os
import time
from collections.abc import Callable
from threading import get_ident
from types import ModuleType

from hostweave.base.errors import ExecutionError
from hostweave.base.interrupts import POLL_SECONDS, expect_not_interrupted

_GRACE_SECONDS = 0.2  # seconds that calls get to end by themselves
_INTERRUPT_TIMEOUT = 15.0  # seconds that calls get to stop after an interrupt
_BACKGROUND_TIMEOUT = 2.0  # seconds that background threads get to end, for example threads that destroy communicators

_interrupts: list[Callable[[], None]] = []
_used = False  # True if this process, or its parent before the fork, has used threads or devices
_forked = False


class Exiting(ExecutionError):
    """The interpreter is exiting."""


class _Calls:
    """Counts the threads that are inside the runtime. A thread enters by `with calls:`."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # thread -> nesting depth; each thread writes only its entry
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
        """Stops the calls of other threads. This thread's own entry is ignored, because an interrupt may have prevented its removal."""
        if self.ending:
            return
        self.ending = True
        self._wait(_GRACE_SECONDS)
        for interrupt in _interrupts if self._has_others else ():
            interrupt()
        self._wait(_INTERRUPT_TIMEOUT)

    def finish(self) -> None:
        """Waits a limited time for background threads of the runtime, which may themselves wait for other ranks."""
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
    """Raises Exiting if the interpreter is exiting. Raises Interrupted if the caller of the current work no longer waits for it. Functions
    that wait call `expect_running` repeatedly."""
    if calls.ending:
        raise Exiting("the interpreter is exiting; join threads that run programs before the main thread ends")
    expect_not_interrupted()


def expect_own_devices() -> None:
    """Raises ExecutionError in a forked process whose parent ran programs. Otherwise marks devices as used. Call this function before any
    import: if another thread was importing a module at the fork, an import of that module in the child never ends."""
    global _used
    if _forked:
        raise ExecutionError("programs cannot run in a forked process if they ran before the fork; use spawn")
    _used = True


def on_end(interrupt: Callable[[], None]) -> None:
    """Registers a function that is called if calls are still running at the exit of the interpreter. The function must stop calls that do
    not poll `expect_running`."""
    _interrupts.append(interrupt)


def _after_fork() -> None:
    global _forked
    _forked = _used
    calls.__init__()  # type: ignore[misc]  # the parent's threads do not exist in the child


os.register_at_fork(after_in_child=_after_fork)
