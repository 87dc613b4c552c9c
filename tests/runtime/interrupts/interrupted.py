"""Interrupts its own work with SIGINT at random moments. `test_interrupts.py` starts this script.

    python interrupted.py WHAT TO SEED COUNT [TARGET]      WHAT is run, call, capture, threads or compile; TO is process or group

The script exits with status 0 if every interrupt raised KeyboardInterrupt soon, the next run and call are correct, and no thread of
interrupted work is left over.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time

import numpy as np

import hostweave as hw

# For each WHAT, the longest time in seconds from the start of the work to the interrupt.
SPANS = {"run": 0.05, "call": 0.01, "capture": 0.01, "threads": 0.1, "compile": 3.0}
SOON = 10.0  # The limit in seconds is long, because other tests may use the machine.
RANKS = 2
X, W = np.arange(48, dtype=np.float32).reshape(8, 6) % 7, np.arange(30, dtype=np.float32).reshape(6, 5) % 5


def product(added: int) -> hw.Fusion:
    @hw.fusion(mesh=hw.Mesh(x=RANKS), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def product(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(x, w).stream("M", chunks=RANKS) + added

    return product


@hw.fusion(x=hw.f32["M", "K"], w=hw.f32["K", "N"])
def alone(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    return hw.matmul(x, w)


class Interrupted:
    """Programs, and work that lasts until it is interrupted."""

    def __init__(self, moments: random.Random, target: str):
        self.moments, self.target = moments, target
        self.kept, self.alone = self.compiled(product(0)), self.compiled(alone)
        self.torch = __import__("torch") if target == "cuda" else None

    def compiled(self, fusion: hw.Fusion) -> hw.Program:
        return hw.compile(fusion, target=self.target)

    def local(self, array: np.ndarray, rank: int = 0) -> object:
        return self.torch.from_numpy(array).cuda(rank) if self.torch else array

    def expect(self, result: object, added: int = 0) -> None:
        np.testing.assert_array_equal(result.cpu().numpy() if self.torch and hasattr(result, "cpu") else result, X @ W + added)

    def run(self) -> None:
        program = self.kept if self.moments.random() < 0.8 else self.compiled(product(0))
        while True:
            self.expect(program.run(X, W))

    def call(self) -> None:
        group, x, w = own_group(), self.local(X), self.local(W)
        while True:
            self.expect(self.alone(x, w, group=group))

    def capture(self) -> None:
        step = self.alone.capture(self.local(X), self.local(W), group=own_group())
        while True:
            self.expect(step())

    def threads(self) -> None:
        provider = hw.Threads(RANKS)

        def rank(rank: int) -> None:
            hw.init(provider)
            rows = len(X) // RANKS
            x, w = (self.local(array, rank) for array in (np.ascontiguousarray(X[rows * rank : rows * (rank + 1)]), W))
            while True:
                self.expect(self.kept(x, w))

        provider.run(rank)

    def compile(self) -> None:
        added = self.moments.randrange(10**9)
        while True:
            added += 1
            self.compiled(product(added)).build()

    def works(self) -> None:
        self.expect(self.kept.run(X, W))
        self.expect(self.alone(self.local(X), self.local(W), group=own_group()))


def own_group() -> hw.Group:
    return hw.init(hw.Environment({"RANK": "0", "WORLD_SIZE": "1"}), "own")


def threads_of_ranks() -> set[str]:
    names = {thread.name.partition(",")[0] for thread in threading.enumerate()}
    return {name for name in names if name.startswith(("hostweave ranks", "rank "))}


def main(what: str, to: str, seed: str, count: str, target: str = "cpu") -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(SOON * 20, exit=True)
    moments = random.Random(seed)
    interrupted = Interrupted(moments, target)
    interrupted.works()
    gc.disable()  # An interrupted call must free its resources without garbage collection.
    for trial in range(int(count)):
        delay, sent = moments.uniform(0, SPANS[what]), [0.0]

        def interrupt(delay: float = delay, sent: list[float] = sent) -> None:
            time.sleep(delay)
            sent[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT) if to == "process" else os.killpg(0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            getattr(interrupted, what)()
        except KeyboardInterrupt:
            took = time.monotonic() - sent[0]
        thread.join()
        assert took < SOON, f"trial {trial}: KeyboardInterrupt came after {took:.1f} seconds"
        interrupted.works()
        deadline = time.monotonic() + SOON
        while len(threads_of_ranks()) > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(threads_of_ranks()) == 1, f"trial {trial}: left over: {threads_of_ranks()}"
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
