"""CUDA graphs of calls: those that the user captures, and those of `Options(graph="auto")`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from hostweave.base.errors import ArgumentError, ExecutionError

MAX_CALLS_BETWEEN_VOTES = 4096
CALLS_PER_NEW_ARRAY = 8  # a rank votes for graphs if at most 1/8 of its calls have new arrays


class CommonGraphs:
    """Common decision of all ranks to run calls as graphs or not, for `Options(graph="auto")` with two-sided and one-sided transports.

    The communication library of these transports requires that all ranks capture a communication, or that no rank does. But a rank knows
    only whether its own arrays repeat. So all ranks vote before calls 3, 5, 9, 17 and so on, at most 4096 calls apart. A rank votes for
    graphs if at most 1/8 of its calls since the last vote had new arrays. If all ranks vote for graphs and can capture, calls run as graphs
    until the next vote, and a call with new arrays is captured. Otherwise calls run without graphs.
    """

    def __init__(self) -> None:
        self.agreed = False
        self._calls, self._votes_after = 0, 2
        self._at_last_vote = 1, 1  # (calls, calls with new arrays); the first call always has new arrays

    @property
    def is_due(self) -> bool:
        return self._calls >= self._votes_after

    def count(self) -> None:
        self._calls += 1

    def vote(self, unseen: int) -> bool:
        """True if this rank votes for graphs. `unseen` counts this rank's calls with new arrays."""
        calls, new = self._calls - self._at_last_vote[0], unseen - self._at_last_vote[1]
        return new * CALLS_PER_NEW_ARRAY <= calls

    def decide(self, agreed: bool, unseen: int) -> None:
        self.agreed = agreed
        self._at_last_vote = self._calls, unseen
        self._votes_after = self._calls + min(self._calls, MAX_CALLS_BETWEEN_VOTES)


class Captured:
    """Result of `Program.capture`: a call with fixed arrays, captured as a CUDA graph.

    A launch computes `outputs` from the current values of the captured input arrays. All launches write to the same memory. If several
    threads use the object, put each launch, and each use of its inputs and outputs, inside `with step:`.

    Example: `step = program.capture(x, w)`, then `x.copy_(new)` and `y = step()`.
    """

    def __init__(self, launch: Callable[[Any], None], inputs: object, outputs: Callable[[], Any]):
        self.launch = launch
        self._inputs = inputs  # keeps memory alive
        self._outputs = outputs
        self._launch_lock = threading.RLock()
        self._depth = 0  # nesting of `with` in the thread that has the lock
        self._last: tuple[threading.Thread, bool] | None = None  # (thread, True if inside `with`) of the last launch

    def __enter__(self) -> Captured:
        self._launch_lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._launch_lock.release()

    @property
    def outputs(self) -> Any:
        """Result array, or tuple of arrays, of the last launch. Each launch writes to the same arrays. For libraries that cannot share
        memory, such as JAX, `outputs` are new copies."""
        return self._outputs()

    def __call__(self, *arrays: NoReturn, stream: Any = None) -> Any:
        """Launches the graph on `stream`, like a call of the program, and returns `outputs`. By default `stream` is the current stream of
        the arrays' library. On the CPU target, the launch returns when the work is done.

        Raises ExecutionError if the group has failed, if the program is closed, or if several threads launch the graph without `with
        step:`. Raises CaptureError if the stream is being captured. Raises ArgumentError if arrays or an invalid stream are passed, or if
        the other ranks launch with other sizes.
        """
        if arrays:
            raise ArgumentError("a captured call takes no arrays; write new values into the captured arrays")
        with self._launch_lock:
            thread, is_exclusive = threading.current_thread(), self._depth > 0
            if self._last and self._last[0] is not thread and self._last[0].is_alive() and not (is_exclusive and self._last[1]):
                raise ExecutionError(
                    "several threads launch this captured call, but share its arrays; put each call, and the use "
                    "of its arrays, inside `with step:`, or capture one call for each thread"
                )
            self._last = thread, is_exclusive
            self.launch(stream)
            return self._outputs()
