"""A function that is called many times with weights of its own: an array of structs, and a loop over the calls."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hostweave.emit.layout import braced, lay_out
from hostweave.emit.names import Names
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.host_ir.expr import Const

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
class Numbered:
    """Names of the user's with the number of the call: `keys_0_updated`, `keys_1_updated`."""

    prefix: str
    first: int
    suffix: str

    def of(self, call: int) -> str:
        return f"{self.prefix}{self.first + call}{self.suffix}"

    def cpp(self, index: str) -> str:
        """That of a call whose number C++ has: `{"keys_", call, "_updated"}`"""
        return braced([f'"{self.prefix}"', plus(index, self.first), *([f'"{self.suffix}"'] if self.suffix else [])])

    @property
    def field(self) -> str:
        return re.sub("_+", "_", f"{self.prefix}_{self.suffix}").strip("_")


@dataclass(frozen=True)
class Layers:
    """Inputs, or outputs, of the program that calls of a function take in turn: `w_0, v_0, w_1, v_1` of `@layer(x, w, v)`."""

    side: str  # in, out
    function: str
    base: str  # of names
    struct: str
    field: str  # of the program's inputs or outputs: the array
    positions: tuple[int, ...]  # of the function's parameters that are members
    members: tuple[str, ...]
    patterns: tuple[Numbered, ...]  # of the user's names
    names: tuple[tuple[str, ...], ...]  # of each call

    def element(self, call: int) -> Element:
        return Element(f"{self.side}.{self.field}", call)

    @property
    def places(self) -> dict[str, Words]:
        """Where each input or output is."""
        return {
            name: (self.element(call), f".{member}")
            for call, names in enumerate(self.names)
            for name, member in zip(names, self.members, strict=True)
        }


def layers_of(program: ir.HostProgram, names: Names) -> Iterator[Layers]:
    """What the calls of a function take and give must stand in order, under names with the number of the call.

    What calls of other functions do not have in turn is looked at once more without what those have.
    """
    behind: dict[str, str] = {}  # views that begin where the buffer does
    for view in program.body:
        if isinstance(view, ir.View) and view.offset == Const(0):
            behind[view.out] = behind.get(view.src, view.src)
    placed = set[str]()
    left: list[tuple[ir.Function, str]] = [(function, side) for function in program.functions for side in ("in", "out")]
    for function, side in (*left, *left):
        calls = [tuple(behind.get(name, name) for name in tree.names(i, "read", "write")) for i in _calls(program.body, function)]
        everywhere = sum(1 for body in bodies(program) for _ in _calls(tree.walk(body.body), function))
        arguments = [each for each in (program.inputs if side == "in" else program.outputs) if each.name not in placed]
        if 1 < len(calls) == everywhere and (function, side) in left and (taken := _taken_in_turn(arguments, calls)):
            left.remove((function, side))
            yield (layers := _layers(function, side, calls, *taken, names))
            placed.update(layers.places)


def _layers(
    function: ir.Function,
    side: str,
    calls: Sequence[tuple[str, ...]],
    positions: tuple[int, ...],
    patterns: tuple[Numbered, ...],
    names: Names,
) -> Layers:
    base = "".join(word[:1].upper() + word[1:] for word in function.name.split("_"))
    parameters = (*function.inputs, *function.outputs)
    own, fields = Names(), [parameters[at].name for at in positions] if side == "in" else [each.field for each in patterns]
    return Layers(
        side,
        function.name,
        base,
        names.of(f"{base}{side.capitalize()}puts", "struct"),
        names.of(f"{function.name}s", "array of structs"),
        positions,
        tuple(own.of(field, str(at)) for at, field in zip(positions, fields, strict=True)),
        patterns,
        tuple(tuple(call[at] for at in positions) for call in calls),
    )


def _calls(body: Iterable[tree.Instruction], function: ir.Function) -> Iterator[tree.Instruction]:
    return (i for i in body if tree.names(i, "call") == (function.name,))


def in_turn(program: ir.HostProgram, function: ir.Function) -> set[int]:
    """The positions of parameters of a function of which each call takes another argument."""
    calls = [tree.names(i, "read", "write") for i in _calls(program.body, function)]
    return {at for at, column in enumerate(zip(*calls, strict=True)) if len({*column}) == len(calls) > 1}


def _taken_in_turn(
    arguments: Sequence[ir.Parameter], calls: Sequence[tuple[str, ...]]
) -> tuple[tuple[int, ...], tuple[Numbered, ...]] | None:
    """Which parameters are arguments of the program in turn, in their order, and the patterns of their names."""
    types = {argument.name: argument.type for argument in arguments}
    order = list(types)
    columns = {at: column for at, column in enumerate(zip(*calls, strict=True)) if len({*column} & {*types}) == len(calls)}
    positions = tuple(sorted(columns, key=lambda at: order.index(columns[at][0])))
    patterns = tuple(pattern for at in positions if (pattern := _pattern(*columns[at][:2])))
    if not positions or len(patterns) < len(positions):
        return None
    expected = [pattern.of(call) for call in range(len(calls)) for pattern in patterns]
    begin = order.index(columns[positions[0]][0])
    same_types = all(len({types[name] for name in columns[at]}) == 1 for at in positions)
    in_calls = [row[at] for row in calls for at in positions]
    return (positions, patterns) if order[begin : begin + len(expected)] == expected == in_calls and same_types else None


def _pattern(name: str, following: str) -> Numbered | None:
    """What two names have in common but for a number that counts on."""
    patterns = (Numbered(name[: match.start()], int(match[0]), name[match.end() :]) for match in re.finditer(r"\d+", name))
    return next((pattern for pattern in patterns if (pattern.of(0), pattern.of(1)) == (name, following)), None)


def rolled(units: Sequence[Words], index: str) -> str:
    """Lines are a loop where they differ by the numbers of elements alone, which count up or down."""
    text, run = "", list[Words]()
    for unit in units:
        steps = _steps(run[-1], unit) if run else ()
        if not steps or (len(run) > 1 and steps != _steps(run[-2], run[-1])):
            text, run = text + _lines(run, index), []
        run.append(unit)
    return text + _lines(run, index)


def _steps(one: Words, other: Words) -> tuple[int, ...]:
    """By how much the number of each element is greater in the other line; none where these differ in anything else, or not at all."""
    if [_apart(word) for word in one] != [_apart(word) for word in other]:
        return ()
    pairs = [(a.index, b.index) for a, b in zip(one, other, strict=True) if isinstance(a, Element) and isinstance(b, Element)]
    steps = tuple(b - a for a, b in pairs)
    return steps if any(steps) and all(abs(step) < 2 for step in steps) else ()


def _apart(word: str | Element) -> object:
    return (word.array,) if isinstance(word, Element) else word


def _lines(run: Sequence[Words], index: str) -> str:
    """The loop counts as the greatest of the numbers does that count up."""
    if len(run) < LOOP:
        return "".join(str(word) for unit in run for word in unit)
    steps = iter(_steps(*run[:2]))
    words = [(word, next(steps) if isinstance(word, Element) else 0) for word in run[0]]
    begin = max((word.index for word, step in words if isinstance(word, Element) and step > 0), default=0)

    def number(element: Element, step: int) -> str:
        if step < 0:
            return f"{element.index + begin} - {index}"
        return plus(index, element.index - begin) if step else str(element.index)

    body = "".join(word if isinstance(word, str) else f"{word.array}[{number(word, step)}]" for word, step in words)
    return lay_out("loop", index=index, begin=begin, count=begin + len(run), body=body)


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
