"""Exchanges on the host: each rank of a group contributes a record, and all receive the records of all.

A failure that one rank tells ends the waiting of the others. A record is the signature of a call, by which ranks detect that they are
about to make different ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from hostweave.runtime.stores import MemoryStore, Store, TcpStore

_LOOK = 0.25  # seconds between looks at whether another rank has failed
_LEFT = "-1 left"  # in place of a record; how many calls the rank has made comes after


class PeerLost(Exception):
    """Timed out while waiting for some ranks."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = tuple(ranks)


class Failed(Exception):
    """Another rank has failed; the reason begins with which."""


class Meeting:
    """One rank's seat in the meetings of its group. Once a meeting has failed, the group is to be made again.

    This is the seat of a rank that has no way to meet the others: it takes it that they do as it does.
    """

    @property
    def waits_at_store(self) -> bool:
        """True if `failure` waits without asking again and again."""
        return False

    def __init__(self, rank: int, count: int):
        self._rank, self._count = rank, count
        self.number = 0  # of meetings that this rank has come to

    def gather(self, record: str, timeout: float) -> list[str]:
        """The records of all ranks, by rank. Raises PeerLost after `timeout` seconds, Failed where another rank has failed."""
        return [record] * self._count

    def fail(self, reason: str) -> None:
        """Tells the others that the group has failed. The first reason counts."""

    def leave(self, calls: int) -> None:
        """Tells the others not to wait for this rank any more, which has made so many calls."""

    def left(self) -> dict[int, int]:
        """The ranks that have left, and how many calls each of them has made."""
        return {}

    def failure(self, timeout: float = 0) -> str | None:
        """Why the group has failed, as some rank told. Waits up to `timeout` seconds for a reason."""
        time.sleep(timeout)
        return None

    def announce(self, text: str) -> None:
        """Tells the watchdogs of the others of the next meeting, to which this rank goes."""

    def announced(self) -> tuple[int, str] | None:
        """The number of the meeting that was announced last, and what was said of it."""
        return None

    def note(self, text: str) -> None:
        """Leaves word for the others of how far this rank came."""

    def notes(self, timeout: float = 0) -> list[str | None]:
        """Notes that the ranks have left. Waits up to `timeout` seconds for those whose process or thread has not ended."""
        return [None] * self._count


class StoreMeeting(Meeting):
    """By way of a store. Its keys are used again, so that it does not grow."""

    def __init__(self, store: Store, prefix: str, rank: int, count: int):
        super().__init__(rank, count)
        self._store, self._prefix = store, prefix

    @property
    def waits_at_store(self) -> bool:
        return isinstance(self._store, TcpStore | MemoryStore)

    def wills(self) -> dict[str, str]:
        """The values that are to be set when this rank's process ends without `leave`."""
        reason = f"rank {self._rank}: its process has ended"
        return {f"{self._prefix}/{key}": reason for key in ("failed", f"ended/{self._rank}")}

    def gather(self, record: str, timeout: float) -> list[str]:
        self.number += 1
        deadline = time.monotonic() + timeout
        self._set(f"record/{self._rank}", f"{self.number} {record}")
        try:
            if self._rank == 0:
                records = [self._await(f"record/{rank}", deadline) for rank in range(self._count)]
                if reason := self.failure():  # some may have given up waiting for this rank
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
        self._set(f"record/{self._rank}", f"{_LEFT} {calls}")
        self._set("left", "")

    def left(self) -> dict[int, int]:
        if self._look("left") is None:
            return {}
        records = [(rank, self._look(f"record/{rank}") or "") for rank in range(self._count)]
        return {rank: int(record.removeprefix(_LEFT)) for rank, record in records if record.startswith(_LEFT)}

    def failure(self, timeout: float = 0) -> str | None:
        return self._look("failed", timeout)

    def announce(self, text: str) -> None:
        self._set("announced", f"{self.number + 1} {text}")

    def announced(self) -> tuple[int, str] | None:
        number, _, text = (self._look("announced") or "").partition(" ")
        return (int(number), text) if number else None

    def note(self, text: str) -> None:
        self._set(f"note/{self._rank}", text)

    def notes(self, timeout: float = 0) -> list[str | None]:
        deadline = time.monotonic() + timeout

        def note(rank: int) -> str | None:
            left = deadline - time.monotonic()
            return self._look(f"note/{rank}", left if left > 0 and self._look(f"ended/{rank}") is None else 0)

        return [note(rank) for rank in range(self._count)]

    def _await(self, key: str, deadline: float) -> str:
        """The record of the present meeting."""
        pause = 0.0002
        look_at = time.monotonic() + _LOOK
        while True:
            now = time.monotonic()
            if (record := self._record(key, max(0.0, min(_LOOK, deadline - now)))) is not None:
                return record
            if now >= look_at:
                look_at = now + _LOOK
                waited_for = key if key != "records" else "record/0"
                has_left = (self._look(waited_for) or "").startswith(_LEFT)
                if reason := self.failure() or (has_left and f"rank {waited_for.removeprefix('record/')} has left"):
                    raise Failed(reason)
            if now >= deadline:
                raise TimeoutError(key)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _record(self, key: str, timeout: float) -> str | None:
        try:
            number, record = self._store.get(f"{self._prefix}/{key}", timeout).decode().split(" ", 1)
        except TimeoutError:
            return None
        return record if int(number) == self.number else None

    def _look(self, key: str, timeout: float = 0) -> str | None:
        try:
            return self._store.get(f"{self._prefix}/{key}", timeout).decode()
        except TimeoutError:
            return None

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value.encode())


