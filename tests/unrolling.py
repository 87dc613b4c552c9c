"""Unrolls repeats into single calls, and inlines calls. The results are large, and only for tests that read programs op by op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from hostweave.base.names import claim_unique
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops.attributes import AXIS, BACKWARD, DEPTH, EACH, INDEX
from hostweave.fusion_ir.ops.calls import carried_by, lagged_by
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.fusion_ir.rewriting import without_loops
from hostweave.types.size import Size


def unrolled(fusion: Fusion) -> Fusion:
    """Replaces repeats by calls, and parameter groups by separate tensors."""
    return _Unrolling(fusion).fusion() if any(op.kind == "repeat" for op in fusion.ops) or fusion.depths else fusion


class _Unrolling:
    def __init__(self, given: Fusion):
        self.given, self.taken = given, {*given.values(), *(value.name for value in (*given.arguments, *given.results))}
        self.elements = {value.name: value.group.names for value in given.inputs if value.group}  # parameter group -> names
        self.returned = {name: group.names for name, group in zip(given.outputs, given.returned, strict=False) if group}
        self.same: dict[str, str] = {}
        self.repeats = {op.result.name for op in given.ops if op.kind == "repeat"}
        self.used = {(op.tensors[0], op[INDEX]): op for op in given.ops if op.kind == "output"}

    def fusion(self) -> Fusion:
        ops = tuple(new for op in self.given.ops for new in self.expanded(op))
        outputs = tuple(value.name for value in self.given.results)
        memories = {value.name: value.group.names for value in self.given.inputs if value.group}
        donated = dict(zip(self.given.outputs, self.given.donated, strict=False))
        places = ((donated.get(name, ""), number) for name, number in self.given.numbered_results)
        into = tuple(memories[memory][number] if memory and number is not None else memory for memory, number in places)
        return replace(self.given, inputs=self.given.arguments, body=ops, outputs=outputs, donated=into if any(into) else (), returned=())

    def expanded(self, op: Op) -> Iterator[Op]:
        if op.kind == "repeat":
            yield from self.calls(op)
        elif op.kind == "output" and op.tensors[0] in self.repeats:
            return
        elif op.kind == "select" and op.tensors[0] in self.elements and op[AXIS] == 0:
            self.same[op.result.name] = self.elements[op.tensors[0]][op[INDEX]]
        else:
            for name in op.tensors:
                yield from self.stack(name)
            yield op.renamed(self.same)

    def stack(self, name: str) -> Iterator[Op]:
        """Concatenates the tensors of a stack, for an op that reads the whole stack."""
        if name not in self.elements or name in self.same:
            return
        parts, type = list[str](), self.given.types[name]
        one = replace(unsharded(type), dims=(replace(type.dims[0], size=Size()), *unsharded(type).dims[1:]))
        for element in self.elements[name]:
            parts.append(claim_unique(f"{element}_expanded", self.taken))
            yield Op("expand_dims", (element,), Value(parts[-1], one), attributes(axis=(0,)))
        self.same[name] = claim_unique(f"{name}_joined", self.taken)
        dims = (replace(type.dims[0], size=Size(len(parts))), *unsharded(type).dims[1:])
        yield Op("concat", tuple(parts), Value(self.same[name], replace(unsharded(type), dims=dims)), attributes(axis=0))

    def calls(self, op: Op) -> Iterator[Op]:
        function, depth = op.callee, op[DEPTH].bind(self.given.depths)
        assert function is not None
        results, carried, name = len(function.outputs), carried_by(op), op.result.name
        names = {0: name} | {index: made.result.name for (call, index), made in self.used.items() if call == name}
        order = range(depth)[:: -1 if op[BACKWARD] else 1]
        taken = [self.same.get(operand, operand) for operand in op.tensors[: len(function.inputs)]]
        firsts = {at: op.tensors[number] for at, number in lagged_by(op).items()}
        whole = results + len(function.inputs)  # From this index on, an output is a stack of one carried value over all calls.
        given: dict[int, dict[int, str]] = {index: {} for index in {*(i for i in names if i < whole), *carried.values(), 0}}
        for at in (*op[EACH], *firsts):
            yield from self.selected(op.tensors[at], depth)
        for call in order:
            for at in op[EACH]:
                taken[at] = self.elements[op.tensors[at]][call]
            for at, first in firsts.items():
                taken[at] = self.elements[op.tensors[at]][call - 1] if call else self.same.get(first, first)
            for index in given:
                if index >= results and names[index] in self.returned:  # Copies the value, because each output needs its own op.
                    given[index][call] = self.returned[names[index]][call]
                    type = unsharded(function.inputs[index - results].type)
                    yield Op("copy", (taken[index - results],), Value(given[index][call], type), location=op.location)
                elif index >= results:
                    given[index][call] = taken[index - results]
                elif index in carried.values() and call == order[-1] and index in names and names.get(index + whole) not in self.returned:
                    given[index][call] = names[index]
                elif names.get(index + whole) in self.returned:
                    given[index][call] = self.returned[names[index + whole]][call]
                elif names.get(index) in self.returned:
                    given[index][call] = self.returned[names[index]][call]
                else:
                    given[index][call] = claim_unique(f"{function.name}_{function.outputs[index]}", self.taken)
            first = given[0][call]
            yield Op("call", tuple(taken), Value(first, unsharded(function.output_types[0])), location=op.location, callee=function)
            for index in (index for index in given if 0 < index < results):
                value = Value(given[index][call], unsharded(function.output_types[index]))
                yield Op("output", (first,), value, attributes(index=index), op.location, callee=function)
            for at, index in carried.items():
                taken[at] = given[index][call]
        for index in carried.values():
            if index in names and given[index][order[-1]] != names[index]:
                self.same[names[index]] = given[index][order[-1]]
            if index + whole in names:
                self.elements[names[index + whole]] = tuple(given[index][call] for call in range(depth))
        for index, made in given.items():
            if index in names and index not in carried.values():
                self.elements[names[index]] = tuple(made[call] for call in range(depth))

    def selected(self, stack: str, depth: int) -> Iterator[Op]:
        """Selects each tensor of a stack that another op made."""
        if stack in self.elements:
            return
        type = unsharded(self.given.types[stack])
        self.elements[stack] = tuple(claim_unique(f"{stack}_{call}", self.taken) for call in range(depth))
        for call, element in enumerate(self.elements[stack]):
            result = Value(element, replace(type, dims=type.dims[1:]))
            yield Op("select", (self.same.get(stack, stack),), result, attributes(axis=0, index=call))
        self.same.setdefault(stack, stack)


@lru_cache(maxsize=1)  # The result is computed once for all outputs of a program.
def inlined(fusion: Fusion) -> Fusion:
    """Inlines all calls of a traced program, including each call of a repeat.

    The first result of a function gets the name of the call. Another value `h` of function `@layer` becomes `layer_h`, with a number
    appended if that name is taken. Arguments are resharded to the types of the parameters.
    """
    fusion = unrolled(without_loops(fusion))
    taken = set(fusion.values())

    others: dict[tuple[str, int], str] = {}  # (call, index of a result) -> name of the result in the caller

    def expanded(op: Op) -> list[Op]:
        if op.callee is None:
            return [op]
        if op.kind == "output":
            return [Op("copy", (others[op.tensors[0], op[INDEX]],), op.result, location=op.location)]
        function = op.callee
        names: dict[str, str] = {}
        ops = []
        for parameter, argument in zip(function.inputs, op.tensors, strict=True):
            names[parameter.name] = claim_unique(f"{function.name}_{parameter.name}", taken)
            ops.append(Op("reshard", (argument,), replace(parameter, name=names[parameter.name]), location=op.location))
        for inner in function.ops:
            name = inner.result.name
            names[name] = op.result.name if name == function.outputs[0] else claim_unique(f"{function.name}_{name}", taken)
            ops.extend(expanded(replace(inner.renamed(names), result=replace(inner.result, name=names[name]))))
        others.update({(op.result.name, i): names[name] for i, name in enumerate(function.outputs)})
        return ops

    return replace(fusion, body=tuple(inner for op in fusion.ops for inner in expanded(op)))
