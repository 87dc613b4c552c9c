"""Compares the sizes of calls between ranks that are processes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.host_ir.ir import HostProgram
from hostweave.runtime.checked_call import CheckedCall
from hostweave.runtime.coordinator import CallSignature, other_call
from hostweave.runtime.group import Group
from hostweave.runtime.rendezvous import ranks_text
from hostweave.types.tensor import Shape, holds

_CALLS_KEPT = 256  # latest calls whose sizes a rank keeps for error messages


class CallSizes(NamedTuple):
    local: Sequence[Shape]
    global_shapes: Sequence[Shape]  # global shapes that the rank infers


class LastSizes:
    """Sizes of a rank's last calls of a program and of the program's variants.

    A rank compares sizes before a call if the sizes or the variant have changed since the previous call. Unless the ranks agree at once in
    shared memory, the rank announces the comparison before it waits for the other ranks. If sizes are consistent, all ranks compare before
    the same calls. Otherwise, the watchdog of a rank that has begun the call without comparing reads the announcement, and fails the group.
    """

    def __init__(self, group: Group):
        self.number = group.number(self)  # equal on all ranks, because the first call of a program is collective
        self.calls = 0  # calls that this rank has begun
        self.recent_calls: deque[tuple[ComparedSizes, CheckedCall]] = deque(maxlen=_CALLS_KEPT)
        self.agreed_sizes: tuple[int, ...] | None = None  # sizes of the last comparison
        self.variant: ComparedSizes | None = None  # variant of the last call
        self.shapes: object = None  # key of the last call's shapes

    @classmethod
    def of(cls, group: Group, family: object) -> LastSizes:
        """The object for a program in a group. `family` is an object that all variants of the program share."""
        last = group.last_sizes.get(family)
        if not isinstance(last, cls):
            last = group.last_sizes[family] = cls(group)
        return last

    def differ_from(self, rank: int, call: int, sizes: Sequence[Sequence[Shape]]) -> str | None:
        """Describes how another rank's sizes of a call differ from this rank's sizes. None if the sizes are equal, if this rank has not
        begun the call, or if the call is too old."""
        calls_ago = self.calls - call
        if calls_ago < 0 or calls_ago >= len(self.recent_calls):
            return None
        variant, checked_call = self.recent_calls[-1 - calls_ago]
        return variant.difference(rank, sizes, checked_call)


class ComparedSizes:
    """Sizes that all ranks have passed to a variant of a program."""

    def __init__(
        self,
        host: HostProgram,
        group: Group,
        signature: CallSignature,
        waits_for: str,
        sizes_of: Callable[[CheckedCall], CallSizes],
        last: LastSizes,
    ):
        self._host, self._group, self._signature, self._waits_for, self._sizes_of = host, group, signature, waits_for, sizes_of
        dims = {str(dim.size): (i, j) for i, p in enumerate(host.arguments) for j, dim in enumerate(p.type.dims) if not dim.size.is_int}
        self._named_dims = tuple(dims.items())  # (name, (input, dim)) for each symbolic size
        self._known: set[tuple[int, ...]] = set()
        self._last = last
        self._variant = hash(tuple(signature.digest.encode()))  # equal on all ranks
        self.is_first = True

    def begin(self, checked_call: CheckedCall) -> None:
        self._last.recent_calls.append((self, checked_call))
        self._last.calls += 1
        self._group.compared_calls += 1

    def undo_begin(self) -> None:
        self._last.recent_calls.pop()
        self._last.calls -= 1
        self._group.compared_calls -= 1

    def compare(self, checked_call: CheckedCall, shapes: object) -> bool:
        """Compares the sizes of the next call between ranks, unless the sizes and the variant are the same as in the last call. Returns
        True for sizes that no earlier call or `prepare` of this variant had. `shapes` is a key of the sizes."""
        last = self._last
        if last.variant is self and last.shapes == shapes:
            return False
        own = self._sizes_of(checked_call)
        combination = self._combination(own.global_shapes)
        agreed_sizes = self._variant, *combination
        if is_other := agreed_sizes != last.agreed_sizes:
            self._compare(agreed_sizes, own)
        last.agreed_sizes, last.variant, last.shapes = agreed_sizes, self, shapes
        is_new = is_other and combination not in self._known
        self._known.add(combination)
        return is_new

    def _compare(self, agreed_sizes: tuple[int, ...], own: CallSizes) -> None:
        group, number, call = self._group, self._last.number, self._last.calls + 1
        if reason := group.diverged():
            group.fail(reason)
            raise ExecutionError(f"{self._host.name}: {reason}")

        def announce() -> None:
            group.announce(number, call, own)

        if group.same_on_host(self._host.name, hash((number, call, *agreed_sizes)), announce, self._waits_for):
            return
        announce()
        records = [json.loads(record) for record in self._gather(call, json.dumps((self._variant, own)))]
        given = {rank: _parsed(sizes) for rank, (_, sizes) in enumerate(records)}
        difference = self._difference(given)
        if other := next((rank for rank, (variant, _) in enumerate(records) if variant != records[0][0]), None):
            difference = difference or f"{other_call(other, 0, call)}, and pass arrays of group.empty for the same arguments"
        if difference:
            raise ArgumentError(f"{self._host.name}: {difference}")

    def compare_prepared(self, global_shapes: Sequence[Sequence[Shape]]) -> None:
        """Compares the sizes for which all ranks prepare calls."""
        combinations = [self._combination(shapes) for shapes in global_shapes]
        records = [json.loads(record) for record in self._gather(0, json.dumps(combinations))]
        if other := next((rank for rank, record in enumerate(records) if record != records[0]), None):
            raise ArgumentError(
                f"{self._host.name}: prepare: rank 0 gives {self._size_text(records[0])}, "
                f"and rank {other} {self._size_text(records[other])}; give the same sizes on all ranks"
            )
        self._known.update(combinations)
        self.is_first = False

    def difference(self, rank: int, sizes: Sequence[Sequence[Shape]], checked_call: CheckedCall) -> str | None:
        return self._difference({rank: _parsed(sizes), self._group.rank: self._sizes_of(checked_call)})

    def _gather(self, call: int, record: str) -> list[str]:
        signature = CallSignature(self._host.name, self._signature.mesh, str(self._last.number), bound=record, call=call)
        return [one.bound for one in self._group.agree(signature, self._waits_for, self._group.call_timeout)]

    def _combination(self, global_shapes: Sequence[Shape]) -> tuple[int, ...]:
        return tuple(global_shapes[i][j] for _, (i, j) in self._named_dims)

    def _size_text(self, combinations: Sequence[Sequence[int]]) -> str:
        names = [name for name, _ in self._named_dims]
        few = [" ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) for sizes in combinations[:4]]
        return ", ".join(few) + ", ..." * (len(combinations) > 4)

    def _difference(self, given: Mapping[int, CallSizes]) -> str | None:
        """Describes the first input whose size differs between the ranks of `given`."""
        for index, parameter in enumerate(self._host.arguments):
            if len({sizes.global_shapes[index] for sizes in given.values()}) == 1:
                continue
            ranks_of: dict[str, list[int]] = {}
            for rank, sizes in sorted(given.items()):
                held = f"block {list(sizes.local[index])}" if holds(parameter.type, self._host.mesh, rank) else "no block"
                ranks_of.setdefault(f"{held} of an array {list(sizes.global_shapes[index])}", []).append(rank)
            text = ", ".join(f"{ranks_text(ranks)} pass{'es' * (len(ranks) == 1)} {what}" for what, ranks in ranks_of.items())
            uneven = ", and sizes= where ranks hold blocks of different sizes" if self._host.uneven else ""
            return f"{parameter.name}: {text}; pass blocks of one array {parameter.type}{uneven}{self._waits_for}"
        return None


def _parsed(sizes: Sequence[Sequence[Sequence[int]]]) -> CallSizes:
    local, global_shapes = (tuple(map(tuple, shapes)) for shapes in sizes)
    return CallSizes(local, global_shapes)
