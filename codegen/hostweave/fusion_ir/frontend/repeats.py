"""Merges repeated calls of a function into one repeat. Operands and results that differ between the calls become parameter groups.

    fusion @f(%x: f32[M, K], %w_0: f32[K, K], %w_1: f32[K, K]) {
      %h: f32[M, K] = call @layer(%x, %w_0)
      %y: f32[M, K] = call @layer(%h, %w_1)

becomes

    fusion @f(%x: f32[M, K], %w: f32[depth, K, K] as w_0 to w_1 of layers) {
      %y: f32[M, K] = repeat @layer(%x, %w, depth=depth, each=(1,), carried=(0,), returned=(0,))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from hostweave.base.names import claim_unique
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops.attributes import AXIS, INDEX
from hostweave.fusion_ir.ops.calls import stacked
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.fusion_ir.rewriting import consumers, eliminate_dead_code
from hostweave.types.group import ParameterGroup
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType

LEAST = 2  # fewest calls that become a repeat

Column = tuple[str, ...]  # values of one operand or of one result in consecutive calls, one per call
_Roles = list[tuple[set[object], set[object], Column]]


class _Unfit(Exception):
    """The run of calls or the column `what` cannot be merged. `repeat_calls` adds it to `unfit`, and starts again without it."""

    def __init__(self, what: object):
        self.what = what


@dataclass(eq=False)
class _Run:
    """Consecutive calls of one function that become a repeat, and the role of each operand."""

    function: Fusion
    calls: tuple[Op, ...]
    results: tuple[Column, ...]  # one column per result; "" for a result that is not used
    carried: dict[int, int] = field(default_factory=dict)  # operand -> index of the previous call's result that it reads
    each: dict[int, Column] = field(default_factory=dict)  # operand -> its values, in the order of the group's tensors
    lagged: dict[int, Column] = field(default_factory=dict)  # operand -> stack or group; call i reads its tensor i - 1
    placed: dict[int, tuple[Column, TensorType]] = field(default_factory=dict)  # result -> the reshards that replace it, all to one type
    backward: bool = False

    @property
    def key(self) -> Column:
        return tuple(call.result.name for call in self.calls)

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(zip(*(call.tensors for call in self.calls), strict=True))

    def in_order(self, column: Column) -> Column:
        """Converts a column from the order of the calls to the order of the group's tensors."""
        return column[::-1] if self.backward else column

    def taken(self, operand: int) -> int:
        """Index of the repeat's result that is the stack of an operand's values."""
        return len(self.results) + operand

    def given(self, result: int) -> int:
        """Index of the repeat's result that is the stack of a result's values."""
        is_carried = result in self.carried.values()
        return len(self.results) + len(self.columns) + result if is_carried else result

    def operand_of(self, result: int) -> int:
        """Operand of the next call that reads a carried result."""
        return next(operand for operand, carried in self.carried.items() if carried == result)

    @property
    def stacks(self) -> dict[Column, int]:
        """Stacks that a later run may read: maps their columns to the indices of the repeat's results."""
        taken = {self.in_order(self.columns[at]): self.taken(at) for at in self.carried}
        return taken | {self.in_order(self.results[at]): self.given(at) for at in (*self.carried.values(), *range(len(self.results)))}


def _counts_up(column: Column) -> bool:
    """True if the names of a column differ in one number, which increases by one."""
    return ParameterGroup(column[0], column[-1], "").names == column


def repeat_calls(fusion: Fusion) -> Fusion:
    """Replaces runs of calls by repeats. Returns the fusion itself if it has no such runs."""
    unfit: set[object] = set()
    groups: dict[Column, bool] = {}
    roles: dict[str, _Roles] = {}
    while True:
        try:
            found = _Repeats(fusion, unfit, groups, roles)
            return _Rewriting(found).fusion() if found.runs else fusion
        except _Unfit as one:
            unfit.add(one.what)


