"""Functions that are called many times with weights of their own: arrays of structs, and loops over the calls."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product, takewhile

from hostweave.emit.layout import braced, lay_out
from hostweave.emit.names import Names
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.host_ir.expr import Const

LOOP = 2  # minimum number of equal lines that become a loop


@dataclass(frozen=True)
class Element:
    """An element of an array: `layers[3]`."""

    array: str
    index: int

    def __str__(self) -> str:
        return f"{self.array}[{self.index}]"


Words = tuple[str | Element, ...]  # pieces of lines of C++


@dataclass(frozen=True)
class Numbered:
    """Names that contain the number of the call: `keys_0_updated`, `keys_1_updated`."""

    prefix: str
    first: int
    suffix: str

    def of(self, call: int) -> str:
        return f"{self.prefix}{self.first + call}{self.suffix}"

    def cpp(self, index: str) -> str:
        """C++ of the name in the call with index `index`: `{"keys_", call, "_updated"}`."""
        return braced([f'"{self.prefix}"', plus(index, self.first), *([f'"{self.suffix}"'] if self.suffix else [])])

    @property
    def field(self) -> str:
        return re.sub("_+", "_", f"{self.prefix}_{self.suffix}").strip("_")


@dataclass(frozen=True)
class InTurn:
    """Consecutive program arguments of which each call takes the next group: `w_0, v_0, w_1, v_1` for `@layer(x, w, v)`."""

    positions: tuple[tuple[int, int], ...]  # (parameter of the function, member of the struct); empty if an argument differs
    patterns: tuple[Numbered, ...]  # one per member
    names: tuple[tuple[str, ...], ...]  # one row per call, in the order of the arguments
    is_reversed: bool  # the last call takes the first row

    @property
    def word(self) -> str:
        """Common prefix of the names, in words."""
        columns = zip(*(pattern.field.split("_") for pattern in self.patterns), strict=False)
        return "_".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, columns))


@dataclass(frozen=True)
class Layers:
    """Inputs or outputs of the program that calls of a function take one per call, as an array of structs."""

    side: str  # in, out
    function: str
    base: str  # prefix of the struct names
    parameter: str  # parameter of the C++ function that is the struct
    struct: str
    field: str  # the array, a field of the program's inputs or outputs
    members: tuple[str, ...]
    taken: InTurn

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        return self.taken.names

    def taken_by(self, call: int) -> Element:
        return Element(f"{self.side}.{self.field}", len(self.names) - 1 - call if self.taken.is_reversed else call)

    @property
    def places(self) -> dict[str, Words]:
        """Path of each input or output: array element and member."""
        return {
            name: (Element(f"{self.side}.{self.field}", number), f".{member}")
            for number, names in enumerate(self.names)
            for name, member in zip(names, self.members, strict=True)
        }


def layers_of(program: ir.HostProgram, names: Names) -> Iterator[Layers]:
    """Arrays of structs for the arguments of repeated calls.

    Arguments must be listed in order, with a number in their names that counts up or down with the calls. A second round
    considers the remaining arguments together with arguments between them.
    """
    behind: dict[str, str] = {}  # views at offset 0 -> their buffer
    for view in program.body:
        if isinstance(view, ir.View) and view.offset == Const(0):
            behind[view.out] = behind.get(view.src, view.src)
    placed = set[str]()
    sides: list[tuple[ir.Function, str]] = [(function, side) for function in program.functions for side in ("in", "out")]
    counts = Counter[tuple[str, str]]()
    for with_others, (function, side) in product((False, True), sides):
        calls = [tuple(behind.get(name, name) for name in tree.names(i, "read", "write")) for i in _calls(program.body, function)]
        everywhere = sum(1 for body in bodies(program) for _ in _calls(tree.walk(body.body), function))
        arguments = program.inputs if side == "in" else program.outputs
        if 1 < len(calls) == everywhere:
            for taken in _taken_in_turn(arguments, calls, placed, with_others):
                yield _layers(function, side, taken, counts[function.name, side], names)
                counts[function.name, side] += 1


def _layers(function: ir.Function, side: str, taken: InTurn, number: int, names: Names) -> Layers:
    """Names an array and its structs.

    The first array of a side has the name of the function. Others have the common prefix of their names, or a number.
    """
    word = taken.word or f"{function.name}_{number + 1}" if number else function.name
    field = names.of(word if word.endswith("s") else f"{word}s", f"array of structs of @{function.name}")
    base = "".join(word[:1].upper() + word[1:] for word in word.split("_"))
    parameters = (*function.inputs, *function.outputs)
    fields = [each.field for each in taken.patterns] if taken.positions else ["tensor"]
    for at, member in taken.positions:  # a result's name may have its origin as a prefix
        if side == "in" or fields[member].endswith(f"_{parameters[at].name}"):
            fields[member] = parameters[at].name
    own = Names()
    return Layers(
        side,
        function.name,
        base,
        field if number else side,
        names.of(f"{base}{side.capitalize()}puts", f"struct of @{function.name}"),
        field,
        tuple(own.of(field, str(number)) for number, field in enumerate(fields)),
        taken,
    )


def _calls(body: Iterable[tree.Instruction], function: ir.Function) -> Iterator[tree.Instruction]:
    return (i for i in body if tree.names(i, "call") == (function.name,))


def in_turn(program: ir.HostProgram, function: ir.Function) -> set[int]:
    """Positions of a function's parameters that receive a different argument in each call."""
    calls = [tree.names(i, "read", "write") for i in _calls(program.body, function)]
    return {at for at, column in enumerate(zip(*calls, strict=True)) if len({*column}) == len(calls) > 1}


