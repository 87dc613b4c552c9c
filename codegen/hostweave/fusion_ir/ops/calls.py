"""Calls of functions, repeats of calls, and user kernels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import BACKWARD, CARRIED, DEPTH, DIM, EACH, INDEX, LAGGED, RETURNED
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, opaque, unsharded
from hostweave.types.mesh import Sizes
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType

OPS: dict[str, OpDef] = {}


def _call(types: Types, op: Op) -> TensorType:
    function = op.called
    if len(types) != len(function.inputs):
        names = ", ".join(value.name for value in function.inputs)
        raise Mismatch(f"@{function.name} takes {len(function.inputs)} tensors, not {len(types)}; pass {names}")
    for value, given in zip(function.inputs, types, strict=True):
        if (given.dtype, given.shape) != (value.type.dtype, value.type.shape):
            raise Mismatch(f"@{function.name} takes {value.type} as {value.name}, not {given}; only the mesh axes may differ")
    return unsharded(function.output_types[0])


def calls(op: Op) -> bool:
    """True for a call and a repeat. An `output` only names a further result of a call."""
    return op.callee is not None and op.kind != "output"


def times_called(op: Op, sizes: Sizes) -> int:
    """Number of times that an op calls its function."""
    if not calls(op):
        return 0
    return op[DEPTH].bind(sizes) if is_repeat(op) else 1


def stacked(type: TensorType, depth: Size) -> TensorType:
    return replace(type, dims=(Dim(depth), *type.dims))


def carried_by(op: Op) -> dict[int, int]:
    """Maps each carried operand of a repeat to the result that replaces this operand in the next call."""
    operands, results = op[CARRIED], op[RETURNED]
    return dict(zip(operands, results, strict=True))


def is_repeat(op: Op) -> bool:
    return op.kind == "repeat"


def is_gathered_by_call(op: Op, users: Sequence[Op | None]) -> bool:
    """True if an op is an async gather of tensors in a stack or group, and only a repeat reads these tensors, one in each call. Each call
    then gathers the tensor of the next call."""
    user = users[0] if op.kind == "all_gather" and len(users) == 1 else None
    is_read_by_call = user is not None and is_repeat(user) and user.operands.index(op.result.name) in user[EACH]
    return is_read_by_call and op.result.is_async and op[DIM] > 0


def lagged_by(op: Op) -> dict[int, int]:
    """Maps each lagged operand of a repeat to the operand that replaces the lagged operand in call 0."""
    operands = op[LAGGED]
    return {operand: number for number, operand in enumerate(operands, len(op.called.inputs))}


def result_type(op: Op, index: int) -> TensorType:
    """Type of result `index` of a call or a repeat. With a depth, the result is a stack over the calls.

    The indices of a repeat count the function's results, then the function's operands, then the function's results again. Results of the
    second kind are stacks of the operands of all calls. Results of the third kind are stacks of the results of all calls.
    """
    types = (*op.called.output_types, *(value.type for value in op.called.inputs), *op.called.output_types)
    return types[index] if op[DEPTH] == Size(0) else stacked(types[index], op[DEPTH])


def _taken_types(op: Op) -> list[TensorType]:
    types, whole = [value.type for value in op.called.inputs], (*op[EACH], *op[LAGGED])
    return [*(stacked(type, op[DEPTH]) if at in whole else type for at, type in enumerate(types)), *(types[at] for at in op[LAGGED])]


def _first_type(op: Op) -> TensorType:
    return op.called.output_types[0] if 0 in op[RETURNED] else result_type(op, 0)


def _repeat(types: Types, op: Op) -> TensorType:
    """Type of the first result of a repeat, which calls a function `depth` times. With `backward`, call 0 is the last call.

    For an operand in `each`, call i gets tensor i of the stack or group. For an operand in `lagged`, call i gets tensor i - 1, and call 0
    gets an operand from the end of the list. For an operand in `carried`, each call except the first gets a result of the previous call.
    """
    function = op.called
    if op[DEPTH] == Size(0):
        raise Mismatch(f"@{function.name} is repeated without a depth; write one, as in depth=2")
    if len(op[CARRIED]) != len(op[RETURNED]):
        raise Mismatch(f"carried={op[CARRIED]} and returned={op[RETURNED]} do not pair operands with results; give as many of both")
    operands, results = range(len(function.inputs)), range(len(function.outputs))
    apart = (*op[EACH], *op[LAGGED], *op[CARRIED])
    if (
        len(types) != len(operands) + len(op[LAGGED])
        or len(set(apart)) < len(apart)
        or not {*apart} <= {*operands}
        or not {*op[RETURNED]} <= {*results}
    ):
        raise Mismatch(
            f"@{function.name} takes {len(operands)} tensors and gives {len(results)}; pass {len(operands) + len(op[LAGGED])}, "
            "name each operand at most once in each=, lagged= and carried=, and name existing results in returned="
        )
    taken = [*function.inputs, *(function.inputs[at] for at in op[LAGGED])]
    for value, wanted, given in zip(taken, _taken_types(op), types, strict=True):
        if (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
            raise Mismatch(f"@{function.name} takes {wanted} for {value.name}, not {given}; only the mesh axes may differ")
    for operand, result in carried_by(op).items():
        wants, given = function.inputs[operand].type, function.output_types[result]
        if (wants.dtype, wants.shape, wants.mesh) != (given.dtype, given.shape, given.mesh):
            raise Mismatch(f"@{function.name} takes {wants}, but passes {given} to its next call; return {wants}")
    return unsharded(_first_type(op))


def _kernel(types: Types, op: Op) -> TensorType:
    kernel = op.user_kernel
    assert kernel is not None
    if len(types) != len(kernel.inputs):
        raise Mismatch(f"@{kernel.name} takes {len(kernel.inputs)} tensors, not {len(types)}; correct its arguments")
    for given, wanted in zip(types, kernel.inputs, strict=True):
        if (given.dtype, given.shape, given.mesh) != (wanted.dtype, wanted.shape, wanted.mesh):
            raise Mismatch(f"@{kernel.name} takes {wanted}, not {given}; only the mesh axes may differ")
    if placed := next((type for type in kernel.outputs if type.mesh), None):
        raise Mismatch(f'@{kernel.name} gives {placed}: outputs are on the mesh of the kernel\'s inputs; remove "on {placed.mesh}"')
    return unsharded(kernel.outputs[0])


def _output(types: Types, op: Op) -> TensorType:
    if op.callee:
        index, most = op[INDEX], len(op.callee.outputs)
        most += len(op.callee.inputs) + most if op[DEPTH] != Size(0) else 0
        if not 0 < index < most:
            remedy = f"use 1 to {most - 1}" if most > 1 else "use the value of the call"
            raise Mismatch(f"@{op.callee.name} has no output {index}; {remedy}")
        return unsharded(result_type(op, index))
    return unsharded(op.result.type)


def _of_no_numpy(np: Any, *arrays: Any, **_: Any) -> Any:
    raise ArgumentError("kernel: NumPy cannot compute the user's C++; compare the program with a NumPy function that you write")


def _stated(types: Types, op: Op) -> tuple[TensorType, Types]:
    if op.user_kernel:
        return op.user_kernel.outputs[0], op.user_kernel.inputs
    if calls(op):
        return _first_type(op), _taken_types(op)
    return (result_type(op, op[INDEX]) if op.callee else op.result.type), types


OPS["call"] = OpDef(None, _call, opaque, lambda np, *arrays, run: run(*arrays), stated=_stated)
OPS["repeat"] = OpDef(
    None,
    _repeat,
    opaque,
    lambda np, *arrays, run, **_: run(*arrays),
    (DEPTH, EACH, LAGGED, CARRIED, RETURNED, BACKWARD),
    stated=_stated,
)
OPS["kernel"] = OpDef(None, _kernel, opaque, _of_no_numpy, stated=_stated, whole="made")
OPS["output"] = OpDef(1, _output, opaque, _of_no_numpy, (INDEX, DEPTH), "shape", stated=_stated, whole="made")
