"""Whether this process can run programs: not while its interpreter ends, nor after a fork from a process that ran some.

A thread that is inside the runtime when the interpreter is taken apart could never come back: Python ends such threads where they ask
for the GIL, in the midst of C++. So what runs is stopped before, and nothing begins any more.
"""

import os
import threading
from collections.abc import Callable

from hostweave.base.errors import ExecutionError

_PATIENCE = 15.0  # seconds for calls to stop

_interrupts: list[Callable[[], None]] = []
_used = False  # threads and devices, by this process or by the one that it was forked from
_forked = False


class _Calls:
    """The calls of the runtime that wait for devices or other ranks; `with calls:` is around each."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._count = 0
        self.ending = False

    def __enter__(self) -> None:
        with self._lock:
            expect_going_on()
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self.ending:  # which is waited for
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.ending = True
            busy = self._count > 0
        for interrupt in _interrupts if busy else ():
            interrupt()
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, _PATIENCE)


calls = _Calls()


def expect_going_on() -> None:
    """Raises ExecutionError where the interpreter is about to end. Asked by calls that wait, too."""
    if calls.ending:
        raise ExecutionError("the interpreter is ending; join the threads that run programs before")


def expect_own_devices() -> None:
    """Raises ExecutionError where the devices are those of the process that this one was forked from. Else they are used from now on."""
    global _used
    if _forked:
        raise ExecutionError("programs ran before this process was forked and cannot run in it; start processes by spawn")
    _used = True


def on_end(interrupt: Callable[[], None]) -> None:
    """Has `interrupt` called where calls are under way when the interpreter ends, to stop those that do not ask."""
    _interrupts.append(interrupt)


def _after_fork() -> None:
    global _forked
    _forked = _used
    calls.__init__()  # type: ignore[misc]  # its lock may have been held by a thread that is not here


os.register_at_fork(after_in_child=_after_fork)
