"""All ranks of a mesh in this process, one thread each, for `Program.run`."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import ModuleType
from typing import Any, TypeVar

from hostweave.base.errors import ExecutionError, reason_of
from hostweave.base.forks import reset_after_fork
from hostweave.base.interrupts import POLL_SECONDS, acquired, in_current_context
from hostweave.runtime.call import GlobalCall
from hostweave.runtime.cpu import CpuSchedule, schedule
from hostweave.runtime.group import INIT_TIMEOUT, Group
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.lifetime import expect_running
from hostweave.runtime.local import LocalProgram, StagedWork
from hostweave.runtime.providers import Threads, next_item
from hostweave.runtime.standstill import describe, print_report
from hostweave.targets.target import Target

T = TypeVar("T")
Answer = tuple[int, Any, BaseException | None]  # rank, result, exception

_END_TIMEOUT = 1.0  # seconds for the threads of a team to end at exit
_STOP_TIMEOUT = 60.0  # seconds for stopped ranks to answer; a rank of the CPU target may be in a long matmul

_numbers = count()
teams: dict[tuple[str, int], Team] = {}  # (target, number of ranks) -> team
_kept_alive: list[BaseException] = []  # errors kept at exit, because freeing the objects to which they refer would crash the process
_run_lock = reset_after_fork(threading.Lock())  # held while a program runs on all ranks, because two programs at a time could deadlock


@dataclass(frozen=True)
class Timing:
    """Times of a call on a rank: host time of the C++ function `enqueue`, and device time from the first work to the last."""

    enqueue_us: float
    total_ms: float
    marks_ms: tuple[float, ...] = field(default=(), repr=False)  # from the start of the first work to each mark


class Team:
    """Ranks of one group. Programs with equal targets and numbers of ranks share a team. A team whose group has failed is `broken`, and
    must be replaced. The main thread must not use a team, because the main thread handles signals (see `interruptibly`)."""

    def __init__(self, size: int):
        self._work: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(size)]
        self.groups: list[Group] = []
        name, ranks = f"ranks {next(_numbers)}", Threads(size)
        self._threads = [
            threading.Thread(target=_serve, args=(work,), name=f"hostweave {name}, rank {rank}", daemon=True)
            for rank, work in enumerate(self._work)
        ]
        ranks.threads[:] = self._threads
        for thread in self._threads:
            thread.start()
        try:
            make = partial(Group, ranks, name, count=size, timeout=INIT_TIMEOUT, call_timeout=INIT_TIMEOUT, has_watchdog=False)
            self.groups = self.each(lambda rank: make(rank=rank, device=rank))
        except BaseException:
            self._end_threads()
            raise

    def __del__(self) -> None:
        self._end_threads()

    @property
    def broken(self) -> bool:
        return any(group.failure for group in self.groups)

    def close(self) -> None:
        """Closes the groups, and ends each thread after its current work."""
        for group in self.groups:
            group.close()
        self._end_threads()

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def run(self, programs: Sequence[LocalProgram], calls: Sequence[GlobalCall], poison: bool) -> None:
        """Makes calls back to back, and waits for the last one. An interrupt stops the ranks."""
        for call in calls:
            call.expect_shapes_of(calls[0])
        self._call(programs, calls, lambda native, *staged: native.run_staged(*staged, poison))

    def measure(self, programs: Sequence[LocalProgram], call: GlobalCall, warmups: int, repetitions: int) -> list[list[Timing]]:
        gate = programs[0].module.Gate(len(programs))
        times = self._call(programs, [call], lambda native, *staged: native.measure(*staged, warmups, repetitions, gate))
        return [[Timing(t.enqueue_us, t.total_ms, tuple(t.marks_ms)) for t in rank] for rank in times]

    def _call(self, programs: Sequence[LocalProgram], calls: Sequence[GlobalCall], work: StagedWork[T]) -> list[T]:
        for group in self.groups:
            group.call_timeout = schedule().timeout_seconds * len(calls)
        module = programs[0].module
        with self.lease(module, programs[0].target, CpuSchedule()):
            if not all(program.is_prepared_for(calls[0]) for program in programs):
                self.each(lambda rank: programs[rank].prepare_for(calls[0]))
            # Staging runs on this thread, because waking the ranks' threads takes longer.
            staged_calls = [program.staged(calls) for program in programs]
        with self.lease(module, programs[0].target, schedule()):
            return self.each(lambda rank: staged_calls[rank](work), programs)

    @contextmanager
    def lease(self, module: ModuleType, target: Target, wanted: CpuSchedule) -> Iterator[None]:
        member = self.groups[0].member(module, target)
        while not (lease := module.lease(module.Schedule(**vars(wanted)), member, POLL_SECONDS)):
            expect_running()
        try:
            yield
        finally:
            del lease, member  # otherwise the traceback of an error would keep the lease and the member alive

    def each(self, work: Callable[[int], T], programs: Sequence[LocalProgram] = ()) -> list[T]:
        """Runs `work` on each rank's thread. Returns the results, by rank.

        Stops all ranks if this call is interrupted, a call of `programs` is overdue, or the group fails. An error of one rank alone does
        not stop the other ranks. Raises the error that made the group fail, or else the first error.
        """
        answers: SimpleQueue[Answer] = SimpleQueue()
        for rank, queue in enumerate(self._work):
            queue.put(partial(_run_and_report, answers, in_current_context(work), rank))
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        is_stopping = False
        check_wait: Callable[[], None] = partial(self._expect_progress, programs)
        try:
            while len(results) < len(self._work):
                try:
                    rank, results[rank], error = next_item(answers, check_wait)
                    failure = self.groups[rank].failure if error and self.groups else None
                except BaseException as interruption:
                    error, failure = interruption, reason_of(interruption)
                    if is_stopping:
                        break  # the ranks do not stop
                if error:
                    errors.append(error)
                    if failure and not is_stopping:
                        _print_positions(programs, error)
                        self._abort(failure)
                        is_stopping, check_wait = True, partial(_expect_stop, time.monotonic() + _STOP_TIMEOUT)
            if errors:
                first = next((group.failure for group in self.groups if group.failure), "")
                raise next((error for error in errors if first.endswith(str(error))), errors[0])
            return [results[rank] for rank in range(len(self._work))]
        finally:
            errors.clear()  # the tracebacks of the errors refer to this frame
            error = None

    def _expect_progress(self, programs: Sequence[LocalProgram]) -> None:
        """Raises an error if the interpreter exits, or if a call is overdue. On the CPU target, the device itself detects overdue calls."""
        expect_running()
        if programs and programs[0].target.is_asynchronous and (late := next(filter(None, (group.overdue() for group in self.groups)), "")):
            raise ExecutionError("\n".join([f"{programs[0].host.name}: {late}", *_positions(programs)]))

    def _abort(self, reason: str) -> None:
        """Aborts all ranks at the same time, because the abort of a rank may wait for that of another rank."""
        for group in self.groups[:1]:
            group.coordinator.fail(reason)  # ends waits on the host
        stopping = [threading.Thread(target=group.abort, args=(reason,)) for group in self.groups]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    def _end_threads(self) -> None:
        for work in self._work:
            work.put(None)


@contextmanager
def team_of(target: Target, size: int) -> Iterator[Team]:
    """Team of `size` ranks for programs of a target, for this thread only. A team that breaks is closed."""
    key = target.name, size
    with acquired(_run_lock), native_calls:
        team = teams[key] = teams.get(key) or Team(size)
        try:
            yield team
        except BaseException as error:
            if native_calls.ending:
                _kept_alive.append(error)
            raise
        finally:
            if team.broken:
                del teams[key]
                team.close()


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while work := queue.get():
        work()
        del work  # `work` may keep device memory alive


def _run_and_report(answers: SimpleQueue[Answer], work: Callable[[int], T], rank: int) -> None:
    try:
        answers.put((rank, work(rank), None))
    except BaseException as error:
        answers.put((rank, None, error))


def _expect_stop(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ExecutionError(f"a rank does not stop within {_STOP_TIMEOUT:g} seconds")


def _print_positions(programs: Sequence[LocalProgram], error: BaseException) -> None:
    """Prints the positions of the ranks on stderr, for an interruption such as Ctrl-C during a call."""
    if not isinstance(error, Exception) and any(program.progress[3] > 0 for program in programs):
        print_report("\n".join([f"{programs[0].host.name}: {reason_of(error)}", *_positions(programs)]))


def _positions(programs: Sequence[LocalProgram]) -> list[str]:
    return describe([[program.position()] for program in programs])


@atexit.register
def _end_all() -> None:
    """Ends the threads of all ranks, before Python ends these threads and destroys their objects."""
    native_calls.end()
    for team in teams.values():
        team.close()
        team.join(_END_TIMEOUT)


os.register_at_fork(after_in_child=teams.clear)
