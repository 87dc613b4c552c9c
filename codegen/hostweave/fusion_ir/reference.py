"""NumPy reference: computes a fusion on global arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXES, BACKWARD, CARRIED, DEPTH, EACH, INDEX, LAGGED, RETURNED
from hostweave.fusion_ir.ops.calls import carried_by, lagged_by
from hostweave.fusion_ir.ops.definition import bound_attributes
from hostweave.types.numpy_dtypes import cast, computing_dtype
from hostweave.types.tensor import DType, bind_sizes


def run_reference(fusion: Fusion, arrays: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
    """Results for global arguments. Each tensor of a parameter group is a separate argument. Floats are computed in float64, and rounded
    only where the program casts."""
    inputs = {value.name: value.type for value in fusion.arguments}
    for name, type in inputs.items():
        if name not in arrays:
            raise ArgumentError(f"{fusion.name}: {name} is missing; pass {name}=")
        if arrays[name].ndim != len(type.dims):
            raise ArgumentError(f"{fusion.name}: {name} has {arrays[name].ndim} dims; pass a {type}")
    sizes = bind_sizes(fusion.name, fusion.mesh, inputs, {name: arrays[name].shape for name in inputs}, uneven=None)
    given = {name: arrays[name].astype(computing_dtype(type.dtype)) for name, type in inputs.items()}
    values = {v.name: np.stack([given[name] for name in v.group.names]) if v.group else given[v.name] for v in fusion.inputs}
    with _NUMPY.np.errstate(all="ignore"):  # NaN and infinity are valid results
        made = dict(zip(fusion.outputs, evaluate(fusion, values, {**sizes, **fusion.depths}, _NUMPY), strict=True))
    return tuple(made[output] if number is None else made[output][number] for output, number in fusion.numbered_results)


@dataclass(frozen=True)
class Arithmetic:
    """The number system in which a fusion is evaluated, such as floats or a finite field."""

    np: Any
    dtype: Callable[[DType], np.dtype[Any]]
    cast: Callable[[Any, DType], Any]
    apply: Callable[..., Any] = lambda function, *operands: function(*operands)
    function: Callable[[Op], Callable[..., Any]] = lambda op: OPS[op.kind].numpy
    kernel: Callable[[Op, Sequence[Any]], tuple[Any, ...]] | None = None  # computes a user kernel
    observe: Callable[[Fusion, Mapping[str, Any]], object] = lambda fusion, values: None  # gets all values of a fusion or function


def evaluate(fusion: Fusion, inputs: Mapping[str, Any], sizes: Mapping[str, int], arithmetic: Arithmetic) -> tuple[Any, ...]:
    """Outputs for global inputs. `inputs` has stacked tensors for parameter groups."""
    values = dict(inputs)
    for op in fusion.ops:
        several = op.callee or (op.user_kernel and arithmetic.kernel)
        if op.kind == "output" and f"{op.tensors[0]}.{op[INDEX]}" in values:
            values[op.result.name] = values[f"{op.tensors[0]}.{op[INDEX]}"]
            continue
        result = _run(op, values, sizes, arithmetic)
        first, *rest = result if several else (result,)
        values |= {op.result.name: first, **{f"{op.result.name}.{i}": more for i, more in enumerate(rest, 1)}}
    arithmetic.observe(fusion, values)
    return tuple(values[name] for name in fusion.outputs)


def _run(op: Op, values: Mapping[str, Any], sizes: Mapping[str, int], arithmetic: Arithmetic) -> Any:
    """Result of an op, or a tuple of results for a call, a repeat, or a kernel that `arithmetic` computes."""
    tensors = [values[name] for name in op.tensors]
    if op.user_kernel and arithmetic.kernel:
        return arithmetic.kernel(op, tensors)
    operands = [values[o] if isinstance(o, str) else arithmetic.np.asarray(o, tensors[-1].dtype) for o in op.operands]
    definition, type = OPS[op.kind], op.result.type
    if (combine := definition.combine) and not combine.identity and 0 in [operands[0].shape[axis] for axis in op[AXES]]:
        raise ArgumentError(f"{op.result.name}: {op.kind} of no elements along axis={op[AXES]}; pass at least one")
    stated = definition.stated_type(lambda: tuple(size.bind(sizes) for size in type.shape), arithmetic.dtype(type.dtype))
    keywords: dict[str, Any] = {**bound_attributes(op, sizes), **stated}
    if op.callee:
        keywords["run"] = partial(_repeat if op.kind == "repeat" else _call, op, sizes, arithmetic)
    if definition.is_cast:
        return arithmetic.cast(operands[0], type.dtype)
    return arithmetic.apply(partial(arithmetic.function(op), arithmetic.np, **keywords), *operands)


def _call(op: Op, sizes: Mapping[str, int], arithmetic: Arithmetic, *arrays: Any) -> tuple[Any, ...]:
    inputs = {value.name: array for value, array in zip(op.called.inputs, arrays, strict=True)}
    return evaluate(op.called, inputs, sizes, arithmetic)


def _repeat(op: Op, sizes: Mapping[str, int], arithmetic: Arithmetic, *arrays: Any) -> tuple[Any, ...]:
    """Results of a repeat. First come the function's results: the last value of each carried result, and the stack of the values of each
    other result. Then come the function's inputs, and its results again: the stack of all values if carried, otherwise None."""

    def moved(kind: str, *operands: Any, **attributes: Any) -> Any:
        return arithmetic.apply(partial(OPS[kind].numpy, arithmetic.np, **attributes), *operands)

    count = len(arrays) - len(op[LAGGED])
    calls, depth, taken = list[tuple[Any, ...]](), op[DEPTH].bind(sizes), list(arrays[:count])
    for call in range(depth)[:: -1 if op[BACKWARD] else 1]:
        for at in op[EACH]:
            taken[at] = moved("select", arrays[at], axis=0, index=call)
        for at, number in lagged_by(op).items():
            taken[at] = moved("select", arrays[at], axis=0, index=call - 1) if call else arrays[number]
        given = _call(op, sizes, arithmetic, *taken)
        taken_on = (one if at in op[CARRIED] else None for at, one in enumerate(taken))
        calls.append((*given, *taken_on, *(one if at in op[RETURNED] else None for at, one in enumerate(given))))
        for operand, result in carried_by(op).items():
            taken[operand] = given[result]
    last, in_order = calls[-1], calls[:: -1 if op[BACKWARD] else 1]

    def whole(at: int) -> Any:
        if at in op[RETURNED] or last[at] is None:
            return last[at]
        return moved("concat", *(moved("expand_dims", call[at], axis=(0,)) for call in in_order), axis=0)

    return tuple(map(whole, range(len(last))))


_NUMPY = Arithmetic(np, computing_dtype, lambda array, dtype: cast(array, dtype).astype(computing_dtype(dtype)))
