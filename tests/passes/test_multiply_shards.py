"""Products with a gathered matrix, half by half: what becomes of the copies of own halves, and that the numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.fusion_ir.choice import IN_SEQUENCE
from hostweave.host_ir import ir, tree
from hostweave.runtime.cpu import seeded
from hostweave.types.machine import H200

Body = Callable[[hw.Tensor, hw.Tensor, hw.Tensor], Any]
SIZES = {"M": 8, "K": 16, "N": 8}


def program_of(body: Body, ranks: int = 2, dtype: hw.DType = hw.f32, **more: Any) -> hw.Program:
    """Of weights that are sharded along their rows, and put to peers ahead of their use."""
    fusion = hw.fusion(mesh=hw.Mesh(x=ranks), x=dtype["M@x", "K"], v=dtype["K@x", "N"], w=dtype["N@x", "K"])(body)
    options = hw.Options(sizes=dict.fromkeys(SIZES, 4096), machine=H200, **more)
    choices = hw.compile(fusion, options=options).choices
    stated = {choice.name: way.name for choice in choices for way in choice.ways if way.algorithm != IN_SEQUENCE}
    return hw.compile(fusion, options=replace(options, ways=stated))


def two_products(x: hw.Tensor, v: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    h = hw.relu(hw.matmul(x, hw.reshard(v, "K", "N")))
    return x + hw.matmul(h, hw.reshard(w, "N", "K"))


def used_twice(x: hw.Tensor, v: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    gathered = hw.reshard(w, "N", "K")
    h = hw.matmul(x, hw.reshard(v, "K", "N"))
    return hw.matmul(h, gathered) - hw.matmul(h + 1.0, gathered)


def transposed_too(x: hw.Tensor, v: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    gathered = hw.reshard(w, "N", "K")
    h = hw.matmul(x, hw.permute_dims(gathered, (1, 0))) + hw.matmul(x, hw.reshard(v, "K", "N"))
    return hw.matmul(h, gathered)


def of_computed_shards(x: hw.Tensor, v: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    return two_products(x, hw.negative(v), hw.negative(w))


def copies_and_products(program: hw.Program) -> tuple[list[str], list[ir.Matmul]]:
    """The shards that are copied, and the products."""
    walked = list(tree.walk(program._host.body))
    return [name for i in walked if i.copies for name in tree.names(i, "read")], [i for i in walked if isinstance(i, ir.Matmul)]


@pytest.mark.parametrize(("body", "products"), [(two_products, 4), (used_twice, 6)])
def test_no_half_is_copied(body: Body, products: int) -> None:
    program = program_of(body)
    copied, multiplied = copies_and_products(program)
    assert not copied
    assert len(multiplied) == products
    assert [i.b for i in multiplied[::2]] == ["v"] + ["w"] * (products // 2 - 1)
    assert all(i.accumulate[-1:] == (i.dst,) for i in multiplied[1::2])
    assert "copies" not in {pool.name for pool in program._host.streams}


def test_what_is_done_to_the_sum_is_done_once() -> None:
    _, (own, other, last, _) = copies_and_products(program_of(two_products))
    assert (own.activation, other.activation) == ("", "relu")
    assert last.accumulate == ("x",)


@pytest.mark.parametrize(
    ("body", "ranks", "dtype", "copied"),
    [
        (two_products, 4, hw.f32, ["v", "w"]),
        (transposed_too, 2, hw.f32, ["w"]),
        (two_products, 2, hw.bf16, []),
        (of_computed_shards, 2, hw.f32, []),
    ],
)
def test_copies_that_stay(body: Body, ranks: int, dtype: hw.DType, copied: list[str]) -> None:
    assert copies_and_products(program_of(body, ranks, dtype))[0] == copied


def test_what_is_returned_is_whole() -> None:
    def returned_too(x: hw.Tensor, v: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.matmul(x, hw.reshard(v, "K", "N"))
        gathered = hw.reshard(w, "N", "K").named("gathered")
        return hw.matmul(h, gathered), gathered

    program = program_of(returned_too, windows=("gathered",))
    assert [p.name for p in program._host.outputs if p.in_window] == ["gathered"]
    assert copies_and_products(program)[0] == ["w"]


@pytest.mark.parametrize("body", [two_products, used_twice, transposed_too, of_computed_shards])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_right_in_every_order(body: Body, seed: int | None) -> None:
    program, random = program_of(body), np.random.default_rng(0)
    shapes = {"x": ("M", "K"), "v": ("K", "N"), "w": ("N", "K")}
    arrays = {name: random.integers(-3, 4, [SIZES[dim] for dim in dims]).astype(np.float32) for name, dims in shapes.items()}
    alone = hw.compile(hw.fusion(mesh=hw.Mesh(x=1), **{name: hw.f32[dims] for name, dims in shapes.items()})(body))
    if seed is None:
        np.testing.assert_array_equal(program.run(**arrays), alone.run(**arrays))
        return
    with seeded(seed):
        result = program.run(**arrays)
    np.testing.assert_array_equal(result, alone.run(**arrays))
