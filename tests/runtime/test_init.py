"""Groups: hw.init and programs called by ranks that the host application started, here as threads, and what goes wrong there."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_counters import counted
from test_providers import free_port, needs_torch, run_processes

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.base.paths import NATIVE
from hostweave.runtime import group as groups
from hostweave.runtime import watchdog
from hostweave.runtime.arrays import NumpyLibrary
from hostweave.runtime.cpu import seeded
from hostweave.runtime.local import LocalProgram
from hostweave.runtime.meeting import CallSignature, StoreMeeting
from hostweave.runtime.stores import MemoryStore, Store
from hostweave.targets.cuda import handle_of
from hostweave.targets.target import find_target

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
    """What `function(rank)` returns, or the exception that it raises, on every rank of a new group of threads."""
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


# --- what works -------------------------------------------------------------------------------------------------------


def test_every_rank_has_the_result() -> None:
    check_results(on_ranks(lambda rank: AG_MATMUL(x_of(rank), W)), X @ W)


def test_calls_of_several_programs_and_sizes() -> None:
    def rank(rank: int) -> None:
        for scale in (1, 2, 1, 3):
            w = np.tile(W, (1, scale))
            np.testing.assert_array_equal(AG_MATMUL(x_of(rank), w), X @ w)
            np.testing.assert_array_equal(TWICE(x_of(rank)), 2 * x_of(rank))
            block = X[8 * (rank // 2) :][:8, 4 * (rank % 2) :][:, :4]
            rows, columns = ROWS_AND_COLUMNS(np.ascontiguousarray(block))
            np.testing.assert_array_equal(rows, X.sum(1)[8 * (rank // 2) :][:8])
            np.testing.assert_array_equal(columns, X.sum(0)[4 * (rank % 2) :][:4])

    assert on_ranks(rank) == [None] * RANKS


def test_one_thing_at_a_time() -> None:
    def rank(rank: int) -> Any:
        with seeded(seed):
            return AG_MATMUL(x_of(rank), W)

    for seed in range(10):  # noqa: B007 (the ranks read it)
        check_results(on_ranks(rank), X @ W)


def test_outputs_that_are_given() -> None:
    def rank(rank: int) -> None:
        y = np.empty((16, 12), np.float32)
        assert AG_MATMUL(x_of(rank), W, out=y) is y
        np.testing.assert_array_equal(y, X @ W)
        both = np.empty(8, np.float32), np.empty(4, np.float32)
        assert ROWS_AND_COLUMNS(np.ones((8, 4), np.float32), out=both) is both
        assert (both[0] == 8).all()
        assert (both[1] == 16).all()

    assert on_ranks(rank) == [None] * RANKS


@needs_torch
def test_results_come_in_the_library_of_the_first_input() -> None:
    import torch

    def rank(rank: int) -> None:
        y = AG_MATMUL(torch.from_numpy(x_of(rank)), W)
        assert isinstance(y, torch.Tensor)
        np.testing.assert_array_equal(y.numpy(), X @ W)
        out = torch.empty(16, 12)
        assert isinstance(AG_MATMUL(x_of(rank), W, out=out), torch.Tensor)
        np.testing.assert_array_equal(out.numpy(), X @ W)

    assert on_ranks(rank) == [None] * RANKS


def test_uneven_shards() -> None:
    @hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
    def total(x):
        return hw.sum(x, axis=0), x + x

    program = hw.compile(total)

    def rank(rank: int) -> None:
        for rows in (10, 8, 3, 10):  # 3, 3, 3, 1, then 2, 2, 2, 2, then 1, 1, 1, 0
            block = -(-rows // RANKS)
            x = X[:rows][block * rank :][:block]
            total, doubled = program(x)
            np.testing.assert_array_equal(total, X[:rows].sum(0))
            np.testing.assert_array_equal(doubled, 2 * x)

    assert on_ranks(rank) == [None] * RANKS


def test_groups_of_different_names_do_not_mix() -> None:
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> None:
        first, second = hw.init(provider, "first"), hw.init(provider, "second")
        for group, x in ((first, X), (second, 2 * X), (first, 3 * X), (second, 4 * X)):
            np.testing.assert_array_equal(AG_MATMUL(x[rank * ROWS :][:ROWS], W, group=group), x @ W)

    assert provider.run(rank) == [None] * RANKS


def test_run_beside_a_group() -> None:
    done = threading.Event()
    results = []

    def run() -> None:
        while not done.is_set():
            results.append(np.array_equal(AG_MATMUL.run(x=X, w=W), X @ W))

    beside = threading.Thread(target=run)
    beside.start()
    try:
        check_results(on_ranks(lambda rank: [AG_MATMUL(x_of(rank), W) for _ in range(20)][-1]), X @ W)
    finally:
        done.set()
        beside.join()
    assert all(results)


def test_a_closed_group_of_a_thread_does_not_hide_that_of_the_process() -> None:
    hw.init(hw.Threads(1), "both").close()
    group = hw.init(Here(), "both")
    assert groups.current("both") is group
    group.close()


def test_this_process_alone() -> None:
    group = hw.init(Here(), "alone")
    assert repr(group) == "<hostweave group 'alone', rank 0 of 1>"
    np.testing.assert_array_equal(ALONE(X, group=group), X.sum(0))
    group.close()


def test_init_again() -> None:
    provider = hw.Threads(2)

    def rank(rank: int) -> None:
        group = hw.init(provider)
        assert hw.init(provider) is group
        assert hw.init() is group
        assert hw.init(provider, "other") is not group
        with pytest.raises(ArgumentError) as caught:
            hw.init(hw.Threads(3))
        assert str(caught.value) == (
            f"hw.init: group 'default' is there already, with this as rank {rank} of 2, and would now have it as rank 0 of 3; "
            "close it first, or give the other one another name"
        )
        group.close()
        again = hw.init(provider)
        assert again is not group
        with pytest.raises(ExecutionError, match=r"^group 'default' has failed and cannot be reused: closed; call hw\.init again$"):
            TWICE(x_of(rank), group=group)

    assert provider.run(rank) == [None] * 2


def test_what_is_freed_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank collects programs of others as garbage while its own group waits for it to make channels."""
    one = hw.init(Here(), "one")
    called, run = hw.compile(alone), hw.compile(alone)
    garbage = [called, run, called(X, group=one), run.run(x=X)]
    one.close()
    connected = groups.Group.connected
    fresh = hw.compile(ag_matmul)

    def late(self: groups.Group, *arguments: Any) -> Any:
        if self.rank == 3 and garbage:
            time.sleep(0.3)
            garbage.clear()
            gc.collect()
        return connected(self, *arguments)

    monkeypatch.setattr(groups.Group, "connected", late)
    del called, run
    started = time.monotonic()
    check_results(on_ranks(lambda rank: fresh(x_of(rank), W)), X @ W)
    assert not garbage
    assert time.monotonic() - started < 60  # the device would give up after 120


