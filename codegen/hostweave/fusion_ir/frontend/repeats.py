"""Merges repeated calls of a function into one repeat. Inputs and outputs that each belong to one call form parameter groups.

    fusion @f(%x: f32[M, K], %w_0: f32[K, K], %w_1: f32[K, K]) {
      %h: f32[M, K] = call @layer(%x, %w_0)
      %y: f32[M, K] = call @layer(%h, %w_1)

becomes

    fusion @f(%x: f32[M, K], %w: f32[depth, K, K] as w_0 to w_1 of layers) {
      %y: f32[M, K] = repeat @layer(%x, %w, depth=depth, each=(1,), carried=(0,), returned=(0,))
"""

from collections.abc import Iterable
from dataclasses import replace

from hostweave.base.names import claim_unique
from hostweave.fusion_ir.frontend.runs import CallRun, Column, Roles, Runs, Unfit
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops.attributes import INDEX
from hostweave.fusion_ir.ops.calls import result_type, stacked
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.fusion_ir.rewriting import eliminate_dead_code
from hostweave.types.group import ParameterGroup
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType


def repeat_calls(fusion: Fusion) -> Fusion:
    unfit: set[object] = set()
    groups: dict[Column, bool] = {}
    roles: dict[str, Roles] = {}
    while True:
        try:
            found = Runs(fusion, unfit, groups, roles)
            return _Rewriting(found).fusion() if found.runs else fusion
        except Unfit as one:
            unfit.add(one.what)


