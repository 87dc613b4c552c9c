"""Fusions that call functions: a pass on each of them, and the same program without calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops.attributes import INDEX
from hostweave.fusion_ir.rewriting import Names


def map_functions(fusion: Fusion, apply: Callable[[Fusion], Fusion]) -> Fusion:
    """`apply` to every function as to a fusion of its own, then to the fusion: whoever calls a function sees what became of it."""
    done: dict[str, Fusion] = {}

    def linked(op: Op) -> Op:
        return replace(op, callee=done[op.callee.name]) if op.callee else op

    for body in (*fusion.functions, fusion):
        done[body.name] = result = apply(replace(body, ops=tuple(map(linked, body.ops))))
    return result


def inlined(fusion: Fusion) -> Fusion:
    """The program with the ops of a function in place of each call, as it is before the first pass.

    A value of the function `@layer` is named `layer_h`, with a number where that is taken. An argument is resharded to the
    parameter's type, which the function states.
    """
    fresh = Names(fusion).new

    others: dict[tuple[str, int], str] = {}  # the results of calls but for the first -> their names here

    def expanded(op: Op) -> list[Op]:
        if op.callee is None:
            return [op]
        if op.kind == "output":
            return [Op("copy", (others[op.tensors[0], op[INDEX]],), op.result, location=op.location)]
        function = op.callee
        names: dict[str, str] = {}
        ops = []
        for parameter, argument in zip(function.inputs, op.tensors, strict=True):
            names[parameter.name] = fresh(f"{function.name}_{parameter.name}")
            ops.append(Op("reshard", (argument,), replace(parameter, name=names[parameter.name]), location=op.location))
        for inner in function.ops:
            name = inner.result.name
            names[name] = op.result.name if name == function.outputs[0] else fresh(f"{function.name}_{name}")
            operands = tuple(names[operand] if isinstance(operand, str) else operand for operand in inner.operands)
            ops.extend(expanded(replace(inner, operands=operands, result=replace(inner.result, name=names[name]))))
        others.update({(op.result.name, i): names[name] for i, name in enumerate(function.outputs)})
        return ops

    return replace(fusion, ops=tuple(inner for op in fusion.ops for inner in expanded(op)))
