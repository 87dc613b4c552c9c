"""All ranks of a mesh in this process: a thread and a device each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, TypeVar

from hostweave.runtime.lifetime import expect_going_on

T = TypeVar("T")
Work = Callable[[], None]
Lease = Callable[[Any, float], Any]  # the turn of a member by some schedule, or None if it has not come in so many seconds

_LOOK = 0.05  # seconds between looks at whether to go on waiting

_numbers = count()


class Ranks:
    """Members of one group, for all programs of a target. After an error that stopped them midway they are `broken`: make others."""

    def __init__(self, module: ModuleType, size: int):
        name = f"ranks {next(_numbers)}"
        self._work: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(size)]
        self.members: list[Any] = [module.Member(name, rank, rank, size, False) for rank in range(size)]
        self.broken = False
        for rank, work in enumerate(self._work):
            threading.Thread(target=_serve, args=(work,), name=f"hostweave {name}, rank {rank}", daemon=True).start()

    def __del__(self) -> None:
        for work in self._work:
            work.put(None)

    def each(self, lease: Lease, work: Callable[[int], T], *, alone: bool = False, look: Work = expect_going_on) -> list[T]:
        """What `work` gives for each rank, on the rank's thread, when the devices are free.

        Where it raises on some rank, or `look`, which is asked now and then, or Ctrl-C in the caller, all ranks are stopped wherever they
        wait, and this raises the first error. With `alone` no rank waits for another: an error of one stops nobody and breaks nothing.
        """
        with self._turn(lease):
            return self._each(work, alone, look)

    def each_here(self, lease: Lease, work: Callable[[int], None]) -> None:
        """Does `work` for one rank after another on this thread: less than it would take to wake others."""
        with self._turn(lease):
            for rank in range(len(self.members)):
                work(rank)

    @contextmanager
    def _turn(self, lease: Lease) -> Iterator[None]:
        while not (turn := lease(self.members[0], _LOOK)):
            expect_going_on()
        try:
            yield
        finally:
            del turn  # which an error would keep

    def _each(self, work: Callable[[int], T], alone: bool, look: Work) -> list[T]:
        answers: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
        for rank, queue in enumerate(self._work):
            queue.put(partial(_answer, answers, work, rank))
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        for _ in self._work:
            try:
                rank, results[rank], error = _next(answers, look if not errors else expect_going_on)
            except BaseException as interruption:
                error = interruption
                self._stop(error)
                rank, results[rank], _ = answers.get()
            if error:
                errors.append(error)
                if not alone:
                    self._stop(error)
        if errors:
            first = self.members[0].stopped
            raise next((error for error in errors if first.endswith(str(error))), errors[0])
        return [results[rank] for rank in range(len(self._work))]

    def _stop(self, error: BaseException) -> None:
        """All at once: what one of them waits for may be another one."""
        if self.broken:
            return
        self.broken = True
        stopping = [threading.Thread(target=member.abort, args=(str(error) or type(error).__name__,)) for member in self.members]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()


def _serve(queue: SimpleQueue[Work | None]) -> None:
    while work := queue.get():
        work()
        del work  # which may hold what a program has on devices


def _answer(answers: SimpleQueue[Any], work: Callable[[int], T], rank: int) -> None:
    try:
        answers.put((rank, work(rank), None))
    except BaseException as error:
        answers.put((rank, None, error))


def _next(answers: SimpleQueue[T], look: Work) -> T:
    while True:
        try:
            return answers.get(timeout=_LOOK)
        except Empty:
            look()
