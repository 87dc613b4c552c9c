"""Generated C++ for meshes of some of the ranks."""

from __future__ import annotations

import pytest

import hostweave as hw
from hostweave.emit import render
from hostweave.emit.meshes import coordinate, membership, rank_in_group
from hostweave.host_ir.ir import HostProgram
from hostweave.types.mesh import Mesh

LINE, GRID = Mesh(x=8), Mesh(dp=2, tp=4)


@pytest.mark.parametrize(
    ("mesh", "name", "is_in"),
    [
        (LINE.ranks([0, 1]), "ranks_0_1", "rank_.index() < 2"),
        (LINE.ranks(range(4, 8)), "ranks_4_to_7", "rank_.index() >= 4"),
        (LINE.ranks(range(2, 5)), "ranks_2_to_4", "rank_.index() >= 2 && rank_.index() < 5"),
        (LINE.ranks([3]), "ranks_3", "rank_.index() == 3"),
        (LINE.ranks([5, 4, 3]), "ranks_5_4_3", "rank_.index() >= 3 && rank_.index() < 6"),
        (LINE.ranks([0, 5, 3]), "ranks_0_5_3", "hw::index_in({0, 5, 3}, rank_.index()) >= 0"),
        (LINE.ranks([0, 2, 4, 6, 7]), "ranks_0_and_others", "hw::index_in({0, 2, 4, 6, 7}, rank_.index()) >= 0"),
        (LINE.ranks(range(8), a=4, b=2), "ranks_0_to_7", "true"),
    ],
)
def test_membership_conditions_of_meshes(mesh: Mesh, name: str, is_in: str) -> None:
    assert (mesh.label, membership(mesh, 8)) == (name, is_in)


def test_coordinates() -> None:
    four = LINE.ranks(range(4, 8), dp=2, tp=2)
    assert [coordinate(four, axis) for axis in ("dp", "tp")] == ["(rank_.index() - 4) / 2", "(rank_.index() - 4) % 2"]
    assert rank_in_group(four, ("dp", "tp")) == "rank_.index() - 4"
    assert rank_in_group(four, ("tp", "dp")) == "(rank_.index() - 4) % 2 * 2 + (rank_.index() - 4) / 2"
    assert coordinate(LINE.ranks([5, 0], x=2), "x") == "hw::index_in({5, 0}, rank_.index())"
    assert [coordinate(GRID, axis) for axis in ("dp", "tp")] == ["rank_.index() / 4", "rank_.index() % 4"]


def test_user_names_that_generated_code_also_uses() -> None:
    """Tensors have the names rank and route, and there are two meshes of the same ranks."""
    first, turned = LINE.ranks([0, 1]), LINE.ranks([1, 0])

    @hw.fusion(mesh=LINE, rank=hw.f32["4@x", "6"].on(first), route=hw.f32["4", "6@x"].on(turned))
    def names(rank, route):
        return hw.reshard(rank, 4, 6, mesh=LINE.ranks([2, 3])), hw.reshard(route, 4, 6, mesh=LINE.ranks([0, 2, 1]))

    program = hw.compile(names)
    cpp = program.sources["program.cpp"]
    assert "for (const hw::Route& route_1 : kRoutes_rank)" in cpp
    assert "if (route_1.sender == rank_1)" in cpp
    program.build()


def test_memory_and_plans_are_for_the_ranks_of_a_mesh() -> None:
    cpp = render(
        HostProgram.parse(
            """host @f(%x: f32[M, M] on mesh(x=1 of ranks 1)) -> (%y: f32[M, M] on mesh(x=1 of ranks 1)) mesh(x=2) {
              on mesh(x=1 of ranks 1) {
                %b = allocate f32[M, M]
                matmul %x, %x -> %b
                copy %b -> %y
              }
            }"""
        )
    )["program.cpp"]
    assert "if (on_ranks_1_) plan_b_.prepare({M, M}, {M, M}, {M, M});" in cpp
    assert "    if (on_ranks_1_) {\n      memory.allocate(b_, M * M);\n    }\n" in cpp


def test_a_copy_to_other_ranks_is_a_broadcast_in_place_on_the_root() -> None:
    mesh = hw.Mesh(x=4)
    first, others = mesh.ranks([0]), mesh.ranks([1, 2, 3])

    @hw.fusion(mesh=mesh, x=hw.bf16["M"].on(first))
    def f(x):
        return hw.reshard(x, "M", mesh=others)

    call = "ncclBroadcast(x, copies_in_ranks_0_to_3 != 0 ? y : const_cast<hw::bf16*>(x), M, ncclBfloat16, 0, "
    assert call in " ".join(hw.compile(f).source.split())
