"""Arrays of structs for parameter groups, such as `in.layers[i].w`, and functions that take one of these structs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from hostweave.emit.layout import braced
from hostweave.emit.names import CppNames
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.types.group import ParameterGroup


@dataclass(frozen=True, eq=False)
class Structs:
    """Parameter groups of inputs or outputs that are passed as one array of structs."""

    side: str  # "in" or "out"
    struct: str
    field: str  # name of the array, a field of the program's Inputs or Outputs
    groups: dict[str, ParameterGroup]  # parameter -> group
    members: dict[str, str]  # parameter -> C++ member
    argument: str  # C++ parameter for one struct, if an earlier parameter is a struct of this side

    @property
    def word(self) -> str:
        """Singular of `field`, such as `layer` for `layers`."""
        return re.sub(r"s(_\d+)?$", r"\1", self.field)

    @property
    def count(self) -> int:
        return len(next(iter(self.groups.values())).names)

    @property
    def span(self) -> str:
        """First and last tensor of the array."""
        *_, last = self.groups.values()
        return f"{next(iter(self.groups.values())).first} to {last.last}"

    def at(self, index: str) -> str:
        return f"{self.side}.{self.field}[{index}]"

    def member(self, name: str, index: str) -> str:
        return f"{self.at(index)}.{self.members[name]}"

    def label(self, name: str, index: str) -> str:
        """C++ for the user's name of one tensor of a parameter group, such as `{"keys_", i, "_updated"}`."""
        before, numbers, after = self.groups[name].pattern
        number = f"{index} + {numbers.start}" if numbers.start else index
        return braced([f'"{before}"', number, *([f'"{after}"'] if after else [])])


def structs_of(program: ir.HostProgram, names: CppNames) -> Iterator[Structs]:
    """Arrays of structs of a program's inputs, then of its outputs."""
    for side, parameters in (("in", program.inputs), ("out", program.outputs)):
        for struct, of_struct in groupby(parameters, key=lambda p: p.group.struct if p.group else None):
            groups = {p.name: p.group for p in of_struct if p.group}
            if struct and groups:
                field = names.of(struct, f"array of structs {struct}")
                word = "".join(each[:1].upper() + each[1:] for each in re.sub(r"s(_\d+)?$", r"\1", struct).split("_"))
                own = CppNames()
                members = {name: own.of(name) for name in groups}
                type_name = names.of(f"{word}{side.capitalize()}puts", f"{side} struct of {struct}")
                yield Structs(side, type_name, field, groups, members, names.of(f"{side}_{struct}", f"{side} argument of {struct}"))


@dataclass(frozen=True)
class Passed:
    """A struct that a C++ function takes instead of single tensors."""

    structs: Structs
    parameter: str  # C++ name of the struct parameter
    members: dict[int, str]  # position of the function's parameter -> parameter group


def passed_to(program: ir.HostProgram, function: str, all_structs: tuple[Structs, ...]) -> tuple[Passed, ...]:
    """Structs that a function can take instead of single tensors: every call passes tensors of one element of an array."""
    of_group = {name: structs for structs in all_structs for name in structs.groups}
    selects = {i.out: (i.src, i.offset) for i in tree.walk(program.body) if isinstance(i, ir.View) and i.src in of_group}
    calls = [i for i in tree.walk(program.body) if tree.names(i, "call") == (function,)]
    everywhere = sum(tree.names(i, "call") == (function,) for body in bodies(program) for i in tree.walk(body.body))
    given = [{at: selects[name] for at, name in enumerate(tree.names(i, "read", "write")) if name in selects} for i in calls]
    if not calls or len(calls) < everywhere or len({tuple((at, src) for at, (src, _) in one.items()) for one in given}) > 1:
        return ()
    found = list[Passed]()
    for structs in all_structs:
        members = {at: src for at, (src, _) in given[0].items() if src in structs.groups}
        if members and all(len({one[at][1] for at in members}) == 1 for one in given):
            is_first = all(other.structs.side != structs.side for other in found)
            found.append(Passed(structs, structs.side if is_first else structs.argument, members))
    return tuple(found)
