"""Blocks of the program, and C++ of the user."""

from __future__ import annotations

from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import INDEX
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, opaque, unsharded
from hostweave.types.tensor import TensorType

OPS: dict[str, OpDef] = {}


def _call(types: Types, op: Op) -> TensorType:
    block = op.callee
    assert block is not None
    if len(types) != len(block.inputs):
        raise Mismatch(f"@{block.name} takes {len(block.inputs)} tensors, not {len(types)}; pass {', '.join(v.name for v in block.inputs)}")
    for value, given in zip(block.inputs, types, strict=True):
        if (given.dtype, given.shape) != (value.type.dtype, value.type.shape):
            raise Mismatch(f"@{block.name} takes {value.type} as {value.name}, not {given}; only the mesh axes may differ")
    return unsharded(block.output_types[0])


def _kernel(types: Types, op: Op) -> TensorType:
    source = op.source
    assert source is not None
    if len(types) != len(source.inputs):
        raise Mismatch(f"@{source.name} takes {len(source.inputs)} tensors, not {len(types)}; correct its arguments")
    for given, wanted in zip(types, source.inputs, strict=True):
        if (given.dtype, given.shape, given.mesh) != (wanted.dtype, wanted.shape, wanted.mesh):
            raise Mismatch(f"@{source.name} takes {wanted}, not {given}; only the mesh axes may differ")
    if placed := next((type for type in source.outputs if type.mesh), None):
        raise Mismatch(f"@{source.name} gives {placed}: an output is where what the kernel takes is; leave out on {placed.mesh}")
    return unsharded(source.outputs[0])


def _output(types: Types, op: Op) -> TensorType:
    if op.callee:
        index = op[INDEX]
        if not 0 < index < len(op.callee.outputs):
            raise Mismatch(f"@{op.callee.name} has no result {index} beside the one of the call; it has {len(op.callee.outputs)} in all")
        return unsharded(op.callee.output_types[index])
    return unsharded(op.result.type)


def _of_no_numpy(np: Any, *arrays: Any, **_: Any) -> Any:
    raise ArgumentError("kernel: NumPy does not know what the user's C++ computes; compare the program with a function of your own")


def _stated_by_block(types: Types, op: Op) -> tuple[TensorType, Types]:
    assert op.callee is not None
    return op.callee.output_types[0], [value.type for value in op.callee.inputs]


def _stated_by_source(types: Types, op: Op) -> tuple[TensorType, Types]:
    assert op.source is not None
    return op.source.outputs[0], op.source.inputs


def _stated_output(types: Types, op: Op) -> tuple[TensorType, Types]:
    return op.callee.output_types[op[INDEX]] if op.callee else op.result.type, types


OPS["call"] = OpDef(None, _call, opaque, lambda np, *arrays, run: run(*arrays), stated=_stated_by_block)
OPS["kernel"] = OpDef(None, _kernel, opaque, _of_no_numpy, stated=_stated_by_source, whole="made")
OPS["output"] = OpDef(1, _output, opaque, _of_no_numpy, (INDEX,), "shape", stated=_stated_output, whole="made")
