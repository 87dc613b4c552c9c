"""Programs with many reshards, and the blocks of their results on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.types.mesh import Mesh
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType, TensorType

Array = NDArray[Any]


def kinds_of(dtype: DType) -> tuple[str, ...]:
    """Reductions of arrays of a dtype."""
    kinds = ("max", "min") if dtype.kind == "bool" else ("sum", "prod", "max", "min")
    return (*kinds, "mean") if dtype.kind == "float" else kinds


def traced(name: str, mesh: Mesh, inputs: dict[str, TensorType], results: Callable[[hw.Tensor], list[hw.Tensor]]) -> Fusion:
    """Returns a fusion that applies `results` to each input. The parameters of the function are the inputs, so the function is generated as
    source."""
    scope: dict[str, Any] = {"results": results}
    exec(f"def {name}({', '.join(inputs)}):\n    return [y for x in ({', '.join(inputs)},) for y in results(x)]", scope)
    return hw.fusion(mesh=mesh, **inputs)(scope[name])


def arrays(fusion: Fusion, sizes: dict[str, int], seed: int) -> dict[str, Array]:
    """For `reshards`, elements are numbered, so that a wrong position is detected. For `reductions`, elements are small integers, mostly
    zeros and ones, so that most sums and products are exact."""
    random = np.random.default_rng(seed)
    result = {}
    for value in fusion.inputs:
        dtype, shape = value.type.dtype, tuple(sizes[str(size)] for size in value.type.shape)
        if fusion.name == "reshards":
            array = np.arange(np.prod(shape)).reshape(shape)
        else:
            few = (np.arange(shape[0]) % max(shape[0] // 4, 1) == 0)[:, None, None]
            low = 0 if dtype.kind in ("uint", "bool") else -2
            array = np.where(few, random.integers(low, 3, shape), random.integers(0, 2, shape[1:]))
        result[value.name] = array.astype(numpy_dtype(dtype))
    return result


def compare(fusion: Fusion, given: dict[str, Array], results: list[dict[str, Array]]) -> None:
    """Compares the block of each rank with NumPy."""
    types = {name: value.type for name, value in fusion.values().items()}
    for name, whole in zip(fusion.outputs, run_reference(fusion, given), strict=True):
        for rank in types[name].mesh_in(fusion.mesh).all_ranks:
            want = types[name].shard(whole.astype(numpy_dtype(types[name].dtype)), rank, fusion.mesh)
            got = results[rank][name].astype(np.float64)
            rtol = {"f8e4m3": 0.13, "f8e5m2": 0.26, "bf16": 0.02, "f16": 2e-3, "f32": 1e-5}.get(types[name].dtype.name, 1e-12)
            rtol = rtol if types[name].dtype.kind == "float" else 0
            np.testing.assert_allclose(got, want.astype(np.float64), rtol=rtol, atol=rtol, err_msg=f"%{name} on rank {rank}")
