"""Outlines equal consecutive bodies of a traced program, such as the iterations of a Python loop, to a function. `repeats` then merges the
calls of the function into one repeat.

    %h_1: f32[M, K] = matmul(%x, %w_0)
    %x_1: f32[M, K] = relu(%h_1)
    %h_2: f32[M, K] = matmul(%x_1, %w_1)          %x_1: f32[M, K] = call @layer(%x, %w_0)
    %x_2: f32[M, K] = relu(%h_2)                  %x_2: f32[M, K] = call @layer(%x_1, %w_1)
    ...                                  becomes  ...

Ops of a call are not fused with ops of the next call, and communication does not overlap with the next call. A program is therefore cut
into bodies only where nothing could be fused or overlap: each body begins with a matmul, attention or a call that needs all earlier such
ops and communications. A body may thus begin in the middle of an iteration of the user's loop, for example after a normalization.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from hostweave.base.names import claim_unique
from hostweave.fusion_ir.frontend.runs import Column
from hostweave.fusion_ir.frontend.trace import Tensor, _Trace
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops import OPS, RESHARDS, operand_types
from hostweave.fusion_ir.ops.attributes import DEPTH
from hostweave.fusion_ir.ops.calls import calls
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.fusion_ir.ops.shapes import is_element
from hostweave.fusion_ir.propagation import with_shardings
from hostweave.fusion_ir.resharding import plan
from hostweave.fusion_ir.rewriting import consumers, map_functions
from hostweave.fusion_ir.sharding import flow, layout, with_layout
from hostweave.types.group import ParameterGroup
from hostweave.types.tensor import TensorType

MIN_BODIES = 4  # fewest bodies that become calls; with fewer, the function and the rest of the program are hardly shorter


def loops(trace: _Trace, outputs: Sequence[Tensor], donated: Sequence[str]) -> Iterator["PythonLoop"]:
    """Loops to outline, which have no common ops."""
    fusion = _numbered(trace, outputs)
    inputs = {value.name for value in fusion.inputs}
    elements = {op.result.name for op in fusion.ops if _is_element(op, inputs)}
    ops = [op for op in fusion.ops if op.result.name not in elements]
    if not any(_regions(list(map(_key, ops)))):
        return
    typed = map_functions(fusion, with_shardings)
    ops = [typed.made[op.result.name] for op in ops]
    in_place = {output._value.name for output, into in zip(outputs, donated, strict=False) if into}
    in_place |= {number for number, tensor in trace.tensors.items() if tensor._op is None and tensor._name in donated}
    finder, used = _LoopFinder(typed, trace, in_place), set[int]()
    for begin, end, period in _regions(list(map(_key, ops))):
        starts = (at for at in range(begin, min(begin + period, end - MIN_BODIES * period + 1)) if _may_begin(ops[at]))
        for at in sorted(starts, key=lambda at: -((end - at) // period)):
            begins = range(at, end - period + 1, period)
            bodies = [tuple(ops[at : at + period]) for at in begins]
            # The first bodies rule out most of the possible starts.
            if used.isdisjoint(range(at, begins[-1] + period)) and finder.loop(bodies[:3]) and (loop := finder.loop(bodies)):
                used.update(range(at, begins[-1] + period))
                yield loop
                break


def _numbered(trace: _Trace, outputs: Sequence[Tensor]) -> Fusion:
    """The traced program. The names of values are their numbers in the trace."""
    numbers = tuple(output._value.name for output in outputs)
    needed = trace.needed_for(outputs)
    made = [(tensor._op, tensor._value) for number, tensor in trace.tensors.items() if tensor._op is None or number in needed]
    ops = tuple(replace(op, result=value) for op, value in made if op)
    return Fusion("numbered", trace.mesh, tuple(value for op, value in made if op is None), ops, numbers)


def _is_element(op: Op | None, inputs: Container[str]) -> bool:
    """True for an index of the first dim of an input, such as `w[i]`. The index differs between bodies, so the body takes the element."""
    return op is not None and is_element(op) and op.tensors[0] in inputs


def _key(op: Op) -> object:
    """Equal for ops that differ only in their tensors."""
    numbers = tuple(None if isinstance(operand, str) else operand for operand in op.operands)
    value = op.result
    called = op.callee and op.callee.name
    text = repr((numbers, op.attributes, value.stream))  # a user's attributes may be unhashable until they are verified
    return op.kind, text, value.type, value.pinned, op.location, called, op.user_kernel


def _regions(keys: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """Maximal regions with a period, as (begin, end, period). Shorter periods come first."""
    number: dict[object, int] = {}
    row = [number.setdefault(key, len(number)) for key in keys]
    positions: dict[int, list[int]] = {}
    for at, key in enumerate(row):
        positions.setdefault(key, []).append(at)
    # A body may have an op twice, so the distance to the second next op counts, too.
    apart = Counter(b - a for found in positions.values() for ahead in (1, 2) for a, b in zip(found, found[ahead:], strict=False))
    for period in sorted(distance for distance, times in apart.items() if distance > 1 and times >= MIN_BODIES - 1):
        differ = [at for at in range(len(row) - period) if row[at] != row[at + period]]
        for before, after in pairwise((-1, *differ, len(row) - period)):
            begin, end = before + 1, after + period
            if end - begin >= MIN_BODIES * period:
                yield begin, end, period


def _is_large(op: Op) -> bool:
    return OPS[op.kind].multiplies or calls(op)


def _only_moves(op: Op) -> bool:
    """True for ops that no kernel computes: views, communication, and further results of a call. Constants are part of other kernels."""
    return OPS[op.kind].is_view or op.kind in RESHARDS or OPS[op.kind].arity == 0 or (op.callee is not None and not calls(op))


def _may_begin(op: Op) -> bool:
    return _is_large(op) or _only_moves(op)


@dataclass(frozen=True)
class PythonLoop:
    """Equal bodies, which become calls of a function. For each op of a body, `operands` has an index of another op of the body, or the
    argument of the function in all calls. `carried` maps arguments to the ops whose results the next body takes. `parameters` has the name
    of each argument: first the carried values in the order of the results, then the others in the order of the program's inputs."""

    bodies: Sequence[tuple[Op, ...]]
    operands: tuple[tuple[int | Column, ...], ...]
    carried: Mapping[Column, int]
    parameters: Mapping[Column, str]
    types: Mapping[str, TensorType]  # types of all values of the program, with inferred shardings
    copied: Set[int] = frozenset()  # results that are communicated in the body; the function returns copies of these results

    @cached_property
    def results(self) -> tuple[int, ...]:
        """Ops of a body that compute the results of the function."""
        return tuple(sorted({*self.carried.values()}))

    def name_of(self, result: int, word: str) -> str:
        """Name of a result, after the argument of the next call: `x_out`, or `x_new` if the function returns a copy."""
        return next(f"{name}_{word}" for column, name in self.parameters.items() if self.carried.get(column) == result)

    def made_by(self, ops: Iterable[int]) -> Iterator[tuple[int, int, str]]:
        """Number of the body, index of the op, and name of the value."""
        return ((number, at, body[at].result.name) for at in ops for number, body in enumerate(self.bodies))