def test_channels_are_made_once_and_freed() -> None:
    def communicators() -> int:
        return counted()["live_communicators"]

    gc.collect()
    before = communicators()
    counts = []
    everyone = threading.Barrier(RANKS)
    other = hw.compile(ag_matmul)

    def rank(rank: int) -> None:
        for program in (AG_MATMUL, AG_MATMUL, other):
            program(x_of(rank), W)
            everyone.wait()
            counts.append(communicators() - before)
            everyone.wait()
        groups.current().close()

    assert on_ranks(rank) == [None] * RANKS
    assert counts == [RANKS] * 3 * RANKS
    assert communicators() == before


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ALONE(), "alone: takes 1 arrays (x: f32[M, K]), not 0"),
        (lambda: ALONE(X.astype(np.float64)), "alone: x: expected f32[M, K], got f64[16, 8]; cast it, or compile for f64"),
        (lambda: ALONE(X[0]), "alone: x: expected f32[M, K], got f32[8]; pass an array of 2 dims"),
        (lambda: ALONE(X.T), "alone: x: is not contiguous, and a call copies nothing; pass a contiguous copy"),
        (lambda: ALONE([1.0]), "alone: x: expected an array, got list; pass a NumPy, PyTorch, CuPy or JAX array"),
        (lambda: ALONE(X, stream=0), "alone: stream= is for the target cuda; on the CPU a call returns when it is done"),
        (lambda: ALONE(X, out=np.empty(7, np.float32)), "alone: out=: y: expected the local shape [8], got [7]"),
        (
            lambda: ALONE(X, out=np.broadcast_to(np.float32(0), 8)),
            "alone: y: is not contiguous, and a call copies nothing; pass a contiguous copy",
        ),
    ],
)
def test_arrays_that_do_not_fit(call: Callable[[], Any], message: str) -> None:
    group = hw.init(Here())
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message
    np.testing.assert_array_equal(ALONE(X), X.sum(0))  # the group is none the worse
    group.close()


