"""Groups: hw.init, and calls of programs by ranks. In groups of several ranks, the ranks are threads."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_counters import counted
from four_ranks import (
    AG_MATMUL,
    ALONE,
    RANKS,
    ROWS,
    ROWS_AND_COLUMNS,
    TWICE,
    Here,
    W,
    X,
    ag_matmul,
    alone,
    check_results,
    mesh,
    on_ranks,
    twice,
    x_of,
)

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.base.paths import NATIVE
from hostweave.runtime import group as groups
from hostweave.runtime.arrays import NumpyLibrary
from hostweave.runtime.checked_call import Arguments
from hostweave.runtime.cpu import seeded
from hostweave.runtime.windows import Windows
from hostweave.targets.target import find_target

# --- success ----------------------------------------------------------------------------------------------------------


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


def test_in_random_schedules_of_one_rank_at_a_time() -> None:
    def rank(rank: int) -> Any:
        with seeded(seed):
            return AG_MATMUL(x_of(rank), W)

    for seed in range(10):  # noqa: B007 (the ranks read seed)
        check_results(on_ranks(rank), X @ W)


def test_outputs_given_by_out() -> None:
    def rank(rank: int) -> None:
        y = np.empty((16, 12), np.float32)
        assert AG_MATMUL(x_of(rank), W, out=y) is y
        np.testing.assert_array_equal(y, X @ W)
        both = np.empty(8, np.float32), np.empty(4, np.float32)
        assert ROWS_AND_COLUMNS(np.ones((8, 4), np.float32), out=both) is both
        assert (both[0] == 8).all()
        assert (both[1] == 16).all()

    assert on_ranks(rank) == [None] * RANKS


@pytest.mark.extra("torch")
def test_results_are_arrays_of_the_first_inputs_library() -> None:
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
        for rows in (10, 8, 3, 10):  # The 4 ranks have 3, 3, 3, 1 rows, then 2, 2, 2, 2, then 1, 1, 1, 0.
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


def test_run_while_a_group_makes_calls() -> None:
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
            f"hw.init: group 'default' exists already, with this process as rank {rank} of 2, not rank 0 of 3; "
            "close it first, or use another name"
        )
        group.close()
        again = hw.init(provider)
        assert again is not group
        with pytest.raises(ExecutionError, match=r"^group 'default' is closed; call hw\.init again$"):
            TWICE(x_of(rank), group=group)

    assert provider.run(rank) == [None] * 2


def test_freeing_a_program_waits_for_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 frees unrelated programs while the other ranks wait for rank 3 to create channels."""
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
    assert time.monotonic() - started < 60  # If freeing waited for a rank, the device would report the wait after 120 s.


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
        (lambda: ALONE(), "alone: takes 1 arrays (x: f32[M, K]), not 0; pass one per input"),
        (lambda: ALONE(X.astype(np.float64)), "alone: x: expected f32[M, K], got f64[16, 8]; cast it, or compile for f64"),
        (lambda: ALONE(X[0]), "alone: x: expected f32[M, K], got f32[8]; pass an array of 2 dims"),
        (lambda: ALONE(X.T), "alone: x: is not contiguous, but calls do not copy; pass a contiguous copy"),
        (lambda: ALONE([1.0]), "alone: x: expected an array, got list; pass a NumPy, PyTorch, CuPy or JAX array"),
        (lambda: ALONE(X, stream=0), "alone: stream= is for the target cuda; on the CPU a call returns when its work is done"),
        (
            lambda: ALONE(X, out=np.empty(7, np.float32)),
            "alone: out=: y: expected the local shape [8], got [7]; pass an array of that shape",
        ),
        (
            lambda: ALONE(X, out=np.broadcast_to(np.float32(0), 8)),
            "alone: y: is not contiguous, but calls do not copy; pass a contiguous copy",
        ),
    ],
)
def test_arrays_that_do_not_fit(call: Callable[[], Any], message: str) -> None:
    group = hw.init(Here())
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message
    np.testing.assert_array_equal(ALONE(X), X.sum(0))  # The group still works.
    group.close()


