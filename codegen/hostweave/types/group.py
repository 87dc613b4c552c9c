"""Parameter groups: tensors such as `w_0` to `w_31` that a caller passes separately, one for each call of a repeat."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group. The names `first` and `last` differ in one number.

    In the IRs, a group is one tensor, with the number of tensors as its first dim. The tensors have unrelated addresses, so a view covers
    only one tensor. Tensors of adjacent groups with the same `struct` alternate in the order of parameters: `w_0, v_0, w_1, v_1`.
    """

    first: str
    last: str
    struct: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors. Empty if `first` and `last` do not differ in one increasing number."""
        before, numbers, after = self.pattern
        return tuple(f"{before}{number}{after}" for number in numbers)

    @cached_property
    def pattern(self) -> tuple[str, range, str]:
        """Text before the number, the numbers, and text after the number. The range is empty if `names` is empty."""
        for match in re.finditer(r"\d+", self.first):
            before, after = self.first[: match.start()], self.first[match.end() :]
            begin, end = match[0], self.last[len(before) : len(self.last) - len(after)]
            are_numbers = end.isdigit() and [begin, end] == [str(int(begin)), str(int(end))]
            if are_numbers and self.last == f"{before}{end}{after}" and int(end) > int(begin):
                return before, range(int(begin), int(end) + 1), after
        return "", range(0), ""

    @property
    def stem(self) -> str:
        """The names without their number, such as `w` for `w_0` and `layers_weight` for `layers_0_weight`."""
        before, _, after = self.pattern
        return "_".join(word for word in (before.strip("_"), after.strip("_")) if word)

    def may_begin_with(self, name: str) -> bool:
        """True if the group from `name` to `last` has all tensors of this group, or the last ones."""
        return ParameterGroup(name, self.last, "").pattern[::2] == self.pattern[::2]

    def __str__(self) -> str:
        return f"as {self.first} to {self.last} of {self.struct}"


class InGroup(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> ParameterGroup | None: ...


T = TypeVar("T", bound=InGroup)


def one_by_one(parameters: Iterable[T]) -> Iterator[tuple[T, int | None, str]]:
    """Every tensor that a caller passes, in order, as (parameter, index in the parameter group or None, name)."""
    for struct, members in groupby(parameters, key=lambda p: p.group.struct if p.group else None):
        if struct is None:
            yield from ((p, None, p.name) for p in members)
            continue
        named = [(p, p.group.names) for p in members if p.group]
        for number in range(len(named[0][1])):
            yield from ((p, number, names[number]) for p, names in named)