def test_an_output_that_cannot_be_written_to() -> None:
    group = hw.init(Here())
    y = np.empty(8, np.float32)
    y.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"^alone: out=: y: cannot be written to; pass another array, or leave out= away$"):
        ALONE(X, out=y)
    group.close()


BYTES = np.zeros(1024, np.uint8)  # of which the arrays of a call are parts


def part(begin: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ndarray(shape, dtype, BYTES, offset=begin)


@pytest.mark.parametrize("library", [pytest.param("numpy"), pytest.param("torch", marks=needs_torch), pytest.param("dlpack")])
def test_outputs_that_overlap(library: str) -> None:
    @hw.fusion(x=hw.f32["M", "N"], w=hw.f32["M", "N"])
    def pair(x, w):
        return x + w, x * w

    def given(array: np.ndarray) -> Any:
        if library == "torch":
            import torch

            return torch.from_numpy(array)
        return array if library == "numpy" else SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__)

    program, group = hw.compile(pair), hw.init(Here())
    outputs = [p.name for p in program._host.outputs]
    shape = (4, 2)  # 32 bytes
    for x, w, y, z, overlap in (
        (0, 32, 64, 96, None),
        (0, 0, 64, 96, None),  # inputs may be one
        (96, 64, 32, 0, None),
        (0, 32, 64, 64, outputs),
        (0, 32, 64, 92, outputs),
        (0, 32, 92, 64, outputs),
        (0, 32, 0, 64, [outputs[0], "x"]),
        (0, 32, 64, 4, [outputs[1], "x"]),
        (64, 32, 0, 60, [outputs[1], "w"]),
        (100, 100, 0, 128, [outputs[1], "w"]),
    ):
        arrays = [given(part(at, *shape)) for at in (x, w, y, z)]
        BYTES[:] = 0
        if overlap is None:
            program(*arrays[:2], out=tuple(arrays[2:]))
            continue
        with pytest.raises(ArgumentError) as caught:
            program(*arrays[:2], out=tuple(arrays[2:]))
        both = (" and ".join(overlap), " and ".join(reversed(overlap)))
        assert str(caught.value) in [f"pair: out=: {names} overlap in memory; pass an array of its own" for names in both]
    nothing = [given(part(at, 0, 2)) for at in (0, 0, 0, 0)]
    program(*nothing[:2], out=tuple(nothing[2:]))  # without bytes nothing overlaps
    group.close()


@pytest.mark.parametrize(
    ("out_of", "names"),
    [
        (lambda rank, apart: X[ROWS * (rank + 1) % 16 :][:ROWS], "y of rank 3 and x of rank 0"),
        (lambda rank, apart: apart[0], "y of rank 0 and y of rank 1"),
        (lambda rank, apart: x_of(0) if rank == 1 else None, "y of rank 1 and x of rank 0"),
        (lambda rank, apart: apart[rank], None),
    ],
)
def test_an_output_that_overlaps_an_array_of_another_rank(out_of: Callable[[int, np.ndarray], Any], names: str | None) -> None:
    apart = np.zeros((RANKS, ROWS, 8), np.float32)

    def rank(rank: int) -> np.ndarray:
        if names is not None:
            with pytest.raises(ArgumentError, match=rf"^twice: out=: {names} overlap in memory; pass an array of its own$"):
                TWICE(x_of(rank), out=out_of(rank, apart))
        return TWICE(x_of(rank), out=apart[rank])  # the group still works

    for at, result in enumerate(on_ranks(rank)):
        np.testing.assert_array_equal(result, 2 * x_of(at))


