"""Random programs on GPUs: their results equal NumPy's results. The generators are those of the tests on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from fusion_properties import IGNORED, checked, compare, without_kernels
from random_attention import REFUSED, Case
from random_dtypes import with_dtypes
from random_fusions import Array, Generator, exchanging, in_groups

import hostweave as hw
from hostweave.base.errors import ArgumentError, HostweaveError, ProgramError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options

pytestmark = pytest.mark.gpu

MESHES = [{"x": ranks} for ranks in (1, 2, 3, 4) if ranks <= len(gpus())] or [{"x": 1}]
REFUSED_IN_CALLS = "some row of the query sees no key|cuBLASLt multiplies 8-bit floats only if "
Made = tuple[Fusion, Options, dict[str, Array]]


def of_ops(seed: int) -> Made:
    generator = Generator(seed, MESHES, ops=[in_groups] * 3)
    if seed % 2:  # Kernels read several elements of such rows at once, or use several blocks.
        random = Random(seed)
        generator.sizes[random.choice("MNK")] = random.choice([64, 96, 1000, 4096] if generator.has_zigzag else [33, 64, 257, 1000, 4096])
    fusion = generator.fusion()
    return fusion, Options(), generator.arrays(fusion, seed)


def of_dtypes(seed: int) -> Made:
    generator, fusion, options = with_dtypes(seed, MESHES)
    return fusion, options, generator.arrays(fusion, seed)


def of_exchanges(seed: int) -> Made:
    generator, fusion = exchanging(seed, MESHES)
    return fusion, Options(), generator.arrays(fusion, seed)


def of_attention(seed: int) -> Made:
    case = Case(seed, MESHES)
    fusion = case.fusion()
    return fusion, Options(), case.arrays(fusion, seed)


def built(make: Callable[[int], Made], seed: int) -> tuple[Made, hw.Program] | None:
    try:
        made = fusion, options, _ = make(seed)
        if checked(fusion, options) is None:
            return None
    except ProgramError as error:
        if any(why in str(error) for why in REFUSED):
            return None
        raise
    program = hw.compile(fusion, target="cuda", options=options)
    try:
        program.build()
    except HostweaveError as error:
        error.add_note(f"seed {seed}\n{fusion}")
        raise
    return made, program


def seed_ranges() -> list[Any]:
    """Ranges that the tests on GPUs run, and ranges that only `-m slow` runs."""
    return [pytest.param(range(i, i + 12), marks=[pytest.mark.slow] * (i >= 24)) for i in range(0, 2400, 12)]


@pytest.mark.parametrize("seeds", seed_ranges(), ids=str)
@pytest.mark.parametrize(("make", "tolerance"), [(of_ops, 1e-12), (of_dtypes, 1e-12), (of_exchanges, 1e-12), (of_attention, 2e-4)])
@pytest.mark.filterwarnings(*IGNORED)
def test_random_programs(make: Callable[[int], Made], tolerance: float, seeds: range) -> None:
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 4, 2)) as pool:
        programs = list(pool.map(lambda seed: built(make, seed), seeds))
    ran = 0
    for seed, found in zip(seeds, programs, strict=True):
        if found is None:
            continue
        (fusion, _, arrays), program = found
        message = f"seed {seed}\n{fusion}\n{program.host}"
        try:
            ranks = program.run(**arrays, ranks=True)
        except ArgumentError:
            continue  # The program does not support these uneven sizes.
        except HostweaveError as error:
            if re.search(REFUSED_IN_CALLS, str(error)):
                continue
            error.add_note(message)
            raise
        names = [output.name for output in program.host.outputs]
        results: list[dict[str, Any]] = [dict(zip(names, own if isinstance(own, tuple) else (own,), strict=True)) for own in ranks]
        compare(program.host, without_kernels(fusion), arrays, results, message, tolerance)
        ran += 1
    assert ran > len(seeds) // 2