def _taken_in_turn(
    arguments: Sequence[ir.Parameter], calls: Sequence[tuple[str, ...]], placed: set[str], with_others: bool
) -> Iterator[InTurn]:
    """Groups of program arguments that calls take in order, one group per call.

    With `with_others`, a group also contains arguments between those of one call and of the next, and arguments that all calls
    but the first or last take. Adds the names to `placed`.
    """
    number = {argument.name: at for at, argument in enumerate(arguments)}
    for is_reversed, rows in ((False, calls), (True, calls[::-1])):
        columns = dict(enumerate(zip(*rows, strict=True)))
        firsts = {at: number[names[0]] for at, names in columns.items() if len({*names} & {*number} - placed) == len(rows)}
        while firsts:
            begin = min(firsts.values())
            strides = {at: number[columns[at][1]] - first for at, first in firsts.items()}
            stride = next(strides[at] for at, first in firsts.items() if first == begin)
            own = {at: first for at, first in firsts.items() if strides[at] == stride and first < begin + max(stride, 1)}
            firsts = {at: first for at, first in firsts.items() if at not in own}
            starts = range(max(own.values()) + 1 - stride, begin + 1) if with_others or len({*own.values()}) == stride else ()
            for start in starts:  # a row may begin with arguments that no call takes
                array = _array(arguments, start, stride, len(rows))
                positions = tuple((at, first - start) for at, first in own.items())
                if array and placed.isdisjoint(chain(*array[1])) and all(columns[at] == column(array[1], of) for at, of in positions):
                    placed.update(*array[1])
                    yield InTurn(positions, *array, is_reversed)
                    break
        for names in columns.values() if with_others else ():
            for given in (names[1:], names[:-1]):
                array = _array(arguments, number[given[0]], 1, len(given)) if given[0] in number and placed.isdisjoint(given) else None
                if array and given == column(array[1], 0):
                    placed.update(given)
                    yield InTurn((), *array, is_reversed)


def column(rows: Sequence[tuple[str, ...]], at: int) -> tuple[str, ...]:
    return tuple(row[at] for row in rows)


def _array(
    arguments: Sequence[ir.Parameter], begin: int, stride: int, count: int
) -> tuple[tuple[Numbered, ...], tuple[tuple[str, ...], ...]] | None:
    """Patterns and names of `count` rows of arguments, or None.

    Each row has the names of the row before with the next number, and the same types.
    """
    if count < 2 or begin < 0 or stride < 1 or begin + stride * count > len(arguments):
        return None
    rows = [arguments[at : at + stride] for at in range(begin, begin + stride * count, stride)]
    patterns = tuple(pattern for one, other in zip(*rows[:2], strict=True) if (pattern := _pattern(one.name, other.name)))
    expected = [tuple(pattern.of(row) for pattern in patterns) for row in range(count)]
    names = [tuple(each.name for each in row) for row in rows]
    same_types = all([each.type for each in row] == [each.type for each in rows[0]] for row in rows)
    return (patterns, tuple(names)) if names == expected and same_types else None


