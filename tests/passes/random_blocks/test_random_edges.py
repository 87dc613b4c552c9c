"""Random programs with extreme sizes, meshes and transports.

Dims may have no elements, one element per rank, or fewer elements than ranks. All meshes of a program have the same ranks. Input sizes are
symbolic. Programs create constants, and functions return views of donated memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fusion_properties import IGNORED, computes, seed_ranges
from interpret import interpret
from random_donations import Donating
from random_fusions import OUTER_OPS, Generator, MakeOp

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType

TRANSPORTS = ("auto", "two_sided", "peer", "one_sided")


def _full(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return t + g.resharded(hw.full(t.shape, g.random.randint(-2, 2), t.dtype))


def _zeros_beside(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return hw.concat([hw.zeros(t.shape, t.dtype), t], g.random.randrange(t.ndim or 1))


def _numbered(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    if not t.ndim:
        return t + hw.full((), 3, t.dtype)
    numbers = g.resharded(hw.arange(t.shape[-1], dtype=hw.i64))
    return t * (numbers if t.dtype == hw.i64 else hw.astype(numbers, t.dtype))


def _shared_out(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Subtracts the sum over a dim from twice the value. The dim may have one element per rank."""
    axis = g.random.randrange(t.ndim or 1)
    return g.resharded(t) * 2 - hw.sum(g.resharded(t), axis, keepdims=True)


CONSTANTS: tuple[MakeOp, ...] = (_full, _zeros_beside, _numbered, _shared_out, _full, _numbered)


class Edges(Donating):
    """Generates programs on three meshes of the same ranks. Sizes are symbolic: 0, 1, or close to the number of ranks."""

    def __init__(self, seed: int):
        super().__init__(seed)
        ranks = self.mesh.size
        self.ops = (*self.ops, *CONSTANTS)
        self.outer_ops = (*self.outer_ops, *CONSTANTS)
        self.sizes = {name: self.random.choice([0, 1, ranks, ranks, ranks + 1, max(1, ranks - 1)]) for name in "MNK"}
        self.has_zigzag = False
        self.meshes = [self.mesh, self.on_all_ranks("u"), self.on_all_ranks("v")]

    def on_all_ranks(self, axis: str) -> Mesh:
        return self.mesh.ranks(self.random.sample(range(self.mesh.size), self.mesh.size), **{axis: self.mesh.size})

    def fusion(self) -> Fusion:
        shapes = [self.random.sample("MNK", self.random.randint(1, 3)) for _ in range(2)]
        inputs: dict[str, TensorType] = {f"x{i}": self.input(self.random.choice(shapes)) for i in range(self.random.randint(1, 3))}
        donate = self.donated([*inputs], [name for name in inputs if self.random.random() < 0.4])

        def random(**tensors: Any) -> tuple[hw.Tensor, ...]:
            ops = (*self.ops, *OUTER_OPS, *self.outer_ops)
            return self.in_place(tensors, donate, 6, ops) if donate else self.body([*tensors.values()], 8, ops)

        return hw.fusion(mesh=self.mesh, donate=donate, **inputs)(random)


def is_right(seed: int) -> bool:
    generator = Edges(seed)
    return computes(generator, generator.fusion(), seed, Options(transport=TRANSPORTS[seed % len(TRANSPORTS)]))


@pytest.mark.parametrize("seeds", seed_ranges(52, 20000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_edges(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.4 * len(seeds)


@pytest.mark.parametrize("op", [hw.argmax, hw.max, hw.min])
def test_a_dim_without_elements_is_refused_in_functions_too(op: Any) -> None:
    @hw.block(x=hw.f32["M", "N"])
    def last(x: hw.Tensor) -> hw.Tensor:
        return op(x + 1, 1)

    fusion = hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])(lambda x: last(x))
    x = np.ones((4, 0), np.float32)
    with pytest.raises(ArgumentError, match=r"of no elements along axis=\(1,\); pass at least one"):
        run_reference(fusion, {"x": x})
    with pytest.raises(ArgumentError, match="of no elements along N"):
        interpret(lower(fusion, Options()), {"x": x})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_keeps_its_shard_on_another_mesh(transport: str) -> None:
    """A tensor moves to a mesh of the same ranks in another order. One rank keeps its shard. The dim is uneven."""
    mesh = hw.Mesh(dp=2, tp=2)
    other = mesh.ranks([3, 0, 2, 1], v=4)
    x = np.arange(30).reshape(5, 2, 3)
    moved = hw.fusion(mesh=mesh, x=hw.i64["K@dp,tp", "N", "M"])(lambda x: hw.reshard(x + 1, "K@v", "N", "M", mesh=other))
    np.testing.assert_array_equal(hw.compile(moved, options=Options(transport=transport)).run(x), x + 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_merged_dim_whose_size_the_ranks_do_not_divide(transport: str) -> None:
    x = np.arange(30).reshape(5, 2, 3)
    merged = hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.i64["K@dp,tp", "N", "M"])(lambda x: hw.reshape(x, -1))
    np.testing.assert_array_equal(hw.compile(merged, options=Options(transport=transport)).run(x), x.ravel())
