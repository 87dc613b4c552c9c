"""Failures of a group: a rank detects them, reports them to the other ranks, and aborts."""

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count as count_from
from typing import Any, Protocol

from hostweave.base.errors import ExecutionError, reason_of
from hostweave.base.interrupts import interruptibly, within
from hostweave.runtime.coordinator import Coordinator, StoreCoordinator, other_call
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.standstill import RankPosition, describe, from_json, print_report, to_json
from hostweave.runtime.stores import StoreClosed
from hostweave.types.tensor import Shape

ABORT_TIMEOUT = 15.0  # seconds
SEND_TIMEOUT = 1.0  # seconds for the store to accept a message
_POSITIONS_TIMEOUT = 1.0  # seconds for the other ranks to report their positions
_STORE_TIMEOUT = 10.0  # seconds for the store to tell if the group has failed


class CalledProgram(Protocol):
    """A program that this rank has called in a group: interface of LocalProgram."""

    @property
    def progress(self) -> tuple[str, int, int, float]: ...
    def position(self) -> RankPosition: ...
    def close(self) -> None: ...


class StartedCalls(Protocol):
    """Sizes of this rank's calls of a program: interface of LastSizes."""

    def differ_from(self, rank: int, call: int, sizes: Sequence[Sequence[Shape]]) -> str | None: ...


class FallibleGroup:
    """The part of a group that handles failures."""

    in_process: bool  # all ranks are in this process

    def __init__(self, name: str, rank: int, count: int, call_timeout: float):
        self.name, self.rank, self.count, self.call_timeout = name, rank, count, call_timeout
        self.coordinator = Coordinator(rank, count)
        self.members: dict[str, Any] = {}  # target -> native object for this rank's device
        self.programs: weakref.WeakKeyDictionary[object, CalledProgram] = weakref.WeakKeyDictionary()
        self.compared_calls = 0  # number of this rank's calls whose sizes are compared
        self.closed = False
        self._lock = threading.RLock()
        self._failure: str | None = None
        self._aborted = threading.Event()  # set when the abort after a failure is done
        self._calls = 0  # calls of this rank
        self._waits_at_barrier = False  # True while this rank waits for late ranks
        self._numbers = count_from(0)
        self._sizes: weakref.WeakValueDictionary[int, StartedCalls] = weakref.WeakValueDictionary()  # assigned number -> sizes

    @property
    def failure(self) -> str | None:
        """Reason why the group cannot be used: its failure, or "closed". None if the group can be used."""
        return self._failure or ("closed" if self.closed else None)

    def expect_working(self) -> None:
        if reason := self.failure:
            if self._failure:
                self._aborted.wait(ABORT_TIMEOUT)
            state = f"has failed and cannot be reused: {reason}" if self._failure else "is closed"
            raise ExecutionError(f"group {self.name!r} {state}; call hw.init again")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(f"rank {self.rank}: {reason_of(error)}")
            raise

    def _known_failure(self) -> str | None:
        """Reason why the group has failed: the report of a rank, or an error of the store. Otherwise None."""
        failure = self.coordinator.failure
        try:
            return within(min(self.call_timeout, _STORE_TIMEOUT), failure) if isinstance(self.coordinator, StoreCoordinator) else failure()
        except StoreClosed:  # the process of rank 0 has ended normally
            return None
        except TimeoutError:
            return "the store in the process of rank 0 does not answer"
        except ExecutionError as error:
            return str(error)

    def fail(self, reason: str) -> None:
        """Marks the group as failed on all ranks."""

        def fail() -> None:
            if not self._failure:  # only the first failure is reported
                self._send(lambda: self._report_failure(reason))
            self.abort(reason)

        interruptibly(fail)

    def _report_failure(self, reason: str) -> None:
        self.coordinator.publish_position(to_json(self.positions()))  # first, because an abort erases positions
        self.coordinator.fail(reason)

    def interrupted(self, reason: str) -> None:
        """Handles an interrupt such as Ctrl-C: prints a report on stderr, and aborts, unless the group has failed already."""
        if not self._failure:
            print_report(report := self.report(f"rank {self.rank}: {reason}"))
            self.abort(report)

    def _send(self, send: Callable[[], None]) -> None:
        """Sends a message to the other ranks, and ignores errors of the store."""
        with contextlib.suppress(ExecutionError, TimeoutError):
            within(SEND_TIMEOUT, send)

    def abort(self, reason: str) -> None:
        """Aborts this rank's waits for other ranks. The group cannot be used afterwards, but other groups can use the same devices."""
        with self._lock:
            is_first, self._failure = not self._failure, self._failure or reason
            members = list(self.members.values())
        if not is_first:
            self._aborted.wait(ABORT_TIMEOUT)
            return
        try:
            with contextlib.nullcontext() if native_calls.ending else native_calls:
                for member in members:
                    member.abort(reason)
        finally:
            self._aborted.set()

    def overdue(self) -> str | None:
        for program in list(self.programs.values()):
            name, _, done, seconds = program.progress
            if seconds > self.call_timeout:
                return f"rank {self.rank}: call {done + 1} of {name} is not done after {self.call_timeout:g} seconds"
        return None

    def left_early(self) -> str | None:
        """Message if another rank has left before the call in which this rank waits, or None."""
        call = self._calls + self._waits_at_barrier
        if call == self._calls and all(made == done for _, made, done, _ in (program.progress for program in list(self.programs.values()))):
            return None
        for rank, calls in self.coordinator.left().items():
            if calls < call:
                return f"rank {rank} has left before call {call}, in which rank {self.rank} waits for it"
        return None

    def number(self, sizes: StartedCalls) -> int:
        """Assigns a number by which other ranks refer to the sizes of a program."""
        number = next(self._numbers)
        self._sizes[number] = sizes
        return number

    def announce(self, number: int = -1, call: int = 0, sizes: object = None) -> None:
        """Tells the watchdogs of the other ranks that this rank is about to join the next gather. If the gather compares sizes, `sizes` are
        the sizes of call `call`."""
        if not self.in_process:  # threads detect a late rank without a message
            self._send(lambda: self.coordinator.announce(json.dumps((self.rank, self.compared_calls, number, call, sizes))))

    def diverged(self) -> str | None:
        """Message if another rank waits in a gather before a call, and this rank has begun a call without joining this gather. Otherwise
        None."""
        if (announced := self.coordinator.announced()) is None:
            return None
        gather_number, text = announced
        rank, calls, number, call, given = json.loads(text)
        if rank == self.rank:
            return None
        sizes = self._sizes.get(number)
        difference = sizes.differ_from(rank, call, given) if sizes else None
        if difference is None and self.compared_calls > calls:
            difference = other_call(rank, self.rank, calls + 1)
        # The number of gathers is read last, because this rank joins the gather of a call before it begins the call.
        return difference if self.coordinator.number < gather_number else None

    def positions(self) -> list[RankPosition]:
        return [program.position() for program in list(self.programs.values())]

    def report(self, reason: str) -> str:
        """Tells the other ranks why the group has failed. Returns a report with the positions of the ranks, within about 2 seconds."""

        def positions() -> list[str | None]:
            self._report_failure(reason)
            return self.coordinator.gather_positions(_POSITIONS_TIMEOUT)

        lines = [f"group {self.name!r}: {reason}"]
        try:
            lines += describe([from_json(text) if text else None for text in within(_POSITIONS_TIMEOUT + SEND_TIMEOUT, positions)])
        except TimeoutError:
            lines.append("  the store in the process of rank 0 does not answer")
        except Exception as error:  # any exception, because the abort must follow
            lines.append(f"  {error}")
        return "\n".join(lines)