class _LoopFinder:
    def __init__(self, fusion: Fusion, trace: _Trace, in_place: set[str]):
        self.fusion, self.trace, self.in_place, self.mesh = fusion, trace, in_place, fusion.mesh
        self.types, self.users = fusion.types, consumers(fusion)

    def loop(self, bodies: Sequence[tuple[Op, ...]]) -> PythonLoop | None:
        """The loop of these bodies, or None if they are not alike, or if the loop might be slower than its iterations."""
        local = [{op.result.name: at for at, op in enumerate(body)} for body in bodies]
        made = {name for of in local for name in of}
        operands, carried = list[tuple[int | Column, ...]](), dict[Column, int]()
        for ops in zip(*bodies, strict=True):
            found = list[int | Column]()
            for column in zip(*(op.tensors for op in ops), strict=True):
                here = {of.get(name) for of, name in zip(local, column, strict=True)}
                before = {of.get(name) for of, name in zip(local, column[1:], strict=False)}
                if len(here) == 1 and (own := next(iter(here))) is not None:
                    found.append(own)
                    continue
                if not made.isdisjoint(column if before == {None} else column[:1]) or len(before) > 1:
                    return None
                found.append(column)
                if (previous := next(iter(before))) is not None:
                    carried[column] = previous
            operands.append(tuple(found))
        columns = dict.fromkeys(operand for of_op in operands for operand in of_op if not isinstance(operand, int))
        parameters = self.parameters(columns, {column: bodies[0][at].result.name for column, at in carried.items()})
        loop = PythonLoop(bodies, tuple(operands), carried, parameters, self.types)
        is_short = sum(not _only_moves(op) for op in bodies[0]) < 2  # such as a single call, for which a function gains nothing
        is_possible = carried and not is_short and self.is_closed(loop, local) and self.is_cut(loop)
        return replace(loop, copied=self.communicated(loop).intersection(loop.results)) if is_possible else None

    def parameters(self, columns: Iterable[Column], carried: Mapping[Column, str]) -> dict[Column, str]:
        """Arguments of the function in the order of its parameters, with the names of the parameters."""
        families = {column: self.family(column) for column in columns if column not in carried}
        ordered = (*sorted(carried, key=lambda column: int(carried[column])), *sorted(families, key=lambda column: families[column][0]))
        taken = set[str]()
        return {c: claim_unique(families[c][1] if c in families else self.variable(carried[c], c[0]), taken) for c in ordered}

    def family(self, column: Column) -> tuple[int, str]:
        """Number of the first input of a group, and the name of the group: `w` for the inputs w_0, w_1, ..., or for w[0], w[1], ..."""
        tensor = self.trace.tensors[column[0]]
        if tensor._op and is_element(tensor._op) and len({*column}) > 1:
            column = (tensor._op.tensors[0],)
        names = {number: str(other._name) for number, other in self.trace.tensors.items() if other._op is None}
        first, last = sorted((names.get(number, "") for number in (column[0], column[-1])), key=lambda name: (len(name), name))
        group = ParameterGroup(first, last, "")
        if not group.names:
            return int(column[0]), self.variable(column[0])
        # The loop may begin after the first input of the group.
        return next(int(number) for number, name in names.items() if group.may_begin_with(name)), group.stem

    def variable(self, *numbers: str) -> str:
        """The user's name of the first of these values that has a name."""
        named = (name for number in numbers for name in (self.trace.tensors[number]._name, self.trace.tensors[number]._variable))
        return next(filter(None, named), "x")

    def communicated(self, loop: PythonLoop) -> set[int]:
        """Ops of a body whose results, or views of them, are communicated. Results of a function are not in windows, but copies are."""
        made, found = dict[int, int](), set[int]()
        for at, op in enumerate(loop.bodies[0]):
            own = [made.get(operand) if isinstance(operand, int) else None for operand in loop.operands[at]]
            found |= {one for number in self.communication(op)[0] if (one := own[number]) is not None}
            made[at] = own[0] if OPS[op.kind].is_view and own and own[0] is not None else at
        return found

    def is_closed(self, loop: PythonLoop, local: Sequence[Mapping[str, int]]) -> bool:
        """True if a body passes values only to the next body, and all values of an argument have one type. Values that the user named,
        streamed, donated or placed on some ranks, and kernels of the user, are not part of loops."""
        symbols = {name for column in loop.parameters for size in self.types[column[0]].shape for name in size.symbols}
        for column in loop.parameters:
            are_alike = len({self.types[name] for name in column}) == 1 and self.in_place.isdisjoint(column)
            if not are_alike or not (column in loop.carried or len({*column}) == 1 or self.is_numbered(column)):
                return False
        for op in loop.bodies[0]:
            type = op.result.type
            if op.user_kernel or OPS[op.kind].updates or op.result.stream or type.mesh or type.partial:
                return False
            if not symbols.issuperset(name for size in type.shape for name in size.symbols):
                return False
        for number, at, name in loop.made_by(range(len(loop.operands))):
            is_result = at in loop.results
            if is_result and number == len(loop.bodies) - 1:
                continue
            near = local[number].keys() | (local[number + 1].keys() if is_result else set())
            if self.trace.tensors[name]._name is not None or any(user is None or user.result.name not in near for user in self.users[name]):
                return False
        return self.in_place.isdisjoint(name for _, _, name in loop.made_by(loop.results))

    def is_numbered(self, column: Column) -> bool:
        """True for inputs whose names count up or down, and for elements of one input."""
        made = [self.fusion.made[name].tensors for name in column if name in self.fusion.made]
        names = tuple(str(self.trace.tensors[name]._name) for name in column)
        numbered = (ParameterGroup(ends[0], ends[-1], "").names for ends in (names, names[::-1]))
        return len({*made}) == 1 if made else names in (next(numbered), next(numbered)[::-1])

    def is_cut(self, loop: PythonLoop) -> bool:
        """True if no kernel, and no communication that overlaps with other work, would cross the border between two bodies."""
        facts: dict[int | Column, _ValueFacts] = {c: _ValueFacts(varies=c in loop.carried, differs=len({*c}) > 1) for c in loop.parameters}
        body, read_first, large = loop.bodies[1], set[int](), set[int]()  # large ops, and communications
        for at, op in enumerate(body):
            given, columns = [facts[operand] for operand in loop.operands[at]], enumerate(loop.operands[at])
            carried = {number: loop.carried[column] for number, column in columns if not isinstance(column, int) and column in loop.carried}
            moved, reduces = self.communication(op)
            facts[at] = made = _ValueFacts(
                any(f.varies for f in given), any(f.differs for f in given), any(f.is_after_large for f in given)
            )
            if any(not given[number].varies for number in moved):
                return False  # Communication of a weight could overlap with the previous iteration.
            if carried and (_only_moves(op) or not moved.isdisjoint(carried)):
                return False  # An argument of a function is contiguous, and in no window, as communication in chunks needs.
            if not made.varies and not _only_moves(op):
                if made.differs and self.joins_reader(op):
                    continue
                return False  # All calls would compute an equal value, or a separate kernel could run in the previous iteration.
            if not made.is_after_large:
                if not _may_begin(op):
                    return False  # A kernel of the previous iteration could compute this op too.
                read_first.update(carried.values())
            if moved or reduces or _is_large(op):
                large.add(at)
                made.needed.add(at)
            made.needed.update(number for fact in given for number in fact.needed)
            made.is_after_large |= _is_large(op)
            linear, terms = OPS[op.kind].linear, [fact.is_term for fact in given]
            is_linear = bool(linear and terms) and (all(terms) if linear == "terms" else any(terms))
            made.is_term = (reduces or is_linear) and not op.result.pinned
        complete = {at for at in loop.results if facts[at].needed == large and not facts[at].is_term}
        return read_first <= complete and all(self.is_stored(body[at]) for at in loop.results)

    def joins_reader(self, op: Op) -> bool:
        """True for a pointwise op of which one kernel reads the result, and therefore computes it."""
        users = self.users[op.result.name]
        return bool(OPS[op.kind].cpp) and len(users) == 1 and users[0] is not None and not _may_begin(users[0])

    def is_stored(self, op: Op) -> bool:
        """True if an op computes its result in new memory."""
        return not _only_moves(op) or OPS[op.kind].arity == 0 or bool(self.communication(op)[0])

    def communication(self, op: Op) -> tuple[set[int], bool]:
        """Indices of the tensors that are communicated before the op, and True if the ranks' results are then reduced."""
        given = [self.types[name] for name in op.tensors]
        if op.kind in RESHARDS:
            wanted, reduces = [op.result.type], False
        else:
            rule = flow(op, operand_types(op, self.types), self.mesh)
            layouts = zip(op.operands, rule.operands(rule.computed(layout(op.result.type))), strict=True)
            needed = [axes for operand, axes in layouts if isinstance(operand, str)]
            wanted = [with_layout(type, axes) for type, axes in zip(given, needed, strict=True)]
            reduces = self.mesh.size_of(rule.partial_axes) > 1
        plans = [plan(source, target, self.mesh, {}, op.location) for source, target in zip(given, wanted, strict=True)]
        sent = [any(not OPS[step.kind].is_view and self.mesh.size_of(step.axes) > 1 for step in steps) for steps in plans]
        return {number for number, is_sent in enumerate(sent) if is_sent}, reduces


