"""Blocks of even and uneven shards. In a move between disjoint meshes, each receiver gets each needed element exactly once."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import hostweave as hw
from hostweave.types.blocks import Cut, boxes, elements, is_in_order, shared_dims, transfer
from hostweave.types.mesh import Mesh, RankSizes
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import TensorType, block_of

M, K = Size.of("M"), Size.of("K")
WORLD = Mesh(x=9)


def part(ranks: range) -> Size:
    return Size(1, (LocalSize(M, ("x",), WORLD.ranks(ranks)),))


def test_cuts_of_a_dim_and_of_a_part() -> None:
    assert Cut(4, M).starts({"M": 10}) == [0, 3, 6, 9, 10]
    assert Cut(4, M).starts({"M": 2}) == [0, 1, 2, 2, 2]
    assert Cut(4, M).starts({"M": 0}) == [0, 0, 0, 0, 0]
    second_of_three = Cut(4, part(range(3)))  # The part has indices 4 to 7 of 10.
    assert second_of_three.starts(RankSizes({"M": 10}, WORLD, 1)) == [0, 0, 2, 4, 4]
    assert Cut(1, part(range(3))).starts(RankSizes({"M": 10}, WORLD, 2)) == [0, 2]


def test_blocks_that_are_contiguous_in_order() -> None:
    one, whole = Cut(1, Size()), Cut(1, K)
    assert is_in_order((Cut(4, M), whole))
    assert is_in_order((one, Cut(4, M), whole))
    assert not is_in_order((whole, Cut(4, M)))
    assert not is_in_order((Cut(2, K), Cut(4, M)))


def cuts_of(type: TensorType, blocks: tuple[int, ...]) -> tuple[Cut, ...]:
    dims = zip(type.dims, type.local_shape(WORLD, ("M",)), blocks, strict=True)
    return tuple(Cut(count, Size(1, (LocalSize(dim.size, dim.axes, type.mesh),)) if dim.axes else held) for dim, held, count in dims)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 12])
@pytest.mark.parametrize(("have", "want"), list(product(range(1, 5), repeat=2)))
def test_routes_of_uneven_blocks(have: int, want: int, rows: int) -> None:
    source, target = (hw.i32["M@x", "2"].on(WORLD.ranks(ranks)) for ranks in (range(have), range(4, 4 + want)))
    found = transfer(source, target, WORLD)
    assert found.leads(source, target, WORLD)
    if not any(dim.is_uneven(("M",)) for dim in shared_dims(source, target, WORLD)):
        assert have == want
        return
    whole = np.arange(rows * 2).reshape(rows, 2)
    got = {rank: np.full(whole[block_of(target, WORLD, rank, whole.shape)].shape, -1) for rank in range(4, 4 + want)}
    for route in found.routes:
        held = whole[block_of(source, WORLD, route.sender, whole.shape)]
        sent = boxes(cuts_of(source, found.sent), RankSizes({"M": rows}, WORLD, route.sender))[route.sent]
        taken = boxes(cuts_of(target, found.received), RankSizes({"M": rows}, WORLD, route.receiver))[route.received]
        assert elements(sent) == elements(taken)
        assert (got[route.receiver][taken] == -1).all()
        got[route.receiver][taken] = held[sent]
    for rank, block in got.items():
        np.testing.assert_array_equal(block, whole[block_of(target, WORLD, rank, whole.shape)])
