"""Programs for ranges of dynamic sizes. A sequential program runs calls while the programs for ranges are compiled in the background."""

import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from hostweave.runtime.group import Group
from hostweave.torch.exported import tracing
from hostweave.torch.graph import Graph

KEPT = 16  # maximum number of ranges for which a part is compiled; each part has separate memory
_MEET = 64  # at calls 1, 2, 4, ... and every 64th call, ranks ask each other if all have compiled a part


class Ranges:
    """Parts of a module for ranges of sizes, each from a power of four to the next. The first call in a range starts the compilation of a
    part for the sizes of the call. Calls use a part that overlaps communication, in a group only after all ranks have compiled it."""

    def __init__(self, graph: Graph, compile: Callable[[Mapping[str, int]], Any]):
        """`compile` compiles a program for the sizes of a call, in a separate thread."""
        self._compile, self._lock = compile, threading.Lock()
        types = graph.input_types
        self._dims = [
            (name, i, dim.size.name, bool(dim.axes)) for name, of in types.items() for i, dim in enumerate(of.dims) if dim.size.name
        ]
        self._programs: dict[tuple[tuple[str, int], ...], Future[Any]] = {}
        self._calls: dict[Any, int] = {}  # (rank, range) -> number of calls, or -1 once all ranks have compiled

    def program_for(self, arrays: Mapping[str, Any], group: Group | None) -> Any:
        """Program for the arguments `arrays`, or None for the sequential program. Collective."""
        is_one = group is None or group.count == 1
        sizes = {
            size: max(arrays[name].shape[dim], 1)  # the cost model needs at least one element
            for name, dim, size, is_sharded in self._dims
            if name in arrays and (group is None or not is_sharded)
        }
        if not sizes or len(sizes) < len({size for _, _, size, _ in self._dims}):
            return None
        key = tuple((name, (size.bit_length() + 1) // 2) for name, size in sorted(sizes.items()))
        with self._lock:
            if key not in self._programs:
                if len(self._programs) == KEPT:
                    return None
                self._programs[key] = self._begun(sizes)
            made = self._programs[key]
        of_rank = group.rank if group else None, key
        if (calls := self._calls.get(of_rank, 0)) >= 0:
            self._calls[of_rank] = calls = calls + 1
            if not is_one and calls % _MEET and calls & (calls - 1):
                return None
            if not (made.done() if is_one or group is None else group.all_true(made.done())):
                return None
            self._calls[of_rank] = -1
        return made.result()

    def wait(self) -> None:
        """Waits for compilations that have begun."""
        for made in list(self._programs.values()):
            made.result()

    def _begun(self, sizes: Mapping[str, int]) -> Future[Any]:
        made: Future[Any] = Future()

        def compile() -> None:
            found = None
            try:
                with tracing:  # one compilation at a time, which leaves most cores to the calls
                    bound = self._compile(sizes)
                if any(choice.chosen.name != "none" for choice in bound.program.choices):
                    bound.program.build()
                    found = bound
            except Exception as error:  # the sequential program stays in use
                warnings.warn(f"{error}; calls of these sizes, {dict(sizes)}, stay sequential", stacklevel=1)
            finally:  # warn() raises if warnings are errors
                made.set_result(found)

        threading.Thread(target=compile, name=f"compiles for {dict(sizes)}", daemon=True).start()
        return made


def vary(graph: Graph, stated: Mapping[str, int]) -> bool:
    """True if a graph has dynamic sizes that are not all stated."""
    named = {dim.size.name for of in graph.input_types.values() for dim in of.dims if dim.size.name}
    return not named <= stated.keys()
