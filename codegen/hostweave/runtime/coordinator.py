"""Coordination of ranks: in a gather, each rank contributes a record, and gets the records of all ranks.

Most records are signatures of calls. The ranks compare signatures to check that all ranks are about to make the same call.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from hostweave.runtime.stores import MemoryStore, Store, TcpStore
from hostweave.types.tensor import Shape

_POLL_SECONDS = 0.25  # seconds between two checks for a failure of another rank
_LEFT_PREFIX = "-1 left"  # followed by the number of calls of the rank that has left


class PeerLost(Exception):
    """Some ranks did not arrive before the timeout."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = tuple(ranks)


class Failed(Exception):
    """The group has failed, or another rank has left. The message is the reason."""


class Coordinator:
    """One rank's access to the gathers and the state of its group. This base class is for ranks that cannot exchange messages, and assumes
    that all records are equal."""

    blocks_on_failure = False  # True if `failure` returns at once when a rank reports a failure

    def __init__(self, rank: int, count: int):
        self._rank, self._count = rank, count
        self.number = 0  # gathers that this rank has joined

    def gather(self, record: str, timeout: float) -> list[str]:
        """Returns the records of all ranks. Raises PeerLost after `timeout` seconds. Raises Failed if the group has failed, or another rank
        has left."""
        return [record] * self._count

    def fail(self, reason: str) -> None:
        """Tells the other ranks that the group has failed. Only the first reason is kept."""

    def leave(self, calls: int) -> None:
        """Tells the other ranks that this rank has left the group after `calls` calls."""

    def left(self) -> dict[int, int]:
        """Ranks that have left, each with the number of its calls."""
        return {}

    def failure(self, timeout: float = 0) -> str | None:
        """Reason for the group's failure, or None if no rank reports a failure within `timeout` seconds."""
        time.sleep(timeout)
        return None

    def announce(self, text: str) -> None:
        """Tells the watchdogs of the other ranks that this rank is about to join the next gather."""

    def announced(self) -> tuple[int, str] | None:
        """Number of the gather that was announced last, and the text of the announcement, or None."""
        return None

    def publish_position(self, text: str) -> None:
        """Publishes this rank's position in its calls, for reports of a call that hangs."""

    def gather_positions(self, timeout: float = 0) -> list[str | None]:
        """Positions of all ranks, None if unknown. May wait up to `timeout` seconds for ranks that have not ended."""
        return [None] * self._count


