"""Groups: tensors that a caller passes one by one, and that a program repeats over: `w_0` to `w_31`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class ParameterGroup:
    """How the tensors of a group are named outside: from `first` to `last`, which differ in one number.

    In a program a group is one tensor, whose outermost dim is its number of tensors, the `depth`. Its tensors have unrelated addresses, so
    only one of them can be viewed at a time. Adjacent groups of one `struct` are passed interleaved: `w_0, v_0, w_1, v_1`, as an array of
    structs.
    """

    first: str
    last: str
    struct: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order. Empty if `first` and `last` do not differ in one number that counts up."""
        found = between(self.first, self.last)
        if found is None:
            return ()
        before, begin, end, after = found
        return tuple(f"{before}{number}{after}" for number in range(begin, end + 1))

    @property
    def pattern(self) -> tuple[str, int, str]:
        """The words before the number, the first number, and the words after it."""
        found = between(self.first, self.last)
        assert found is not None
        return found[0], found[1], found[3]

    def __str__(self) -> str:
        return f"as {self.first} to {self.last} of {self.struct}"


def between(first: str, last: str) -> tuple[str, int, int, str] | None:
    """If two names differ in one number: the text around it, and both numbers. None if there is no such number."""
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
    """Every tensor that a caller passes, in order: its parameter, its number in the group or None, and its name."""
    for struct, members in groupby(parameters, key=lambda p: p.group.struct if p.group else None):
        if struct is None:
            yield from ((p, None, p.name) for p in members)
            continue
        named = [(p, p.group.names) for p in members if p.group]
        for number in range(len(named[0][1])):
            yield from ((p, number, names[number]) for p, names in named)