@dataclass
class _ValueFacts:
    """Facts of a value in a body.

    - `varies`: the value depends on a carried result
    - `differs`: the value depends on an argument that differs between calls
    - `is_after_large`: the value depends on a large op of the same body
    - `needed`: the large ops and communications of the body on which the value depends
    - `is_term`: linear ops may be applied to the value before the ranks' terms are reduced
    """

    varies: bool = False
    differs: bool = False
    is_after_large: bool = False
    needed: set[int] = field(default_factory=set)
    is_term: bool = False


# --- the function, and its calls --------------------------------------------------------------------------------------


def function_of(trace: _Trace, loop: PythonLoop) -> tuple[_Trace, list[Tensor]]:
    """Trace of the function, and its results."""
    made = _Trace(trace.mesh, trace.functions, trace.sources)
    given: dict[int | Column, str] = {}
    returned = dict[int, str]()
    for column, name in loop.parameters.items():
        given[column] = made.add(None, loop.types[column[0]], pinned=True, name=name)._value.name
    for at, op in enumerate(loop.bodies[0]):
        old = trace.tensors[op.result.name]
        names = iter(loop.operands[at])  # numbers among the operands are constants
        operands = tuple(given[next(names)] if isinstance(operand, str) else operand for operand in op.operands)
        given[at] = number = str(len(made.tensors))
        made.tensors[number] = _like(old, made, old._op and replace(old._op, operands=operands), replace(old._value, name=number))
        if at in loop.copied:
            made.tensors[number]._variable = loop.name_of(at, "new")
            value = Value(str(len(made.tensors)), unsharded(old.type))
            copy = Op("copy", (number,), value, location=op.location)
            made.tensors[value.name] = Tensor(made, copy, value)
        if at in loop.results:
            returned[at] = value.name if at in loop.copied else number
            made.tensors[returned[at]]._variable = loop.name_of(at, "out")
    return made, [made.tensors[returned[at]] for at in loop.results]


