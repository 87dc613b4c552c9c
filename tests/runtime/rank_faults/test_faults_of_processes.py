"""Ranks that are processes: agreement through a store before a call, and reports of faults. Threads replace the processes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from four_ranks import AG_MATMUL, RANKS, Here, W, X, ag_matmul, twice, x_of

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.runtime import watchdog
from hostweave.runtime.coordinator import CallSignature, StoreCoordinator
from hostweave.runtime.standstill import RankPosition
from hostweave.runtime.stores import MemoryStore


def as_processes(count: int, function: Callable[[hw.Group], Any], call_timeout: float = 1) -> list[Any]:
    store = MemoryStore()

    def call(rank: int) -> Any:
        group = hw.Group(Here(rank, count, store), "default", rank, count, 10, call_timeout, None)
        try:
            return function(group)
        except ExecutionError as error:
            return str(error)
        finally:
            group.close()

    return hw.Threads(count).run(call)


def test_processes_agree_before_anything_is_sent() -> None:
    def rank(group: hw.Group) -> None:
        group.agree(CallSignature("p", "mesh(x=3)", "1"), "", 5)
        group.agree(CallSignature("p" if group.rank else "q", "mesh(x=3)", "1"), "", 5)

    reason = "rank 1 calls p on mesh(x=3), and rank 0 calls q on mesh(x=3); all ranks of a group call the same programs in the same order"
    assert as_processes(3, rank) == [f"q: {reason}", f"p: {reason}", f"p: {reason}"]


def test_processes_compare_sizes_at_every_call_with_verify_calls() -> None:
    verified = hw.compile(ag_matmul, options=hw.Options(verify_calls=True))

    def rank(group: hw.Group) -> list[str]:
        messages = []
        x, wide = x_of(group.rank), np.tile(W, (1, 2))
        for arrays in (
            (x, W if group.rank != 3 else wide),
            (x if group.rank != 2 else X[:5], W),
            (x, W if group.rank != 1 else W.astype("i4")),
        ):
            np.testing.assert_array_equal(verified(x, W, group=group), X @ W)
            with pytest.raises((ArgumentError, ExecutionError)) as caught:
                verified(*arrays, group=group)
            messages.append(str(caught.value))
        np.testing.assert_array_equal(verified(x, wide, group=group), X @ wide)
        return messages

    for number, (sizes, rows, dtype) in enumerate(as_processes(RANKS, rank, call_timeout=20)):
        assert sizes == "ag_matmul: w: rank 3 passes [8, 24], and rank 0 [8, 12]; pass blocks of one array f32[K, N]"
        assert rows == "ag_matmul: x: rank 2 passes [5, 8], and rank 0 [4, 8]; pass blocks of one array f32[M@x, K]"
        reason = "ag_matmul: w: expected f32[K, N], got i32[8, 12]; cast it, or compile for i32"
        assert dtype == (reason if number == 1 else f"ag_matmul: rank 1 cannot continue: {reason}")


@pytest.mark.parametrize(("by", "exchanges"), [("memory", 3), ("store", 6)])
def test_processes_exchange_nothing_at_a_call_of_the_last_sizes(by: str, exchanges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    gather = StoreCoordinator.gather

    def counted(self: StoreCoordinator, record: str, timeout: float) -> list[str]:
        gathered.append(1)
        return gather(self, record, timeout)

    monkeypatch.setattr(StoreCoordinator, "gather", counted)
    if by == "store":  # The ranks have no shared memory, like ranks on two hosts.
        monkeypatch.setattr(hw.Group, "make_barrier", lambda group: (None,))

    def rank(group: hw.Group) -> None:
        for w in (W, W, np.tile(W, (1, 2)), W, np.tile(W, (1, 2))):
            np.testing.assert_array_equal(AG_MATMUL(x_of(group.rank), w, group=group), X @ w)

    assert as_processes(RANKS, rank, call_timeout=20) == [None] * RANKS
    # The first call gathers the program and the arrays, and with "memory" also the ranks that have mapped the shared memory. Later calls
    # compare sizes in this memory. With "store", the first call and each call that changes sizes gather the sizes.
    assert len(gathered) == exchanges * RANKS


def test_a_call_that_exceeds_its_time_limit_is_reported_with_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    class Native:
        aborted: str | None = None

        def abort(self, reason: str) -> None:
            self.aborted = reason

    keep = []

    def rank(group: hw.Group) -> str:
        program, native = hw.compile(twice), Native()
        keep.append(program)
        waiting = 5.0 if group.rank == 0 else 0.0
        if group.rank < 2:  # Rank 2 does not answer, like a rank that was killed.
            position = RankPosition("twice", 17, 16 + group.rank)
            here = SimpleNamespace(progress=("twice", 17, 16 + group.rank, waiting), position=lambda: position, close=lambda: None)
            group.programs[program] = here
            group.members["cuda"] = native
            watchdog.Watchdog(group)
            while native.aborted is None:
                time.sleep(0.01)
            with pytest.raises(ExecutionError, match="has failed and cannot be reused: group 'default': rank 0: call 17 of twice"):
                group.check()
            return native.aborted
        time.sleep(8)
        return ""

    reports = as_processes(3, rank)
    expected = """group 'default': rank 0: call 17 of twice is not done after 1 seconds
  rank 0: twice: 17 calls, 16 done
  rank 1: twice: 17 calls, 17 done
  rank 2: does not answer"""
    assert reports == [expected, expected, ""]
    assert f"hostweave: {expected}\n" in capsys.readouterr().err


def test_a_rank_sends_its_message_before_it_aborts_its_channels() -> None:
    """A rank that closes its group sends a message to the other ranks before it frees its channels. NCCL may block until the other ranks
    abort their channels. The other ranks abort only after the message."""

    def rank(group: hw.Group) -> list[int]:
        class Channel:
            def __del__(self) -> None:
                seen.append(group.coordinator.left())

        seen: list[dict[int, int]] = []
        group.members["cuda"] = Channel()
        group.close()
        return [rank for ranks in seen for rank in ranks if rank == group.rank]

    assert as_processes(2, rank) == [[0], [1]]


class Stopped(MemoryStore):
    """Simulates a store in a stopped process. A request ends only when the process continues."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def set(self, key: str, value: bytes) -> None:
        self.goes_on.wait(60)
        super().set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        self.goes_on.wait(60)
        return super().get(key, timeout)


