"""Random fusions of ops that passes rewrite, such as reshards, transposes, contractions and sums. `pytest -m slow` tests many more."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fusion_properties import IGNORED, computes, seed_ranges
from random_fusions import Generator, of_sums, turned_in_a_loop

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options

MESHES_OF_MOVES: tuple[dict[str, int], ...] = ({"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2})


def overlaps_right(seed: int) -> bool:
    """Gathers of one dim after another, and random reshards. Each reshard reads the previous result, and may be asynchronous."""
    generator = Generator(seed, MESHES_OF_MOVES)
    random, axes = generator.random, [axis for axis, _ in generator.mesh.axes]
    sharded = [f"{name}@{axis}" for name, axis in zip("MNK", random.sample(axes, len(axes)), strict=False)]

    @hw.fusion(mesh=generator.mesh, x=hw.f64[tuple(sharded)])
    def moved(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        results = [x * 2]
        for place in random.sample(range(len(sharded)), len(sharded)):
            sharded[place] = sharded[place][0]
            results.append(hw.reshard(results[-1], *(sharded if random.random() < 0.8 else generator.sharded("MNK"[: len(sharded)]))))
        return tuple(value + 1 for value in random.sample(results, len(results)))

    body = (replace(op, result=replace(op.result, is_async=random.random() < 0.8)) for op in moved.ops)
    return computes(generator, replace(moved, body=tuple(body)), seed, Options(transport=random.choice(["auto", "one_sided", "peer"])))


@pytest.mark.parametrize("seeds", seed_ranges(36, 4000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_moves_on_a_separate_stream(seeds: range) -> None:
    assert sum(map(overlaps_right, seeds)) > 0.5 * len(seeds)


def moves_right(seed: int) -> bool:
    """Reshards a tensor between shardings over several axes, sometimes with permuted dims, and sometimes in loops."""
    generator = Generator(seed)
    generator.mesh = hw.Mesh(**generator.random.choice(MESHES_OF_MOVES))
    generator.sizes = dict.fromkeys("MNK", 2 * generator.mesh.size)
    dims = list("MNK")[: generator.random.randint(1, 3)]

    @hw.fusion(mesh=generator.mesh, x=hw.f64[generator.sharded(dims)])
    def moved(x: hw.Tensor) -> hw.Tensor:
        for _ in range(generator.random.randint(1, 3)):
            if generator.random.random() < 0.5:
                order = generator.random.sample(range(x.ndim), x.ndim)
                x, dims[:] = hw.permute_dims(x, tuple(order)), [dims[dim] for dim in order]
            x = hw.reshard(x, *generator.sharded(dims))
            if generator.random.random() < 0.7:
                x.stream(generator.random.randrange(x.ndim), chunks=generator.random.choice([None, 2, generator.mesh.size]))
        return x

    return computes(generator, moved, seed)


@pytest.mark.parametrize("seeds", seed_ranges(80, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_moves(seeds: range) -> None:
    assert sum(map(moves_right, seeds)) > 0.5 * len(seeds)


def turns_right(seed: int) -> bool:
    """Programs with transposes between ops of one chunk loop. Some loops also communicate."""
    generator = Generator(seed)
    dims = list("MNK")[: generator.random.randint(2, 3)]

    @hw.fusion(mesh=generator.mesh, x=hw.f64[generator.sharded(dims)])
    def turned(x: hw.Tensor) -> hw.Tensor:
        return turned_in_a_loop(generator, [x], x) * 2

    return computes(generator, turned, seed)


@pytest.mark.parametrize("seeds", seed_ranges(40, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_transposes_in_loops(seeds: range) -> None:
    assert sum(map(turns_right, seeds)) > 0.5 * len(seeds)


def contracts_right(seed: int) -> bool:
    """Contractions of one to three tensors with independent shardings, some of them in loops.

    The result of a contraction is an operand of an addition, is returned unchanged, or is stacked with its double.
    """
    generator = Generator(seed)
    random = generator.random
    letters = random.sample("abcde", random.randint(2, 5))
    sizes = {letter: random.choice(["M", "N", "K", 2]) for letter in letters}
    terms = ["".join(random.sample(letters, random.randint(1, len(letters)))) for _ in range(random.choice([1, 2, 2, 2, 3]))]
    known = sorted(set("".join(terms)))
    result = "".join(random.sample(known, random.randint(0, len(known))))
    inputs = {f"x{i}": hw.f64[generator.sharded([sizes[letter] for letter in term])] for i, term in enumerate(terms)}
    use, place = random.choice(["operand", "view", "part"]), random.randint(0, len(result))

    @hw.fusion(mesh=generator.mesh, **inputs)
    def contracted(**tensors: hw.Tensor) -> hw.Tensor:
        made = hw.einsum(f"{','.join(terms)}->{result}", *tensors.values())
        if made.ndim and random.random() < 0.5:
            with contextlib.suppress(ProgramError):
                made.stream(random.randrange(made.ndim), chunks=random.choice([None, 2, generator.mesh.size]))
        return {"operand": made + 0, "view": made, "part": hw.stack([made, 2 * made], axis=place)}[use]

    arrays = generator.arrays(contracted, seed)
    (wanted,) = run_reference(contracted, arrays)
    wanted = wanted.take(0, place) if use == "part" else wanted
    np.testing.assert_allclose(np.einsum(f"{','.join(terms)}->{result}", *arrays.values()), wanted)
    return computes(generator, contracted, seed)


@pytest.mark.parametrize("seeds", seed_ranges(32, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_contractions(seeds: range) -> None:
    assert sum(map(contracts_right, seeds)) > 0.5 * len(seeds)


def merges_right(seed: int) -> bool:
    """Contractions as in `contracts_right`, written as matmuls of reshaped operands. The first operand is transposed before or after the
    reshape."""
    generator = Generator(seed)
    random = generator.random
    k = random.sample(["M", "N", 2, 3], random.randint(2, 3))

    @hw.fusion(mesh=generator.mesh, x=hw.f64[generator.sharded([*k, "K", 2])], y=hw.f64[generator.sharded([*k, "K"])])
    def merged(x: hw.Tensor, y: hw.Tensor) -> hw.Tensor:
        count, size = len(k), "*".join(map(str, k))
        if random.random() < 0.5:
            a = hw.permute_dims(hw.reshape(x, size, "2*K"), (1, 0))
        else:
            a = hw.reshape(hw.permute_dims(x, (count, count + 1, *range(count))), "2*K", size)
        product = a @ hw.reshape(y, size, "K")
        return product.stream(random.randrange(2), chunks=2) if random.random() < 0.4 else product

    return computes(generator, merged, seed)


@pytest.mark.parametrize("seeds", seed_ranges(24, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_merged_matrices(seeds: range) -> None:
    assert sum(map(merges_right, seeds)) > 0.3 * len(seeds)


def regroups_right(seed: int) -> bool:
    """Reshapes that split and merge dims. A rank may have a single index of a dim."""
    generator = Generator(seed)
    random = generator.random
    factors = [size for _, size in generator.mesh.axes for _ in range(random.randint(1, 2))] + ["K"] * random.randint(0, 1) + [2]

    def grouped(rest: list[Any]) -> list[Any]:
        dims = []
        while rest:
            count = random.randint(1, len(rest))
            taken, rest = rest[:count], rest[count:]
            number = math.prod(factor for factor in taken if factor != "K")
            dims.append(f"{number}*K" if "K" in taken and number > 1 else "K" if "K" in taken else number)
        return dims

    shapes = [grouped(factors) for _ in range(3)]

    @hw.fusion(mesh=generator.mesh, x=hw.f64[generator.sharded(factors)])
    def regrouped(x: hw.Tensor) -> hw.Tensor:
        for shape in shapes:
            x = hw.reshape(x, *shape) * 2
            x = generator.resharded(x) if random.random() < 0.5 else x
        return x

    return computes(generator, regrouped, seed)


@pytest.mark.parametrize("seeds", seed_ranges(24, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_regrouping(seeds: range) -> None:
    assert sum(map(regroups_right, seeds)) > 0.5 * len(seeds)


def sums_right(seed: int) -> bool:
    """Sums over sharded dims, followed by linear and nonlinear ops."""
    generator = Generator(seed)

    @hw.fusion(mesh=generator.mesh, x=generator.dtype[generator.sharded("MN")], y=generator.dtype[generator.sharded("NK")])
    def summed(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
        values = [x, y]
        for _ in range(generator.random.randint(1, 2)):
            with contextlib.suppress(ProgramError):  # The random op does not accept these operands.
                values.append(of_sums(generator, values, values[-1]))
        return tuple(value + 0 for value in values)

    return computes(generator, summed, seed)


@pytest.mark.parametrize("seeds", seed_ranges(24, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_sums(seeds: range) -> None:
    assert sum(map(sums_right, seeds)) > 0.5 * len(seeds)


def differences_right(seed: int) -> bool:
    """The difference of two equal sums is zero on every rank."""
    generator = Generator(seed)

    def total(x: hw.Tensor) -> hw.Tensor:
        while x.ndim:
            x = hw.sum(generator.resharded(x), generator.random.randrange(x.ndim))
        return x

    @hw.fusion(mesh=generator.mesh, x=hw.f64[generator.sharded("MNK")])
    def difference(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        zero = total(x) - total(-x * -1)
        return hw.sign(zero) + x, hw.where(zero == 0, x, -x)

    return computes(generator, difference, seed)


@pytest.mark.parametrize("seeds", seed_ranges(24, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_differences(seeds: range) -> None:
    assert sum(map(differences_right, seeds)) > 0.5 * len(seeds)