def test_without_a_group_and_after_close() -> None:
    with pytest.raises(ExecutionError) as caught:
        ALONE(X)
    assert str(caught.value) == "alone: this process has not joined a group; call hw.init first, or run all ranks here with .run"
    group = hw.init(Here())
    program = hw.compile(alone)
    program(X)
    program.close()
    with pytest.raises(ExecutionError, match=r"^alone: the program is closed; compile it again$"):
        program(X)
    group.close()


def test_a_group_of_another_size() -> None:
    errors = on_ranks(lambda rank: AG_MATMUL(x_of(rank), W), count=2)
    assert [type(error) for error in errors] == [ArgumentError] * 2
    assert [str(error) for error in errors] == ["ag_matmul: is for the 4 ranks of mesh(x=4), and group 'default' has 2"] * 2


def test_streams_of_other_libraries() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 7

    assert [handle_of(one) for one in (0, 5, SimpleNamespace(cuda_stream=6), Protocol(), SimpleNamespace(ptr=8))] == [0, 5, 6, 7, 8]
    with pytest.raises(TypeError) as caught:
        handle_of("main")
    assert str(caught.value) == "stream=: expected an int, a stream of PyTorch or CuPy, or one with __cuda_stream__, got str"


def test_an_error_in_a_librarys_stream_is_not_the_callers() -> None:
    class Broken(NumpyLibrary):
        def stream(self, device: int) -> int:
            raise TypeError("in the library")

    local = object.__new__(LocalProgram)
    local.__dict__.update(_target=find_target("cuda"), _device=0, _host=SimpleNamespace(name="ag_matmul"))
    with pytest.raises(TypeError, match=r"^in the library$"):
        local._handle(None, Broken())
    with pytest.raises(ArgumentError, match=r"^ag_matmul: stream=: expected an int"):
        local._handle("main", Broken())


# --- faults -----------------------------------------------------------------------------------------------------------

GATHER = r"; `recv %\w+ from .* on x` \(test_init.py:\d+\) needs all ranks of its channel along x of mesh\(x=4\)"


def messages(results: list[Any]) -> list[str]:
    assert all(isinstance(result, (ArgumentError, ExecutionError)) for result in results), results
    return [str(result) for result in results]


def then_works(fault: Callable[[int], Any]) -> list[Any]:
    """What the ranks raise in a fault after which the group goes on."""

    def rank(rank: int) -> Any:
        try:
            fault(rank)
        except (ArgumentError, ExecutionError) as error:
            np.testing.assert_array_equal(AG_MATMUL(x_of(rank), W), X @ W)
            return error
        return None

    return messages(on_ranks(rank))


def test_a_rank_with_a_wrong_array() -> None:
    errors = then_works(lambda rank: AG_MATMUL(x_of(rank), W if rank != 2 else W.astype(np.float64)))
    reason = "ag_matmul: w: expected f32[K, N], got f64[8, 12]; cast it, or compile for f64"
    assert errors == [reason if rank == 2 else f"ag_matmul: rank 2 cannot go on: {reason}" for rank in range(RANKS)]


def test_a_rank_with_another_size() -> None:
    errors = then_works(lambda rank: AG_MATMUL(x_of(rank), W if rank != 3 else W[:, :6].copy()))
    assert errors == ["ag_matmul: w: rank 3 passes [8, 6], and rank 0 [8, 12]; pass blocks of one f32[K, N]"] * RANKS
    errors = then_works(lambda rank: AG_MATMUL(X[:5] if rank == 2 else x_of(rank), W))
    assert errors == ["ag_matmul: x: rank 2 passes [5, 8], and rank 0 [4, 8]; pass blocks of one f32[M@x, K]"] * RANKS


