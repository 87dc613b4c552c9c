"""Random fusions. Hostweave refuses a fusion, or lowers it to a program. The program can be printed and parsed, passes the check, and gives
NumPy's results. `pytest -m slow` tests many more fusions."""

from __future__ import annotations

import contextlib

import pytest
from fusion_properties import IGNORED, checked, compare, computes, seed_ranges, without_kernels
from random_fusions import GATHERING, SCATTERING, SUMMING, Generator, collided, exchanging, in_groups, wider

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded

# These seeds suffice for test_random_programs_have_every_instruction_and_algorithm, which tries them first.
RICH = (69, 82, 29, 10, 78, 22, 94, 0, 36, 40, 90, 126, 135)
SEEDS = 160  # number of seeds by default; the programs of these seeds and of `exchanging` have all instructions except NOT_MADE


def is_right(seed: int) -> bool:
    """Returns True if the program of this seed runs at some sizes. Fails if results are wrong."""
    generator = Generator(seed)
    return computes(generator, generator.fusion(), seed)


@pytest.mark.parametrize("seeds", seed_ranges(SEEDS, 20000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_programs(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.8 * len(seeds)  # The remaining programs are refused, or run at none of the tried sizes.


@pytest.mark.parametrize("seeds", seed_ranges(40, 10000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_wider_programs(seeds: range) -> None:
    def is_right(seed: int) -> bool:
        generator = wider(seed)
        return computes(generator, generator.fusion(), seed)

    assert sum(map(is_right, seeds)) > 0.7 * len(seeds)


NOT_MADE = {"Barrier", "Gather", "Mark", "Scatter"}  # These instructions occur only in handwritten host programs and in timelines.
NOT_MADE |= {"Attention", "AttentionBackward"}  # Attention has separate tests, because its results are not exact.
NOT_MADE |= {"GroupedMatmul", "GroupedOuter"}  # test_random_routings covers grouped matmuls.


@pytest.mark.parametrize("seeds", seed_ranges(60, 6000), ids=str)
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


@pytest.mark.parametrize("seeds", seed_ranges(60, 6000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_collectives_in_kernels(seeds: range) -> None:
    assert all(computes(*exchanging(seed), seed) for seed in seeds)


@pytest.mark.filterwarnings(*IGNORED)
def test_random_programs_have_every_instruction_and_algorithm() -> None:
    known = {name for name, value in vars(ir).items() if isinstance(value, type) and issubclass(value, tree.Instruction) and value.syntax}
    missing: set[str | None] = {None, "sent_on", *known - NOT_MADE, *GATHERING, *SCATTERING, *SUMMING}
    for fusion in (one for seed in (*RICH, *range(SEEDS)) for one in (Generator(seed).fusion(), exchanging(seed)[1])):
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
