"""Fault injection. If a device call fails during preparation, there is an error, nothing leaks, and the next call works. Also tests
adopted communicators, and processes that end with programs open."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from device_counters import counted
from forked import run

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.base.paths import NATIVE
from hostweave.runtime import team

RANKS = 2
X, W = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
CALLS = ("cudaMalloc", "cudaStreamCreate", "cudaEventCreate", "ncclCommInitRank", "cublasLtCreate")


@hw.fusion(mesh=hw.Mesh(x=RANKS), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def product(x, w):
    return hw.matmul(x, w).stream("M", chunks=RANKS)


def in_this_thread(program: hw.Program) -> Any:
    return program.run(x=X, w=W)


def in_a_group(program: hw.Program) -> Any:
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> Any:
        group = hw.init(provider)
        try:
            return program(X[4 * rank : 4 * rank + 4], W)
        finally:
            group.close()

    return provider.run(rank)[0]


def report_of(how: Callable[[hw.Program], Any], program: hw.Program) -> str:
    try:
        np.testing.assert_array_equal(how(program), X @ W)
    except ExecutionError as error:
        return str(error)
    return ""


class Device:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so"))

    def live(self) -> dict[str, int]:
        return {name: count for name, count in counted().items() if name.startswith("live_")}

    def live_after_freeing(self, expected: dict[str, int]) -> dict[str, int]:
        gc.collect()
        deadline = time.monotonic() + 20
        while (live := self.live()) != expected and time.monotonic() < deadline:
            time.sleep(0.01)  # Another thread frees resources as soon as nothing uses them.
        return live

    def fail(self, call: str, nth: int) -> None:
        self.library.hw_cpu_fail_call(call.encode(), nth)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(team, "teams", {})
    device = Device()
    yield device
    device.fail("", 0)


@pytest.mark.parametrize("how", [in_this_thread, in_a_group])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails(call: str, how: Callable[[hw.Program], Any], device: Device) -> None:
    gc.collect()
    gc.freeze()  # Later collections visit only objects of this test. Visiting all objects would take a second each time.
    before, started = device.live(), time.monotonic()
    for nth in range(1, 200):
        program = hw.compile(product)
        program.build()
        device.fail(call, nth)
        if not (report := report_of(how, program)):
            break  # The program makes fewer than `nth` of these calls, so no call failed.
        assert f"{call}: made to fail" in report
        device.fail("", 0)
        np.testing.assert_array_equal(how(program), X @ W)
        program.close()
        team.teams.clear()
        del program
        assert device.live_after_freeing(before) == before, nth
    assert nth > 1
    assert time.monotonic() - started < 100  # The time limit of the device for a missing rank is 120 seconds.


@pytest.mark.parametrize("how", [in_this_thread, in_a_group])
@pytest.mark.parametrize("transport", ["peer", "one_sided"])
def test_a_rank_without_memory_for_windows(transport: str, how: Callable[[hw.Program], Any], device: Device) -> None:
    """The other rank does not wait for the rank that fails."""
    gc.collect()
    before, started = device.live(), time.monotonic()
    for nth in range(1, 30):
        with closing(hw.compile(product, options=hw.Options(transport=transport))) as program:
            program.build()
            device.fail("cudaMalloc", nth)
            if not (report := report_of(how, program)):
                break
        assert "cudaMalloc: made to fail" in report
    assert nth > 5
    assert time.monotonic() - started < 60
    team.teams.clear()
    assert device.live_after_freeing(before) == before


@pytest.mark.parametrize("transport", ["two_sided", "peer", "one_sided"])
def test_memory_is_freed_after_a_failure_of_a_group(transport: str, device: Device) -> None:
    gc.collect()
    before, program = device.live(), hw.compile(product, options=hw.Options(transport=transport))
    provider = hw.Threads(RANKS)

    def rank(rank: int) -> None:
        with closing(hw.init(provider)) as group:
            x = group.empty((4, 3), hw.f32)
            x[:] = X[4 * rank : 4 * rank + 4]
            np.testing.assert_array_equal(program(x, W), X @ W)
            if rank:
                raise RuntimeError("a test")
            program(x, W)

    with pytest.raises((RuntimeError, ExecutionError), match=r"a test|has left"):
        provider.run(rank)
    program.close()
    assert device.live_after_freeing(before) == before


ADOPTS_WHILE_ANOTHER_RUNS = f"""
import ctypes, threading, time
import numpy as np
import hostweave as hw

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "K"])
def long(x, w):
    for _ in range(2):
        x = hw.matmul(x, w)
    return hw.sum(x, axis="M")

@hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M@x", "K"])
def total(x):
    return hw.sum(x, axis=0)

device = ctypes.CDLL({str(NATIVE / "libhostweave_cpu.so")!r})
class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)

id, comm = UniqueId(), ctypes.c_void_p()
assert device.ncclGetUniqueId(ctypes.byref(id)) == device.ncclCommInitRank(ctypes.byref(comm), 1, id, 0) == 0
long, total = hw.compile(long), hw.compile(total)
long.build(), total.build()
x, w = np.zeros((2048, 2048), np.float32), np.zeros((2048, 2048), np.float32)
long.run(x=x, w=w)
thread = threading.Thread(target=lambda: [long.run(x=x, w=w) for _ in range(2)])
thread.start()
time.sleep(0.2)
group = hw.init(hw.Communicators({{"x": comm.value}}, 0, 1), "owned")
assert (total(np.ones((4, 2), np.float32), group=group) == 4).all()
thread.join()
group.close()
print("done")
"""


def test_communicators_are_adopted_while_another_thread_has_the_devices() -> None:
    done = run([sys.executable, "-c", ADOPTS_WHILE_ANOTHER_RUNS], timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["done"]), done.stderr


BEGINS = """
import os, sys, threading, time
import numpy as np
import hostweave as hw

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "K"])
def product(x, w):
    return hw.sum(hw.matmul(x, w), axis="M")

product = hw.compile(product)
x, w = np.zeros((2048, 1024), np.float32), np.zeros((1024, 1024), np.float32)

def in_this_thread():
    while True:
        product.run(x=x, w=w)

"""
ENDS_IN_THREADS = """
product.run(x=x, w=w)
threading.excepthook = lambda failure: print(failure.exc_value)
threading.Thread(target={how}, daemon=True).start()
time.sleep(0.5)
"""
ENDS_IN_A_CHILD = """
group = hw.init()
product.run(x=x, w=w)
if (child := os.fork()) == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
product.run(x=x, w=w)
assert group.failure is None
"""


@pytest.mark.parametrize("end", [ENDS_IN_THREADS.format(how="in_this_thread"), ENDS_IN_A_CHILD], ids=["thread", "child"])
def test_a_process_ends(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGINS + end], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
