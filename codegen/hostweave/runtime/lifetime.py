"""Whether this process can run programs: not while its interpreter ends, nor after a fork from a process that ran some.

A thread that is inside the runtime when the interpreter is taken apart could never come back: Python ends such threads where they ask
for the GIL, in the midst of C++. So what runs is stopped before, and nothing begins any more.
"""

import os
import time
from collections.abc import Callable
from threading import get_ident

from hostweave.base.errors import ExecutionError
from hostweave.base.interrupts import LOOK, expect_not_interrupted

_PATIENCE = 15.0  # seconds for calls to stop

_interrupts: list[Callable[[], None]] = []
_used = False  # threads and devices, by this process or by the one that it was forked from
_forked = False


class _Calls:
    """The calls of the runtime that wait for devices or other ranks; `with calls:` is around each."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # how many of them a thread is in; each thread writes its own entry
        self.ending = False

    def __enter__(self) -> None:
        thread = get_ident()
        self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            expect_going_on()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        left = self._inside.get(thread, 1) - 1
        if left > 0:
            self._inside[thread] = left
        else:
            self._inside.pop(thread, None)

    def end(self) -> None:
        """Stops the calls of other threads. An interrupt may have left an entry of this one, which is here."""
        self.ending = True
        for interrupt in _interrupts if self._others else ():
            interrupt()
        deadline = time.monotonic() + _PATIENCE
        while self._others and time.monotonic() < deadline:
            time.sleep(LOOK / 10)

    @property
    def _others(self) -> bool:
        return bool(self._inside.keys() - {get_ident()})


calls = _Calls()


def expect_going_on() -> None:
    """Raises ExecutionError where the interpreter is about to end, Interrupted where nobody waits. Asked by calls that wait, too."""
    if calls.ending:
        raise ExecutionError("the interpreter is ending; join the threads that run programs before")
    expect_not_interrupted()


def expect_own_devices() -> None:
    """Raises ExecutionError where the devices are those of the process that this one was forked from. Else they are used from now on.

    Asked before anything is imported or made: another thread may have been in the midst of that when this process was forked.
    """
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
    calls.__init__()  # type: ignore[misc]  # threads that were inside are not here


os.register_at_fork(after_in_child=_after_fork)
