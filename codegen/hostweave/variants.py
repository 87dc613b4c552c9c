"""Variants of a program: the same computation, compiled under other assumptions, such as particular sizes."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from hostweave.base.forks import reset_after_fork
from hostweave.compiled import Compiled
from hostweave.host_ir.size_requirements import are_divided, undivided
from hostweave.types.machine import Machine

MOST_PER_GROUP = 16  # maximum number of variants per owner in `at_sizes`; each variant has its own memory

Constants = tuple[tuple[str, int], ...]


class Runner(Protocol):
    """Runs a program and owns the resources of the program."""

    compiled: Compiled

    def close(self) -> None: ...


R = TypeVar("R", bound=Runner)


class Variants(Generic[R]):
    """The variants of one program. A variant is compiled when a call first needs it. Iteration yields all variants that are kept. Only
    information that all ranks share selects a variant, so all ranks select the same variant."""

    def __init__(self, compiled: Compiled, running: Callable[[Compiled], R]):
        """`running` creates the object that runs a variant."""
        self._compiled, self._running = compiled, running
        self._made: dict[Hashable, R | None] = {}  # None if the variant would equal the program itself
        # Latest variants of `at_sizes`, by owner.
        self._at_sizes: WeakKeyDictionary[object, dict[Constants, R | None]] = WeakKeyDictionary()
        self._compiled_at = lru_cache(MOST_PER_GROUP)(lambda sizes: compiled.at_sizes(dict(sizes)))
        self._lock = reset_after_fork(threading.Lock())

    def __iter__(self) -> Iterator[R]:
        kept = (one for of_group in self._at_sizes.values() for one in of_group.values())
        return filter(None, dict.fromkeys((*self._made.values(), *kept)))

    def close(self) -> None:
        for variant in list(self):
            variant.close()

    def in_sequence(self) -> R | None:
        """The program without the chunk loops that the compiler chose, or None if there are none."""
        made = self._compiled.in_sequence
        return self._get("in sequence", lambda: made) if made is not self._compiled else None

    def marked(self) -> R:
        return self._get("marked", lambda: self._compiled.marked)

    def on(self, machine: Machine) -> R:
        return self._get(machine, lambda: self._compiled.otherwise("without some transports", choices={}, machine=machine))

    def for_windows(self, names: tuple[str, ...]) -> R | None:
        """The program for arguments in windows. None if that would equal the program itself."""
        with self._lock:
            if names not in self._made:
                made = self._compiled.otherwise(f"for {', '.join(names)} in windows", windows=names)
                known = {one.compiled.host.windows: one for one in filter(None, self._made.values())}
                same = made.host.windows == self._compiled.host.windows
                self._made[names] = None if same else known.get(made.host.windows) or self._running(made)
            return self._made[names]

    def at_sizes(self, sizes: Mapping[str, int], owner: object) -> R | None:
        """The program with constants in place of the sizes that `undivided` finds. None if `undivided` finds no sizes, or if
        `Compiled.at_sizes` returns None.

        `owner` is a group, or the runner of `Program.run`. Each owner keeps `MOST_PER_GROUP` recent variants. All ranks of a group make the
        same calls, so all ranks keep the same variants. A dropped variant is freed when no call or captured call uses it.
        """
        divided = are_divided(self._compiled.host, sizes)
        constants = tuple(undivided((self._compiled if divided else self._compiled.in_sequence).host, sizes).items())
        if not constants:
            return None
        with self._lock:
            kept = self._at_sizes.setdefault(owner, {})
            if constants in kept:
                found = kept.pop(constants)
            else:
                made = self._compiled_at(constants)
                found = self._running(made) if made else None
            kept[constants] = found
            _freed = kept.pop(next(iter(kept))) if len(kept) > MOST_PER_GROUP else None  # freed at the return, outside of the lock
        return found

    def _get(self, key: Hashable, compile: Callable[[], Compiled]) -> R:
        with self._lock:
            if (found := self._made.get(key)) is None:
                found = self._made[key] = self._running(compile())
            return found