def test_a_rank_that_calls_another_program() -> None:
    errors = then_works(lambda rank: TWICE(x_of(rank)) if rank == 1 else AG_MATMUL(x_of(rank), W))
    reason = "rank 1 calls twice on mesh(x=4), rank 0 ag_matmul on mesh(x=4); all ranks of a group call the same programs in the same order"
    assert errors == [f"{'twice' if rank == 1 else 'ag_matmul'}: {reason}" for rank in range(RANKS)]


def test_ranks_that_call_in_another_order() -> None:
    def rank(rank: int) -> None:
        TWICE(x_of(rank))
        AG_MATMUL(x_of(rank), W)
        for program in (TWICE, AG_MATMUL) if rank else (AG_MATMUL, TWICE):
            program(*([x_of(rank)] if program is TWICE else [x_of(rank), W]))

    errors = messages(on_ranks(rank))
    reason = "rank 1 calls twice on mesh(x=4), rank 0 ag_matmul on mesh(x=4); all ranks of a group call the same programs in the same order"
    assert errors == [f"{'twice' if rank else 'ag_matmul'}: {reason}" for rank in range(RANKS)]


def test_a_rank_with_another_mesh_or_other_options() -> None:
    wide = hw.compile(ag_matmul, options=hw.Options(streams=2))
    assert (
        then_works(lambda rank: (wide if rank == 1 else AG_MATMUL)(x_of(rank), W))
        == ["ag_matmul: rank 1 calls another program of that name than rank 0; compile the same one, with the same options, on all ranks"]
        * RANKS
    )
    errors = then_works(lambda rank: ROWS_AND_COLUMNS(X) if rank == 1 else AG_MATMUL(x_of(rank), W))
    assert errors[0].startswith("ag_matmul: rank 1 calls rows_and_columns on mesh(dp=2, tp=2), rank 0 ag_matmul on mesh(x=4)")


@pytest.fixture
def late() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_rank_that_never_comes(late: threading.Event) -> None:
    def rank(rank: int) -> Any:
        AG_MATMUL(x_of(rank), W)
        if rank == 2:
            late.wait(20)
        else:
            try:
                AG_MATMUL(x_of(rank), W)
            except ExecutionError as error:
                if rank == 0:
                    late.set()
                with pytest.raises(
                    ExecutionError,
                    match=r"^group 'default' has failed and cannot be reused: timed out after 0.5 s waiting for rank 2.*; call hw",
                ):
                    AG_MATMUL(x_of(rank), W)
                return error
        with pytest.raises(ExecutionError, match=r"timed out after 0\.5 s waiting for rank 2"):
            AG_MATMUL(x_of(rank), W)
        return None

    results = on_ranks(rank, call_timeout=0.5)
    assert results.pop(2) is None
    for message in messages(results):
        assert re.fullmatch(r"ag_matmul: timed out after 0.5 s waiting for rank 2" + GATHER, message)


def test_a_rank_that_raises_or_ends() -> None:
    started = time.monotonic()
    provider = hw.Threads(RANKS)
    seen: dict[int, str] = {}
    first_call_done = threading.Barrier(RANKS)

    def rank(rank: int) -> None:
        hw.init(provider)
        AG_MATMUL(x_of(rank), W)
        first_call_done.wait()
        if rank == 1:
            raise KeyError("data")
        try:
            AG_MATMUL(x_of(rank), W)
        except ExecutionError as error:
            seen[rank] = str(error)

    with pytest.raises(KeyError, match="data"):
        provider.run(rank)
    assert sorted(seen) == [0, 2, 3]
    for message in seen.values():
        assert re.fullmatch(r"ag_matmul: rank 1: KeyError: 'data'" + GATHER, message)

    def ends(rank: int) -> Any:
        return None if rank == 1 else AG_MATMUL(x_of(rank), W)

    results = on_ranks(ends)
    assert results.pop(1) is None
    for message in messages(results):
        assert re.fullmatch(r"ag_matmul: rank 1: its thread has ended" + GATHER, message)
    assert time.monotonic() - started < 20


