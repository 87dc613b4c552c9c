"""Random fusions. Hostweave refuses a fusion, or lowers it to a program. The program can be printed and parsed, passes the check, and gives
NumPy's results. `pytest -m slow` tests many more fusions."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fusion_properties import IGNORED, checked, compare, computes, parts, without_kernels
from random_fusions import GATHERING, SCATTERING, SUMMING, Generator, collided, exchanging, in_groups, of_sums, turned_in_a_loop, wider

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded

MESHES_OF_MOVES: tuple[dict[str, int], ...] = ({"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2})
SEEDS = 160  # number of seeds by default; the programs of these seeds and of `exchanging` have all instructions except NOT_MADE


def is_right(seed: int) -> bool:
    """Returns True if the program of this seed runs at some sizes. Fails if results are wrong."""
    generator = Generator(seed)
    return computes(generator, generator.fusion(), seed)


@pytest.mark.parametrize("seeds", parts(SEEDS, 20000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_programs(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.8 * len(seeds)  # The remaining programs are refused, or run at none of the tried sizes.


@pytest.mark.parametrize("seeds", parts(40, 10000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_wider_programs(seeds: range) -> None:
    def is_right(seed: int) -> bool:
        generator = wider(seed)
        return computes(generator, generator.fusion(), seed)

    assert sum(map(is_right, seeds)) > 0.7 * len(seeds)


NOT_MADE = {"Barrier", "Gather", "Mark", "Scatter"}  # These instructions occur only in handwritten host programs and in timelines.
NOT_MADE |= {"Attention", "AttentionBackward"}  # Attention has separate tests, because its results are not exact.
NOT_MADE |= {"GroupedMatmul", "GroupedOuter"}  # test_random_routings covers grouped matmuls.


@pytest.mark.parametrize("seeds", parts(60, 6000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_routings(seeds: range) -> None:
    """Programs with grouped matmuls. Some groups may be empty, and some rows may be in no group."""

    made: set[str] = set()

    def is_right(seed: int) -> bool:
        generator = Generator(seed, ops=[in_groups] * 15)
        fusion = generator.fusion()
        made.update(op.kind for op in fusion.ops)
        return computes(generator, fusion, seed)

    assert sum(map(is_right, seeds)) > 0.7 * len(seeds)
    assert made >= {"grouped_matmul", "grouped_outer"}


@pytest.mark.parametrize("seeds", parts(60, 6000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_collectives_in_kernels(seeds: range) -> None:
    assert all(computes(*exchanging(seed), seed) for seed in seeds)


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


@pytest.mark.parametrize("seeds", parts(36, 4000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_moves_on_a_separate_stream(seeds: range) -> None:
    assert sum(map(overlaps_right, seeds)) > 0.5 * len(seeds)


@pytest.mark.filterwarnings(*IGNORED)
def test_random_programs_have_every_instruction_and_algorithm() -> None:
    known = {name for name, value in vars(ir).items() if isinstance(value, type) and issubclass(value, tree.Instruction) and value.syntax}
    missing: set[str | None] = {None, "sent_on", *known - NOT_MADE, *GATHERING, *SCATTERING, *SUMMING}
    for fusion in (one for seed in range(SEEDS) for one in (Generator(seed).fusion(), exchanging(seed)[1])):
        with contextlib.suppress(ProgramError):
            instructions = [i for body in bodies(lower(fusion, Options())) for i in tree.walk(body.body)]
            made = {type(i).__name__ for i in instructions} | {"sent_on" for i in instructions if isinstance(i, ir.Launch) and i.sent_on}
            assert not made & NOT_MADE
            missing -= made | {op.result.stream.algorithm for op in fusion.ops if op.result.stream}
        if not missing:
            break
    assert not missing


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 500))])
@pytest.mark.filterwarnings(*IGNORED)
def test_compiled_programs(seed: int) -> None:
    generator = wider(seed) if seed % 3 else Generator(seed)
    fusion = generator.fusion()
    arrays = generator.arrays(fusion, seed)
    if seed % 2:
        fusion = collided(fusion)
        arrays = dict(zip((value.name for value in fusion.inputs), arrays.values(), strict=True))
    host = checked(fusion, Options())
    if host is None:
        return
    program = hw.compile(fusion)
    names = [output.name for output in host.outputs]
    for schedule in (parallel(check_dependencies=True), seeded(seed)):
        with schedule:
            try:
                ranks = program.run(**arrays, ranks=True)
            except ArgumentError:
                return  # The program does not support these uneven sizes.
        results = [dict(zip(names, own if isinstance(own, tuple) else (own,), strict=True)) for own in ranks]
        compare(host, without_kernels(fusion), arrays, results, f"seed {seed}\n{program.source}")


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


@pytest.mark.parametrize("seeds", parts(80, 2000), ids=str)
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


@pytest.mark.parametrize("seeds", parts(40, 2000), ids=str)
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


@pytest.mark.parametrize("seeds", parts(32, 2000), ids=str)
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


@pytest.mark.parametrize("seeds", parts(24, 2000), ids=str)
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


@pytest.mark.parametrize("seeds", parts(24, 2000), ids=str)
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


@pytest.mark.parametrize("seeds", parts(24, 2000), ids=str)
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


@pytest.mark.parametrize("seeds", parts(24, 2000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_differences(seeds: range) -> None:
    assert sum(map(differences_right, seeds)) > 0.5 * len(seeds)
