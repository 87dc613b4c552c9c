"""Ctrl-C at random moments, forks, and programs that are closed during calls."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import run
from four_ranks import ALONE, alone
from processes import environment

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.base.interrupts import Interrupted, expect_not_interrupted, interruptibly, within
from hostweave.build.cuda import gpus

SCRIPT = Path(__file__).with_name("interrupted.py")
WHAT = ("run", "call", "capture", "threads", "compile")
TARGETS = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(len(gpus()) < 2, reason="needs 2 GPUs")])]


def interrupt_at_random_moments(what: str, to: str, count: int, target: str = "cpu") -> None:
    """Runs a process that interrupts its own work. With "process", only this process gets the signal, as from Jupyter. With "group", the
    compilers that the process starts also get the signal, as from a terminal."""
    command = [sys.executable, str(SCRIPT), what, to, "0", str(count), target]
    done = run(command, env=environment(), timeout=550, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


@pytest.mark.parametrize("to", ["process", "group"])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("target", TARGETS)
def test_interrupts(target: str, what: str, to: str) -> None:
    interrupt_at_random_moments(what, to, 3 if what == "compile" else 25, target)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["process", "group"])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("target", TARGETS)
def test_200_interrupts(target: str, what: str, to: str) -> None:
    interrupt_at_random_moments(what, to, 50 if what == "compile" else 200, target)


# --- work that is interrupted -----------------------------------------------------------------------------------------


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], threading.Timer]]:
    """Returns a function that schedules a KeyboardInterrupt after some seconds."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        return timer

    yield interrupt
    signal.signal(signal.SIGINT, before)


class Held:
    """An object that a reference cycle would keep alive."""


def test_work_returns_raises_and_keeps_no_references() -> None:
    gc.disable()
    try:
        assert interruptibly(lambda: threading.current_thread().name) == "hostweave task"
        held = Held()
        kept = weakref.ref(held)

        def fails(held: Held = held) -> None:
            raise ValueError("a mistake")

        del held
        with pytest.raises(ValueError, match="a mistake"):
            interruptibly(fails)
        del fails
        deadline = time.monotonic() + 10
        while kept() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()


def test_interrupted_work_stops_at_its_next_check(interrupts: Callable[[float], threading.Timer]) -> None:
    ended = []

    def work() -> None:
        try:
            while True:
                expect_not_interrupted()
                time.sleep(0.01)
        except Interrupted as why:
            ended.append(str(why))
            raise

    timer = interrupts(0.2)
    with pytest.raises(KeyboardInterrupt):
        interruptibly(work)
    timer.join()
    assert ended == ["KeyboardInterrupt"]


def test_interrupted_work_is_stopped_where_it_waits(interrupts: Callable[[float], threading.Timer]) -> None:
    stopped, reasons = threading.Event(), []

    def stop(reason: str) -> None:
        reasons.append(reason)
        stopped.set()

    timer = interrupts(0.2)
    with pytest.raises(KeyboardInterrupt):
        interruptibly(lambda: stopped.wait(60), stop)
    timer.join()
    assert reasons == ["KeyboardInterrupt"]


def test_a_second_interrupt_does_not_wait_for_the_end(interrupts: Callable[[float], threading.Timer]) -> None:
    ended, started = threading.Event(), time.monotonic()
    timers = interrupts(0.2), interrupts(0.7)
    with pytest.raises(KeyboardInterrupt):
        interruptibly(lambda: ended.wait(60))
    assert time.monotonic() - started < 10
    ended.set()
    for timer in timers:
        timer.join()


def test_work_that_exceeds_its_time_limit() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.2, lambda: ended.wait(60))
    ended.set()
    assert within(60, lambda: 7) == 7


# --- programs that are closed -----------------------------------------------------------------------------------------


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def total(x: hw.Tensor) -> hw.Tensor:
    return hw.sum(x, axis=0)


@pytest.mark.parametrize("how", ["run", "call", "capture"])
def test_a_program_is_closed_while_threads_call_it(how: str) -> None:
    x, group = np.ones((4, 3), np.float32), hw.init(hw.Environment({"RANK": "0", "WORLD_SIZE": "1"}), "closed")
    unexpected: list[BaseException] = []
    for _ in range(15):
        program = hw.compile(total if how == "run" else alone)
        ready = threading.Barrier(9)

        def call(program: hw.Program = program, ready: threading.Barrier = ready) -> None:
            ready.wait()
            try:
                step = program.capture(x, group=group) if how == "capture" else None
                while True:
                    result = program.run(x) if how == "run" else step() if step else program(x, group=group)
                    np.testing.assert_array_equal(result, x.sum(axis=0))
            except ExecutionError as error:
                if not str(error).endswith(": the program is closed; compile it again"):
                    unexpected.append(error)
            except BaseException as error:
                unexpected.append(error)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        ready.wait()
        time.sleep(0.01)
        program.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not unexpected
    np.testing.assert_array_equal(ALONE(x, group=group), x.sum(axis=0))
    group.close()


# --- forks ------------------------------------------------------------------------------------------------------------


FORKS = """
import os, sys, threading, time
import numpy as np
import hostweave as hw

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def total(x):
    return hw.sum(x, axis=0)

x = np.ones((4, 3), np.float32)
program = hw.compile(total)
thread = threading.Thread(target=lambda: program.run(x))
thread.start()
children = []
while len(children) < 8 or thread.is_alive():
    if (child := os.fork()) == 0:
        try:
            (program if len(children) % 2 else hw.compile(total)).build() if len(children) % 4 < 2 else program.run(x)
            os.write(1, b"done\\n")
        except hw.errors.HostweaveError as error:
            os.write(1, f"{error}\\n".encode())
        os._exit(0)
    children.append(child)
    time.sleep(float(sys.argv[1]))
    if len(children) > 20:
        break
thread.join()
deadline = time.monotonic() + 60
while children and time.monotonic() < deadline:
    children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
    time.sleep(0.05)
for child in children:
    os.kill(child, 9)
print("hang:", len(children))
"""


@pytest.mark.parametrize("pause", [0.03, 0.2])
def test_a_fork_while_another_thread_makes_its_first_run(pause: float, tmp_path: Path) -> None:
    """The child does not block on a lock or an import. The child can build programs. The child raises an error if it runs a program."""
    env = environment(HOSTWEAVE_CACHE=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", FORKS, str(pause)], env=env, capture_output=True, text=True, timeout=300)
    *said, hang = done.stdout.splitlines()
    assert hang == "hang: 0", done.stdout + done.stderr
    assert {*said} == {"done", "programs cannot run in a forked process if they ran before the fork; use spawn"}
