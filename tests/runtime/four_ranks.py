"""Programs for one or four ranks, and functions that run and check them. Ranks are threads of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.runtime.stores import MemoryStore, Store

RANKS = 4
mesh = hw.Mesh(x=RANKS)
grid = hw.Mesh(dp=2, tp=2)


@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def ag_matmul(x, w):
    return hw.matmul(x, w).stream("M", chunks=RANKS)


@hw.fusion(mesh=grid, x=hw.f32["M@dp", "K@tp"])
def rows_and_columns(x):
    return hw.sum(x, axis=1), hw.sum(x, axis=0)


@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def twice(x):
    return x + x


@hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M@x", "K"])
def alone(x):
    return hw.sum(x, axis=0)


AG_MATMUL, ROWS_AND_COLUMNS, TWICE, ALONE = (hw.compile(one) for one in (ag_matmul, rows_and_columns, twice, alone))
RANDOM = np.random.default_rng(0)
X = RANDOM.integers(-4, 5, (16, 8)).astype(np.float32)
W = RANDOM.integers(-4, 5, (8, 12)).astype(np.float32)
ROWS = X.shape[0] // RANKS


def x_of(rank: int) -> np.ndarray:
    return X[rank * ROWS : (rank + 1) * ROWS]


def on_ranks(function: Callable[[int], Any], count: int = RANKS, **options: Any) -> list[Any]:
    """Returns, for every rank of a new group of threads, the result of `function(rank)`. If the function raises an ArgumentError or
    ExecutionError, returns the error."""
    provider = hw.Threads(count)

    def call(rank: int) -> Any:
        group = hw.init(provider, **options)
        assert (group.rank, group.local_rank, group.count) == (rank, rank, count)
        try:
            return function(rank)
        except (ArgumentError, ExecutionError) as error:
            return error

    return provider.run(call)


def check_results(results: list[Any], expected: Any) -> None:
    for rank, result in enumerate(results):
        assert not isinstance(result, Exception), (rank, result)
        np.testing.assert_array_equal(result, expected)


class Here:
    """Provider of one rank. Does not read the environment. If `count` exceeds 1, the group treats the rank as a process, although the rank
    is a thread. All ranks of a group need the same store."""

    def __init__(self, rank: int = 0, count: int = 1, store: Store | None = None):
        self.rank, self.count, self._store = rank, count, store or MemoryStore()

    def rank_and_count(self, group: str) -> tuple[int, int]:
        return self.rank, self.count

    def store(self, group: str, timeout: float) -> Store:
        return self._store