class Silent(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.is_silent, self.was_asked = False, False

    def get(self, key: str, timeout: float) -> bytes:
        if self.is_silent:
            self.was_asked = True
            raise ExecutionError("the store does not answer")
        return super().get(key, timeout)


@pytest.mark.parametrize("is_late", [True, False])
def test_an_overdue_call_is_reported_rather_than_a_silent_store(is_late: bool) -> None:
    """If rank 0 is stopped, calls of other ranks become overdue at about the time at which the store of rank 0 stops answering. The error
    names the call if the call is overdue, and otherwise the store."""
    store, program, reasons, both = Silent(), hw.compile(twice), queue.Queue[str](), threading.Barrier(2)

    class Local:
        @property
        def progress(self) -> tuple[str, int, int, float]:
            return "twice", 2, 1, 5.0 if store.was_asked and is_late else 0.0

        def position(self) -> RankPosition:
            return RankPosition("twice", 2, 1)

        def close(self) -> None:
            pass

    def rank(rank: int) -> str:
        group = hw.Group(Here(rank, 2, store), "default", rank, 2, 10, 1, None)
        both.wait()
        if rank == 0:
            return ""
        group.programs[program] = Local()
        group.members["cuda"] = SimpleNamespace(abort=reasons.put)
        store.is_silent = True
        watchdog.Watchdog(group)
        return reasons.get(timeout=30)

    _, reason = hw.Threads(2).run(rank)
    assert reason.startswith("group 'default': rank 1: call 2 of twice is not done" if is_late else "group 'default': the store does not")


@pytest.mark.parametrize("what", ["a call", "a gather", "check", "close"])
def test_time_limits_apply_if_the_store_does_not_answer(what: str) -> None:
    store, program = Stopped(), hw.compile(twice)
    provider = hw.Threads(2)
    both = threading.Barrier(2)

    def rank(rank: int) -> float:
        group = hw.Group(Here(rank, 2, store), "default", rank, 2, 10, 1, None)
        both.wait()
        if rank == 1:
            both.wait(60)
            return 0
        store.goes_on.clear()
        started = time.monotonic()
        if what == "a call":
            aborted = threading.Event()
            group.programs[program] = SimpleNamespace(progress=("twice", 2, 1, 5.0), close=lambda: None)
            group.members["cuda"] = SimpleNamespace(abort=lambda _: aborted.set())
            watchdog.Watchdog(group)
            assert aborted.wait(30)
        elif what == "close":
            group.close()
        else:
            with pytest.raises(ExecutionError):
                group.check() if what == "check" else group.agree(CallSignature("p", "mesh(x=2)", "1"), "", 1)
        took = time.monotonic() - started
        store.goes_on.set()
        both.wait()
        return took

    assert provider.run(rank)[0] < 6


def test_ranks_learn_of_a_failure_after_all_channels_are_aborted() -> None:
    """Until all channels are aborted, aborted work may occupy the devices, so that a new group would fail."""
    group, order, begins = hw.init(provider=hw.Threads(1), group="aborted"), list[str](), threading.Event()

    def abort(reason: str) -> None:
        begins.set()
        time.sleep(0.3)
        order.append(f"aborted: {reason}")

    group.members["other"] = SimpleNamespace(abort=abort)
    watching = threading.Thread(target=group.abort, args=("a rank is gone",))
    watching.start()
    assert begins.wait(10)
    others = [threading.Thread(target=group.abort, args=("later",)) for _ in range(2)]
    for other in others:
        other.start()
    with pytest.raises(ExecutionError, match="a rank is gone"):
        group.expect_working()
    order.append("heard")
    for thread in (watching, *others):
        thread.join(10)
    assert order == ["aborted: a rank is gone", "heard"]
    group.close()
