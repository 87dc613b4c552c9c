"""Random programs on random meshes of some or all ranks. Meshes may overlap. Programs pass the check, and the results of the interpreter
equal those of NumPy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import lower
from hostweave.types.mesh import Mesh

SIZE = 72  # a multiple of the number of ranks of each mesh


def some_ranks(draw: random.Random, world: Mesh) -> Mesh:
    ranks = draw.sample(range(world.size), draw.choice([1, 2, 2, 3, 4]))
    if draw.random() < 0.5:
        ranks.sort()
    return world.ranks(ranks, a=2, b=2) if len(ranks) == 4 and draw.random() < 0.5 else world.ranks(ranks, z=len(ranks))


def layout(draw: random.Random, mesh: Mesh, dims: list[str]) -> list[str]:
    axes, result = [name for name, _ in mesh.axes], list(dims)
    for axis in draw.sample(axes, len(axes)):
        if draw.random() < 0.6:
            i = draw.randrange(len(dims))
            result[i] += ("," if "@" in result[i] else "@") + axis
    return result


def program(seed: int) -> Fusion:
    draw = random.Random(seed)
    world = draw.choice([Mesh(x=4), Mesh(x=6), Mesh(p=2, q=2)])
    meshes = [world, some_ranks(draw, world), some_ranks(draw, world)]
    first = draw.choice(meshes)
    types = {name: hw.f32[tuple(layout(draw, first, dims))].on(first) for name, dims in (("x", ["A", "B"]), ("w", ["B", "C"]))}

    @hw.fusion(mesh=world, **types)
    def random_meshes(x, w):
        t, dims = (hw.matmul(x, w), ["A", "C"]) if draw.random() < 0.4 else (x, ["A", "B"])
        results = []
        for _ in range(draw.randrange(2, 6)):
            match draw.choice(["negative", "sum", "permute_dims", "move", "move", "move"]):
                case "negative":
                    t = -t
                case "sum":
                    t = t + hw.sum(t, axis=draw.randrange(2), keepdims=True)
                case "permute_dims":
                    t, dims = t.T, dims[::-1]
                case _:
                    there = draw.choice(meshes)
                    t = hw.reshard(t, *layout(draw, there, dims), mesh=there)
            if draw.random() < 0.15:
                results.append(t)
        return t, *results

    return random_meshes


@pytest.mark.parametrize("seed", [*range(40), 7200367])  # The last seed uses a view of one mesh on another mesh.
def test_results_of_every_rank_equal_those_of_numpy(seed: int) -> None:
    fusion = program(seed)
    host = lower(fusion, hw.Options())
    assert hw.Fusion.parse(str(fusion)) == fusion
    assert HostProgram.parse(str(host)) == host
    check(host, fusion=fusion)
    draw = np.random.default_rng(seed)
    for size in (SIZE, 10, 3):
        sizes = {name: size if name in host.uneven else SIZE for name in "ABC"}
        shapes = {value.name: [sizes[str(dim_size)] for dim_size in value.type.shape] for value in fusion.inputs}
        given = {name: draw.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}
        results = interpret(host, given)
        for output, whole in zip(host.outputs, run_reference(fusion, given), strict=True):
            for rank in output.type.mesh_in(fusion.mesh).all_ranks:
                want = output.type.shard(whole.astype(np.float32), rank, fusion.mesh)
                np.testing.assert_array_equal(results[rank][output.name], want, err_msg=f"%{output.name} on rank {rank}")
