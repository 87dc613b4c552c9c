"""What programs with blocks compute: nested ones, arguments that are resharded or packed, and the same as with the blocks inlined."""

from __future__ import annotations

import pytest
from whole_programs import compiled, expect, integer_arrays, random_arrays, sizes_of

import hostweave as hw
from hostweave.fusion.blocks import inlined
from hostweave.fusion.ir import Fusion
from hostweave.runtime.cpu import parallel, seeded


def nested(ranks: int) -> Fusion:
    """A block that calls a block, streams inside, a parameter that nobody reads, arguments of other shardings and layouts."""

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E", "F@x"], v=hw.f32["F@x", "E"], unused=hw.f32["E"])
    def mlp(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, unused: hw.Tensor) -> hw.Tensor:
        h = hw.clamp(hw.matmul(x, w).stream("M", chunks=ranks, by="ring"), -1, 1)
        return hw.reshard(hw.matmul(h, v), "M@x", "E").stream("M", chunks=ranks)

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E", "F@x"], v=hw.f32["F@x", "E"], b=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        return hw.clamp(x + mlp(hw.clamp(x + b, -1, 1), w, v, unused=b), -1, 1)

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M", "E@x"], w=hw.f32["F@x", "E"], b=hw.f32["E@x"])
    def nested(x: hw.Tensor, w: hw.Tensor, b: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = layer(x, w.T, w, b).named("h")
        total = hw.sum(mlp(h, w.T, w, b), axis="M")
        return layer(h, w.T, w, b), total

    return nested


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_matches_numpy_and_the_program_without_blocks(ranks: int) -> None:
    fusion = nested(ranks)
    flat, program = compiled(inlined(fusion)), compiled(fusion)
    sizes = sizes_of(fusion)
    arrays = random_arrays(fusion, sizes, seed=1)
    with parallel(check_dependencies=True):
        expect(fusion, arrays, program.run(**arrays, ranks=True))
    calls = [integer_arrays(fusion, sizes, seed) for seed in range(3)]
    for seed in range(4):
        with seeded(seed):
            results, without = (p.run_in_flight(calls, poison=True) for p in (program, flat))
        for arrays, ranks_of_call in zip(calls, results, strict=True):
            expect(fusion, arrays, ranks_of_call, exact=True)
        for with_blocks, others in zip(results, without, strict=True):
            for a, b in zip(with_blocks, others, strict=True):
                assert all((x == y).all() for x, y in zip(a, b, strict=True))


def test_one_function_a_block() -> None:
    source = compiled(nested(4)).source
    assert [source.count(f"void Program::{name}(") for name in ("mlp", "layer")] == [1, 1]
    assert [source.count(f"  {name}(") for name in ("mlp", "layer")] == [2, 2]


@pytest.mark.parametrize("name", ["run", "int", "M"])
def test_names_of_blocks_that_mean_something_else_in_cpp(name: str) -> None:
    """The generated program has members of this name, or it is a keyword; a size and a buffer may have it too."""

    def body(x: hw.Tensor) -> hw.Tensor:
        return x * 2

    body.__name__ = name
    block = hw.block(x=hw.f32["M"])(body)
    fusion = hw.fusion(x=hw.f32["M"], **{name: hw.f32["M"]})(lambda x, **others: block(block(x)) + others[name])
    arrays = random_arrays(fusion, {"M": 5}, seed=1)
    expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))