class _Repeats:
    def __init__(self, fusion: Fusion, unfit: set[object], groups: dict[Column, bool], roles: dict[str, _Roles]):
        """`groups` and `roles` are caches that all attempts share: of `is_group`, and of `roles_after`."""
        self.fusion, self.unfit, self.groups, self.roles = fusion, unfit, groups, roles
        self.values = fusion.values()
        self.inputs = {value.name for value in fusion.inputs}
        self.users = consumers(fusion)
        self.taken = {*self.values, *(name for value in self.values.values() for size in value.type.shape for name in size.symbols)}
        self.stacks: dict[Column, tuple[_Run, int]] = {}
        self.runs: list[_Run] = []
        self.selects = {op.result.name: op for op in fusion.ops if op.kind == "select" and op[AXIS] == 0}
        self.result_of: dict[tuple[str, int], str] = {  # (call, index) -> name of that result
            (op.tensors[0], op[INDEX]): op.result.name for op in fusion.ops if op.kind == "output" and op.callee
        }
        self.find()

    # --- runs ---

    def find(self) -> None:
        calls: dict[str, list[Op]] = {}
        for op in self.fusion.ops:
            if op.kind == "call" and op.callee:
                calls.setdefault(op.callee.name, []).append(op)
        for of_function in calls.values():
            begin = 0
            while begin < len(of_function):
                most = self.most_alike(of_function[begin:])
                # shorter runs too: a model may return the carried values of all layers except the last
                ends = sorted({most, most - 1, *(len(column) for column in self.stacks if len(column) < most)}, reverse=True)
                run = next((run for end in ends if end >= LEAST and (run := self.run(of_function[begin : begin + end]))), None)
                if run and not (run.carried or run.each or run.lagged):
                    run = None  # `share_equal_ops` merges such equal calls
                if run:
                    self.runs.append(run)
                    run.placed = {at: placed for at in range(len(run.results)) if (placed := self.placed(run, at))}
                    self.stacks |= {column: (run, number) for column, number in run.stacks.items()}
                    self.stacks |= {run.in_order(column): (run, at) for at, (column, _) in run.placed.items()}
                begin += len(run.calls) if run else 1

    def most_alike(self, calls: Sequence[Op]) -> int:
        """Length of the longest prefix of calls in which each operand has one role: carried from one result, shared by all calls, or
        different in each call."""
        in_turn = {name for column in self.stacks for name in column} | self.inputs | self.selects.keys()
        roles: list[set[object]] = []
        for number, (before, call) in enumerate(pairwise(calls), 1):
            own = [fixed if not in_turn.isdisjoint(pair) else rest for fixed, rest, pair in self.roles_after(before, call)]
            roles = [a & b for a, b in zip(roles, own, strict=True)] if roles else own
            if not all(roles):
                return number
        return len(calls)

    def roles_after(self, before: Op, call: Op) -> _Roles:
        """For each operand: its possible roles if one group or stack has its values of both calls, its roles if none has, and the two
        values."""
        if call.result.name not in self.roles:
            given, found = self.results_of(before), _Roles()
            for a, b in zip(before.tensors, call.tensors, strict=True):
                rest = {*(("carried", at) for at, name in enumerate(given) if name == b), *(("shared",) if a == b else ())}
                found.append((rest | {"in turn"}, rest, (a, b) if a != b else ()))
            self.roles[call.result.name] = found
        return self.roles[call.result.name]

    def results_of(self, call: Op) -> list[str]:
        """Names of the results of a call, with "" for a result that is not used."""
        assert call.callee is not None
        return [call.result.name, *(self.result_of.get((call.result.name, at), "") for at in range(1, len(call.callee.outputs)))]

    def run(self, calls: Sequence[Op]) -> _Run | None:
        """The run that these calls form, or None if they cannot be a repeat."""
        function = calls[0].callee
        assert function is not None
        is_inner = any(op.callee and op.callee.name == function.name for other in self.fusion.functions for op in other.ops)
        if is_inner or any(type.mesh for type in function.types.values()):
            return None
        run = _Run(function, tuple(calls), ())
        if run.key in self.unfit:
            return None
        run.results = tuple(zip(*map(self.results_of, calls), strict=True))
        before = {column[:-1]: at for at, column in enumerate(run.results)}
        in_turn = dict[int, Column]()
        for at, column in enumerate(run.columns):
            if column[1:] in before and before[column[1:]] not in run.carried.values():
                run.carried[at] = before[column[1:]]
            elif len({*column}) > 1:
                in_turn[at] = column
        for is_late, backward in product((False, True), (False, True)):
            run.backward = backward
            run.each = {at: run.in_order(column) for at, column in in_turn.items()}
            late = {at: column for at, column in run.each.items() if not (self.is_stack(column) or self.is_group(column))}
            run.lagged = {at: whole for at, column in late.items() if is_late and (whole := self.whole(column))}
            run.each = {at: column for at, column in run.each.items() if at not in late}
            if len(run.lagged) == len(late):
                return run
        if not self.stacks:  # later attempts have fewer groups, and these calls cannot repeat there either
            self.unfit.add(run.key)
        return None

    def placed(self, run: _Run, at: int) -> tuple[Column, TensorType] | None:
        """Results and type of the reshards of a result, if all uses of the result are reshards to one type. The function can then
        reshard."""
        users = [[op for op in self.users.get(name, []) if op is None or op.kind != "output"] for name in run.results[at]]
        reshards = [of[0].result for of in users if len(of) == 1 and of[0] and of[0].kind == "reshard"]
        is_inner = all(None not in self.users[value.name] for value in reshards)
        if at in run.carried.values() or len(reshards) < len(users) or not is_inner or len({value.type for value in reshards}) > 1:
            return None
        return tuple(value.name for value in reshards), reshards[0].type

    def whole(self, column: Column) -> Column:
        """The stack or group whose tensors, except the last one, are the values of a lagged column after its first value. () if there is
        none."""
        rest = column[1:]
        if found := next((stack for stack in self.stacks if stack[:-1] == rest), None):
            return found
        for match in re.finditer(r"\d+", rest[-1]) if len(rest) > 1 else ():
            following = f"{rest[-1][: match.start()]}{int(match[0]) + 1}{rest[-1][match.end() :]}"
            if self.is_group((*rest, following)):
                return (*rest, following)
        return ()

    def is_stack(self, column: Column) -> bool:
        """True if these values are a stack: results of an earlier run, or consecutive indices of one tensor."""
        return column in self.stacks or self.is_part(column)

    def is_part(self, column: Column) -> bool:
        """True if these values are consecutive indices of the outermost dim of one tensor, such as seeds of random numbers."""
        ops = [self.selects[name] for name in column if name in self.selects]
        source = ops[0].tensors[0] if ops else ""
        expected = [((source,), ops[0][INDEX] + number) for number in range(len(column))] if ops else []
        return bool(ops) and [(op.tensors, op[INDEX]) for op in ops] == expected and not self.values[source].type.dims[0].axes

    def is_group(self, column: Column) -> bool:
        """True if these inputs can form a parameter group: their names count up, and their types are equal."""
        if column not in self.groups:
            are_inputs = all(name in self.inputs for name in column)
            self.groups[column] = (
                are_inputs and _counts_up(column) and all(self.values[name].type == self.values[column[0]].type for name in column)
            )
        return self.groups[column] and column not in self.unfit

    # --- groups of inputs and outputs ---

    def group_inputs(self) -> list[Value | tuple[Column, ...]]:
        """Inputs in order, with groups replaced. Consecutive inputs such as `w_0, v_0, w_1, v_1` are one entry, the tuple of their columns.

        Raises _Unfit if a run needs a column whose names are not at regular distances in the inputs.
        """
        columns = (column for run in self.runs for column in (*run.each.values(), *run.lagged.values()))
        wanted = {column: column for column in columns if not self.is_stack(column)}
        counts = Counter(name for column in wanted for name in column)
        if twice := next((name for name, times in counts.items() if times > 1), None):
            raise _Unfit(next(column for column in wanted if twice in column))
        return self.in_structs([value.name for value in self.fusion.inputs], wanted)

    def in_structs(self, names: list[str], wanted: Mapping[Column, object]) -> list[Value | tuple[Column, ...]]:
        """Names in order, with groups replaced as in `group_inputs`. `wanted` maps each required column to the argument of its _Unfit."""
        found: list[Value | tuple[Column, ...]] = []
        in_column = {name: column for column in wanted for name in column}
        at = 0
        while at < len(names):
            rows = self.rows(names, at, wanted)
            if rows:
                found.append(rows)
                at += len(rows) * len(rows[0])
            elif names[at] in in_column:
                raise _Unfit(wanted[in_column[names[at]]])
            else:
                found.append(self.values[names[at]])
                at += 1
        return found

    def rows(self, names: list[str], begin: int, wanted: Mapping[Column, object]) -> tuple[Column, ...] | None:
        """Columns that are interleaved from index `begin` on. None unless one is in `wanted`, and the others are wanted or groups."""
        for column in wanted:
            try:
                first, second = names.index(column[0], begin), names.index(column[1], begin)
            except ValueError:
                continue
            stride, length = second - first, len(column)
            if first - begin >= stride or stride < 1 or begin + stride * length > len(names):
                continue
            columns = tuple(tuple(names[begin + of : begin + stride * length : stride]) for of in range(stride))
            if column in columns and all(one in wanted or self.is_group(one) for one in columns):
                return columns
        return None

    def group_outputs(self) -> dict[Column, tuple[_Run, int, TensorType | None]]:
        """Columns of results that the program returns. Values: the run, the result's index, and the type of a reshard after it or None."""
        found: dict[Column, tuple[_Run, int, TensorType | None]] = {}
        for run in self.runs:
            for at, given in enumerate(run.results):
                returned = [self.returned(name) for name in given]
                is_carried = at in run.carried.values()
                if is_carried and any(returned[:-1]) and self.is_kept_otherwise(run, at):
                    raise _Unfit(run.key)
                if any(returned[:-1] if is_carried else returned):
                    column = run.in_order(tuple(names[0] if len(names) == 1 else "" for names in returned))
                    types = {self.values[name].type for name in column if name}
                    if "" in column or len(types) > 1 or not _counts_up(column):
                        raise _Unfit(run.key)
                    found[column] = run, at, None if column == run.in_order(given) else types.pop()
        return found

    def is_kept_otherwise(self, run: _Run, at: int) -> bool:
        """True if the carried value is updated in place, or if other runs use all values of its operand."""
        operand = run.operand_of(at)
        kept = run.in_order(run.columns[operand])
        is_updated = bool(run.function.donated) and run.function.donated[at] == run.function.inputs[operand].name
        return is_updated or any(kept in other.each.values() for other in self.runs)

    def returned(self, name: str) -> list[str]:
        """Outputs of the program that are this value or a reshard of this value."""
        if not name:
            return []
        reshards = [op.result.name for op in self.users[name] if op and op.kind == "reshard" and None in self.users[op.result.name]]
        return [name] * (None in self.users[name]) + reshards