def _pattern(name: str, following: str) -> Numbered | None:
    """Pattern of two names that differ only in one number, which increases by 1."""
    patterns = (Numbered(name[: match.start()], int(match[0]), name[match.end() :]) for match in re.finditer(r"\d+", name))
    return next((pattern for pattern in patterns if (pattern.of(0), pattern.of(1)) == (name, following)), None)


def rolled(units: Sequence[Words], index: str) -> str:
    """C++ of these lines. Consecutive lines become a loop if they differ only in indices of array elements that count up or down."""
    text, run = "", list[Words]()
    for unit in units:
        steps = _steps(run[-1], unit) if run else ()
        if not steps or (len(run) > 1 and steps != _steps(run[-2], run[-1])):
            text, run = text + _lines(run, index), []
        run.append(unit)
    return text + _lines(run, index)


def _steps(one: Words, other: Words) -> tuple[int, ...]:
    """Increment of each element's index from one line to the other; empty if the lines differ otherwise or not at all."""
    if [_apart(word) for word in one] != [_apart(word) for word in other]:
        return ()
    pairs = [(a.index, b.index) for a, b in zip(one, other, strict=True) if isinstance(a, Element) and isinstance(b, Element)]
    steps = tuple(b - a for a, b in pairs)
    return steps if any(steps) and all(abs(step) < 2 for step in steps) else ()


def in_loop(rows: Sequence[Words], index: str) -> Words | None:
    """Words of a loop's body that stand for all rows, with the index from 0. None if the rows do not form a loop."""
    if not any(rows):
        return ()
    steps = {_steps(one, other) for one, other in pairwise(rows)}
    return _in_loop(rows[0], steps.pop(), index, 0) if len(steps) == 1 and () not in steps else None


def _apart(word: str | Element) -> object:
    return (word.array,) if isinstance(word, Element) else word


def _lines(run: Sequence[Words], index: str) -> str:
    """C++ of a run of lines. The loop variable is the largest index that increases."""
    if len(run) < LOOP:
        return "".join(str(word) for unit in run for word in unit)
    steps = _steps(*run[:2])
    elements = (word for word in run[0] if isinstance(word, Element))
    begin = max((element.index for element, step in zip(elements, steps, strict=True) if step > 0), default=0)
    body = "".join(_in_loop(run[0], steps, index, begin))
    return lay_out("loop", index=index, begin=begin, count=begin + len(run), body=body)


def _in_loop(words: Words, steps: Sequence[int], index: str, begin: int) -> tuple[str, ...]:
    """Body of a loop that starts at `begin`: the first row, with indices that depend on the loop variable."""

    def number(element: Element, step: int) -> str:
        if step < 0:
            return f"{element.index + begin} - {index}"
        return plus(index, element.index - begin) if step else str(element.index)

    of_elements = iter(steps)
    return tuple(word if isinstance(word, str) else f"{word.array}[{number(word, next(of_elements))}]" for word in words)


def plus(index: str, offset: int) -> str:
    return f"{index} {'-' if offset < 0 else '+'} {abs(offset)}" if offset else index


def arrays_of(program: ir.HostProgram) -> dict[str, tuple[str, int]]:
    """Temporaries that calls of a function write one per call: name -> (name of the first, index).

    Only functions with enough calls for a loop have such arrays.
    """
    allocated = {name: type for i in program.body if tree.names(i, "allocate") for name, type in i.defined({}).items()}
    found: dict[str, tuple[str, int]] = {}
    for function in program.functions:
        for column in zip(*(tree.names(i, "write") for i in _calls(program.body, function)), strict=True):
            given = [name for name in dict.fromkeys(column) if name in allocated]
            if len(given) > LOOP and len({allocated[name] for name in given}) == 1:
                found |= {name: (given[0], number) for number, name in enumerate(given)}
    return found
