"""Sizes of calls, which ranks that are processes compare at the first call of each combination."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.host_ir.ir import HostProgram
from hostweave.runtime.meeting import CallSignature, Shape
from hostweave.runtime.taken import Taken
from hostweave.types.tensor import holds

if TYPE_CHECKING:
    from hostweave.runtime.group import Group

_KEPT = 256  # last calls whose sizes a rank remembers for messages


class Sizes(NamedTuple):
    """Shapes of a call's inputs, as one rank has them."""

    local: Sequence[Shape]
    of_all: Sequence[Shape]  # of the global arrays, by what the rank knows


class ComparedSizes:
    """Combinations of sizes that all ranks have passed to a program.

    Ranks whose sizes fit together know the same combinations, so that all of them compare, or none. A rank that compares announces it.
    The watchdog of a rank that has begun that call without comparing finds the announcement, and fails the group.
    """

    def __init__(self, host: HostProgram, group: Group, signature: CallSignature, waits_for: str, sizes_of: Callable[[Taken], Sizes]):
        self._host, self._group, self._signature, self._waits_for, self._sizes_of = host, group, signature, waits_for, sizes_of
        dims = {str(dim.size): (i, j) for i, p in enumerate(host.inputs) for j, dim in enumerate(p.type.dims) if not dim.size.is_int}
        self._named_dims = tuple(dims.items())  # a dim of each size that has a name
        self._known: set[tuple[int, ...]] = set()
        self._calls = 0  # that this rank has begun
        self._last: deque[Taken] = deque(maxlen=_KEPT)
        self.number = group.number(self)  # the same on all ranks, which make the first call of a program together
        self.is_first = True  # no call was made or prepared yet

    def begin(self, taken: Taken) -> None:
        """Counts a call that this rank begins."""
        self._last.append(taken)
        self._calls += 1

    def take_back(self) -> None:
        """Discounts the last call, which was not made."""
        self._last.pop()
        self._calls -= 1

    def compare(self, taken: Taken) -> bool:
        """Compares the sizes of the next call with those of the other ranks, unless all have passed this combination before: then False.

        Raises ArgumentError if another rank compares other sizes, ExecutionError if another rank has made the call without comparing.
        """
        own = self._sizes_of(taken)
        combination = self._combination(own.of_all)
        if combination in self._known:
            return False
        group, call = self._group, self._calls + 1
        if reason := group.diverged():
            group.fail(reason)
            raise ExecutionError(f"{self._host.name}: {reason}")
        group.meeting.announce(json.dumps((group.rank, self.number, call, own)))
        given = {rank: _parsed(json.loads(record)) for rank, record in enumerate(self._gathered(call, json.dumps(own)))}
        if difference := self._difference(given):
            raise ArgumentError(f"{self._host.name}: {difference}")
        self._known.add(combination)
        return True

    def compare_prepared(self, of_all: Sequence[Sequence[Shape]]) -> None:
        """Compares the sizes that calls are prepared for. All ranks then know them."""
        combinations = [self._combination(shapes) for shapes in of_all]
        records = [json.loads(record) for record in self._gathered(0, json.dumps(combinations))]
        if other := next((rank for rank, record in enumerate(records) if record != records[0]), None):
            raise ArgumentError(
                f"{self._host.name}: prepare: rank 0 gives {self._texts(records[0])}, and rank {other} {self._texts(records[other])}; "
                "give the same sizes on all ranks"
            )
        self._known.update(combinations)
        self.is_first = False

    def differ_from(self, rank: int, call: int, sizes: Sequence[Sequence[Shape]]) -> str | None:
        """The difference between another rank's sizes of a call and this rank's, if this rank has begun it."""
        back = self._calls - call
        if back < 0:
            return None
        own = self._group.rank
        unknown = f"ranks {rank} and {own} pass other sizes to call {call} of {self._host.name}{self._waits_for}"
        try:
            return self._difference({rank: _parsed(sizes), own: self._sizes_of(self._last[-1 - back])}) or unknown
        except IndexError:
            return unknown

    def _gathered(self, call: int, record: str) -> list[str]:
        signature = CallSignature(self._host.name, self._signature.mesh, self._signature.digest, bound=record, call=call)
        return [one.bound for one in self._group.agree(signature, self._waits_for, self._group.call_timeout)]

    def _combination(self, of_all: Sequence[Shape]) -> tuple[int, ...]:
        return tuple(of_all[i][j] for _, (i, j) in self._named_dims)

    def _texts(self, combinations: Sequence[Sequence[int]]) -> str:
        names = [name for name, _ in self._named_dims]
        few = [" ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) for sizes in combinations[:4]]
        return ", ".join(few) + ", ..." * (len(combinations) > 4)

    def _difference(self, given: Mapping[int, Sizes]) -> str | None:
        """The first input whose size is not the same on these ranks, and what each of them passes."""
        for index, parameter in enumerate(self._host.inputs):
            if len({sizes.of_all[index] for sizes in given.values()}) == 1:
                continue
            ranks_of: dict[str, list[int]] = {}
            for rank, sizes in sorted(given.items()):
                held = list(sizes.local[index]) if holds(parameter.type, self._host.mesh, rank) else "nothing"
                ranks_of.setdefault(f"{held} of {list(sizes.of_all[index])}", []).append(rank)
            said = ", ".join(f"{_ranks(ranks)} {what}" for what, ranks in ranks_of.items())
            uneven = ", and sizes= where ranks hold blocks of different sizes" if self._host.uneven else ""
            return f"{parameter.name}: {said}; pass blocks of one {parameter.type}{uneven}{self._waits_for}"
        return None


def _parsed(sizes: Sequence[Sequence[Sequence[int]]]) -> Sizes:
    local, of_all = (tuple(map(tuple, shapes)) for shapes in sizes)
    return Sizes(local, of_all)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} passes" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} pass"
