"""Slices, concat and pad in whole programs, compared with NumPy. Most sizes are known only at the call."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import reduce
from random import Random

import numpy as np
import pytest
from compiled_fusions import compiled, expect, integer_arrays, lowered

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.verify import verify_host
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.tensor import DType

SIZES = {"M": 9, "N": 12, "J": 5, "K": 6, "P": 135}


def slices(ranks: int, t: DType) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M@x", "N"], z=t["N@x", 6])
    def slices(x, z):  # type: ignore[no-untyped-def]
        y = (x * 2).named("h")
        rows = x[1:3], x[-2:] + 1, x[0], -x[-1, None, 2:]
        columns = hw.sum(x[:, 1:4], axis=1), x[:, ::2] + y[:, 1::2], hw.relu(y[..., -3:]), y[:, 1] * y[:, -1]
        return (*rows, *columns, z[:, 4] - z[:, 1::3][:, 1], hw.matmul(x, z[:, ::3]))

    return slices


def joined(ranks: int, t: DType) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M@x", "N"], z=t["J", "N"], w=t["N", "K"])
    def joined(x, z, w):  # type: ignore[no-untyped-def]
        both = hw.concat([x, z], axis=0)
        wide = hw.concat([hw.matmul(x, w), -x, x, hw.matmul(x, w)], axis=1)
        return both, hw.concat([both, both * 2]) + 1, wide, hw.concat([z, z], axis=None), hw.sum(both, axis=0)

    return joined


def padded(ranks: int, t: DType) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M@x", "N"])
    def padded(x):  # type: ignore[no-untyped-def]
        return (
            hw.pad(x, (1, 2)),
            hw.pad(x * 3, (0, 2, 1, 1), value=5),
            hw.sum(hw.pad(x, (0, 0, 3, 0)), axis=1),
            hw.pad(x[1:], (0, 0, 1, 0)) - x,
            hw.pad(x > 0, (1, 0)),
        )

    return padded


def in_loops(ranks: int, t: DType) -> Fusion:
    """Slices and concats of chunks along a dim that the chunk loop does not split."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M", "K@x"], w=t["K@x", "N"], z=t["M", "N"])
    def in_loops(x, w, z):  # type: ignore[no-untyped-def]
        h = hw.reshard(hw.matmul(x, w), "M", "N").stream("M", chunks=3)
        both = hw.concat([h[:, 2:4], z[:, :1] * 2], axis=1).stream("M", chunks=3)
        return h, hw.pad(both, (1, 1)).stream("M", chunks=3), (z[:, 1] + z[:, -1]).stream("M")

    return in_loops


def products(ranks: int, t: DType) -> Fusion:
    """Matmuls that write to slices in which rows and columns are not contiguous."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["J", "M@x", "K"], w=t["N", "M"], z=t["J", "K", "M@x"])
    def products(x, w, z):  # type: ignore[no-untyped-def]
        y = hw.matmul(x, z)
        squares = hw.matmul(x[0], x[1].T)
        return (
            hw.permute_dims(hw.reshard(y, "J", "M", "M"), (1, 2, 0)),
            hw.einsum("bqd,bkd->qkb", x, hw.reshard(x, "J", "M", "K")),
            hw.reshape(hw.permute_dims(2 * hw.matmul(w, x), (2, 1, 0)), "K", "N*J"),
            hw.stack([squares, hw.relu(hw.matmul(x[1], x[0].T)) * 3], axis=2),
            hw.pad(hw.expand_dims(hw.matmul(x[2], x[1].T), 2), (0, 1)),
        )

    return products


def thirds(ranks: int, t: DType) -> Fusion:
    """Slices whose sizes are sums of quotients of a symbolic size."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["P", 2])
    def thirds(x):  # type: ignore[no-untyped-def]
        y = x[::3][::3][1::3]
        return y[1:][::2] * 2, y[1:-1][1:], hw.concat([y, x])[1:-2][:-1] + 1

    return thirds


PROGRAMS: tuple[Callable[[int, DType], Fusion], ...] = (slices, joined, padded, in_loops, products, thirds)


@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.f64), (3, hw.bf16)], ids=str)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_matches_numpy(make: Callable[[int, DType], Fusion], ranks: int, dtype: DType) -> None:
    fusion = make(ranks, dtype)
    assert type(fusion).parse(str(fusion)) == fusion
    assert type(lowered(fusion)).parse(str(lowered(fusion))) == lowered(fusion)
    arrays = integer_arrays(fusion, SIZES, seed=ranks)
    for schedule in (parallel(check_dependencies=True), seeded(0), seeded(1)):
        with schedule:
            expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True), exact=True)