class Table:
    """What the threads of one world share to meet."""

    def __init__(self, threads: Sequence[threading.Thread | None]):
        self.threads = tuple(threads)  # by rank
        self.changed = threading.Condition()
        self.number = 0  # of meetings that are over
        self.records: dict[int, str] = {}  # of the present one
        self.result: list[str] = []  # of the last one
        self.left: dict[int, int] = {}  # how many calls each rank has made that has left
        self.absent: list[int] = []  # when the first rank gave up waiting, which the others do then too
        self.failure: str | None = None
        self.notes: list[str | None] = [None] * len(self.threads)

    def finish(self) -> None:
        """Ends a meeting, all being here."""
        self.result = [record for _, record in sorted(self.records.items())]
        self.records = {}
        self.number += 1
        self.changed.notify_all()

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()


class ThreadMeeting(Meeting):
    """Among the threads of one process. It also sees when a thread has ended."""

    @property
    def waits_at_store(self) -> bool:
        return True

    def __init__(self, table: Table, rank: int):
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
                if table.absent:
                    raise PeerLost(table.absent)
                if len(table.records) == self._count:
                    table.finish()
                    break
                self._wait(deadline)
            return table.result

    def _wait(self, deadline: float) -> None:
        """For another rank to come, a little while. Raises Failed where one never will."""
        table = self._table
        absent = [rank for rank in range(self._count) if rank not in table.records]
        if gone := next(filter(None, map(self._gone, absent)), None):
            raise Failed(gone)
        left = deadline - time.monotonic()
        if left > 0:
            table.changed.wait(min(_LOOK, left))
        else:
            table.absent = absent
            table.changed.notify_all()

    def _gone(self, rank: int) -> str | None:
        """Why a rank will not come, if that is certain."""
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

    def note(self, text: str) -> None:
        with self._table.changed:
            self._table.notes[self._rank] = text
            self._table.changed.notify_all()

    def notes(self, timeout: float = 0) -> list[str | None]:
        table = self._table
        with table.changed:
            table.changed.wait_for(lambda: all(table.notes[rank] or self._gone(rank) for rank in range(self._count)), timeout)
            return list(table.notes)


# --- signatures of calls ----------------------------------------------------------------------------------------------


Shape = tuple[int, ...]


class Span(NamedTuple):
    """The bytes of an argument, in the memory of the rank's process."""

    begin: int
    end: int
    rank: int
    name: str
    written: bool


@dataclass(frozen=True)
class CallSignature:
    """A program that a rank is about to make ready or to call; `error` says why it cannot."""

    program: str
    mesh: str
    digest: str  # of all that decides what the program does
    shapes: tuple[Shape, ...] = ()  # of the rank's inputs, in a call
    spans: tuple[Span, ...] = ()  # of the rank's arguments, where ranks share the memory of one process
    error: str = ""
    bound: str = ""  # a digest of the inputs that are bound, which shapes and spans are then without
    windows: tuple[tuple[int, int], ...] = ()  # where arguments lie in memory that ranks share
    call: int = 0  # number of the call of the program whose sizes are compared

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> CallSignature:
        fields = json.loads(text)
        return CallSignature(
            **{
                **fields,
                "shapes": tuple(map(tuple, fields["shapes"])),
                "spans": tuple(Span(*span) for span in fields["spans"]),
                "windows": tuple(map(tuple, fields["windows"])),
            }
        )


def disagreement(signatures: Sequence[CallSignature]) -> str | None:
    """In what some rank differs from rank 0, or what keeps it from going on; None where they can all go on together."""
    first = signatures[0]
    for rank, signature in enumerate(signatures):
        if signature.error:
            return f"rank {rank} cannot go on: {signature.error}"
    for rank, signature in enumerate(signatures):
        if (signature.program, signature.mesh) != (first.program, first.mesh):
            return (
                f"rank {rank} calls {signature.program} on {signature.mesh}, rank 0 {first.program} on {first.mesh}; "
                "all ranks of a group call the same programs in the same order"
            )
        if signature.digest != first.digest:
            return f"rank {rank} calls another program of that name than rank 0; compile the same one, with the same options, on all ranks"
        if signature.call != first.call:
            return (
                f"rank {rank} compares the sizes of call {signature.call}, rank 0 those of call {first.call}; "
                "pass sizes that fit together to each call"
            )
        if signature.windows != first.windows:
            return f"rank {rank} passes other arrays of group.empty than rank 0; pass what one call of it gave, from the same place on"
    return None