def test_an_output_that_cannot_be_written_to() -> None:
    group = hw.init(Here())
    y = np.empty(8, np.float32)
    y.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"^alone: out=: y: is read-only; pass a writable array, or omit out=$"):
        ALONE(X, out=y)
    group.close()


BYTES = np.zeros(1024, np.uint8)  # The arrays of a call are slices of this memory.


def part(begin: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ndarray(shape, dtype, BYTES, offset=begin)


@pytest.mark.parametrize(
    "library", [pytest.param("numpy"), pytest.param("torch", marks=pytest.mark.extra("torch")), pytest.param("dlpack")]
)
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
    outputs = [p.name for p in program.host.outputs]
    shape = (4, 2)  # An array of this shape has 32 bytes.
    for x, w, y, z, overlap in (
        (0, 32, 64, 96, None),
        (0, 0, 64, 96, None),  # Inputs may overlap.
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
        assert str(caught.value) in [f"pair: out=: {names} overlap in memory; pass separate arrays" for names in both]
    nothing = [given(part(at, 0, 2)) for at in (0, 0, 0, 0)]
    program(*nothing[:2], out=tuple(nothing[2:]))  # Empty arrays do not overlap.
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
            with pytest.raises(ArgumentError, match=rf"^twice: out=: {names} overlap in memory; pass separate arrays$"):
                TWICE(x_of(rank), out=out_of(rank, apart))
        return TWICE(x_of(rank), out=apart[rank])  # The group still works.

    for at, result in enumerate(on_ranks(rank)):
        np.testing.assert_array_equal(result, 2 * x_of(at))


def test_an_interrupted_call_informs_the_other_ranks() -> None:
    """Later calls of the group report the interrupt, although KeyboardInterrupt has no text. The group has only one rank here."""
    group = hw.init(hw.Threads(1))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.run("program", SimpleNamespace(stopped="", abort=lambda _: None), interrupted)
    with pytest.raises(ExecutionError, match=r"rank 0: KeyboardInterrupt; call hw\.init again"):
        group.expect_working()
    group.close()


def test_without_a_group_and_after_close() -> None:
    with pytest.raises(ExecutionError) as caught:
        ALONE(X)
    assert str(caught.value) == "alone: this process has not joined a group; call hw.init first, or use .run to run all ranks here"
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
    assert all("the program is for the 4 ranks of mesh(x=4), but group 'default' has 2; start 4 ranks" in str(error) for error in errors)


def test_an_error_in_a_librarys_stream_is_not_the_callers() -> None:
    class Broken(NumpyLibrary):
        def stream(self, device: int) -> int:
            raise TypeError("in the library")

    arguments = Arguments(AG_MATMUL.host, find_target("cuda"), rank=0, device=0, native_table=list, verifies_calls=False, windows=Windows())
    with pytest.raises(TypeError, match=r"^in the library$"):
        arguments.handle(None, Broken())
    with pytest.raises(ArgumentError, match=r"^ag_matmul: stream=: expected an int"):
        arguments.handle("main", Broken())


# --- communicators of the application ---------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
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


def test_communicators_of_the_application_are_used(communicator: Callable[[int], int]) -> None:
    text = (
        "host @total(%x: f32[M, K]) -> (%y: f32[M, K]) mesh(dp=1, tp=1) channels(tp: tp two_sided) {\n  all_reduce sum %x -> %y on tp\n}\n"
    )
    program = hw.compile(hw.HostProgram.parse(text))
    group = hw.init(hw.Communicators({"tp": communicator(1)}, 0, 1), "owned")
    np.testing.assert_array_equal(program(X, group=group), X)
    group.close()
    for communicators, message in (
        ({"dp": communicator(1)}, "total: no communicator along tp; pass one for every process group that the program uses"),
        ({"tp": communicator(2)}, "total: the communicator along tp: this rank is rank 0 of 2; the mesh needs rank 0 of 1"),
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
        "twice: verify_calls: the ranks of group 'owned' have no store for messages; use a provider with a store, or omit the option"
    )
    group.close()