def test_a_slice_is_a_view_and_operands_of_a_concat_are_computed_in_place() -> None:
    @hw.fusion(x=hw.bf16["M", "N"], w=hw.bf16["N", 4])
    def parts(x, w):  # type: ignore[no-untyped-def]
        return hw.concat([hw.matmul(x, w), x[:, 2:4] * 2], axis=1), hw.exp(x[:, :2] + x[:, 1:3])

    body = lowered(parts).body
    assert not [i for i in tree.walk(body) if isinstance(i, ir.Copy | ir.Allocate)]
    assert sum(isinstance(i, ir.Launch) for i in tree.walk(body)) == 2


TOO_SMALL = [
    (lambda x: x[2:5], 4, "M - 5 = -1: a slice or an index exceeds its dim; pass at least 1 more, or take less"),
    (lambda x: x[-3:], 1, "M - 3 = -2: a slice or an index exceeds its dim; pass at least 2 more, or take less"),
    (lambda x: x[3], 2, "M - 4 = -2: a slice or an index exceeds its dim; pass at least 2 more, or take less"),
    (lambda x: x[3:], 2, "M - 3 = -1: a slice or an index exceeds its dim; pass at least 1 more, or take less"),
    (lambda x: x[::2], 3, "output y: M/2: 2 does not divide 3; pass a size that is divisible"),
    (lambda x: x[:"M/2"], 3, "output y: M/2: 2 does not divide 3; pass a size that is divisible"),
    (lambda x: x[2:"(M - 1)"], 2, "M - 3 = -1: a slice or an index exceeds its dim; pass at least 1 more, or take less"),
]


@pytest.mark.parametrize(("take", "size", "message"), TOO_SMALL)
def test_a_slice_beyond_the_size_of_a_call(take: Callable[[hw.Tensor], hw.Tensor], size: int, message: str) -> None:
    fusion = hw.fusion(x=hw.f32["M"])(lambda x: -take(x))
    with pytest.raises(ArgumentError) as caught:
        compiled(fusion).run(x=np.zeros(size, np.float32))
    assert str(caught.value).endswith(message)


def test_the_end_of_a_slice_can_be_a_size() -> None:
    @hw.fusion(x=hw.f32["M", "K"], y=hw.f32["N"])
    def parts(x, y):  # type: ignore[no-untyped-def]
        return x[:"M/2"], x[1 : x.shape[0]], x[2:"(M - 1)"], x[:, 1:"K/2"] * 2, x[: y.shape[0]]

    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    for got, want in zip(compiled(parts).run(x, np.zeros(5, np.float32)), (x[:3], x[1:], x[2:5], x[:, 1:2] * 2, x[:5]), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("seed", range(20))
def test_any_slices_of_slices_of_an_unknown_size(seed: int) -> None:
    """Sizes of repeated slices are nested quotients, such as (M/3 - 1)/5."""
    cuts = Random(seed).choices([slice(None, None, 3), slice(1, None, 5), slice(None, None, 17), slice(1, None), slice(None, -1)], k=12)
    fusion = hw.fusion(x=hw.f32["M"])(lambda x: reduce(operator.getitem, cuts, x) * 2)
    assert type(fusion).parse(str(fusion)) == fusion


def test_a_sum_of_sizes_that_ranks_share() -> None:
    @hw.fusion(mesh=hw.Mesh(x=4), x=hw.f32["M", "N"], z=hw.f32[3, "N"])
    def shared(x, z):  # type: ignore[no-untyped-def]
        return hw.reshard(hw.concat([x, z]), "(M + 3)@x", "N")

    for rows in (5, 6, 0):
        arrays = {"x": np.ones((rows, 2), np.float32), "z": np.zeros((3, 2), np.float32)}
        expect(shared, arrays, compiled(shared).run(**arrays, ranks=True), exact=True)


def test_views_of_more_dims_than_arrays_have() -> None:
    """A communication along a dim needs a view with an additional dim for blocks. Kernels that copy accept any number of dims."""

    @hw.fusion(mesh=hw.Mesh(x=2, y=2), x=hw.f32["A", 3, "4@x", 2, "4@y", 3, 4, "H"])
    def turned(x):  # type: ignore[no-untyped-def]
        return hw.reshard(x, "A", 3, 4, 2, "4@y", 3, "4@x", "H"), hw.reshard(x, "A", 3, 4, 2, 4, 3, 4, "H")

    text = str(lowered(turned))
    assert max(view.count(",") for view in re.findall(r"reshape .* to (.*)", text)) >= 8
    arrays = integer_arrays(turned, {"A": 2, "H": 2}, seed=0)
    for seed in range(3):
        with seeded(seed):
            expect(turned, arrays, compiled(turned).run(**arrays, ranks=True), exact=True)


def test_more_dims_than_an_argument_has() -> None:
    text = "host @p(%x: f32[{dims}]) -> (%y: f32[{dims}]) mesh(x=1) {{\n  copy %x -> %y\n}}\n".format(dims=", ".join("ABCDEFGHI"))
    with pytest.raises(ProgramError, match="has 9 dims, and an array has at most 8; reshape it"):
        verify_host(ir.HostProgram.parse(text))
