"""Dims in zigzag: text, local blocks, propagation through a program, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compiled_fusions import expect_every_way, random_arrays
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import multiples
from hostweave.pipeline import lower
from hostweave.types.tensor import Dim
from hostweave.types.zigzag import Zigzag, some_of

MESH = hw.Mesh(cp=4)
ROWS = hw.f32["S@zigzag(cp)", 3]


def test_text() -> None:
    assert str(ROWS) == "f32[S@zigzag(cp), 3]"
    assert ROWS.dims[0] == Dim.of("S@zigzag(cp)") != Dim.of("S@cp")
    assert Dim.of("8@zigzag(dp,cp)").axes == Zigzag(("dp", "cp"))
    assert hash(Dim.of("S@zigzag(cp)")) == hash(Dim.of("S@zigzag(cp)"))
    with pytest.raises(ProgramError, match=r"not a dim: 'S@zigzag\(cp'; write it like"):
        hw.f32["S@zigzag(cp"]


def test_axes_of_one_rank_do_not_change_zigzag() -> None:
    both = Zigzag(("dp", "cp"))
    assert some_of(both, lambda axis: axis == "cp", ranks_stay=True) == Zigzag(("cp",))
    assert some_of(both, lambda axis: axis == "cp") == ("cp",) != Zigzag(("cp",))
    assert some_of(both, lambda axis: False, ranks_stay=True) == ()


def test_each_rank_has_a_piece_from_either_end() -> None:
    array = np.arange(48).reshape(16, 3)
    for rank, rows in enumerate(([0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9])):
        np.testing.assert_array_equal(ROWS.shard(array, rank, MESH), array[rows])
        np.testing.assert_array_equal(array[ROWS.block((16, 3), rank, MESH)], array[rows])
    np.testing.assert_array_equal(ROWS.unshard([ROWS.shard(array, rank, MESH) for rank in range(4)], MESH), array)
    np.testing.assert_array_equal(ROWS.shard(array[:5], 0, hw.Mesh(cp=1)), array[:5])


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(
        ArgumentError, match=r"dim 0 \(S = 12\) cannot be divided evenly by 4 ranks along cp in two pieces each; pad it to 16"
    ):
        ROWS.shard(np.zeros((12, 3), np.float32), 0, MESH)

    why = r"test_zigzag.py:\d+: .* each of 4 ranks has two pieces of dim 12@zigzag\(cp\), but 8 does not divide 12; pad it to 16"
    with pytest.raises(ProgramError, match=why):
        hw.fusion(mesh=MESH, x=hw.f32["12@zigzag(cp)"])(lambda x: -x)


def test_two_dims() -> None:
    mesh = hw.Mesh(dp=2, cp=3)

    @hw.fusion(mesh=mesh, x=hw.f32["S@zigzag(cp)", "K"], w=hw.f32["K", "T@zigzag(dp)"])
    def product(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        y = x @ w
        return y, hw.reshard(y, "S", "T"), hw.reshard(y, "S@zigzag(dp)", "T@cp")

    arrays = {"x": np.arange(36).reshape(12, 3).astype(np.float32), "w": np.arange(36).reshape(3, 12).astype(np.float32)}
    wanted = run_reference(product, arrays)
    program = hw.compile(product)
    for got, want in zip(program.run(**arrays), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    type = program.host.outputs[0].type
    assert str(type) == "f32[S@zigzag(cp), T@zigzag(dp)]"
    np.testing.assert_array_equal(type.unshard([type.shard(wanted[0], rank, mesh) for rank in range(6)], mesh), wanted[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_zigzag_is_kept_or_changed_as_stated(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(cp=ranks), x=ROWS, w=hw.f32[3, 5], y=hw.f32["S@cp", 5], z=hw.f32["S", 5], b=hw.f32["S@zigzag(cp)", 2, 5])
    def travels(x, w, y, z, b):  # type: ignore[no-untyped-def]
        h = hw.relu(x @ w)
        whole, in_order, turned = hw.reshard(h, "S", 5), hw.reshard(h, "S@cp", 5), hw.reshard(z.T, 5, "S@zigzag(cp)")
        back, other = hw.reshard(y, "S@zigzag(cp)", 5), hw.reshard(x.T, "3@cp", "S")
        sums = hw.reshard(hw.sum(b, axis=0), 2, "5@cp"), h.T @ back, hw.reshard(z.T @ h, 5, 5), hw.max(h, axis=0)
        merged = hw.reshape(b, "2*S", 5)
        return h, h + y, h * z, whole, in_order, turned, back, other, *sums, merged, hw.cumsum(h, 0), h[1:]

    host = lower(travels, hw.Options())
    assert Fusion.parse(str(travels)) == travels
    assert HostProgram.parse(str(host)) == host
    of_result = {p.name: str(p.type) for p in host.outputs}
    if ranks > 1:
        assert list(of_result.values())[:3] == ["f32[S@zigzag(cp), 5]"] * 3
        assert next(v for k, v in of_result.items() if "2*S" in v or "S*2" in v).count("zigzag")
    random = np.random.default_rng(ranks)
    size = 12 * ranks
    arrays = {v.name: random.standard_normal([e.bind({"S": size}) for e in v.type.shape]).astype(np.float32) for v in travels.inputs}
    wanted = run_reference(travels, arrays)
    program = hw.compile(travels)
    for got, want in zip(program.run(**arrays), wanted, strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-4)
    for rank, results in enumerate(interpret(host, arrays)):
        for parameter, want in zip(host.outputs, wanted, strict=True):
            np.testing.assert_allclose(results[parameter.name], parameter.type.shard(want, rank, travels.mesh), 1e-4, 1e-4)
    program.check()


def test_an_exported_project_gives_each_rank_its_pieces(tmp_path: Path) -> None:
    @hw.fusion(mesh=hw.Mesh(cp=2), x=ROWS, y=hw.f32["S", 3])
    def added(x: hw.Tensor, y: hw.Tensor) -> hw.Tensor:
        return x + y

    program = hw.compile(added)
    assert multiples(program.host) == {"S": 4}
    program.export(tmp_path)
    assert "{sizes.S, 2, r, true}" in (tmp_path / "main.cpp").read_text()


def test_other_meshes_and_streams() -> None:
    half = MESH.ranks([0, 1])

    @hw.fusion(mesh=MESH, x=ROWS)
    def moves(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "S@cp", 3, mesh=half)

    @hw.fusion(mesh=MESH, x=ROWS)
    def streams(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "S", 3).stream(0)

    moved = r"test_zigzag.py:\d+: reshard: .* a zigzag sharding cannot move between meshes; reshard on the first mesh before"
    with pytest.raises(ProgramError, match=moved):
        lower(moves, hw.Options())
    streamed = (
        r"test_zigzag.py:\d+: reshard: .* is streamed, but the reshard from .* to .* reorders the pieces of a dim; stream a value computed"
    )
    with pytest.raises(ProgramError, match=streamed):
        lower(streams, hw.Options())


def test_a_second_half_in_reverse() -> None:
    """`reverse_second` of several dims, including innermost and adjacent dims. The result is stored, used by other ops, or reduced."""
    text = """\
