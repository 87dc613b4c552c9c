"""Parameter groups: tensors such as `w_0` to `w_31`, which a caller passes separately and a repeat iterates over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class ParameterGroup:
    """Names of the tensors of a parameter group: from `first` to `last`, which differ in one number.

    In the IRs, a group is one tensor, with the number of tensors as an additional first dim, the `depth`. The tensors have unrelated
    addresses, so a view covers only one tensor. Adjacent groups with the same `struct` are passed as an array of structs: `w_0, v_0, w_1,
    v_1`.
    """

    first: str
    last: str
    struct: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order. Empty if `first` and `last` do not differ in one number that counts up."""
        found = between(self.first, self.last)
        if found is None:
            return ()
        before, begin, end, after = found
        return tuple(f"{before}{number}{after}" for number in range(begin, end + 1))

    @property
    def pattern(self) -> tuple[str, int, str]:
        """Text before the number, the first number, and text after it."""
        found = between(self.first, self.last)
        assert found is not None
        return found[0], found[1], found[3]

    def __str__(self) -> str:
        return f"as {self.first} to {self.last} of {self.struct}"


def between(first: str, last: str) -> tuple[str, int, int, str] | None:
    """Text before the number, both numbers, and text after it, if two names differ in one number. None otherwise."""
    for match in re.finditer(r"\d+", first):
        before, after = first[: match.start()], first[match.end() :]
        middle = last[len(before) : len(last) - len(after)]
        is_alike = len(last) > len(before) + len(after) and last.startswith(before) and last.endswith(after)
        if is_alike and middle.isdigit() and str(int(middle)) == middle and match[0] == str(int(match[0])) and int(middle) > int(match[0]):
            return before, int(match[0]), int(middle), after
    return None


class InGroup(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> ParameterGroup | None: ...


T = TypeVar("T", bound=InGroup)


def one_by_one(parameters: Iterable[T]) -> Iterator[tuple[T, int | None, str]]:
    """Every tensor that a caller passes, in order: its parameter, its index in the parameter group (or None), and its name."""
    for struct, members in groupby(parameters, key=lambda p: p.group.struct if p.group else None):
        if struct is None:
            yield from ((p, None, p.name) for p in members)
            continue
        named = [(p, p.group.names) for p in members if p.group]
        for number in range(len(named[0][1])):
            yield from ((p, number, names[number]) for p, names in named)