class _Rewriting:
    def __init__(self, found: Runs):
        self.found, self.before = found, found.fusion
        self.values, self.taken = found.values, set(found.taken)
        self.inputs, self.outputs = found.group_inputs(), found.group_outputs()
        columns = (column for rows in self.inputs if isinstance(rows, tuple) for column in rows)
        self.in_groups = {len(column) for column in (*columns, *self.outputs)}
        self.sizes: dict[int, Size] = {}
        self.structs: set[str] = set()
        self.element: dict[str, tuple[str, int]] = {}  # value -> its group or stack (see `runs`), and index in this group or stack
        self.name_of: dict[Column, str] = {}  # names of groups and stacks
        self.same: dict[str, str] = {}  # value -> value that replaces it
        self.functions: dict[str, Fusion] = {}
        self.slices: list[Op] = []  # slices of tensors; each call reads one index of a slice

    def depth(self, calls: int) -> Size:
        """Number of calls as a size: symbolic if it is the length of a parameter group, otherwise an int."""
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
            self.take_slices(run)
        ops = self.sorted_ops(inputs, outputs)
        return replace(self.before, inputs=tuple(inputs), body=ops, outputs=outputs, donated=donated, returned=groups)

    def grouped(self, columns: tuple[Column, ...]) -> Iterable[Value]:
        runs = [run.function.name for run in self.found.runs if not {*run.each.values(), *run.lagged.values()}.isdisjoint(columns)]
        struct = claim_unique(f"{runs[0]}s", self.structs)
        for column in columns:
            group, value = ParameterGroup(column[0], column[-1], struct), self.values[column[0]]
            name = self.named(column, group)
            self.element |= {element: (name, number) for number, element in enumerate(column)}
            yield replace(value, name=name, type=stacked(value.type, self.depth(len(column))), group=group)

    def named(self, column: Column, group: ParameterGroup) -> str:
        self.name_of[column] = claim_unique(group.stem or "group", self.taken)
        return self.name_of[column]

    def returned(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[ParameterGroup | None, ...]]:
        """Outputs of the program, with the donated input and the parameter group of each output."""
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
                    raise Unfit(run.key)
                group = ParameterGroup(column[0], column[-1], struct)
                name, into = self.named(column, group), tuple(donated[one] for one in column)
                if any(into) and into not in self.name_of:
                    raise Unfit(self.outputs[column][0].key)
                outputs.append((name, self.name_of[into] if any(into) else "", group))
        of_groups = {name for column in self.name_of for name in column if name in self.found.inputs}
        if any(into in of_groups for name, into, group in outputs if not group):
            raise Unfit(next(run.key for run in self.found.runs))
        names, into, groups = zip(*outputs, strict=True)
        return names, into if any(into) else (), groups if any(groups) else ()

    def pin(self, run: CallRun) -> None:
        """Makes the function return each result in the sharding that the next call, later reshards or the outputs need."""
        function = self.functions.get(run.function.name, run.function)
        wanted = {result: function.inputs[operand].type for operand, result in run.carried.items()}
        wanted |= {at: type for at, (_, type) in run.placed.items()}
        for of, at, type in self.outputs.values():
            if of is run and type and wanted.setdefault(at, type) != type:
                raise Unfit(run.key)
        made, ops, outputs = function.made, list(function.ops), function.outputs
        names = set(function.values())
        for at, type in wanted.items():
            value = made[outputs[at]].result
            if (value.type != type or not value.pinned) and function.mesh.axes:
                before = claim_unique(f"{value.name}_local", names)
                ops = [
                    replace(op, result=replace(op.result, name=before)) if op.result == value else op.renamed({value.name: before})
                    for op in ops
                ]
                ops.append(Op("reshard", (before,), Value(value.name, type, pinned=True), location=made[value.name].location))
            elif value.type != type:
                raise Unfit(run.key)
        self.functions[function.name] = replace(function, body=tuple(ops))

    def take_as_given(self, run: CallRun) -> None:
        """Makes the function reshard an input if the input's parameter group has another sharding. No reshard can read a whole group."""
        function = self.functions[run.function.name]
        names, reshards, inputs = set(function.values()), list[Op](), list(function.inputs)
        for at, value in enumerate(run.function.inputs):
            given = {type for other in self.found.runs if other.function.name == function.name and (type := self.type_in_group(other, at))}
            if given <= {inputs[at].type}:
                continue
            if len(given) > 1 or value.name in function.donated:
                raise Unfit(run.key)
            inputs[at] = replace(value, name=claim_unique(f"{value.name}_given", names), type=given.pop())
            reshards.append(Op("reshard", (inputs[at].name,), replace(value, pinned=True), location=run.calls[0].location))
        self.functions[function.name] = replace(function, inputs=tuple(inputs), body=(*reshards, *function.body))

    def take_slices(self, run: CallRun) -> None:
        """If the calls read consecutive indices of a tensor, adds a slice with these indices."""
        for column in run.each.values():
            if column not in self.found.stacks and column not in self.name_of and self.found.is_slice(column):
                first = self.found.selects[column[0]]
                self.name_of[column] = claim_unique(f"{first.tensors[0]}_of_{run.function.name}", self.taken)
                result = Value(self.name_of[column], stacked(first.result.type, self.depth(len(column))))
                given = attributes(axis=0, start=first[INDEX], step=1)
                self.slices.append(Op("slice", first.tensors, result, given, first.location))

    def type_in_group(self, run: CallRun, operand: int) -> TensorType | None:
        """Type of one tensor of the parameter group that an operand reads, or None."""
        column = (run.each | run.lagged).get(operand)
        return None if column is None or self.found.is_stack(column) else self.values[column[0]].type

    def sorted_ops(self, inputs: list[Value], outputs: tuple[str, ...]) -> tuple[Op, ...]:
        """The ops, with each run replaced by a repeat, in the original order as far as operands allow."""
        run_of = {name: run for run in self.found.runs for names in (run.key, *run.results) for name in names if name}
        for run in self.found.runs:
            self.enter_elements(run, outputs)
        units: list[Op | CallRun] = [*self.slices]
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
                new = self.repeat(unit) if isinstance(unit, CallRun) else [self.linked(unit)]
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
                raise Unfit(next(unit.key for unit in units if isinstance(unit, CallRun)))
        return eliminate_dead_code(ops, outputs)

    def enter_elements(self, run: CallRun, outputs: tuple[str, ...]) -> None:
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

    def stack(self, run: CallRun, column: Column, at: int, elements: Column) -> None:
        """Names the stack of a column. The stack replaces the values of the column that are in `elements`."""
        returned = next((self.name_of[c] for c, (of, number, _) in self.outputs.items() if of is run and run.given(number) == at), None)
        if column not in self.name_of:
            names = [*run.function.outputs, *(f"{value.name}_taken" for value in run.function.inputs), *run.function.outputs]
            self.name_of[column] = returned or claim_unique(f"{run.function.name}_{names[at]}", self.taken)
        for number, name in enumerate(column):
            if name in elements and name and name not in self.element:
                self.element[name] = self.name_of[column], number

    def repeat(self, run: CallRun) -> list[Op]:
        """The repeat, followed by `output` ops for its results after result 0."""
        function, first, depth = self.functions[run.function.name], run.calls[0], self.depth(len(run.calls))
        whole = run.each | run.lagged
        firsts = tuple(self.now(run.in_order(run.columns[at])[0]) for at in run.lagged)
        operands = (*(self.name_of[whole[at]] if at in whole else self.now(name) for at, name in enumerate(first.tensors)), *firsts)
        roles: dict[str, Iterable[int]] = {"each": run.each, "lagged": run.lagged, "carried": run.carried, "returned": run.carried.values()}
        numbers = {name: tuple(of_role) or None for name, of_role in roles.items()}
        given = attributes(depth=depth, **numbers, backward=run.backward)
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

    def output(self, run: CallRun, call: str, at: int, name: str) -> Op:
        function, depth = self.functions[run.function.name], self.depth(len(run.calls))
        given = attributes(index=at, depth=None if at in run.carried.values() else depth)
        op = Op("output", (call,), run.calls[0].result, given, run.calls[0].location, callee=function)
        return replace(op, result=Value(name, unsharded(result_type(op, at))))

    def now(self, name: str) -> str:
        return self.same.get(name, name)

    def linked(self, op: Op) -> Op:
        callee = self.functions.get(op.callee.name, op.callee) if op.callee else None
        return replace(op.renamed({name: self.now(name) for name in op.tensors}), callee=callee)

    def select(self, name: str) -> Op:
        stack, number = self.element[name]
        type, count = self.values[name].type, len(next(column for column, other in self.name_of.items() if other == stack))
        if number >= count / 2 and not self.depth(count).is_int:  # indices in the second half are negative: the last index is always -1
            number -= count
        return Op("select", (stack,), Value(name, type if name in self.found.inputs else unsharded(type)), attributes(axis=0, index=number))
