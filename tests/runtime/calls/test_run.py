"""Calls of a program: results on every rank, calls in flight, threads, failures and Ctrl-C."""

import gc
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError, HostweaveError, ProgramError
from hostweave.build.cuda import Gpu
from hostweave.build.toolchain import find_compiler
from hostweave.cli.demo import demo
from hostweave.runtime.cpu import parallel, schedule, seeded

RANKS = 4
mesh = hw.Mesh(x=RANKS)


@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def ag_matmul(x, w):
    return hw.matmul(x, w).stream("M", chunks=RANKS)


@hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"])
def total_and_twice(x):
    return hw.sum(x, axis=0), x + x


PROGRAM = hw.compile(ag_matmul)
RANDOM = np.random.default_rng(0)


def arguments() -> dict[str, np.ndarray]:
    return {"x": RANDOM.integers(-4, 5, (16, 8)).astype(np.float32), "w": RANDOM.integers(-4, 5, (8, 12)).astype(np.float32)}


def product(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return arrays["x"] @ arrays["w"]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that compiles ag_matmul and replaces one line of program.cpp: the first line that contains `what`."""

    def make(what: str, replacement: str) -> hw.Program:
        monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path))
        _ = hw.compile(ag_matmul).folder
        file = tmp_path / "ag_matmul" / "program.cpp"
        lines = file.read_text().splitlines(keepends=True)
        number = next(i for i, line in enumerate(lines) if what in line)
        lines[number] = replacement.replace("LINE", lines[number])
        file.write_text('#include "hostweave/errors.h"\n' + "".join(lines))
        program = hw.compile(ag_matmul)
        program.build()
        monkeypatch.delenv("HOSTWEAVE_EDIT")
        return program

    return make


def works() -> bool:
    arrays = arguments()
    return all(np.array_equal(y, product(arrays)) for y in PROGRAM.run(**arrays, ranks=True))


def test_global_and_local_results() -> None:
    arrays = arguments()
    np.testing.assert_array_equal(PROGRAM.run(**arrays), product(arrays))
    copies = PROGRAM.run(**arrays, ranks=True)
    assert len(copies) == RANKS
    for y in copies:
        np.testing.assert_array_equal(y, product(arrays))


def test_several_outputs_are_a_tuple() -> None:
    program = hw.compile(total_and_twice)
    x = arguments()["x"]
    total, twice = program.run(x=x)
    np.testing.assert_array_equal(total, x.sum(axis=0))
    np.testing.assert_array_equal(twice, x + x)
    for rank, (own_total, own_twice) in enumerate(program.run(x=x, ranks=True)):
        np.testing.assert_array_equal(own_total, x.sum(axis=0))
        np.testing.assert_array_equal(own_twice, (x + x)[4 * rank : 4 * rank + 4])


def test_sizes_may_change_from_call_to_call() -> None:
    for rows, inner, columns in ((4, 1, 1), (64, 32, 16), (8, 2, 3), (64, 32, 16)):
        x, w = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
        np.testing.assert_array_equal(PROGRAM.run(x=x, w=w), np.full((rows, columns), inner))


@pytest.mark.parametrize("picker", ["mixed", "uniform", "pct", "hosts"])
def test_calls_in_flight(picker: str) -> None:
    for seed in range(5):
        calls = [arguments() for _ in range(3)]
        with seeded(seed, picker):
            for arrays, results in zip(calls, PROGRAM.run_in_flight(calls, poison=True), strict=True):
                for y in results:
                    np.testing.assert_array_equal(y, product(arrays))


def test_calls_in_flight_have_one_shape() -> None:
    other = {"x": np.ones((8, 8), np.float32), "w": np.ones((8, 12), np.float32)}
    with pytest.raises(ArgumentError) as error:
        PROGRAM.run_in_flight([arguments(), other])
    assert str(error.value) == "ag_matmul: x: shapes differ between calls of one run; make them equal"
    assert works()


def test_a_dropped_wait_changes_results(broken) -> None:
    program = broken(".join(caller)", "")
    wrong = 0
    for seed in range(10):
        calls = [arguments() for _ in range(3)]
        with seeded(seed, check_dependencies=False):
            results = program.run_in_flight(calls, poison=True)
        wrong += not all(np.array_equal(y, product(a)) for a, copies in zip(calls, results, strict=True) for y in copies)
    assert wrong > 0
    with seeded(0), pytest.raises(ExecutionError, match=r"^ag_matmul: "):
        program.run_in_flight([arguments() for _ in range(3)], poison=True)
    assert works()


def test_schedules_nest_and_end() -> None:
    with seeded(3, "pct"):
        assert (schedule().seeded, schedule().seed, schedule().picker) == (True, 3, 2)
        with parallel(timeout_seconds=5):
            assert (schedule().seeded, schedule().timeout_seconds) == (False, 5)
        assert schedule().seeded
    assert not schedule().seeded


@pytest.mark.parametrize(
    ("schedule_of", "message"),
    [
        (lambda: seeded(0, "best"), "seeded: there is no picker 'best'; the pickers are mixed, uniform, pct, hosts"),
        (lambda: seeded(-1), "seeded: seed=-1 is not an int from 0 to 2**64 - 1; pass such an int"),
        (lambda: parallel(timeout_seconds=math.nan), "parallel: timeout_seconds=nan is not a positive number; pass a number of seconds"),
        (lambda: parallel(buffered_sends="no"), "buffered_sends='no' is not a bool"),
    ],
)
def test_invalid_schedules(schedule_of: Callable[[], object], message: str) -> None:
    with pytest.raises(HostweaveError, match=re.escape(message)):
        schedule_of()


def test_endless_timeout() -> None:
    with parallel(timeout_seconds=math.inf):
        assert works()


def test_measure() -> None:
    times = PROGRAM.measure(**arguments(), warmups=1, repetitions=3)
    assert [len(rank) for rank in times] == [3] * RANKS
    assert all(t.enqueue_us > 0 and t.total_ms > 0 for rank in times for t in rank)


def test_programs_for_several_meshes_run_in_several_threads() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
    def total(x):
        return hw.sum(x, axis=0)

    other = hw.compile(total)
    failures: list[int] = []

    def call(rows: int) -> None:
        for _ in range(10):
            x = np.ones((4 * rows, 3), np.float32)
            w = np.ones((3, rows), np.float32)
            if not (works() and np.array_equal(PROGRAM.run(x=x, w=w), x @ w) and np.array_equal(other.run(x=x), x.sum(axis=0))):
                failures.append(rows)

    threads = [threading.Thread(target=call, args=(rows,)) for rows in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_threads_continue_while_a_program_runs(broken) -> None:
    program = broken("multiply(", "for (int i = 0; i < 2000; ++i) LINE")
    done = threading.Event()
    caller = threading.Thread(target=lambda: (program.run(**arguments()), done.set()))
    caller.start()
    count = 0
    while not done.is_set():
        count += 1
        time.sleep(0)
    caller.join()
    assert count > 10


@pytest.mark.parametrize("mode", [parallel(), seeded(1)], ids=["parallel", "seeded"])
def test_a_missing_send_is_a_deadlock(broken, mode) -> None:
    program = broken("ncclSend", "")
    with mode, pytest.raises(ExecutionError) as error:
        program.run(**arguments())
    first, *others = str(error.value).splitlines()
    assert first == "ag_matmul: deadlock: no rank can continue"
    assert any("rank 3" in line and "recv" in line and "program.cpp" in line for line in others)
    assert works()


def test_a_rank_that_fails_stops_the_others(broken) -> None:
    program = broken(
        "ncclSend", 'if (rank_.index() == 2) throw hw::ExecutionError("made by hand");LINE'.replace("x_coordinate()", "rank_.index()")
    )
    for _ in range(2):
        with pytest.raises(ExecutionError) as error:
            program.run(**arguments())
        assert str(error.value) == "ag_matmul: made by hand"
        assert works()


def test_arguments_that_the_program_refuses_break_nothing() -> None:
    with pytest.raises(ArgumentError):
        hw.compile(ag_matmul).run(x=np.ones((4, 2), np.float32), w=np.ones((3, 2), np.float32))
    assert works()


def test_close() -> None:
    program = hw.compile(ag_matmul)
    program.run(**arguments())
    program.close()
    program.close()
    with pytest.raises(ExecutionError) as error:
        program.run(**arguments())
    assert str(error.value) == "ag_matmul: the program is closed; compile it again"
    assert works()
    del program
    gc.collect()


def test_properties() -> None:
    assert PROGRAM.fusion_ir == str(ag_matmul)
    assert PROGRAM.source == PROGRAM.sources["program.cpp"] == hw.compile(ag_matmul, target="cuda").source
    assert repr(PROGRAM) == "<hostweave program ag_matmul for cpu on mesh(x=4)>"
    again = hw.compile(hw.HostProgram.parse(PROGRAM.host_ir))
    assert again.host_ir == PROGRAM.host_ir
    arrays = arguments()
    np.testing.assert_array_equal(again.run(**arrays), product(arrays))
    with pytest.raises(ProgramError) as error:
        _ = again.fusion_ir
    assert str(error.value) == "ag_matmul: was compiled from host IR and has no fusion IR; see host_ir"
    with pytest.raises(ProgramError) as error:
        hw.compile(ag_matmul, target="tpu")
    assert str(error.value) == "ag_matmul: there is no target 'tpu'; the targets are cpu and cuda"


def test_wrong_arguments_of_compile_and_measure() -> None:
    for given, options, message in (
        (None, None, "compile: None is neither a fusion nor a host program; mark a function with @hw.fusion(...)"),
        (ag_matmul, {"streams": 2}, "ag_matmul: options must be hw.Options, got dict; write hw.Options(streams=4)"),
    ):
        with pytest.raises(ProgramError) as error:
            hw.compile(given, options=options)  # type: ignore[arg-type]
        assert str(error.value) == message
    with pytest.raises(ProgramError, match=r"Options: streams=0 must be an int of at least 1$"):
        hw.Options(streams=0)
    named = hw.fusion(ranks=hw.f32["M"])(lambda ranks: ranks + 1)
    with pytest.raises(ProgramError, match=r"input ranks has the name of a parameter of run or measure; rename the input$"):
        hw.compile(named)
    with pytest.raises(ArgumentError, match=r"measure: warmups=3, repetitions=0: give ints: at least 0 warmups and 1 repetition$"):
        PROGRAM.measure(repetitions=0, **arguments())
    with pytest.raises(ArgumentError, match=r"check: M='a': a size is an int of at least 0$"):
        PROGRAM.check(M="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "gpus", "message"),
    [
        (None, 0, 'no GPU can be used: this machine has no NVIDIA driver, libcuda.so.1; install it, or compile with target="cpu"'),
        ("13.0", 0, 'no GPU can be used: the driver reports none; check CUDA_VISIBLE_DEVICES, or compile with target="cpu"'),
        ("13.0", 1, f"{RANKS} GPUs are needed, and this machine has 1; compile for a smaller mesh, or for the CPU"),
    ],
)
def test_without_gpus(version: str | None, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine has too few GPUs, a run, a call in a group, and the demo raise an error before anything is built."""

    def build(*_: Any) -> None:
        raise AssertionError("something is built")

    program = hw.compile(ag_matmul, target="cuda")
    monkeypatch.setattr("hostweave.build.cuda.driver_version", lambda: version)
    monkeypatch.setattr("hostweave.build.cuda.gpus", lambda: (Gpu("H100", "sm_90"),) * gpus)
    monkeypatch.setattr("hostweave.build.program.build", build)
    with pytest.raises(ExecutionError, match=f"^ag_matmul: {re.escape(message)}$"):
        program.run(**arguments())
    with pytest.raises(HostweaveError, match=f"^demo: {re.escape(message)}$"):
        demo("ag_matmul_p2p", RANKS, "cuda")
    if not gpus:
        one = hw.compile(hw.fusion(x=hw.f32["M"])(lambda x: x + 1), target="cuda")
        with closing(hw.init(group="without GPUs")) as group, pytest.raises(ExecutionError, match=re.escape(message)):
            one(np.ones(3, np.float32), group=group)


def test_ctrl_c(broken) -> None:
    program = broken("ncclSend", "for (volatile int i = 0; hw_cpu_failed() == 0;) hw_cpu_pause();LINE")
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs start without this handler.
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            program.run(**arguments())
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert works()


FORK = """
import gc, os
from four_ranks import AG_MATMUL, W, X, on_ranks, x_of
from hostweave.base.errors import ExecutionError

kept = []
kept.append(kept)  # Only a collection frees the objects.

def use(rank):
    graph = AG_MATMUL.capture(x_of(rank), W)
    kept.append((graph, graph(), AG_MATMUL(x_of(rank), W)))

on_ranks(use)
AG_MATMUL.run(X, W)
assert len(kept) == 5
if (child := os.fork()) == 0:
    del kept
    try:
        AG_MATMUL.run(X, W)
    except ExecutionError as error:
        print(error, flush=True)
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
assert (AG_MATMUL.run(X, W) == X @ W).all()
"""


def test_a_forked_process_cannot_run_programs() -> None:
    """The child may free objects of its parent."""
    done = run([sys.executable, "-c", FORK], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "programs cannot run in a forked process if they ran before the fork; use spawn\n"


def test_libraries_that_others_have_loaded_are_not_mistaken_for_the_cpu_device(tmp_path: Path) -> None:
    (tmp_path / "other.cpp").write_text(
        '#include <cstdlib>\nextern "C" {\n'
        + "".join(
            f"int {name}() {{ abort(); }}\n" for name in ("cudaMemcpyAsync", "cudaMalloc", "cublasLtMatmul", "ncclSend", "ncclGroupStart")
        )
        + "}\n"
    )
    other = tmp_path / "libother.so"
    subprocess.run([str(find_compiler()), "-shared", "-fPIC", str(tmp_path / "other.cpp"), "-o", str(other)], check=True)
    script = (
        "import ctypes, numpy as np, hostweave as hw\n"
        f"ctypes.CDLL({str(other)!r}, ctypes.RTLD_GLOBAL)\n"
        f"program = hw.compile(hw.Fusion.parse({str(ag_matmul)!r}))\n"
        "assert (program.run(x=np.ones((4, 2), np.float32), w=np.ones((2, 3), np.float32)) == 2).all()\n"
    )
    done = run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_process_ends_cleanly_with_programs_open() -> None:
    script = (
        "import numpy as np, hostweave as hw\n"
        "@hw.fusion(mesh=hw.Mesh(x=4), x=hw.f32['M@x'])\n"
        "def total(x):\n    return hw.sum(x, axis=0)\n"
        "program = hw.compile(total)\n"
        "assert program.run(x=np.ones(8, np.float32)) == 8\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


class Broken:
    """An array whose DLPack export raises an exception."""

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise KeyError("nothing")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class BrokenAttribute:
    @property
    def __dlpack__(self) -> Any:
        raise ValueError("nothing")


class BrokenNamespace:
    """An array of a library that can pass arrays but cannot create results."""

    def __dlpack__(self, **options: Any) -> Any:
        return np.ones((2, 2), np.float32).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __array_namespace__(self) -> Any:
        raise ValueError("nothing")


class Closed:
    """An object that raises ValueError for an unknown attribute, like a closed dataset."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("the file is closed")


def test_objects_that_are_not_arrays() -> None:
    program = hw.compile(hw.fusion(x=hw.f32["M", "N"])(lambda x: x + 1))
    with pytest.raises(hw.errors.ArgumentError, match="x: expected an array, got Closed"):
        program.run(x=Closed())
    with pytest.raises(hw.errors.ArgumentError, match="x: its library's DLPack fails"):
        program.run(x=BrokenAttribute())
    np.testing.assert_array_equal(program.run(x=BrokenNamespace()), np.full((2, 2), 2))
    with pytest.raises(hw.errors.ArgumentError, match="x: its library's DLPack fails"):
        program.run(x=Broken())
    with pytest.raises(hw.errors.ExecutionError, match=r"no memory for a contiguous copy of float32\[1048576, 1048576\]"):
        program.run(x=np.broadcast_to(np.float32(1), (2**20, 2**20)))  # A contiguous copy has 4 TiB.


@pytest.mark.extra("jax")
def test_an_array_of_jax_that_was_deleted() -> None:
    """JAX deletes an array that is passed with donate_argnums."""
    jax = pytest.importorskip("jax", reason="needs JAX: pip install '.[jax]'")
    program, x = hw.compile(hw.fusion(x=hw.f32["M", "N"])(lambda x: x + 1)), jax.numpy.ones((2, 2))
    x.delete()
    with pytest.raises(hw.errors.ArgumentError, match=r"x: JAX cannot give its values \(Array has been deleted"):
        program.run(x=x)
