"""Groups of some of the ranks: `group.split`."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.runtime.stores import MemoryStore, Store

RANKS = 4
X = np.arange(24, dtype=np.float32).reshape(4, 6)


def gathers(ranks: int, transport: str = "auto") -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"])
    def gather(x):  # type: ignore[no-untyped-def]
        return hw.reshard(x + 1, "M", "K")

    return hw.compile(gather, options=hw.Options(transport=transport))


PAIR, ALL, ONE_SIDED = gathers(2), gathers(RANKS), gathers(2, "one_sided")


def test_programs_run_in_several_at_once() -> None:
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> tuple[Any, ...]:
        group = hw.init(provider)
        part = group.split(rank % 2, key=-rank)  # The parts are ranks 2, 0 and ranks 3, 1.
        assert part is not None
        mine = X[rank : rank + 1]
        for scale in (1, 2):
            for program in (PAIR, ONE_SIDED):
                np.testing.assert_array_equal(program(scale * mine, group=part), scale * X[[rank % 2 + 2, rank % 2]] + 1)
            np.testing.assert_array_equal(ALL(scale * mine, group=group), scale * X + 1)
        alone = part.split(part.rank)
        assert alone is not None
        assert group.split(None) is None
        again = group.split(0 if rank else None)
        group.close()
        assert part.closed
        assert alone.closed
        return part.rank, part.count, alone.rank, alone.count, again and (again.rank, again.count)

    assert provider.run(rank) == [(1, 2, 0, 1, None), (1, 2, 0, 1, (0, 3)), (0, 2, 0, 1, (1, 3)), (0, 2, 0, 1, (2, 3))]


def test_a_part_fails_by_itself() -> None:
    provider, late = hw.Threads(RANKS), threading.Event()

    def rank(rank: int) -> str:
        group = hw.init(provider, call_timeout=0.5)
        part = group.split(rank // 2)
        assert part is not None
        mine = X[rank : rank + 1]
        PAIR(mine, group=part)
        if rank == 1:
            late.wait(20)
            with pytest.raises(ExecutionError, match=r"^group 'default/1/0' has failed and cannot be reused: timed out"):
                part.check()
        elif rank == 0:
            with pytest.raises(ExecutionError, match=r"gather: timed out after 0.5 s waiting for rank 1"):
                PAIR(mine, group=part)
            late.set()
        else:
            np.testing.assert_array_equal(PAIR(mine, group=part), X[2:] + 1)
        late.wait(20)
        np.testing.assert_array_equal(ALL(mine, group=group), X + 1)
        return part.failure or ""

    failures = provider.run(rank)
    assert [bool(failure) for failure in failures] == [True, True, False, False]


def test_a_new_group_splits_differently() -> None:
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> Any:
        with contextlib.closing(hw.init(provider)) as group:
            group.split(rank % 2)
        part = hw.init(provider).split(0)
        return ALL(X[rank : rank + 1], group=part)

    for result in provider.run(rank):
        np.testing.assert_array_equal(result, X + 1)


def test_mistakes() -> None:
    provider = hw.Threads(2)

    def rank(rank: int) -> list[str]:
        group = hw.init(provider)
        errors = []
        for arguments in ((1.5,), (True,), (0, "a"), (0, None)):
            with pytest.raises(ArgumentError) as caught:
                group.split(*arguments)  # type: ignore[arg-type]
            errors.append(str(caught.value))
        with pytest.raises(ExecutionError) as failed:
            group.split(0) if rank else PAIR(X[:1], group=group)
        return [*errors, str(failed.value)]

    first, second = provider.run(rank)
    assert first[:4] == [
        "group.split: color=1.5 is not an int or None; pass one",
        "group.split: color=True is not an int or None; pass one",
        "group.split: key='a' is not an int; pass one",
        "group.split: key=None is not an int; pass one",
    ]
    assert "rank 1 calls group.split on default, and rank 0 calls gather on mesh(x=2)" in first[4]
    assert "rank 1 calls group.split on default, and rank 0 calls gather on mesh(x=2)" in second[4]
    given = hw.init(hw.Communicators({}, 0, 1), "given")
    with pytest.raises(ArgumentError, match=r"^group.split: hw.Communicators has no store; split the communicators"):
        given.split(0)
    given.close()


class Processes:
    """Simulates processes. The ranks share only the store."""

    def __init__(self, rank: int, count: int, store: Store):
        self._rank, self.count, self._store = rank, count, store

    def rank_and_count(self, group: str) -> tuple[int, int]:
        return self._rank, self.count

    def store(self, group: str, timeout: float) -> Store:
        return self._store


def test_ranks_that_are_processes() -> None:
    store = MemoryStore()
    parts: dict[int, hw.Group | None] = {}

    def process(rank: int) -> None:
        group = hw.Group(Processes(rank, RANKS, store), "default", rank, RANKS, 10, 10, None)
        parts[rank] = group.split(None if rank == 1 else 7, key=RANKS - rank)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {rank: part and (part.rank, part.count, part.local_rank) for rank, part in parts.items()}
    assert found == {0: (2, 3, 0), 1: None, 2: (1, 3, 2), 3: (0, 3, 3)}
