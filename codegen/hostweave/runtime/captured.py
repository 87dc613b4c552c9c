"""A call of a program as a CUDA graph: what `Program.capture` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Captured:
    """A call with fixed arrays, captured as a CUDA graph. Made by `Program.capture`.

    Calling it computes `outputs` anew from what its input arrays hold.

    Example: `step = program.capture(x, w)`, then `x.copy_(new)` and `y = step()`.
    """

    def __init__(self, launch: Callable[[Any], None], inputs: object, outputs: Callable[[], Any]):
        self._launch = launch
        self._inputs = inputs  # whose memory the graph reads
        self._outputs = outputs

    @property
    def outputs(self) -> Any:
        """The array that the last launch wrote, or a tuple of them. They are always in the same memory."""
        return self._outputs()

    def __call__(self, stream: Any = None) -> Any:
        """Launches the graph as a call of the program is enqueued: after what `stream` holds, by default the library's current one.

        Returns `outputs`. On the CPU target it returns when the call is done. Raises ExecutionError where the group has failed or
        the program is closed, CaptureError where the stream is being captured itself.
        """
        self._launch(stream)
        return self.outputs
