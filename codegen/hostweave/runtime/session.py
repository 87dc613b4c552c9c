"""A loaded program on the ranks of this process, for `Program.run`."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from hostweave.base.errors import ExecutionError, reason_of
from hostweave.base.forks import renewed
from hostweave.base.interrupts import taken
from hostweave.runtime.algorithms import Measured
from hostweave.runtime.call import GlobalCall
from hostweave.runtime.cpu import Schedule, schedule
from hostweave.runtime.group import INIT_TIMEOUT
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.lifetime import expect_going_on
from hostweave.runtime.ranks import Ranks
from hostweave.runtime.standstill import describe, marks_graphs, stand_of
from hostweave.runtime.watchdog import say
from hostweave.targets.target import Target

_ranks: dict[tuple[str, int], Ranks] = {}  # by target and number of ranks, shared by all programs
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_turn = renewed(threading.Lock())  # two programs that run on all ranks at the same time could deadlock


@dataclass(frozen=True)
class Timing:
    """One call on one rank: host time of the program's `run`, and device time from the start of its first work to the end of its last."""

    enqueue_us: float
    total_ms: float
    marks_ms: tuple[float, ...] = field(default=(), repr=False)  # time from the first work to each mark


class Session:
    """A program on every rank. Raises ExecutionError if there are too few devices.

    Use it only from threads other than the main thread, which alone receives signals (`interruptibly`).
    """

    def __init__(self, module: ModuleType, target: Target, ranks: int, tune: bool = False):
        self._module, self._target = module, target
        self._instances: list[Any] = []
        self._staged: list[Any] = []
        self._closed = False
        self._ready_for: object = None  # shapes of the last calls
        self._at_rest = at_rest = partial(module.lease, self._native(Schedule()))  # for work of single ranks
        with taken(_turn), native_calls:
            self._ranks = _ranks_of(module, target.name, ranks)
            _sessions.add(self)
            with self._freed_if_broken():
                members = self._ranks.members
                ids: dict[str, bytes] = {}  # of channels to make

                def find(rank: int) -> None:
                    for key, _ in module.missing_process_groups(members[rank]):
                        ids[key] = ids.get(key) or module.new_id(members[rank], key)

                self._ranks.each_here(at_rest, find)
                if ids:
                    self._ranks.each(at_rest, lambda rank: module.connect(members[rank], ids, INIT_TIMEOUT))
                reasons = self._ranks.each(at_rest, lambda rank: str(module.out_of_reach(members[rank])))
                self.out_of_reach = next(filter(None, reasons), "")  # reason why ranks cannot reach each other's memory, or ""
                self._instances = self._ranks.each(at_rest, lambda rank: module.Instance(members[rank], tune, marks_graphs()), alone=True)
                self._staged = self._ranks.each(at_rest, lambda rank: module.StagedCalls(self._instances[rank]), alone=True)
        self._measured = Measured(module, target.device_name()) if tune else None

    @property
    def broken(self) -> bool:
        """True if it was closed, or if an error stopped the ranks midway. A new session is then needed."""
        return not self._instances or self._ranks.broken

    def run(self, calls: Sequence[GlobalCall], poison: bool) -> None:
        """Runs calls one after another and waits for the last. An interrupt stops the ranks."""
        for call in calls:
            call.expect_shapes_of(calls[0])
        self._each(calls, lambda staged, schedule: staged.run(schedule, poison), len(calls))

    def measure(self, call: GlobalCall, warmups: int, repetitions: int) -> list[list[Timing]]:
        gate = self._module.Gate(len(self._ranks.members))
        times = self._each([call], lambda staged, schedule: staged.measure(schedule, warmups, repetitions, gate), 1)
        return [[Timing(t.enqueue_us, t.total_ms, tuple(t.marks_ms)) for t in rank] for rank in times]

    def close(self) -> None:
        """Frees what the program holds on every rank, after the current call."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        self._instances, self._staged = [], []

    def _each(self, calls: Sequence[GlobalCall], work: Callable[[Any, Any], Any], in_flight: int) -> list[Any]:
        """Results of `work` on every rank, after the ranks are prepared for these calls. At most `in_flight` calls run at a time."""
        native_schedule = self._native(schedule())
        with taken(_turn), native_calls, self._freed_if_broken():
            staged, instances = self._staged, self._instances  # keep them, in case another thread closes it
            if self._closed:
                raise ExecutionError(f"{self._module.name}: the program is closed; compile it again")
            if self.broken:
                raise ExecutionError(f"{self._module.name}: an error in another call has stopped the ranks; call again")
            self._prepare(calls, instances, staged)
            look = partial(self._expect_progress, schedule().timeout_seconds * in_flight, instances)
            lease = partial(self._module.lease, native_schedule)
            try:
                results = self._ranks.each(
                    lease, lambda rank: work(staged[rank], native_schedule), look=look, before_stop=partial(self._say_where, instances)
                )
            except BaseException:
                if self._ranks.broken:
                    staged.clear()  # the traceback would keep them
                    instances.clear()
                raise
        if self._measured:
            self._measured.keep()
        return results

    def _prepare(self, calls: Sequence[GlobalCall], instances: list[Any], staged: list[Any]) -> None:
        first = calls[0]
        ready_for, before, self._ready_for = first.global_shapes(), self._ready_for, None

        def prepare(rank: int) -> None:
            instances[rank].prepare([view.shape for view in first.inputs[rank]], ready_for, 0)

        def stage(rank: int) -> None:
            staged[rank].prepare([call.places(rank) for call in calls])

        if before != ready_for:
            self._ranks.each(self._at_rest, prepare, alone=not self._module.prepares_together)
        self._ranks.each_here(self._at_rest, stage)
        self._ready_for = ready_for

    @contextmanager
    def _freed_if_broken(self) -> Iterator[None]:
        """Frees the resources of all programs on the ranks if the code inside breaks the ranks."""
        try:
            yield
        finally:
            if self._ranks.broken:
                for session in list(_sessions):
                    if session._ranks is self._ranks:
                        session._drop()
                if _ranks.get(key := (self._target.name, len(self._ranks.members))) is self._ranks:
                    del _ranks[key]

    def _expect_progress(self, patience: float, instances: list[Any]) -> None:
        """Raises ExecutionError if the interpreter ends or no rank makes progress. The CPU device detects the latter itself."""
        expect_going_on()
        states = [instance.progress() for instance in instances if self._target.is_asynchronous]
        if any(seconds > patience for _, _, seconds in states):
            lines = "\n".join([f"no rank has come further for {patience:g} seconds", *self._stands(instances)])
            raise ExecutionError(f"{self._module.name}: {lines}")

    def _stands(self, instances: list[Any]) -> list[str]:
        """Positions of the ranks, as lines of a report."""
        module = self._module
        return describe([[stand_of(module.name, one.progress(), one.standstill(), module)] for one in instances])

    def _say_where(self, instances: list[Any], error: BaseException) -> None:
        """Prints the positions of the ranks on stderr if an interruption, such as Ctrl-C, strikes a call."""
        if not isinstance(error, Exception) and any(one.progress()[2] > 0 for one in instances):
            say("\n".join([f"{self._module.name}: {reason_of(error)}", *self._stands(instances)]))

    def _native(self, schedule: Schedule) -> Any:
        return self._module.Schedule(**vars(schedule))


def _ranks_of(module: ModuleType, target: str, count: int) -> Ranks:
    """Ranks for a target, shared by all programs. Any program's module can make them. Broken ranks are replaced."""
    ranks = _ranks.get((target, count))
    if ranks is None or ranks.broken:
        ranks = _ranks[target, count] = Ranks(module, count)
    return ranks


def _close_all() -> None:
    for session in list(_sessions):
        session.close()
    _ranks.clear()


os.register_at_fork(after_in_child=_close_all)


@atexit.register
def _at_exit() -> None:
    native_calls.end()
    _close_all()