class _Rewriting:
    def __init__(self, found: _Repeats):
        self.found, self.before = found, found.fusion
        self.values, self.taken = found.values, set(found.taken)
        self.inputs, self.outputs = found.group_inputs(), found.group_outputs()
        columns = (column for rows in self.inputs if isinstance(rows, tuple) for column in rows)
        self.in_groups = {len(column) for column in (*columns, *self.outputs)}
        self.sizes: dict[int, Size] = {}
        self.structs: set[str] = set()
        self.element: dict[str, tuple[str, int]] = {}  # value -> the group or stack that contains it, and its index there
        self.name_of: dict[Column, str] = {}  # names of groups and stacks
        self.same: dict[str, str] = {}  # value -> value that replaces it
        self.functions: dict[str, Fusion] = {}
        self.parts: list[Op] = []  # slices of tensors of which each call reads one index

    def depth(self, calls: int) -> Size:
        """Number of calls of a repeat: a symbolic size if a parameter group has that many tensors, otherwise an int."""
        if calls not in self.in_groups:
            return Size(calls)
        if calls not in self.sizes:
            self.sizes[calls] = Size.of(claim_unique("depth", self.taken))
        return self.sizes[calls]

    def fusion(self) -> Fusion:
        inputs = [value for item in self.inputs for value in (self.grouped(item) if isinstance(item, tuple) else (item,))]
        outputs, donated, groups = self.returned()
        for run in self.found.runs:
            self.pin(run)
            self.take_as_given(run)
            self.take_parts(run)
        ops = self.sorted_ops(inputs, outputs)
        return replace(self.before, inputs=tuple(inputs), body=ops, outputs=outputs, donated=donated, returned=groups)

    def grouped(self, columns: tuple[Column, ...]) -> Iterable[Value]:
        """Replaces each column of inputs by one value, a parameter group. The groups form one struct."""
        runs = [run.function.name for run in self.found.runs if not {*run.each.values(), *run.lagged.values()}.isdisjoint(columns)]
        struct = claim_unique(f"{runs[0]}s", self.structs)
        for column in columns:
            group, value = ParameterGroup(column[0], column[-1], struct), self.values[column[0]]
            name = self.named(column, group)
            self.element |= {element: (name, number) for number, element in enumerate(column)}
            yield replace(value, name=name, type=stacked(value.type, self.depth(len(column))), group=group)

    def named(self, column: Column, group: ParameterGroup) -> str:
        before, _, after = group.pattern
        words = [word for word in (before.strip("_"), after.strip("_")) if word]
        self.name_of[column] = claim_unique("_".join(words) or "group", self.taken)
        return self.name_of[column]

    def returned(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[ParameterGroup | None, ...]]:
        """Outputs of the program, the donated input of each output, and the parameter group of each output."""
        old = list(self.before.outputs)
        donated = dict(zip(old, self.before.donated or ("",) * len(old), strict=True))
        outputs: list[tuple[str, str, ParameterGroup | None]] = []
        structs: set[str] = set()
        for item in self.found.in_structs(old, {column: run.key for column, (run, _, _) in self.outputs.items()}):
            if isinstance(item, Value):
                outputs.append((item.name, donated[item.name], None))
                continue
            run = next(self.outputs[column][0] for column in item if column in self.outputs)
            struct = claim_unique(f"{run.function.name}s", structs)
            for column in item:
                if column not in self.outputs:
                    raise _Unfit(run.key)
                group = ParameterGroup(column[0], column[-1], struct)
                name, into = self.named(column, group), tuple(donated[one] for one in column)
                if any(into) and into not in self.name_of:
                    raise _Unfit(self.outputs[column][0].key)
                outputs.append((name, self.name_of[into] if any(into) else "", group))
        of_groups = {name for column in self.name_of for name in column if name in self.found.inputs}
        if any(into in of_groups for name, into, group in outputs if not group):
            raise _Unfit(next(run.key for run in self.found.runs))
        names, into, groups = zip(*outputs, strict=True)
        return names, into if any(into) else (), groups if any(groups) else ()

    def pin(self, run: _Run) -> None:
        """Makes the function return its results in the shardings that the next call and the program's outputs need."""
        function = self.functions.get(run.function.name, run.function)
        wanted = {result: function.inputs[operand].type for operand, result in run.carried.items()}
        wanted |= {at: type for at, (_, type) in run.placed.items()}
        for of, at, type in self.outputs.values():
            if of is run and type and wanted.setdefault(at, type) != type:
                raise _Unfit(run.key)
        made, ops, outputs = function.made, list(function.ops), function.outputs
        names = set(function.values())
        for at, type in wanted.items():
            value = made[outputs[at]].result
            if (value.type != type or not value.pinned) and function.mesh.axes:
                before = claim_unique(f"{value.name}_made", names)
                ops = [
                    replace(op, result=replace(op.result, name=before)) if op.result == value else op.renamed({value.name: before})
                    for op in ops
                ]
                ops.append(Op("reshard", (before,), Value(value.name, type, pinned=True), location=made[value.name].location))
            elif value.type != type:
                raise _Unfit(run.key)
        self.functions[function.name] = replace(function, body=tuple(ops))

    def take_as_given(self, run: _Run) -> None:
        """Moves reshards of a group's tensors into the function, because a group is not one buffer that could be resharded before."""
        function = self.functions[run.function.name]
        names, reshards, inputs = set(function.values()), list[Op](), list(function.inputs)
        for at, value in enumerate(run.function.inputs):
            given = {type for other in self.found.runs if other.function.name == function.name and (type := self.type_in_group(other, at))}
            if given <= {inputs[at].type}:
                continue
            if len(given) > 1 or value.name in function.donated:
                raise _Unfit(run.key)
            inputs[at] = replace(value, name=claim_unique(f"{value.name}_given", names), type=given.pop())
            reshards.append(Op("reshard", (inputs[at].name,), replace(value, pinned=True), location=run.calls[0].location))
        self.functions[function.name] = replace(function, inputs=tuple(inputs), body=(*reshards, *function.body))

    def take_parts(self, run: _Run) -> None:
        """Adds a slice for each tensor of which each call reads the next index."""
        for column in run.each.values():
            if column not in self.found.stacks and column not in self.name_of and self.found.is_part(column):
                first = self.found.selects[column[0]]
                self.name_of[column] = claim_unique(f"{first.tensors[0]}_of_{run.function.name}", self.taken)
                result = Value(self.name_of[column], stacked(first.result.type, self.depth(len(column))))
                given = attributes(axis=0, start=first[INDEX], step=1)
                self.parts.append(Op("slice", first.tensors, result, given, first.location))

    def type_in_group(self, run: _Run, operand: int) -> TensorType | None:
        """Type of the tensors of the parameter group that an operand reads. None if the operand reads no group."""
        column = (run.each | run.lagged).get(operand)
        return None if column is None or self.found.is_stack(column) else self.values[column[0]].type

    # --- ops ---

    def sorted_ops(self, inputs: list[Value], outputs: tuple[str, ...]) -> tuple[Op, ...]:
        """The ops, with each run replaced by a repeat. Keeps the original order where the operands allow it."""
        run_of = {name: run for run in self.found.runs for names in (run.key, *run.results) for name in names if name}
        for run in self.found.runs:
            self.place(run, outputs)
        units: list[Op | _Run] = [*self.parts]
        for op in self.before.ops:
            name = op.result.name
            if name in run_of:
                if run_of[name] not in units:
                    units.append(run_of[name])
            elif name not in self.element:
                units.append(op)
        known, ops, selected, elements = {value.name for value in inputs}, list[Op](), set[str](), {*self.element}
        while units:
            for unit in units:
                new = self.repeat(unit) if isinstance(unit, _Run) else [self.linked(unit)]
                own = {op.result.name for op in new}
                needed = dict.fromkeys(name for op in new for name in op.tensors if name not in own)
                selects = [self.select(name) for name in needed if name in self.element and name not in selected]
                if needed.keys() - elements <= known and all(op.tensors[0] in known for op in selects):
                    selected.update(op.result.name for op in selects)
                    ops += [*selects, *new]
                    known.update(op.result.name for op in ops[-len(selects) - len(new) :])
                    units.remove(unit)
                    break
            else:
                raise _Unfit(next(unit.key for unit in units if isinstance(unit, _Run)))
        return eliminate_dead_code(ops, outputs)

    def place(self, run: _Run, outputs: tuple[str, ...]) -> None:
        """Names the results of a repeat, and maps each result of the calls to its replacement."""
        for column, (of, _, _) in self.outputs.items():
            if of is run:
                self.element |= {name: (self.name_of[column], number) for number, name in enumerate(column)}
        for at, given in enumerate(run.results):
            if at in run.carried.values():
                first, last = given[0], given[-1]
                is_read = any(op is None or op.kind not in ("call", "output") for op in self.found.users[first])
                self.same[last] = last if not last or last in outputs or is_read else first
                self.stack(run, run.in_order(given), run.given(at), ())
                self.stack(run, run.in_order(run.columns[run.operand_of(at)]), run.taken(run.operand_of(at)), given[:-1])
                self.element.pop(self.same[last], None)
            else:
                self.stack(run, run.in_order(given), at, given)
                placed = run.in_order(run.placed[at][0]) if at in run.placed else ()
                self.name_of |= {placed: self.name_of[run.in_order(given)]} if placed else {}
                self.element |= {name: (self.name_of[placed], number) for number, name in enumerate(placed)}

    def stack(self, run: _Run, column: Column, at: int, elements: Column) -> None:
        """Names a stack, and maps each value of `elements` to a tensor of the stack."""
        returned = next((self.name_of[c] for c, (of, number, _) in self.outputs.items() if of is run and run.given(number) == at), None)
        if column not in self.name_of:
            names = [*run.function.outputs, *(f"{value.name}_taken" for value in run.function.inputs), *run.function.outputs]
            self.name_of[column] = returned or claim_unique(f"{run.function.name}_{names[at]}", self.taken)
        for number, name in enumerate(column):
            if name in elements and name and name not in self.element:
                self.element[name] = self.name_of[column], number

    def repeat(self, run: _Run) -> list[Op]:
        """The repeat, followed by an `output` op for each further result."""
        function, first, depth = self.functions[run.function.name], run.calls[0], self.depth(len(run.calls))
        whole = run.each | run.lagged
        firsts = tuple(self.now(run.in_order(run.columns[at])[0]) for at in run.lagged)
        operands = (*(self.name_of[whole[at]] if at in whole else self.now(name) for at, name in enumerate(first.tensors)), *firsts)
        roles = {
            "each": tuple(run.each),
            "lagged": tuple(run.lagged),
            "carried": tuple(run.carried),
            "returned": tuple(run.carried.values()),
        }
        given = attributes(depth=depth, **{name: numbers for name, numbers in roles.items() if numbers}, backward=run.backward)
        is_carried = 0 in run.carried.values()
        name = self.same[run.results[0][-1]] if is_carried else self.name_of[run.in_order(run.results[0])]
        result = Value(name, first.result.type if is_carried else stacked(first.result.type, depth))
        ops = [Op("repeat", operands, result, given, first.location, callee=function)]
        for at, column in enumerate(run.results[1:], 1):
            if at in run.carried.values():
                ops += [self.output(run, name, at, self.same[column[-1]])] if column[-1] else []
            elif any(column):
                ops.append(self.output(run, name, at, self.name_of[run.in_order(column)]))
        for operand, at in run.carried.items():
            ops.append(self.output(run, name, run.taken(operand), self.name_of[run.in_order(run.columns[operand])]))
            ops.append(self.output(run, name, run.given(at), self.name_of[run.in_order(run.results[at])]))
        return ops

    def output(self, run: _Run, call: str, at: int, name: str) -> Op:
        function, depth = self.functions[run.function.name], self.depth(len(run.calls))
        given = attributes(index=at, depth=None if at in run.carried.values() else depth)
        types = (*function.output_types, *(value.type for value in function.inputs), *function.output_types)
        type = types[at] if at in run.carried.values() else stacked(types[at], depth)
        return Op("output", (call,), Value(name, unsharded(type)), given, run.calls[0].location, callee=function)

    def now(self, name: str) -> str:
        return self.same.get(name, name)

    def linked(self, op: Op) -> Op:
        callee = self.functions.get(op.callee.name, op.callee) if op.callee else None
        return replace(op.renamed({name: self.now(name) for name in op.tensors}), callee=callee)

    def select(self, name: str) -> Op:
        stack, number = self.element[name]
        type, count = self.values[name].type, len(next(column for column, other in self.name_of.items() if other == stack))
        if number >= count / 2 and not self.depth(count).is_int:  # counts from the end: then no index depends on the depth
            number -= count
        return Op("select", (stack,), Value(name, type if name in self.found.inputs else unsharded(type)), attributes(axis=0, index=number))
