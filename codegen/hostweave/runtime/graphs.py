"""CUDA graphs of calls: a call that the user captures, and the agreement of ranks to run calls as graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hostweave.base.errors import ArgumentError, ExecutionError

MOST_CALLS_BETWEEN_VOTES = 4096  # maximum number of calls between two decisions on graphs
CALLS_PER_NEW_ARRAY = 8  # at most one in this number of calls may have new arrays


class CommonGraphs:
    """Agreement of all ranks, for `Options(graph="auto")`, to run calls as graphs. Used if ranks signal each other.

    Signals of graphs are counted separately from those of calls, so all ranks must decide the same. A rank only knows if its own
    arrays repeat, but all ranks make the same calls. So the ranks meet before calls 3, 5, 9, 17 and so on. Each says if nearly
    all of its calls since the last meeting used arrays that it had seen. If all ranks do, calls are graphs until the next meeting;
    a rank captures a new graph for new arrays. Otherwise they are plain calls until then.
    """

    def __init__(self) -> None:
        self.agreed = False
        self._calls, self._meets_after = 0, 2
        self._before = 1, 1  # calls, and calls with new arrays, at the last vote; the first call is always new

    @property
    def is_due(self) -> bool:
        return self._calls >= self._meets_after

    def count(self) -> None:
        """Counts a call that all ranks make."""
        self._calls += 1

    def wants(self, unseen: int) -> bool:
        """Vote of this rank. `unseen` is its number of calls with new arrays so far."""
        calls, new = self._calls - self._before[0], unseen - self._before[1]
        return new * CALLS_PER_NEW_ARRAY <= calls

    def decide(self, wanted: Sequence[bool], unseen: int) -> None:
        """Sets the decision from the votes of all ranks."""
        self.agreed = all(wanted)
        self._before = self._calls, unseen
        self._meets_after = self._calls + min(self._calls, MOST_CALLS_BETWEEN_VOTES)


class Captured:
    """A call with fixed arrays, captured as a CUDA graph. `Program.capture` makes it.

    Calling it recomputes `outputs` from the current values of its input arrays. Each call writes the same memory. So one thread at a time
    may use it: put the call, and all use of its inputs and outputs, inside `with step:`.

    Example: `step = program.capture(x, w)`, then `x.copy_(new)` and `y = step()`.
    """

    def __init__(self, launch: Callable[[Any], None], inputs: object, outputs: Callable[[], Any]):
        self.launch = launch  # takes a stream or None
        self._inputs = inputs  # keeps the memory that the graph reads
        self._outputs = outputs
        self._turn = threading.RLock()
        self._turns = 0  # nesting depth of `with` in the current thread
        self._last: tuple[threading.Thread, bool] | None = None  # thread of the last launch, and True if it was inside `with`

    def __enter__(self) -> Captured:
        self._turn.acquire()
        self._turns += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._turns -= 1
        self._turn.release()

    @property
    def outputs(self) -> Any:
        """Array that the last launch wrote, or a tuple of them. Their addresses do not change."""
        return self._outputs()

    def __call__(self, *arrays: NoReturn, stream: Any = None) -> Any:
        """Launches the graph, ordered like a call of the program: after all work on `stream`, by default the library's current one.

        Returns `outputs`. On the CPU target it returns when the call is done. Raises ExecutionError if the group has failed, if
        the program is closed, or if another thread launches it without `with step:`. Raises CaptureError if the stream is being
        captured. Raises ArgumentError if arrays are passed.
        """
        if arrays:
            raise ArgumentError("a captured call takes no arguments; write new values into the captured arrays")
        with self._turn:
            by, by_turns = threading.current_thread(), self._turns > 0
            if self._last and self._last[0] is not by and self._last[0].is_alive() and not (by_turns and self._last[1]):
                raise ExecutionError(
                    "several threads launch this captured call, but share its arrays; put each call, and the use "
                    "of its arrays, inside `with step:`, or capture one call for each thread"
                )
            self._last = by, by_turns
            self.launch(stream)
            return self._outputs()
