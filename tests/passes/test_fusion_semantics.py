"""After the passes on the fusion IR, each rank computes its block of the result from its shards and the communications.

The tests execute the result of the passes op by op in NumPy, with one local array per rank for each value. So the tests cover the semantics
of shardings, partial sums and reshards without a host program.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fusions_from_files import all_fusions
from numpy.typing import NDArray

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS
from hostweave.fusion_ir.ops.definition import bound_attributes
from hostweave.fusion_ir.reference import run_reference
from hostweave.fusion_ir.resharding import step_of
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.options import Options
from hostweave.passes.lower.lower_to_host import lower_to_host
from hostweave.pipeline import PASSES, level_of
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import bind_sizes

Array = NDArray[Any]
REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def lowered(fusion: Fusion) -> Fusion:
    for apply in PASSES[: PASSES.index(lower_to_host)]:
        fusion = apply(fusion, Options())
        verify_fusion(fusion, after=level_of(apply.__name__))
        assert Fusion.parse(str(fusion)) == fusion
    return fusion


def run_ranks(fusion: Fusion, arrays: dict[str, Array]) -> list[list[Array]]:
    mesh = fusion.mesh
    sizes = bind_sizes(fusion.name, mesh, {v.name: v.type for v in fusion.inputs}, {name: a.shape for name, a in arrays.items()})
    local = {v.name: [v.type.shard(arrays[v.name], rank, mesh) for rank in range(mesh.size)] for v in fusion.inputs}
    for op in fusion.ops:
        if op.kind in RESHARD_STEPS:
            local[op.result.name] = exchange(op, local[op.tensors[0]], mesh)
        else:
            local[op.result.name] = [compute(op, [local[n][rank] for n in op.tensors], sizes, mesh) for rank in range(mesh.size)]
    return [local[name] for name in fusion.outputs]


def compute(op: Op, tensors: list[Array], sizes: dict[str, int], mesh: Mesh) -> Array:
    operands = iter(tensors)
    values = [next(operands) if isinstance(o, str) else o for o in op.operands]
    keywords = bound_attributes(op, sizes)
    if OPS[op.kind].target == "shape":
        keywords["shape"] = tuple(size.bind(sizes) for size in op.result.type.local_shape(mesh))
    return np.asarray(OPS[op.kind].numpy(np, *values, **keywords))


def exchange(op: Op, local: list[Array], mesh: Mesh) -> list[Array]:
    change = step_of(op)
    result = []
    for rank, mine in enumerate(local):
        group = mesh.process_group(rank, change.axes)
        theirs, place = [local[member] for member in group], group.index(rank)
        match change.kind:
            case "all_gather":
                result.append(np.concatenate(theirs, axis=change.dim))
            case "all_to_all":
                pieces = [np.split(other, len(group), axis=change.to)[place] for other in theirs]
                result.append(np.concatenate(pieces, axis=change.dim))
            case "permute_shards":
                assert change.sources is not None
                result.append(theirs[change.sources[place]])
            case _:
                value = mine
                if change.reduction:
                    value = REDUCE[change.reduction].reduce(theirs)
                result.append(value if change.dim is None else np.split(value, len(group), axis=change.dim)[place])
    return result


def check(fusion: Fusion, arrays: dict[str, Array]) -> None:
    result = lowered(fusion)
    for name, ranks, whole in zip(result.outputs, run_ranks(result, arrays), run_reference(fusion, arrays), strict=True):
        type = result.values()[name].type
        for rank, mine in enumerate(ranks):
            np.testing.assert_allclose(mine, type.shard(whole, rank, fusion.mesh), rtol=1e-12, atol=1e-12)


def inputs_of(fusion: Fusion, sizes: dict[str, int], seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {v.name: rng.standard_normal([e.bind(sizes) for e in v.type.shape]) for v in fusion.inputs}


@pytest.mark.parametrize("name", all_fusions())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_examples(name: str, ranks: int) -> None:
    fusion = all_fusions(ranks, chunks=3)[name]
    size = 3 * ranks
    sizes = {symbol: size for value in fusion.inputs for dim_size in value.type.shape for symbol in dim_size.symbols}
    check(fusion, inputs_of(fusion, sizes, seed=ranks))


SIZES = {"A": 12, "B": 24, "C": 36}
POINTWISE = (hw.add, hw.multiply, hw.maximum, hw.subtract)
UNARY = (hw.negative, hw.relu, hw.tanh, hw.copy)
REDUCTIONS = (hw.sum, hw.mean, hw.max, hw.min)


def random_fusion(seed: int) -> Fusion:
    """Random program on one of five meshes, with random shardings of inputs and random reshards."""
    rng = random.Random(seed)
    mesh = rng.choice([hw.Mesh(x=2), hw.Mesh(x=3), hw.Mesh(x=2, y=3), hw.Mesh(x=2, y=2), hw.Mesh(x=1, y=4)])

    def dims(names: list[str]) -> tuple[str, ...]:
        free = [name for name, _ in mesh.axes]
        result = []
        for name in names:
            axes = [free.pop(rng.randrange(len(free))) for _ in range(rng.randint(0, len(free))) if rng.random() < 0.6]
            result.append(name + ("@" + ",".join(axes) if axes else ""))
        return tuple(result)

    def function(a: hw.Tensor, b: hw.Tensor, c: hw.Tensor) -> Any:
        values = [a, b, c]
        for _ in range(rng.randint(2, 8)):
            x = rng.choice(values)
            match rng.randrange(8):
                case 0:
                    y = rng.choice(UNARY)(x)
                case 1:
                    other = rng.choice([v for v in values if v.type.shape == x.type.shape] + [0.5])
                    y = rng.choice(POINTWISE)(x, other)
                case 2:
                    y = x.T if x.ndim == 2 else x[:, None]
                case 3 if x.ndim:
                    y = rng.choice(REDUCTIONS)(x, axis=rng.randrange(x.ndim), keepdims=rng.random() < 0.7)
                case 4:
                    pairs = [v for v in values if v.ndim == x.ndim == 2 and v.type.shape[0] == x.type.shape[1]]
                    y = x @ rng.choice(pairs) if pairs else -x
                case 5 if all(isinstance(d, str) for d in x.shape):
                    y = hw.reshard(x, *dims([str(d) for d in x.shape]))
                case 6 if x.ndim == 2 and x.shape[0] in SIZES:
                    y = hw.reshape(hw.reshape(x, 12, f"{x.shape[0]}/12", x.shape[1]), *x.shape)
                case 7 if x.ndim == 2:  # Ops after the matmuls are linear, so they accept partial sums.
                    y = hw.permute_dims(hw.concat([x.T @ x, (x * 0.5).T @ x - x.T @ x], axis=0) + 0 * (x.T @ x)[:1], (1, 0))
                case _:
                    y = x * 0.5
            values.append(y)
        return tuple(values[-2:])

    return hw.fusion(mesh=mesh, a=hw.f64[dims(["A", "B"])], b=hw.f64[dims(["B", "C"])], c=hw.f64[dims(["C", "A"])])(function)


@pytest.mark.parametrize("start", [0, 40, *(pytest.param(start, marks=pytest.mark.slow) for start in range(80, 1000, 40))])
def test_random_programs(start: int) -> None:
    for seed in range(start, start + 40):
        fusion = random_fusion(seed)
        check(fusion, inputs_of(fusion, SIZES, seed))
