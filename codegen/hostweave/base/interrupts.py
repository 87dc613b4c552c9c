"""Work that Ctrl-C does not leave half done, and work that is waited for only so long.

Python raises KeyboardInterrupt in the main thread between any two of its instructions, also where a lock was just taken or an answer was
just read. So the main thread only waits for such work, which another thread does. That thread stops where it asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from threading import Lock, Thread, get_ident, main_thread
from typing import Any, Generic, TypeVar, cast

from hostweave.base.shortages import tells_shortages

T = TypeVar("T")

LOOK = 0.05  # seconds between looks at whether to go on waiting
_PATIENCE = 15.0  # seconds for work that was interrupted to end


class Interrupted(BaseException):
    """The caller of this work no longer waits for it. Nobody but that caller sees it."""


class _Task(Generic[T]):
    """Work on a thread of its own."""

    def __init__(self, work: Callable[[], T]):
        self._work: Callable[[], T] | None = work
        self._context: Context | None = copy_context()
        self._begun, self._ended = Lock(), Lock()  # the first who takes `_begun` decides whether it begins
        self._ended.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_done = False
        self.reason = ""  # why it is to stop

    def begin(self) -> None:
        try:
            Thread(target=self.run, name="hostweave task", daemon=True).start()
        except RuntimeError:  # some versions of Python start no thread while they end
            self.run()

    def run(self) -> None:
        work, context, self._work, self._context = self._work, self._context, None, None
        if self._begun.acquire(blocking=False):
            assert work is not None
            assert context is not None
            context.run(self._run, work)
            del work, context  # before the caller goes on: what they hold ends with him
            self.is_done = True
        self._ended.release()

    def _run(self, work: Callable[[], T]) -> None:
        _current.set(self)
        try:
            self._result = work()
        except BaseException as error:
            if not self.reason:
                self._error = error

    def wait(self, seconds: float) -> bool:
        """Waits for the end. A look now and then finds one that was taken and lost."""
        deadline = time.monotonic() + seconds
        while not self.is_done and (left := deadline - time.monotonic()) > 0:
            self._ended.acquire(timeout=min(LOOK, left))
        return self.is_done

    def interrupt(self, reason: str, stop: Callable[[str], object] | None) -> None:
        """Has it stop, and waits for its end. A second interruption ends this wait."""
        self.reason = reason
        if self._begun.acquire(blocking=False):
            return
        if stop:
            Thread(target=stop, args=(reason,), name="hostweave stop", daemon=True).start()
        self.wait(_PATIENCE)

    def drop(self) -> None:
        """Forgets the error, whose traceback leads back here."""
        self._error = self._result = None

    def result(self) -> T:
        error = self._error
        try:
            if error:
                raise error
            return cast(T, self._result)
        finally:
            self.drop()
            del error


_current: ContextVar[_Task[Any] | None] = ContextVar("hostweave_task", default=None)


@tells_shortages
def interruptibly(work: Callable[[], T], stop: Callable[[str], object] | None = None) -> T:
    """Returns what `work` returns. The main thread has another thread do it.

    An exception that a signal raises in the main thread meanwhile has the work stop: at its next `expect_not_interrupted`, or where `stop`,
    which is given the reason, ends its waits. That exception is raised when the work has ended, or after 15 seconds.

    Raises ExecutionError if the machine has too little memory, too few files or threads.
    """
    if get_ident() != main_thread().ident:
        return work()
    task = _Task(work)
    try:
        task.begin()
        while not task.wait(3600):
            pass
        return task.result()
    except BaseException as error:
        if not task.is_done:
            task.interrupt(type(error).__name__, stop)
        raise
    finally:
        task.drop()
        del task


def within(seconds: float, work: Callable[[], T]) -> T:
    """Returns what `work` returns. Raises TimeoutError if it does not end in time; it then stops where it asks, or goes on by itself."""
    task, deadline = _Task(work), time.monotonic() + seconds
    try:
        task.begin()
        while not task.wait(LOOK):
            expect_not_interrupted()
            if time.monotonic() > deadline:
                raise TimeoutError
        return task.result()
    finally:
        task.reason = "nobody waits for it"
        del task


def expect_not_interrupted() -> None:
    """Raises Interrupted if nobody waits for this work any more."""
    task = _current.get()
    if task and task.reason:
        raise Interrupted(task.reason)


def carried(work: Callable[..., T]) -> Callable[..., T]:
    """`work` for the threads of a pool, where it is a part of the present work."""
    context = copy_context()
    return lambda *arguments: context.copy().run(work, *arguments)


@contextmanager
def taken(lock: Any) -> Iterator[None]:
    """Takes a lock, unless the work is interrupted before."""
    while not lock.acquire(timeout=LOOK):
        expect_not_interrupted()
    try:
        yield
    finally:
        lock.release()