FORK = "  HW_CHECK(ring_.fork(caller));\n"
GUARD = "      const hw::CloseGroupOnError guard;\n"
RECV = "channel_x_.comm(), stream));\n"


@pytest.mark.parametrize(
    ("transport", "place"),
    [("two_sided", FORK), ("two_sided", GUARD), ("two_sided", RECV), ("one_sided", "HW_CHECK(puts_.fork(caller));\n")],
    ids=["before a loop", "inside a group", "inside a group with a recv in it", "while others wait for its signal"],
)
def test_a_rank_that_fails_in_the_middle(transport: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of their calls too. A new group works after it, on the same threads, and so does .run."""
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path))
    options = hw.Options(transport=transport)
    _ = hw.compile(ag_matmul, options=options).folder
    file = tmp_path / "ag_matmul" / "program.cpp"
    head, found, tail = file.read_text().partition(place)
    assert found
    bomb = 'if (rank_.index() == 2 && w[0] == 99) throw hw::ExecutionError("no luck");\n'
    file.write_text('#include "hostweave/errors.h"\n' + head + found + bomb + tail)
    program = hw.compile(ag_matmul, options=options)
    program.build()
    monkeypatch.delenv("HOSTWEAVE_EDIT")
    trap = W.copy()
    trap[0, 0] = 99
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> str:
        hw.init(provider)
        np.testing.assert_array_equal(program(x_of(rank), W), X @ W)
        with pytest.raises(ExecutionError) as caught:
            program(x_of(rank), trap)
        again = hw.init(provider)
        np.testing.assert_array_equal(program(x_of(rank), W, group=again), X @ W)
        np.testing.assert_array_equal(AG_MATMUL(x_of(rank), W, group=again), X @ W)
        return str(caught.value)

    errors = provider.run(rank)
    assert errors[2] == "ag_matmul: no luck"
    for error in (errors[rank] for rank in (0, 1, 3)):
        assert re.search("rank 2: (ag_matmul: )?no luck", error)
    np.testing.assert_array_equal(AG_MATMUL.run(x=X, w=W), X @ W)


def test_a_rank_that_leaves() -> None:
    gone = threading.Event()

    def rank(rank: int) -> Any:
        if rank == 3:
            groups.current().close()
            gone.set()
            time.sleep(0.5)
            return None
        gone.wait()
        return AG_MATMUL(x_of(rank), W)

    results = on_ranks(rank)
    assert results.pop(3) is None
    for message in messages(results):
        assert re.fullmatch(r"ag_matmul: rank 3 has left" + GATHER, message)


def test_the_process_that_keeps_the_store_is_killed() -> None:
    """Rank 1 says so, gives the group up, and is a world of its own."""
    script = """
import os, subprocess, sys
import hostweave as hw

keep = "import sys, hostweave as hw; group = hw.init(hw.Environment()); print(group.rank, flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
with subprocess.Popen([sys.executable, "-c", keep], env=os.environ | {"RANK": "0"}, **pipes) as keeper:
    group = hw.init(hw.Environment())
    keeper.stdout.readline()
    keeper.kill()
try:
    group.check()
except hw.base.errors.ExecutionError as error:
    print(error)
print(group.failure is not None)
again = hw.init(hw.Environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["OTHER_PORT"]}))
print(again.rank, again.count, again.failure)
"""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OTHER_PORT": str(free_port())}
    said, has_failed, again = run_processes(script, [{"RANK": "1", "WORLD_SIZE": "2", **address}])[0].splitlines()
    assert re.fullmatch(
        r"group 'default' has failed and cannot be reused: the store in the process of rank 0 does not answer \(.*\); "
        r"has that process ended\?; call hw\.init again",
        said,
    )
    assert (has_failed, again) == ("True", "0 1 None")


FAULTS = """
import os, time
import numpy as np
import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.runtime import cpu, rendezvous

