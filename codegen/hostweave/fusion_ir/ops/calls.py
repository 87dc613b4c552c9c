"""Calls of functions, and user kernels."""

from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import INDEX
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, opaque, unsharded
from hostweave.types.tensor import TensorType

OPS: dict[str, OpDef] = {}


def _call(types: Types, op: Op) -> TensorType:
    function = op.callee
    assert function is not None
    if len(types) != len(function.inputs):
        names = ", ".join(value.name for value in function.inputs)
        raise Mismatch(f"@{function.name} takes {len(function.inputs)} tensors, not {len(types)}; pass {names}")
    for value, given in zip(function.inputs, types, strict=True):
        if (given.dtype, given.shape) != (value.type.dtype, value.type.shape):
            raise Mismatch(f"@{function.name} takes {value.type} as {value.name}, not {given}; only the mesh axes may differ")
    return unsharded(function.output_types[0])


def _kernel(types: Types, op: Op) -> TensorType:
    kernel = op.user_kernel
    assert kernel is not None
    if len(types) != len(kernel.inputs):
        raise Mismatch(f"@{kernel.name} takes {len(kernel.inputs)} tensors, not {len(types)}; correct its arguments")
    for given, wanted in zip(types, kernel.inputs, strict=True):
        if (given.dtype, given.shape, given.mesh) != (wanted.dtype, wanted.shape, wanted.mesh):
            raise Mismatch(f"@{kernel.name} takes {wanted}, not {given}; only the mesh axes may differ")
    if placed := next((type for type in kernel.outputs if type.mesh), None):
        raise Mismatch(f"@{kernel.name} gives {placed}: an output is where what the kernel takes is; leave out on {placed.mesh}")
    return unsharded(kernel.outputs[0])


def _output(types: Types, op: Op) -> TensorType:
    if op.callee:
        index = op[INDEX]
        if not 0 < index < len(op.callee.outputs):
            raise Mismatch(f"@{op.callee.name} has no result {index} beside the one of the call; it has {len(op.callee.outputs)} in all")
        return unsharded(op.callee.output_types[index])
    return unsharded(op.result.type)


def _of_no_numpy(np: Any, *arrays: Any, **_: Any) -> Any:
    raise ArgumentError("kernel: NumPy does not know what the user's C++ computes; compare the program with a function of your own")


def _stated_by_function(types: Types, op: Op) -> tuple[TensorType, Types]:
    assert op.callee is not None
    return op.callee.output_types[0], [value.type for value in op.callee.inputs]


def _stated_by_source(types: Types, op: Op) -> tuple[TensorType, Types]:
    assert op.user_kernel is not None
    return op.user_kernel.outputs[0], op.user_kernel.inputs


def _stated_output(types: Types, op: Op) -> tuple[TensorType, Types]:
    return op.callee.output_types[op[INDEX]] if op.callee else op.result.type, types


OPS["call"] = OpDef(None, _call, opaque, lambda np, *arrays, run: run(*arrays), stated=_stated_by_function)
OPS["kernel"] = OpDef(None, _kernel, opaque, _of_no_numpy, stated=_stated_by_source, whole="made")
OPS["output"] = OpDef(1, _output, opaque, _of_no_numpy, (INDEX,), "shape", stated=_stated_output, whole="made")
