"""A function that is called many times with weights of its own: an array of structs, and a loop over the calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from hostweave.emit.names import Names
from hostweave.emit.templates import lay_out
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies

LOOP = 2  # calls that differ by their number alone are a loop from here on


@dataclass(frozen=True)
class Element:
    """`layers[3]`"""

    array: str
    index: int

    def __str__(self) -> str:
        return f"{self.array}[{self.index}]"


Words = tuple[str | Element, ...]  # of lines of C++


@dataclass(frozen=True)
class Layers:
    """Inputs of the program that calls of a function take in turn: `w_0, v_0, w_1, v_1` of `@layer(x, w, v)`."""

    function: str
    struct: str
    field: str  # of the program's inputs: the array
    parameter: str  # of the function: an element
    positions: tuple[int, ...]  # of the function's inputs that are members
    members: tuple[str, ...]
    prefixes: tuple[str, ...]  # of the user's names
    first: int  # number in them
    inputs: tuple[tuple[str, ...], ...]  # of each call

    def element(self, call: int) -> Element:
        return Element(f"in.{self.field}", call)

    @property
    def paths(self) -> dict[str, str]:
        """Where each input is in the struct of inputs."""
        return {
            name: f"{self.field}[{call}].{member}"
            for call, names in enumerate(self.inputs)
            for name, member in zip(names, self.members, strict=True)
        }


def layers_of(program: ir.HostProgram, names: Names) -> dict[str, Layers]:
    """By function. The inputs of its calls must stand in order, and end in the number of the call."""
    found = {}
    for function in program.functions:
        calls = [tree.names(i, "read") for i in _calls(program.body, function)]
        everywhere = sum(1 for body in bodies(program) for _ in _calls(tree.walk(body.body), function))
        taken = _taken_in_turn(program, calls) if 1 < len(calls) == everywhere else None
        if taken is None:
            continue
        positions, prefixes, first = taken
        struct = "".join(word[:1].upper() + word[1:] for word in function.name.split("_"))
        found[function.name] = Layers(
            function.name,
            names.of(f"{struct}Weights", "struct"),
            names.of(f"{function.name}s", "array of structs"),
            names.of("weights", "of a call"),
            positions,
            tuple(names.of(function.inputs[at].name) for at in positions),
            prefixes,
            first,
            tuple(tuple(call[at] for at in positions) for call in calls),
        )
    return found


def _calls(body: Iterable[tree.Instruction], function: ir.Function) -> Iterator[tree.Instruction]:
    return (i for i in body if tree.names(i, "call") == (function.name,))


def _taken_in_turn(program: ir.HostProgram, calls: Sequence[tuple[str, ...]]) -> tuple[tuple[int, ...], tuple[str, ...], int] | None:
    """Which arguments are inputs in turn, in the order of the inputs, with the names before their numbers, and the first number."""
    inputs = {parameter.name: parameter.type for parameter in program.inputs}
    order = list(inputs)
    columns = {at: column for at, column in enumerate(zip(*calls, strict=True)) if len({*column} & {*inputs}) == len(calls)}
    positions = tuple(sorted(columns, key=lambda at: order.index(columns[at][0])))
    numbered = [re.fullmatch(r"(.*?)(0|[1-9]\d*)", columns[at][0]) for at in positions]
    if not positions or not all(numbered):
        return None
    prefixes, first = tuple(match[1] for match in numbered if match), int(str(numbered[0] and numbered[0][2]))
    expected = [f"{prefix}{first + call}" for call in range(len(calls)) for prefix in prefixes]
    begin = order.index(expected[0]) if expected[0] in order else 0
    same_types = all(len({inputs[name] for name in columns[at]}) == 1 for at in positions)
    in_calls = [row[at] for row in calls for at in positions]
    return (positions, prefixes, first) if order[begin : begin + len(expected)] == expected == in_calls and same_types else None


def rolled(units: Sequence[Words], index: str) -> str:
    """Lines that differ by the numbers of their elements alone are a loop over the greatest of these."""

    def relative(number_and_unit: tuple[int, Words]) -> object:
        number, unit = number_and_unit
        at = _greatest(unit)
        if at is None:
            return number
        return at - number, [(word.array, word.index - at) if isinstance(word, Element) else word for word in unit]

    return "".join(_lines([unit for _, unit in run], index) for _, run in groupby(enumerate(units), relative))


def _lines(run: Sequence[Words], index: str) -> str:
    begin = _greatest(run[0])
    if len(run) < LOOP or begin is None:
        return "".join(str(word) for unit in run for word in unit)
    body = "".join(word if isinstance(word, str) else f"{word.array}[{plus(index, word.index - begin)}]" for word in run[0])
    return lay_out("loop", index=index, begin=begin, count=begin + len(run), body=body)


def _greatest(unit: Words) -> int | None:
    return max((word.index for word in unit if isinstance(word, Element)), default=None)


def plus(index: str, offset: int) -> str:
    return f"{index} {'-' if offset < 0 else '+'} {abs(offset)}" if offset else index


def arrays_of(program: ir.HostProgram) -> dict[str, tuple[str, int]]:
    """Temporaries that calls of a function give in turn: name -> the first of them, and its number. As many as make a loop."""
    allocated = {name: type for i in program.body if tree.names(i, "allocate") for name, type in i.defined({}).items()}
    found: dict[str, tuple[str, int]] = {}
    for function in program.functions:
        for column in zip(*(tree.names(i, "write") for i in _calls(program.body, function)), strict=True):
            given = [name for name in dict.fromkeys(column) if name in allocated]
            if len(given) > LOOP and len({allocated[name] for name in given}) == 1:
                found |= {name: (given[0], number) for number, name in enumerate(given)}
    return found