def with_calls(trace: _Trace, loop: PythonLoop, function: Fusion) -> _Trace:
    """Trace in which calls of the function replace the bodies. The numbers of values do not change."""
    made = _Trace(trace.mesh, trace.functions, trace.sources)
    inputs = {number: tensor for number, tensor in trace.tensors.items() if tensor._op is None}
    elements = {name: trace.tensors[name] for column in loop.parameters for name in column if _is_element(trace.tensors[name]._op, inputs)}
    gone = {name for _, _, name in loop.made_by(range(len(loop.operands)))}
    new = dict[str, Op]()
    results = {name: loop.name_of(at, "out") for _, at, name in loop.made_by(loop.results)}
    for number, body in enumerate(loop.bodies):
        call, *others = (body[at].result.name for at in loop.results)
        arguments = tuple(column[number] for column in loop.parameters)
        new[call] = Op("call", arguments, Value(call, function.output_types[0]), location=body[0].location, callee=function)
        for index, name in enumerate(others, 1):
            value = Value(name, function.output_types[index])
            new[name] = Op("output", (call,), value, attributes(index=index), body[0].location, callee=function)
    for name, tensor in (inputs | elements | trace.tensors).items():
        if name in new:
            value = Value(name, unsharded(new[name].result.type))
            made.tensors[name] = _like(tensor, made, replace(new[name], result=value), value)
            made.tensors[name]._variable = results[name]
        elif name not in gone:
            made.tensors[name] = _like(tensor, made, tensor._op, tensor._value)
    return made


def is_one_repeat(fusion: Fusion, function: Fusion, loop: PythonLoop) -> bool:
    """True if one repeat of the function replaces all bodies, and all values keep their shardings."""
    users = [op for op in fusion.ops if calls(op) and op.called.name == function.name]
    if len(users) != 1 or users[0][DEPTH].bind(fusion.depths) != len(loop.bodies):
        return False
    typed = map_functions(replace(users[0].called, mesh=fusion.mesh), with_shardings)
    ops = typed.ops
    expected = [op.result.type for at, op in enumerate(loop.bodies[1]) for _ in range(2 if at in loop.copied else 1)]
    added = ops[len(expected) :]
    are_equal = [op.result.type for op in ops[: len(expected)]] == expected
    return are_equal and all(op.kind in RESHARDS and typed.types[op.tensors[0]] == op.result.type for op in added)


def _like(tensor: Tensor, trace: _Trace, op: Op | None, value: Value) -> Tensor:
    made = Tensor(trace, op, value)
    made._name, made._variable, made._word = tensor._name, tensor._variable, tensor._word
    return made
