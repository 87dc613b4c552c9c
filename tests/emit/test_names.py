from __future__ import annotations

import pytest
from compiled_fusions import compiled, expect, integer_arrays

import hostweave as hw
from hostweave.api import compile
from hostweave.emit import render
from hostweave.emit.names import CppNames
from hostweave.host_ir.ir import HostProgram


@pytest.mark.parametrize(
    ("name", "cpp"),
    [
        ("x", "x"),
        ("_x", "x_1"),  # C++ reserves names with a leading underscore.
        ("x_", "x_1"),  # A trailing underscore marks a member.
        ("a__b", "a_b_1"),
        ("_", "v_1"),
        ("int", "int_1"),
        ("in", "in_1"),
        ("stream", "stream_1"),
        ("cudaMalloc", "v_cudaMalloc_1"),
        ("INFINITY", "INFINITY_1"),
        ("(2*M - 1)_x", "v_2_M_1_x_1"),  # This name is the number of local rows of a concat.
    ],
)
def test_one_name(name: str, cpp: str) -> None:
    assert CppNames().of(name) == cpp


def test_names_are_unique_and_stable() -> None:
    names = CppNames()
    assert [names.of("int"), names.of("int_1"), names.of("int", "size"), names.of("int")] == ["int_1", "int_1_1", "int_2", "int_1"]


NASTY = """
kernel @sizes(%out: f32[caller, K]) {
  %template: f32[caller, K] = negative(%out)
}
host @exp(%in: f32[caller@stream, K], %x_: f32[K, this]) -> (%int: f32[caller, this], %M: f32[caller, K]) mesh(stream=1)
    streams(rank[2], arena[1]) events(prepared[2]) {
  %channel_stream = allocate f32[caller, K]
  %x = allocate f32[caller, K]
  %rank_stream = chunk %x_[1: 0 of 1]
  fork rank
  fork arena
  for %new in 0..2 {
    stream rank[%new] {
      %auto = chunk %in[0: %new of 2]
      %delete = chunk %channel_stream[0: (rank.stream + %new) % 2 of 2]
      copy %auto -> %delete
      record prepared[%new]
    }
  }
  stream arena[0] {
    wait prepared[0]
    wait prepared[1]
    launch @sizes %channel_stream -> %x
  }
  join arena
  join rank
  copy %x -> %M
  matmul %x, %rank_stream -> %int
}
"""


def test_no_name_of_the_user_collides() -> None:
    import numpy as np

    program = compile(HostProgram.parse(NASTY))
    x, w = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
    product, negative = program.run(**{"in": x, "x_": w})
    program.close()
    np.testing.assert_array_equal(product, -x @ w)
    np.testing.assert_array_equal(negative, -x)


def test_no_composed_name_collides() -> None:
    """Local sizes are named after a size and axes. Elements are named after a value and an index. User names may equal these names."""
    mesh = hw.Mesh(a=2, b=2, a_b=2)
    sizes = {"x": hw.f32["N@a,b"], "y": hw.f32["N@a_b"], "z": hw.f32["N_a@a_b"], "w": hw.f32["N_block_2@a", "N_a_b@b"]}

    @hw.fusion(mesh=mesh, **sizes, p_e=hw.f32[()], p_i=hw.f32["N"])
    def collide(x: hw.Tensor, y: hw.Tensor, z: hw.Tensor, w: hw.Tensor, p_e: hw.Tensor, p_i: hw.Tensor) -> tuple[hw.Tensor, ...]:
        p = x * 2
        return p, (p + p_e * p_e) * p_e, hw.reshard(y, "N") + p_i, z * 2, hw.reshard(w, "N_block_2", "N_a_b@a_b")

    arrays = integer_arrays(collide, {"N": 5, "N_a": 3, "N_block_2": 3, "N_a_b": 7}, seed=0)
    expect(collide, arrays, compiled(collide).run(**arrays, ranks=True))


def test_meshes_over_the_same_ranks() -> None:
    world = hw.Mesh(x=4)
    square, turned, line = world.ranks(range(4), u=2, v=2), world.ranks(range(4), v=2, u=2), world.ranks([3, 1, 2, 0], u=4)

    @hw.fusion(mesh=world, x=hw.f32["M@x", 3])
    def moved(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        first = hw.reshard(x, "M@u", 3, mesh=square) * 2
        second = hw.reshard(first, "M@u", 3, mesh=turned) + 1
        return first, second, hw.reshard(second, "M@u", 3, mesh=line) @ hw.reshard(second, "M", 3, mesh=line).T, x

    for rows in (8, 5, 1):
        arrays = integer_arrays(moved, {"M": rows}, seed=rows)
        expect(moved, arrays, compiled(moved).run(**arrays, ranks=True))


def test_source_keeps_the_names_of_the_user() -> None:
    text = render(HostProgram.parse("host @f(%left: f32[Rows], %right: f32[Rows]) -> (%sum: f32[Rows]) mesh() {\n  copy %left -> %sum\n}"))
    assert "const int64_t Rows = in.left.dim(0);" in text["program.cpp"]
    assert "auto* sum = out.sum.as<float>();" in text["program.cpp"]