class StoreCoordinator(Coordinator):
    """Coordination through a store. Keys are reused, so that the store does not grow."""

    def __init__(self, store: Store, prefix: str, rank: int, count: int):
        super().__init__(rank, count)
        self._store, self._prefix = store, prefix
        self.blocks_on_failure = isinstance(store, TcpStore | MemoryStore)

    def last_wills(self) -> dict[str, str]:
        """Values that the store sets if the process of this rank ends without closing the store."""
        reason = f"rank {self._rank}: its process has ended"
        return {f"{self._prefix}/{key}": reason for key in ("failed", f"ended/{self._rank}")}

    def gather(self, record: str, timeout: float) -> list[str]:
        self.number += 1
        deadline = time.monotonic() + timeout
        self._set(f"record/{self._rank}", f"{self.number} {record}")
        try:
            if self._rank == 0:
                records = [self._await(f"record/{rank}", deadline) for rank in range(self._count)]
                if reason := self.failure():  # other ranks may have timed out while they waited for this rank
                    raise Failed(reason)
                self._set("records", f"{self.number} {json.dumps(records)}")
                return records
            all_records: list[str] = json.loads(self._await("records", deadline))
            return all_records
        except TimeoutError:
            missing = [rank for rank in range(self._count) if self._record(f"record/{rank}", 0) is None]
            raise PeerLost(missing or [0]) from None

    def fail(self, reason: str) -> None:
        if self.failure() is None:
            self._set("failed", reason)

    def leave(self, calls: int) -> None:
        self._set(f"record/{self._rank}", f"{_LEFT_PREFIX} {calls}")
        self._set("left", "")

    def left(self) -> dict[int, int]:
        if self._peek("left") is None:
            return {}
        records = [(rank, self._peek(f"record/{rank}") or "") for rank in range(self._count)]
        return {rank: int(record.removeprefix(_LEFT_PREFIX)) for rank, record in records if record.startswith(_LEFT_PREFIX)}

    def failure(self, timeout: float = 0) -> str | None:
        return self._peek("failed", timeout)

    def announce(self, text: str) -> None:
        self._set("announced", f"{self.number + 1} {text}")

    def announced(self) -> tuple[int, str] | None:
        number, _, text = (self._peek("announced") or "").partition(" ")
        return (int(number), text) if number else None

    def publish_position(self, text: str) -> None:
        self._set(f"note/{self._rank}", text)

    def gather_positions(self, timeout: float = 0) -> list[str | None]:
        deadline = time.monotonic() + timeout

        def position(rank: int) -> str | None:
            left = deadline - time.monotonic()
            return self._peek(f"note/{rank}", left if left > 0 and self._peek(f"ended/{rank}") is None else 0)

        return [position(rank) for rank in range(self._count)]

    def _await(self, key: str, deadline: float) -> str:
        pause = 0.0002
        next_check = time.monotonic() + _POLL_SECONDS
        while True:
            now = time.monotonic()
            if (record := self._record(key, max(0.0, min(_POLL_SECONDS, deadline - now)))) is not None:
                return record
            if now >= next_check:
                next_check = now + _POLL_SECONDS
                waited_for = key if key != "records" else "record/0"
                has_left = (self._peek(waited_for) or "").startswith(_LEFT_PREFIX)
                if reason := self.failure() or (has_left and f"rank {waited_for.removeprefix('record/')} has left"):
                    raise Failed(reason)
            if now >= deadline:
                raise TimeoutError(key)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _record(self, key: str, timeout: float) -> str | None:
        if (text := self._peek(key, timeout)) is None:
            return None
        number, record = text.split(" ", 1)
        return record if int(number) == self.number else None

    def _peek(self, key: str, timeout: float = 0) -> str | None:
        try:
            return self._store.get(f"{self._prefix}/{key}", timeout).decode()
        except TimeoutError:
            return None

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value.encode())


class ThreadTable:
    """Shared state through which the threads of one group exchange records."""

    def __init__(self, threads: Sequence[threading.Thread | None]):
        self.threads = tuple(threads)  # by rank
        self.changed = threading.Condition()
        self.number = 0  # number of finished gathers
        self.records: dict[int, str] = {}  # rank -> record in the current gather
        self.result: list[str] = []  # records of the last gather, by rank
        self.left: dict[int, int] = {}  # rank that has left -> number of its calls
        self.timed_out_ranks: list[int] = []  # ranks that were absent when a rank timed out; all waiting ranks then time out too
        self.failure: str | None = None
        self.positions: list[str | None] = [None] * len(self.threads)
        self.position_functions: dict[int, Callable[[], str | None]] = {}  # by rank

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()


