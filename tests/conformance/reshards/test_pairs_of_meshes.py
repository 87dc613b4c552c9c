"""Moves to another mesh and back, for every pair of MESHES. The two meshes may share ranks, in the same or another order."""

from __future__ import annotations

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

WORLD = Mesh(x=4)
MESHES = [WORLD.ranks(ranks, x=len(ranks)) for ranks in ([0], [1], [0, 1, 2, 3], [0, 2, 3], [1, 0, 2], [1, 0])]


def reduced(first: Mesh, second: Mesh) -> Fusion:
    @hw.fusion(mesh=WORLD, x=hw.f32["M", "K@x"].on(first), w=hw.f32["K@x", "K"].on(first), v=hw.f32["K@x", "K"].on(second))
    def reduced(x, w, v):  # type: ignore[no-untyped-def]
        h = hw.reshard(hw.matmul(x, w), "M", "K", mesh=second)
        y = hw.reshard(hw.matmul(h, v), "M", "K", mesh=first)
        return y, hw.concat([y, h @ v], axis=1) if first == second else hw.concat([y, y * 2], axis=1)

    return reduced


def gathered(first: Mesh, second: Mesh) -> Fusion:
    @hw.fusion(mesh=WORLD, x=hw.f32["M", "K@x"].on(first))
    def gathered(x):  # type: ignore[no-untyped-def]
        h = hw.reshard(hw.concat([x, x * 2], axis=1), "M", "2*K@x", mesh=second)
        y = hw.reshard(hw.concat([h, h * 2], axis=1), "M", "4*K@x", mesh=first)
        return y, y * 3

    return gathered


def turned(first: Mesh, second: Mesh) -> Fusion:
    @hw.fusion(mesh=WORLD, x=hw.f32["M", "N@x", "K"].on(first))
    def turned(x):  # type: ignore[no-untyped-def]
        h = hw.reshard(hw.reshard(hw.concat([x, x * 2], axis=2), "M", "N", "2*K@x"), "M", "N@x", "2*K", mesh=second)
        y = hw.reshard(hw.concat([h, h * 2], axis=2), "M", "N", "4*K@x")
        return hw.reshard(y + 1, "M@x", "N", "4*K", mesh=first), y

    return turned


@pytest.mark.parametrize("make", [reduced, gathered, pytest.param(turned, marks=pytest.mark.more)])
@pytest.mark.parametrize("first", MESHES, ids=str)
def test_results_of_every_rank_equal_those_of_numpy(make, first: Mesh) -> None:  # type: ignore[no-untyped-def]
    for second in MESHES:
        fusion = make(first, second)
        host = lower(fusion, hw.Options())
        check(host, fusion=fusion)
        for size in (12, 5):
            expect(fusion, host, size, str(second))


def expect(fusion: Fusion, host: HostProgram, size: int, where: str) -> None:
    sizes = {name: size if name in host.uneven else 12 for name in "MNK"}
    draw = np.random.default_rng(0)
    given = {v.name: draw.integers(-2, 3, [e.bind(sizes) for e in v.type.shape]).astype(np.float32) for v in fusion.inputs}
    results = interpret(host, given)
    for output, whole in zip(host.outputs, run_reference(fusion, given), strict=True):
        for rank in output.type.mesh_in(fusion.mesh).all_ranks:
            want = output.type.shard(whole.astype(np.float32), rank, fusion.mesh)
            np.testing.assert_array_equal(results[rank][output.name], want, err_msg=f"{where}: %{output.name} on rank {rank}")
