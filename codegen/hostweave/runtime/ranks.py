"""All ranks of a mesh in this process: one thread and one device each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, TypeVar

from hostweave.base.errors import ExecutionError, reason_of
from hostweave.base.interrupts import LOOK
from hostweave.runtime.lifetime import expect_going_on

T = TypeVar("T")
RankWork = Callable[[], None]
Lease = Callable[[Any, float], Any]  # (member, seconds) -> lease of the devices, or None after a timeout
Answer = tuple[int, Any, BaseException | None]  # rank, result, exception

_STOPPING = 60.0  # seconds for stopped ranks to answer; on the CPU target one may be in a long matmul

_numbers = count()


class Ranks:
    """Members of one group, shared by all programs of a target. An error that stops them midway leaves them `broken`: make new
    ones.

    Use them only from threads other than the main thread, which alone receives signals (`interruptibly`).
    """

    def __init__(self, module: ModuleType, size: int):
        name = f"ranks {next(_numbers)}"
        self._work: list[SimpleQueue[RankWork | None]] = [SimpleQueue() for _ in range(size)]
        self.members: list[Any] = [module.Member(name, rank, rank, size, False) for rank in range(size)]
        self.broken = False
        for rank, work in enumerate(self._work):
            threading.Thread(target=_serve, args=(work,), name=f"hostweave {name}, rank {rank}", daemon=True).start()

    def __del__(self) -> None:
        self._end_threads()

    def each(
        self,
        lease: Lease,
        work: Callable[[int], T],
        *,
        alone: bool = False,
        look: RankWork = expect_going_on,
        before_stop: Callable[[BaseException], None] = lambda _: None,
    ) -> list[T]:
        """Returns the result of `work` for each rank, run on the rank's thread when the devices are free.

        `look` is called periodically. If it raises, or if `work` raises on some rank, all ranks are stopped wherever they wait.
        The first error is passed to `before_stop`, then raised. Use `alone` if no rank waits for another: an error of one then
        stops no other and breaks nothing.
        """
        with self._turn(lease):
            return self._each(work, alone, look, before_stop)

    def each_here(self, lease: Lease, work: Callable[[int], None]) -> None:
        """Runs `work` for one rank after another on this thread, which is cheaper than waking other threads."""
        with self._turn(lease):
            for rank in range(len(self.members)):
                work(rank)

    @contextmanager
    def _turn(self, lease: Lease) -> Iterator[None]:
        while not (turn := lease(self.members[0], LOOK)):
            expect_going_on()
        try:
            yield
        finally:
            del turn  # an error's traceback would keep it

    def _each(self, work: Callable[[int], T], alone: bool, look: RankWork, before_stop: Callable[[BaseException], None]) -> list[T]:
        answers: SimpleQueue[Answer] = SimpleQueue()
        for rank, queue in enumerate(self._work):
            queue.put(partial(_answer, answers, work, rank))
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        try:
            while len(results) < len(self._work):
                try:
                    rank, results[rank], error = _next(answers, look)
                except BaseException as interruption:
                    error, is_of_rank = interruption, False
                else:
                    is_of_rank = True
                if error:
                    errors.append(error)
                    if self.broken and not is_of_rank:
                        break  # the timeout for stopping has passed
                    if not alone or not is_of_rank:
                        if not self.broken:
                            before_stop(error)
                        self._stop(error)
                        look = _until(time.monotonic() + _STOPPING)
            if errors:
                first = self.members[0].stopped
                raise next((error for error in errors if first.endswith(str(error))), errors[0])
            return [results[rank] for rank in range(len(self._work))]
        finally:
            errors.clear()  # their tracebacks refer to this frame
            error = None
            if self.broken:
                self._end_threads()

    def _stop(self, error: BaseException) -> None:
        """Aborts all members concurrently, because one of them may wait for another."""
        if self.broken:
            return
        self.broken = True
        stopping = [threading.Thread(target=member.abort, args=(reason_of(error),)) for member in self.members]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    def _end_threads(self) -> None:
        """Ends each thread after its current work."""
        for work in self._work:
            work.put(None)


def _serve(queue: SimpleQueue[RankWork | None]) -> None:
    while work := queue.get():
        work()
        del work  # may hold a program's device memory


def _answer(answers: SimpleQueue[Answer], work: Callable[[int], T], rank: int) -> None:
    try:
        answers.put((rank, work(rank), None))
    except BaseException as error:
        answers.put((rank, None, error))


def _next(answers: SimpleQueue[Answer], look: RankWork) -> Answer:
    while True:
        try:
            return answers.get(timeout=LOOK)
        except Empty:
            look()


def _until(deadline: float) -> RankWork:
    def look() -> None:
        if time.monotonic() > deadline:
            raise ExecutionError(f"a rank does not stop within {_STOPPING:g} seconds")

    return look
