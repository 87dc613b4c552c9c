"""Arithmetic of fusions and host programs on arrays with samples (see samples.py). User kernels are random functions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostweave.check.results import field
from hostweave.check.results.dual import DUAL
from hostweave.check.results.field import PRIME, P
from hostweave.check.results.functions import ON_SAMPLES, Functions
from hostweave.check.results.samples import Exact, Real, Samples, apply, values_of
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.reference import Arithmetic, evaluate
from hostweave.types.mesh import Mesh, Sizes
from hostweave.types.numpy_dtypes import computing_dtype
from hostweave.types.tensor import DType, TensorType, block_of, global_shape

RANDOM_EXP, MULTIPLICATIVE_EXP = ON_SAMPLES, DUAL  # exp: a random function, or a function with exp(a + b) = exp(a) exp(b)


def cast_in_samples(x: Any, dtype: DType, functions: Functions) -> Samples:
    """Casts an array. Casts between floats keep values unrounded."""
    if dtype.kind == "float":
        return functions.real.of(x)
    exact = x if isinstance(x, Samples) else Exact.of(x)
    expected = computing_dtype(dtype)
    return exact if exact.dtype == expected else exact.astype(expected)


def results_of_kernel(
    name: str, inputs: Sequence[Samples], outputs: Sequence[tuple[tuple[int, ...], DType]], functions: Functions
) -> tuple[Samples, ...]:
    """Results of a user kernel. Each element is a random function of all inputs of the kernel."""
    digest = np.zeros(1, np.uint64)
    for x in inputs:
        elements = x.element if isinstance(x, Real) else field.of_integers(x.value)
        flat = elements.reshape(len(elements), -1)
        positions = np.arange(flat.shape[1], dtype=np.uint64)
        digest = field.hashed(name, digest, field.hashed("of input", flat, positions).sum(axis=1) % P)
    results: list[Samples] = []
    for number, (shape, dtype) in enumerate(outputs):
        positions = np.arange(int(np.prod(shape)), dtype=np.uint64)
        elements = field.hashed(f"{name} {number}", digest[:, None], positions).reshape(len(digest), *shape)
        if dtype.kind == "float":
            results.append(functions.real.from_components(elements / (PRIME / 4) - 2, elements))
        else:
            results.append(Exact((elements % np.uint64(2)).astype(computing_dtype(dtype))))
    return tuple(results)


def _index(np: Any, ids: Samples, rows: Any) -> Samples:
    positions: Samples = ON_SAMPLES.remainder(ids.astype(np.int64), max(len(rows), 1))
    return positions


def _philox(_: Any, i: Any, *others: Any) -> Any:
    """Computes philox with NumPy, exactly, because all operands are integers."""
    return Real.of(Exact(OPS["philox"].numpy(np, *values_of(Exact.of(i), *others))))


_OVERRIDES = {"index": _index, "philox": _philox}


def function_of(op: Op) -> Any:
    return _OVERRIDES.get(op.kind, OPS[op.kind].numpy)


def run_fusion(
    fusion: Fusion, inputs: dict[str, Samples], sizes: Sizes, functions: Functions, observe: Callable[..., object] = lambda *_: None
) -> tuple[Samples, ...]:
    """Outputs of a fusion for the global `inputs`. Calls `observe` with the values of each body."""

    def kernel(op: Op, tensors: Sequence[Samples]) -> tuple[Samples, ...]:
        return _run_kernel_on_ranks(op, tensors, op.result.type.mesh_in(fusion.mesh), sizes, functions)

    arithmetic = Arithmetic(
        functions, computing_dtype, lambda x, dtype: cast_in_samples(x, dtype, functions), apply, function_of, kernel, observe
    )
    with np.errstate(all="ignore"):
        return evaluate(fusion, inputs, sizes, arithmetic)


def _run_kernel_on_ranks(op: Op, tensors: Sequence[Samples], mesh: Mesh, sizes: Sizes, functions: Functions) -> tuple[Samples, ...]:
    kernel = op.user_kernel
    assert kernel is not None
    samples = max((x.samples for x in tensors), default=1)
    zeros = [functions.zeros(global_shape(type, sizes), computing_dtype(type.dtype)) for type in kernel.outputs]
    results = [x.map(lambda component: np.repeat(component, samples, axis=0)) for x in zeros]
    types, arrays, inputs = (*kernel.inputs, *kernel.outputs), (*tensors, *results), len(tensors)
    for rank in mesh.all_ranks:
        indices = [block_of(TensorType(type.dtype, type.dims), mesh, rank, x.shape) for type, x in zip(types, arrays, strict=True)]
        blocks = [x[index] for x, index in zip(arrays, indices, strict=True)]
        outputs = [(block.shape, type.dtype) for block, type in zip(blocks[inputs:], kernel.outputs, strict=True)]
        made = results_of_kernel(kernel.name, blocks[:inputs], outputs, functions)
        for result, index, block in zip(results, indices[inputs:], made, strict=True):
            result[index] = block
    return tuple(results)
