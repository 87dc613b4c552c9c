"""Type specs, meshes, and blocks of global arrays."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.types.mesh import RankSizes
from hostweave.types.size import FirstIndex, LocalSize, Size
from hostweave.types.tensor import Dim, TensorType


def test_a_spec_prints_as_it_is_written() -> None:
    assert str(hw.bf16["M@x", "K"]) == "bf16[M@x, K]"
    assert str(hw.f32[8, "N@dp,tp"]) == "f32[8, N@dp,tp]"
    assert str(hw.i32[()]) == "i32[]"
    assert hw.f32["8@x"] == hw.f32[f"{8}@x"]
    assert hw.f32["8"] == hw.f32[8]


@pytest.mark.parametrize(
    ("text", "coefficient", "names", "divisor"),
    [("M/8", 1, ("M",), 8), ("8*M*K/4", 2, ("K", "M"), 1), ("6/4", 3, (), 2)],
)
def test_products_of_sizes(text: str, coefficient: int, names: tuple[str, ...], divisor: int) -> None:
    assert Size.of(text) == Size(coefficient, names, divisor)


def test_sums_of_sizes() -> None:
    m, n, k = map(Size.of, "MNK")
    sums = {m + n: "(M + N)", m - 2: "(M - 2)", m + m: "2*M", m // 2 + 4: "(M/2 + 4)", (m + n) * k: "(M + N)*K", m + n - m: "N", m - m: "0"}
    for size, text in sums.items():
        assert str(size) == text
        assert Size.of(text) == size
    assert Size.of("(4 + M)") == m + 4
    assert Size.of("(M + M)") == m * 2
    assert Size.of("3*(N - M + M - 2 + 2)/2") == n * 3 // 2
    assert (n + m) * k - k * m == k * n
    assert ((m - 2) * k // 4).bind({"M": 6, "K": 3}) == 3
    assert ((m + n) // 2).symbols == ("M", "N")


def test_sizes_of_shards() -> None:
    """The texts of these sizes can be parsed."""
    m, n = Size.of("M"), Size.of("N")
    mesh = hw.Mesh(x=4)
    part = Size(1, (LocalSize(m, ("x",)),))
    sizes = {
        m.ceil_div(8): "ceil(M/8)",
        (m + n).ceil_div(8): "ceil((M + N)/8)",
        part + 2: "(local(M, x) + 2)",
        part // 2 * n: "N*local(M, x)/2",
        (m // 2).ceil_div(8): "ceil(M/2/8)",
        Size(1, (LocalSize(m * n // 2, ("x",)),)): "local(M*N/2, x)",
        Size(1, (FirstIndex((m + n) // 2, ("x",)),)): "first((M + N)/2, x)",
    }
    for size, text in sizes.items():
        assert str(size) == text
        assert Size.of(text) == size
    assert (m + n).ceil_div(8).bind({"M": 9, "N": 8}) == 3
    assert [(part + 2).bind(RankSizes({"M": 10}, mesh, rank)) for rank in range(4)] == [5, 5, 5, 3]
    assert (part + n).symbols == ("N", "M")
    with pytest.raises(KeyError, match=r"local\(M, x\)"):
        part.bind({"M": 10})


@pytest.mark.parametrize(
    "text", ["M M", "M/N", "M/2*K", "(M + )", "(M", "ceil(M/0)", "part(M)", "local(M, x on ranks 1, 1)", "M # rows", "", "1.5"]
)
def test_texts_that_are_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^not a size: {re.escape(repr(text))}; write a name, an int, or a product such as 8\*M/4$"):
        Size.of(text)


@pytest.mark.parametrize(
    ("size", "ranks", "uneven"), [("M", 8, True), ("M", 1, False), ("K", 8, False), ("2*M", 8, False), ("10", 4, True), ("8", 4, False)]
)
def test_uneven_sizes(size: str, ranks: int, uneven: bool) -> None:
    assert Size.of(size).is_uneven(ranks, ("M",)) == uneven


@pytest.mark.parametrize("dim", ["local(M, x)", "ceil(M/8)", "2*M", "(M + 2)"])
def test_an_input_names_its_dims(dim: str) -> None:
    with pytest.raises(ProgramError, match=rf"not a dim of an input: {re.escape(repr(dim))}; give it one name$"):
        hw.f32[dim]


def test_dims() -> None:
    assert Dim.of("M/4@dp,tp") == Dim(Size(1, ("M",), 4), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"^not a dim: 'M@1'; write it like 'M', 'M@x' or 'M@dp,tp'$"):
        Dim.of("M@1")


def test_ranks_are_row_major() -> None:
    mesh = hw.Mesh(dp=2, tp=4)
    assert mesh.size == 8
    assert [mesh.coordinate(6, axis) for axis in ("dp", "tp")] == [1, 2]
    assert mesh.process_group(6, ("dp",)) == (2, 6)
    assert mesh.process_group(6, ("tp", "dp")) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert str(mesh) == "mesh(dp=2, tp=4)"
    assert mesh == hw.Mesh((("dp", 2), ("tp", 4)))


def test_blocks_of_a_dim_that_is_a_sum() -> None:
    spec, mesh = TensorType(hw.f32, (Dim.of("N"), Dim.of("(N - 1)@x"))), hw.Mesh(x=2)
    array = np.arange(35.0).reshape(5, 7)
    with pytest.raises(ArgumentError, match=r"dim 1 is 7; it must be 4 for \(N - 1\)"):
        spec.shard(array, 0, mesh)
    blocks = [spec.shard(array[:, :4], rank, mesh) for rank in range(2)]
    np.testing.assert_array_equal(blocks[1], array[:, 2:4])
    np.testing.assert_array_equal(spec.unshard(blocks, mesh), array[:, :4])
    alone = TensorType(hw.f32, (Dim.of("(N - 1)@x"),))  # N may have any value.
    np.testing.assert_array_equal(alone.shard(array[0], 1, mesh), array[0, 4:])


def test_shard_and_unshard() -> None:
    mesh, spec = hw.Mesh(dp=2, tp=3), hw.f32["M@tp,dp", "N"]
    array = np.arange(24).reshape(12, 2)
    blocks = [spec.shard(array, rank, mesh) for rank in range(6)]
    np.testing.assert_array_equal(blocks[1], array[4:6])  # Rank 1 is at dp=0, tp=1, and has the first half of the second third.
    assert all(block.base is not None for block in blocks)
    np.testing.assert_array_equal(spec.unshard(blocks, mesh), array)
    np.testing.assert_array_equal(hw.f32["M", "N"].unshard([array] * 6, mesh), array)


def test_arrays_that_do_not_fit() -> None:
    mesh, spec = hw.Mesh(x=2), hw.f32["M@x", 4]
    with pytest.raises(ArgumentError, match=r"^an array of 1 dims does not fit f32\[M@x, 4\]; pass one of 2 dims$"):
        spec.shard(np.ones(4), 0, mesh)
    with pytest.raises(ArgumentError, match=r"^unshard: 1 arrays for the 2 ranks of mesh\(x=2\); pass one per rank, in this order$"):
        spec.unshard([np.ones((2, 4))], mesh)
    with pytest.raises(ArgumentError, match=r"^unshard: rank 0 holds \[2, 4\], not its block \[3, 4\] of \[5, 4\]; pass its block$"):
        spec.unshard([np.ones((2, 4)), np.ones((3, 4))], mesh)


@pytest.mark.parametrize(("rows", "held"), [(10, [3, 3, 3, 1]), (3, [1, 1, 1, 0]), (9, [3, 3, 3, 0]), (8, [2, 2, 2, 2])])
def test_uneven_shards(rows: int, held: list[int]) -> None:
    """The last ranks may have fewer rows, or none."""
    mesh, spec = hw.Mesh(dp=2, tp=2), hw.f32["M@dp,tp", 4]
    array = np.arange(rows * 4).reshape(rows, 4)
    blocks = [spec.shard(array, rank, mesh) for rank in range(4)]
    assert [len(block) for block in blocks] == held
    np.testing.assert_array_equal(np.concatenate(blocks), array)
    np.testing.assert_array_equal(spec.unshard(blocks, mesh), array)


def test_an_error_of_a_spec_has_its_location() -> None:
    with pytest.raises(
        ProgramError, match=r"^test_fusion_types.py:\d+: f32\[M@x, N@x\]: mesh axis x is used twice; each axis can split one dim$"
    ):
        hw.f32["M@x", "N@x"]