mesh = hw.Mesh(x=2)

@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def gathered(x):
    return hw.reshard(x, "M", "K")

@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def other(x):
    return hw.reshard(x + x, "M", "K")

def said(call):
    try:
        print(call())
    except HostweaveError as error:
        print(type(error).__name__, *str(error).split())

def anew(attempt, **more):
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": str(attempt)}
    return hw.init(hw.Environment(environment), timeout=20, **more)

rank = int(os.environ["RANK"])
x = np.full((2, 3), rank, np.float32)
program, verified, another = hw.compile(gathered), hw.compile(gathered, options=hw.Options(verify_calls=True)), hw.compile(other)
anew(0)
said(lambda: program(x)[::2, 0])
with cpu.seeded(3):
    said(lambda: program(x))
said(lambda: (hw.compile(gathered) if rank else another)(x))  # at its first call
said(lambda: verified(x if rank else x[:, :2].copy()))
said(lambda: verified(x)[::2, 0])
said(lambda: program(x if rank else x[:1]))  # nothing was exchanged before
anew(1, call_timeout=1)
said(lambda: program(x)[::2, 0])
if rank == 1:
    time.sleep(4)
said(lambda: program(x))
rendezvous.this_host = lambda: str(rank)
anew(2)
said(lambda: program(x))
"""


def test_ranks_as_processes_on_the_cpu_and_what_goes_wrong() -> None:
    """What NCCL would wait for, or get wrong, the CPU device says."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = run_processes(FAULTS, [common | {"RANK": str(rank)} for rank in range(2)])
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if not line.startswith(("hostweave:", "  rank"))]  # but for reports of the watchdog
        right, seeded, programs, sizes, again, counts, anew, late, hosts = lines
        assert (right, again, anew) == ("[0. 1.]",) * 3
        assert seeded == (
            "ArgumentError gathered: seeded schedules, buffered sends and the check of dependencies are of ranks that are threads of one "
            "process; group 'default' has 2 processes: use hw.Threads or program.run for them"
        )
        assert "rank 1 calls gathered on mesh(x=2), rank 0 other on mesh(x=2); all ranks of a group call the same" in programs
        assert "gathered: x: rank 1 passes [2, 3], and rank 0 [2, 2]; pass blocks of one f32[M@x, K]" in sizes
        assert re.search(r"ExecutionError gathered: .*mismatch: the counts differ: \d and \d rank \d stream \d: ", counts), counts
        assert "rank 0: call 2 of gathered is not done after 1 seconds" in late or (rank == 1 and "has failed" in late), late
        assert hosts == (
            "ArgumentError gathered: is for the target cpu, whose ranks share the memory of one host; group 'default' is on 2 hosts: "
            "compile for cuda, or start all ranks on one"
        )


# --- processes: what can be shown of them without GPUs ----------------------------------------------------------------


class Here:
    """A world of one, whatever the environment says; or, with a store, a rank as if in a process of its own."""

    def __init__(self, rank: int = 0, count: int = 1, store: Store | None = None):
        self._rank, self._count, self._store = rank, count, store or MemoryStore()

    def rank_and_count(self, group: str) -> tuple[int, int]:
        return self._rank, self._count

    def store(self, group: str, timeout: float) -> Store:
        return self._store


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

    reason = "rank 1 calls p on mesh(x=3), rank 0 q on mesh(x=3); all ranks of a group call the same programs in the same order"
    assert as_processes(3, rank) == [f"q: {reason}", f"p: {reason}", f"p: {reason}"]


def test_processes_exchange_sizes_at_every_call_where_that_is_asked_for() -> None:
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
        assert sizes == "ag_matmul: w: rank 3 passes [8, 24], and rank 0 [8, 12]; pass blocks of one f32[K, N]"
        assert rows == "ag_matmul: x: rank 2 passes [5, 8], and rank 0 [4, 8]; pass blocks of one f32[M@x, K]"
        reason = "ag_matmul: w: expected f32[K, N], got i32[8, 12]; cast it, or compile for i32"
        assert dtype == (reason if number == 1 else f"ag_matmul: rank 1 cannot go on: {reason}")


