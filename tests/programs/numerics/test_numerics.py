"""Results of programs on every rank of the CPU target, compared with NumPy: with parallel ranks, and in seeded orders."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from compiled_fusions import (
    ONE_DEVICE,
    SEVERAL,
    Arrays,
    at_sizes,
    compiled,
    expect,
    fusion_of,
    integer_arrays,
    lowered,
    random_arrays,
    sizes_of,
)

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.tensor import DType

SEEDS = range(4)


@dataclass(frozen=True)
class Variant:
    """Parameters of a fusion, and options of its compilation. `chunks` is used only if the number of ranks does not determine the number of
    chunks. If `known`, sizes are constants."""

    ranks: int
    chunks: int
    streams: int
    dtype: DType
    known: bool = False

    def __str__(self) -> str:
        return f"{self.ranks}-{self.dtype}"


VARIANTS = (
    Variant(ranks=1, chunks=3, streams=4, dtype=hw.f32),
    Variant(ranks=2, chunks=5, streams=3, dtype=hw.f16, known=True),
    Variant(ranks=3, chunks=2, streams=4, dtype=hw.f32),
    Variant(ranks=4, chunks=3, streams=4, dtype=hw.bf16),
    Variant(ranks=8, chunks=6, streams=4, dtype=hw.bf16, known=True),
)
ON_ONE_DEVICE = (
    Variant(ranks=1, chunks=3, streams=4, dtype=hw.f32),
    Variant(ranks=1, chunks=5, streams=2, dtype=hw.f16, known=True),
    Variant(ranks=1, chunks=3, streams=4, dtype=hw.bf16),
)
OFTEN = VARIANTS[3]  # Other tests run every program of SEVERAL in this variant.
QUICK = [v for v in VARIANTS if v is not OFTEN]  # Each program runs in only one of these variants by default.
CASES = [
    pytest.param(name, v, id=f"{name}-{v}", marks=[] if names is ONE_DEVICE or v == QUICK[number % 4] else [pytest.mark.slow])
    for names, variants in ((SEVERAL, VARIANTS), (ONE_DEVICE, ON_ONE_DEVICE))
    for number, name in enumerate(names)
    for v in variants
]


def fusion_and_sizes(name: str, variant: Variant, times: int = 3) -> tuple[Fusion, dict[str, int]]:
    fusion = fusion_of(name, variant.ranks, variant.chunks, variant.dtype)
    sizes = sizes_of(fusion, times)
    return (at_sizes(fusion, sizes), sizes) if variant.known else (fusion, sizes)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_matches_numpy(name: str, variant: Variant) -> None:
    fusion, sizes = fusion_and_sizes(name, variant)
    program = compiled(fusion, options=Options(streams=variant.streams))
    arrays = random_arrays(fusion, sizes, seed=1)
    expect(fusion, arrays, program.run(**arrays, ranks=True))
    calls: list[Arrays] = [integer_arrays(fusion, sizes, seed) for seed in range(3)]
    with parallel(check_dependencies=True):
        for arrays, ranks in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
            expect(fusion, arrays, ranks, exact=True)
    for seed in SEEDS:
        with seeded(seed):
            for arrays, ranks in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
                expect(fusion, arrays, ranks, exact=True)


@pytest.mark.parametrize("name", [*SEVERAL, *ONE_DEVICE])
def test_any_size(name: str) -> None:
    variant = OFTEN if name in SEVERAL else ON_ONE_DEVICE[0]
    for times in (1, 4, 1):
        fusion, sizes = fusion_and_sizes(name, variant, times)
        program = compiled(fusion, options=Options(streams=variant.streams))
        arrays = random_arrays(fusion, sizes, seed=times)
        expect(fusion, arrays, program.run(**arrays, ranks=True))


UNEVEN = (
    *("matmul_ar_flat", "matmul_rs_flat", "matmul_rs_ring", "allreduce_rows", "matmul_ar_unstreamed", "two_outputs", "matmul_ar_two_axes"),
    *("matmul_ar_ag", "three_layers", "gradients", "halves", "two_loops", "gated_in_loops"),
)


def test_names_of_programs_with_uneven_shards() -> None:
    assert [name for name in SEVERAL if lowered(fusion_of(name, 4, 3, hw.bf16)).uneven] == [*UNEVEN]


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_shards(name: str) -> None:
    """At three of the sizes, the last ranks have fewer elements, or none."""
    variant = OFTEN
    fusion, even = fusion_and_sizes(name, variant)
    program = compiled(fusion, options=Options(streams=variant.streams))
    for more in (1, 2, 3, 0):
        sizes = even | dict.fromkeys(lowered(fusion).uneven, variant.ranks + more)
        arrays = random_arrays(fusion, sizes, seed=more)
        expect(fusion, arrays, program.run(**arrays, ranks=True))
        with seeded(more):
            expect(fusion, arrays, program.run(**arrays, ranks=True))