fusion @reversed(%a: bf16[2, 3, N, 8], %b: f32[N, 5, 2], %c: f32[N, 2, 4], %d: f8e4m3[2, N], %e: bool[4, N, 2, 8]) mesh(x=1) {
  %a_pieces: bf16[2, 3, N, 8] = reverse_second(%a, axis=1, halves=0)
  %b_pieces: f32[N, 5, 2] = reverse_second(%b, axis=1, halves=2)
  %b_twice: f32[N, 5, 2] = add(%b_pieces, %b_pieces)
  %c_pieces: f32[N, 2, 4] = reverse_second(%c, axis=2, halves=1)
  %c_scaled: f32[N, 2, 4] = multiply(%c_pieces, %c)
  %c_sum: f32[N, 2] = sum(%c_scaled, axis=(2,))
  %d_pieces: f8e4m3[2, N] = reverse_second(%d, axis=1, halves=0)
  %e_pieces: bool[4, N, 2, 8] = reverse_second(%e, axis=0, halves=2)
  return %a_pieces, %b_twice, %c_sum, %d_pieces, %e_pieces
}
"""
    fusion = Fusion.parse(text)
    arrays = random_arrays(fusion, {"N": 6}, seed=0) | {"e": np.random.default_rng(1).random((4, 6, 2, 8)) > 0.5}
    a, b, c, d, e = arrays.values()
    turned = [np.concatenate(pair, axis) for pair, axis in (
        ((a[:1], a[1:, ::-1]), 0), ((b[..., :1], b[:, ::-1, 1:]), 2), ((c[:, :1], c[:, 1:, ::-1]), 1), ((d[:1], d[1:, ::-1]), 0),
        ((e[:, :, :1], e[::-1, :, 1:]), 2),
    )]  # fmt: skip
    expect_every_way(fusion, arrays, (turned[0], 2 * turned[1].astype(float), (turned[2] * c.astype(float)).sum(2), *turned[3:]), seed=1)
    for wrong in ("axis=1, halves=1", "axis=0, halves=1"):
        with pytest.raises(ProgramError, match=r"reverse_second: halves=1 must be a dim of .* with size 2, other than axis=[01]"):
            Fusion.parse(text.replace("axis=1, halves=0", wrong))
