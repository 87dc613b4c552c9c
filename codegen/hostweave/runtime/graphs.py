"""When calls of a program whose ranks signal each other are launched as graphs, by `Options(graph="auto")`."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4096  # calls between two meetings, at most
SPARE = 8  # of so many calls one may have arrays that are new


class CommonGraphs:
    """Whether a call is a graph, which all ranks decide together: signals of graphs are counted apart from those of calls.

    A rank knows of its own arrays alone whether they come again. But all make the same calls. So the ranks meet before calls 3, 5, 9, 17
    and so on, where each says whether its calls since the last time had arrays that it knew, but for a few. Where all say so, calls are
    graphs until the next time, on every rank: for arrays that are new it captures one. Where one does not, they are calls until then.
    """

    def __init__(self) -> None:
        self.agreed = False
        self._calls, self._meets_after = 0, 2
        self._before = 1, 1  # calls, and those with new arrays, that were judged: the first, which nobody knew

    @property
    def is_due(self) -> bool:
        return self._calls >= self._meets_after

    def count(self) -> None:
        """A call that all ranks make."""
        self._calls += 1

    def wants(self, unseen: int) -> bool:
        """What this rank says, of whose calls so many had new arrays."""
        calls, new = self._calls - self._before[0], unseen - self._before[1]
        return new * SPARE <= calls

    def decide(self, wanted: Sequence[bool], unseen: int) -> None:
        """With what all ranks say."""
        self.agreed = all(wanted)
        self._before = self._calls, unseen
        self._meets_after = self._calls + min(self._calls, LONGEST)