class ThreadCoordinator(Coordinator):
    """Coordination of the threads of one process. Also detects threads that have ended."""

    blocks_on_failure = True

    def __init__(self, table: ThreadTable, rank: int):
        super().__init__(rank, len(table.threads))
        self._table = table

    def gather(self, record: str, timeout: float) -> list[str]:
        table = self._table
        deadline = time.monotonic() + timeout
        with table.changed:
            number = table.number
            table.records[self._rank] = record
            while table.number == number:
                if table.failure:
                    raise Failed(table.failure)
                if table.timed_out_ranks:
                    raise PeerLost(table.timed_out_ranks)
                if len(table.records) == self._count:  # this rank is the last to arrive
                    table.result = [one for _, one in sorted(table.records.items())]
                    table.records, table.number = {}, number + 1
                    table.changed.notify_all()
                    break
                self._wait(deadline)
            return table.result

    def _wait(self, deadline: float) -> None:
        """Waits briefly for another rank to arrive. Raises Failed if a rank can no longer arrive."""
        table = self._table
        missing = [rank for rank in range(self._count) if rank not in table.records]
        if reason := next(filter(None, map(self._reason_gone, missing)), None):
            raise Failed(reason)
        left = deadline - time.monotonic()
        if left > 0:
            table.changed.wait(min(_POLL_SECONDS, left))
        else:
            table.timed_out_ranks = missing
            table.changed.notify_all()

    def _reason_gone(self, rank: int) -> str | None:
        thread = self._table.threads[rank]
        if rank in self._table.left:
            return f"rank {rank} has left"
        return f"rank {rank}: its thread has ended" if thread and not thread.is_alive() else None

    def fail(self, reason: str) -> None:
        self._table.fail(reason)

    def leave(self, calls: int) -> None:
        with self._table.changed:
            self._table.left[self._rank] = calls
            self._table.changed.notify_all()

    def left(self) -> dict[int, int]:
        with self._table.changed:
            return dict(self._table.left)

    def failure(self, timeout: float = 0) -> str | None:
        with self._table.changed:
            self._table.changed.wait_for(lambda: self._table.failure, timeout)
            return self._table.failure

    def publish_position(self, text: str) -> None:
        with self._table.changed:
            self._table.positions[self._rank] = text
            self._table.changed.notify_all()

    def gather_positions(self, timeout: float = 0) -> list[str | None]:
        """Positions of all ranks. Ranks whose thread is alive report their current position."""
        with self._table.changed:
            published = list(self._table.positions)
            position_functions = {rank: answer for rank, answer in self._table.position_functions.items() if not self._reason_gone(rank)}
        return [position_functions[rank]() if rank in position_functions else text for rank, text in enumerate(published)]

    def answer_positions_by(self, answer: Callable[[], str | None]) -> None:
        with self._table.changed:
            self._table.position_functions[self._rank] = answer


class ByteRange(NamedTuple):
    """Byte range of an argument in the address space of the rank's process."""

    begin: int
    end: int
    rank: int
    name: str
    written: bool


@dataclass(frozen=True)
class CallSignature:
    """Next action of a rank, such as a call of a program or of `group.split`. `error` says why the rank cannot act."""

    program: str
    mesh: str
    digest: str  # hash of everything that determines the program
    shapes: tuple[Shape, ...] = ()  # for a call: shapes of the inputs that are not bound, or of all inputs
    spans: tuple[ByteRange, ...] = ()  # memory of the rank's arguments, if ranks are threads
    error: str = ""
    bound: str = ""  # for a call: digest of the bound inputs; for other actions: the rank's record
    windows: tuple[tuple[int, int], ...] = ()  # positions in window memory of the arguments that are in windows
    call: int = 0  # number of the call whose sizes are compared

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> CallSignature:
        fields = json.loads(text)
        fields["shapes"], fields["windows"] = (tuple(map(tuple, fields[name])) for name in ("shapes", "windows"))
        fields["spans"] = tuple(ByteRange(*span) for span in fields["spans"])
        return CallSignature(**fields)


def disagreement(signatures: Sequence[CallSignature]) -> str | None:
    """Describes the first error of a rank, or the first difference from rank 0. None if all ranks can continue."""
    first = signatures[0]
    for rank, signature in enumerate(signatures):
        if signature.error:
            return f"rank {rank} cannot continue: {signature.error}"
    for rank, signature in enumerate(signatures):
        if (signature.program, signature.mesh) != (first.program, first.mesh):
            return (
                f"rank {rank} calls {signature.program} on {signature.mesh}, and rank 0 calls {first.program} on {first.mesh}; "
                "all ranks of a group call the same programs in the same order"
            )
        if signature.digest != first.digest:
            return (
                f"rank {rank} and rank 0 call different programs of the same name; compile one program, with the same options, on all ranks"
            )
        if signature.call != first.call:
            return (
                f"rank {rank} compares the sizes of call {signature.call}, and rank 0 those of call {first.call}; "
                "pass consistent sizes to each call"
            )
        if signature.windows != first.windows:
            return f"rank {rank} and rank 0 pass arrays from different calls of group.empty; pass arrays of one call, with equal offsets"
    return None


def other_call(rank: int, other: int, call: int) -> str:
    return f"rank {rank} and rank {other} make different calls as call {call}; make the same calls on all ranks, with consistent sizes"
