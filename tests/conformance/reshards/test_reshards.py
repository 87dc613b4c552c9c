"""Reshards between all pairs of shardings in LAYOUTS, on meshes of one and two axes. The block of each rank is compared with NumPy.

One program contains all reshards on one mesh, so that few programs are compiled. Each program runs at several sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from blocks_of_ranks import arrays, compare, kinds_of, traced
from interpret import interpret

import hostweave as hw
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import lower
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DTYPES

LAYOUTS = {
    1: [("A", "B", "C"), ("A@x", "B", "C"), ("A", "B@x", "C"), ("A", "B", "C@x")],
    2: [
        ("A", "B", "C"),
        ("A@dp", "B", "C"),
        ("A", "B@tp", "C"),
        ("A@dp,tp", "B", "C"),
        ("A@tp,dp", "B", "C"),
        ("A@dp", "B@tp", "C"),
        ("A@tp", "B", "C@dp"),
        ("A", "B@tp,dp", "C"),
    ],
}
EIGHT = Mesh(x=8)
MESHES = [Mesh(x=1), Mesh(x=2), Mesh(x=3), Mesh(dp=2, tp=2), EIGHT, Mesh(dp=2, tp=4)]
SIZES = {"A": 8, "B": 16, "C": 24}  # multiplied by 3 for meshes of 3 ranks


def reshards(mesh: Mesh) -> Fusion:
    layouts = LAYOUTS[len(mesh.axes)]

    def results(x: hw.Tensor) -> list[hw.Tensor]:
        return [hw.reshard(x, *dims) for dims in layouts if str(hw.i32[dims]) != str(x.type)]

    return traced("reshards", mesh, {f"x{i}": hw.i32[dims] for i, dims in enumerate(layouts)}, results)


def reductions(mesh: Mesh) -> Fusion:
    """Reductions over a sharded dim, with every dtype. The result is replicated or sharded."""
    axes = ",".join(name for name, _ in mesh.axes)

    def results(x: hw.Tensor) -> list[hw.Tensor]:
        found = []
        for kind in kinds_of(x.dtype):
            found.append(getattr(hw, kind)(x, axis="A").named(f"{kind}_{x.dtype}"))
            found.append(hw.reshard(getattr(hw, kind)(x, axis="A"), "B", f"C@{axes}").named(f"{kind}_scattered_{x.dtype}"))
        return found

    return traced("reductions", mesh, {f"x_{dtype}": dtype[f"A@{axes}", "B", "C"] for dtype in DTYPES.values()}, results)


def sizes_of(of: Callable[[Mesh], Fusion], mesh: Mesh, seed: int) -> dict[str, int]:
    """For seed 0, sizes are even. For other seeds, sizes are uneven if the program allows uneven sizes, and some shards may be empty."""
    even = {name: size * (3 if mesh.size == 3 else 1) * (1 + seed) for name, size in SIZES.items()}
    uneven = [{}, {"A": 10, "B": 3, "C": 7}, {"A": 1, "B": 17, "C": 2}][seed]
    return {**even, **{name: size for name, size in uneven.items() if name in lowered(of, mesh).uneven}}


@cache
def lowered(of: Callable[[Mesh], Fusion], mesh: Mesh, transport: str = "auto") -> HostProgram:
    return lower(of(mesh), hw.Options(transport=transport))


CASES = [
    pytest.param(of, mesh, marks=[pytest.mark.xdist_group(f"{of.__name__} {mesh}"), *([pytest.mark.slow] if mesh == EIGHT else [])])
    for of, meshes in ((reshards, MESHES), (reductions, MESHES[:-1]))
    for mesh in meshes
]  # One worker runs all tests of a case, because these tests share the lowered program.


NAME_PARTS = {"ids": lambda part: part.__name__ if callable(part) else str(part)}


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("of", "mesh"), CASES, **NAME_PARTS)
def test_interpreted(of: Callable[[Mesh], Fusion], mesh: Mesh, seed: int) -> None:
    fusion = of(mesh)
    given = arrays(fusion, sizes_of(of, mesh, seed), seed)
    compare(fusion, given, interpret(lowered(of, mesh), given))


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if 1 < mesh.size < 8], ids=str)
def test_interpreted_one_sided(mesh: Mesh) -> None:
    fusion, host = reshards(mesh), lowered(reshards, mesh, "one_sided")
    assert host.uneven == lowered(reshards, mesh).uneven
    check(host, fusion=fusion)
    for seed in range(3):
        given = arrays(fusion, sizes_of(reshards, mesh, seed), seed)
        compare(fusion, given, interpret(host, given))


@pytest.mark.parametrize(("of", "mesh"), CASES, **NAME_PARTS)
def test_compiled(of: Callable[[Mesh], Fusion], mesh: Mesh, target: str) -> None:
    fusion, program = of(mesh), hw.compile(lowered(of, mesh), target=target)
    for seed in range(3):
        given = arrays(fusion, sizes_of(of, mesh, seed), seed)
        results = program.run(ranks=True, **given)
        compare(fusion, given, [dict(zip(fusion.outputs, local, strict=True)) for local in results])
    program.close()


@pytest.mark.parametrize(("of", "mesh"), CASES, **NAME_PARTS)
def test_uneven_sizes_need_no_second_communication(of: Callable[[Mesh], Fusion], mesh: Mesh) -> None:
    host = lowered(of, mesh)
    assert not any(isinstance(i, ir.If) for i in tree.walk(host.body))
    moved = Counter(name for i in tree.walk(host.body) if isinstance(i, ir.Communication) for name in tree.names(i, "write"))
    assert set(moved.values()) <= {1}


def test_sizes_that_may_be_uneven() -> None:
    assert lowered(reshards, Mesh(x=4)).uneven == ("A", "B", "C")
    assert lowered(reductions, Mesh(x=4)).uneven == ("A", "C")