def test_processes_exchange_nothing_at_a_call_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    gather = StoreMeeting.gather

    def counted(self: StoreMeeting, record: str, timeout: float) -> list[str]:
        gathered.append(1)
        return gather(self, record, timeout)

    monkeypatch.setattr(StoreMeeting, "gather", counted)

    def rank(group: hw.Group) -> None:
        for w in (W, W, np.tile(W, (1, 2))):
            np.testing.assert_array_equal(AG_MATMUL(x_of(group.rank), w, group=group), X @ w)

    assert as_processes(RANKS, rank, call_timeout=20) == [None] * RANKS
    assert len(gathered) == RANKS  # when the program was made ready


def test_a_call_that_takes_too_long_is_reported_with_what_every_rank_did(capsys: pytest.CaptureFixture[str]) -> None:
    class Native:
        aborted: str | None = None

        def abort(self, reason: str) -> None:
            self.aborted = reason

    keep = []

    def rank(group: hw.Group) -> str:
        program, native = hw.compile(twice), Native()
        keep.append(program)
        waiting = 5.0 if group.rank == 0 else 0.0
        if group.rank < 2:  # rank 2 has been killed
            group.programs[program] = SimpleNamespace(progress=("twice", 17, 16 + group.rank, waiting), close=lambda: None)
            group._members["cuda"] = native
            watchdog.watch(group)
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


# --- communicators of the host ----------------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    """As NCCL has it."""

    _fields_ = (("internal", ctypes.c_char * 128),)


@pytest.fixture
def communicator() -> Iterator[Callable[[int], int]]:
    device = ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so"))
    made: list[ctypes.c_void_p] = []

    def make(count: int) -> int:
        comms, id = (ctypes.c_void_p * count)(), UniqueId()
        calls = [device.ncclGetUniqueId(ctypes.byref(id)), device.ncclGroupStart()]
        for rank in range(count):
            place = ctypes.byref(comms, rank * ctypes.sizeof(ctypes.c_void_p))
            calls += [device.cudaSetDevice(rank), device.ncclCommInitRank(place, count, id, rank)]
        assert not any([*calls, device.ncclGroupEnd(), device.cudaSetDevice(0)])
        made.extend(map(ctypes.c_void_p, comms))
        return int(comms[0])

    yield make
    for comm in made:
        device.ncclCommDestroy(comm)


def test_communicators_that_the_host_owns(communicator: Callable[[int], int]) -> None:
    text = (
        "host @total(%x: f32[M, K]) -> (%y: f32[M, K]) mesh(dp=1, tp=1) channels(tp: tp two_sided) {\n  all_reduce sum %x -> %y on tp\n}\n"
    )
    program = hw.compile(hw.HostProgram.parse(text))
    group = hw.init(hw.Communicators({"tp": communicator(1)}, 0, 1), "owned")
    np.testing.assert_array_equal(program(X, group=group), X)
    group.close()
    for communicators, message in (
        ({"dp": communicator(1)}, "total: no communicator along tp; pass one for every process group that the program uses"),
        ({"tp": communicator(2)}, "total: the communicator along tp: is rank 0 of 2, and the mesh has rank 0 of 1 here"),
    ):
        group = hw.init(hw.Communicators(communicators, 0, 1), "owned")
        with pytest.raises(ArgumentError) as caught:
            program(X, group=group)
        assert str(caught.value) == message
        group.close()


def test_communicators_of_the_host_and_calls_that_are_to_be_verified() -> None:
    group = hw.init(hw.Communicators({}, 0, 2), "owned")
    with pytest.raises(ArgumentError) as caught:
        hw.compile(twice, options=hw.Options(verify_calls=True))(X, group=group)
    assert str(caught.value) == (
        "twice: verify_calls: the ranks of group 'owned' have nowhere to meet; use a provider with a store, or leave it out"
    )
    group.close()
