"""The slices of a concat's or pad's result into which its operands are computed."""

from __future__ import annotations

from collections.abc import Iterator

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import AXIS, HIGH, LOW
from hostweave.fusion_ir.ops.shapes import padded_dims
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const
from hostweave.passes.lower.dataflow import Dataflow
from hostweave.passes.lower.steps import Steps, dim_of_chunk, expr_of
from hostweave.types.size import Size


def part(b: Builder, flow: Dataflow, op: Op, number: int, target: str, steps: Steps | None) -> str:
    """The view of `target`, what is here of the result, that is an operand."""
    type, name, source = flow.types[op.tensors[number]], op.result.name, flow.values[op.tensors[0]]
    if op.kind == "concat":
        axis = op[AXIS]
        before = Size(0)
        for other in op.tensors[:number]:
            before = before + flow.types[other].shape[axis]
        return b.slice(target, dim_of_chunk(axis, op, source, steps), type.shape[axis], expr_of(before), f"{name}_{number}")
    low = op[LOW]
    for axis in padded_dims(op):
        target = b.slice(target, dim_of_chunk(axis, op, source, steps), type.shape[axis], Const(low[axis]), f"{name}_inside")
    return target


def borders(b: Builder, flow: Dataflow, op: Op, target: str, steps: Steps | None) -> Iterator[str]:
    """What a pad adds, each element once: of every dim what lies inside of the dims before it."""
    low, high, name = op[LOW], op[HIGH], op.result.name
    source = flow.values[op.tensors[0]]
    for axis in padded_dims(op):
        own, dim = source.type.shape[axis], dim_of_chunk(axis, op, source, steps)
        if low[axis]:
            yield b.slice(target, dim, Size(low[axis]), Const(0), f"{name}_before")
        if high[axis]:
            yield b.slice(target, dim, Size(high[axis]), expr_of(own + low[axis]), f"{name}_after")
        target = b.slice(target, dim, own, Const(low[axis]), f"{name}_inside")
