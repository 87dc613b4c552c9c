"""Times when this process must not run programs: while its interpreter ends, and after a fork if the parent ran some.

A thread inside the runtime while the interpreter shuts down could never return: Python ends such threads when they request the
GIL, in the middle of C++. So running calls are stopped first, and no new ones begin.
"""

import os
import time
from collections.abc import Callable
from threading import get_ident
from types import ModuleType

from hostweave.base.errors import ExecutionError
from hostweave.base.interrupts import LOOK, expect_not_interrupted

_GRACE = 0.2  # seconds for calls to end by themselves
_PATIENCE = 15.0  # seconds for calls to stop
_BACKGROUND = 2.0  # seconds for threads of the runtime to end, such as those that destroy communicators

_interrupts: list[Callable[[], None]] = []
_used = False  # true if this process, or the parent that it was forked from, has used threads or devices
_forked = False


class Exiting(ExecutionError):
    """The interpreter is about to end."""


class _Calls:
    """Uses of the runtime by threads. Each is inside `with calls:`."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # nesting depth by thread; each thread writes its own entry
        self.ending = False
        self.modules: set[ModuleType] = set()  # modules of programs that ranks have used

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
        """Stops the calls of other threads. An interrupted call of this thread may have left an entry, which is ignored."""
        if self.ending:
            return
        self.ending = True
        self._wait(_GRACE)
        for interrupt in _interrupts if self._others else ():
            interrupt()
        self._wait(_PATIENCE)

    def finish(self) -> None:
        """Waits for threads that the runtime has started. They may wait for other ranks, and the process exits without them."""
        deadline = time.monotonic() + _BACKGROUND
        for module in self.modules:
            module.finish_background(max(0.0, deadline - time.monotonic()))

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._others and time.monotonic() < deadline:
            time.sleep(LOOK / 10)

    @property
    def _others(self) -> bool:
        return bool(self._inside.keys() - {get_ident()})


calls = _Calls()


def expect_going_on() -> None:
    """Raises Exiting if the interpreter is about to end, Interrupted if no thread waits for the result.

    Waiting calls poll it too.
    """
    if calls.ending:
        raise Exiting("the interpreter is exiting; join threads that run programs first")
    expect_not_interrupted()


def expect_own_devices() -> None:
    """Raises ExecutionError if the parent of this forked process ran programs. Otherwise marks devices as used.

    Call it before the first import or construction: another thread may have been importing at the fork.
    """
    global _used
    if _forked:
        raise ExecutionError("programs cannot run in a forked process if they ran before the fork; use spawn")
    _used = True


def on_end(interrupt: Callable[[], None]) -> None:
    """Registers `interrupt`, called at the end of the interpreter if calls are running, to stop those that do not poll."""
    _interrupts.append(interrupt)


def _after_fork() -> None:
    global _forked
    _forked = _used
    calls.__init__()  # type: ignore[misc]  # the parent's threads do not exist here


os.register_at_fork(after_in_child=_after_fork)
