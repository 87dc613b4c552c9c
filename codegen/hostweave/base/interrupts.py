"""Runs work that Ctrl-C must not interrupt halfway, and work with a time limit.

Python may raise KeyboardInterrupt in the main thread between two bytecode instructions, even right after a lock was taken. So another
thread does the work, and the main thread waits. Interrupted work stops at its next call of `expect_not_interrupted`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from threading import Lock, Thread, get_ident, main_thread
from typing import Any, Generic, TypeVar, cast

from hostweave.base.shortages import expect_memory, explains_shortages

T = TypeVar("T")

POLL_SECONDS = 0.05  # seconds between checks during a wait
_THREAD_BYTES = 4 << 20  # memory that a thread may need in addition to its stack
_WAIT_TIMEOUT = 15.0  # seconds for interrupted work to end


class Interrupted(BaseException):
    """Ends work whose caller no longer waits."""


class _Task(Generic[T]):
    def __init__(self, work: Callable[[], T]):
        self._work: Callable[[], T] | None = work
        self._context: Context | None = copy_context()
        self._started, self._finished = Lock(), Lock()  # the work starts only if `run` is the first to take `_started`
        self._finished.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_done = False
        self.reason = ""  # why the work must stop, or ""

    def start(self) -> None:
        expect_memory(_THREAD_BYTES)  # a thread without memory would end without an error
        try:
            Thread(target=self.run, name="hostweave task", daemon=True).start()
        except RuntimeError:  # no thread can be started, for example during shutdown
            self.run()

    def run(self) -> None:
        work, context, self._work, self._context = self._work, self._context, None, None
        if self._started.acquire(blocking=False):
            assert work is not None
            assert context is not None
            context.run(self._run, work)
            del work, context  # so that only the caller keeps `work` and `context` alive
            self.is_done = True
        self._finished.release()

    def _run(self, work: Callable[[], T]) -> None:
        _current.set(self)
        try:
            self._result = work()
        except BaseException as error:
            if not self.reason:
                self._error = error

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the end of the work. Polls, because an interrupt right after a lock was taken would leave the lock
        taken. Returns True if the work has ended."""
        deadline = time.monotonic() + seconds
        while not self.is_done and (left := deadline - time.monotonic()) > 0:
            self._finished.acquire(timeout=min(POLL_SECONDS, left))
        return self.is_done

    def interrupt(self, reason: str, stop: Callable[[str], object] | None) -> None:
        """Makes the work stop, and waits up to 15 seconds for its end. A second Ctrl-C ends this wait."""
        self.reason = reason
        if self._started.acquire(blocking=False):
            return
        if stop:
            Thread(target=stop, args=(reason,), name="hostweave stop", daemon=True).start()
        self.wait(_WAIT_TIMEOUT)

    def release(self) -> None:
        """Drops the result, and the error, whose traceback refers to the task."""
        self._error = self._result = None

    def result(self) -> T:
        error = self._error
        try:
            if error:
                raise error
            return cast(T, self._result)
        finally:
            self.release()
            del error


_current: ContextVar[_Task[Any] | None] = ContextVar("hostweave_task", default=None)


@explains_shortages
def interruptibly(work: Callable[[], T], stop: Callable[[str], object] | None = None) -> T:
    """Returns the result of `work`, which another thread runs if the current thread is the main thread.

    If a signal raises an exception in the main thread, `stop(reason)` ends waits of the work. The exception is raised again when the work
    has ended, at the latest after 15 seconds.
    """
    if get_ident() != main_thread().ident:
        return work()
    task = _Task(work)
    try:
        task.start()
        while not task.wait(3600):
            pass
        return task.result()
    except BaseException as error:
        if not task.is_done:
            task.interrupt(type(error).__name__, stop)
        raise
    finally:
        task.release()
        del task


def within(seconds: float, work: Callable[[], T]) -> T:
    """Returns the result of `work`, which another thread runs. Raises TimeoutError after `seconds`. The work then runs until its next call
    of `expect_not_interrupted`."""
    task, deadline = _Task(work), time.monotonic() + seconds
    try:
        task.start()
        while not task.wait(POLL_SECONDS):
            expect_not_interrupted()
            if time.monotonic() > deadline:
                raise TimeoutError
        return task.result()
    finally:
        task.reason = "nobody waits for it"
        del task


def expect_not_interrupted() -> None:
    """Raises Interrupted if the caller of the current work no longer waits."""
    task = _current.get()
    if task and task.reason:
        raise Interrupted(task.reason)


def in_current_context(work: Callable[..., T]) -> Callable[..., T]:
    """Binds `work` to the current context, so that threads of a pool are interrupted with the current work."""
    context = copy_context()
    return lambda *arguments: context.copy().run(work, *arguments)


@contextmanager
def acquired(lock: Any) -> Iterator[None]:
    """Holds a lock. An interrupt ends the wait for the lock."""
    while not lock.acquire(timeout=POLL_SECONDS):
        expect_not_interrupted()
    try:
        yield
    finally:
        lock.release()
