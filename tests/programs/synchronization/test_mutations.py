"""Programs that lack one record, wait, fork or join.

A mutant lacks one synchronisation, and runs on the CPU device. The caller's stream writes inputs and reads outputs. Several calls are in
flight, and outputs and temporaries are NaN before each call. If the static check rejects the mutant, one of the tried schedules must give
wrong results, and one must report a missing dependency. Otherwise, no schedule may do either. Waits for events that are never recorded are
not checked. Mutants without the order of channels (TURNS) are an exception: they may deadlock, but give right results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from attention_cases import keys_in_a_loop
from compiled_fusions import ONE_DEVICE, SEVERAL, Arrays, compiled, expect, fusion_of, integer_arrays, sizes_of

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, joined
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded

SEEDS = 200
CALLS = 3  # number of calls in flight
SYNCHRONISATION = (ir.Record, ir.Wait, ir.Fork, ir.Join)
TURNS = "channels_idle"  # Name of the event that orders channels. Without this event, ranks may deadlock, but results are not wrong.


def mutants(host: HostProgram) -> Iterator[tuple[str, HostProgram]]:
    parts = bodies(host)
    found = [(at, i) for at, part in enumerate(parts) for i in tree.walk(part.body) if isinstance(i, SYNCHRONISATION)]
    for number, (at, dropped) in enumerate(found):
        (text,) = dropped.lines()
        body = tree.rewrite(parts[at].body, lambda i, dropped=dropped: () if i is dropped else None)
        yield f"{number} {text}", joined([*parts[:at], replace(parts[at], body=body), *parts[at + 1 :]])


@dataclass(frozen=True)
class Variant:
    ranks: int
    chunks: int
    streams: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks {self.streams} streams"


SMALL = Variant(ranks=3, chunks=5, streams=4)
ONE_STREAM = Variant(ranks=3, chunks=5, streams=1)  # With one stream, the records and waits of rings are redundant.
MORE = (Variant(ranks=1, chunks=3, streams=2), Variant(ranks=2, chunks=3, streams=3), Variant(ranks=4, chunks=6, streams=2))


# Only slow tests use these programs, because programs of fast tests have the same forks and joins.
SIMILAR = ("add", "allreduce", "allreduce_rows", "epilogues", "matmul_m", "matmul_n", "matmul_ar_flat", "reduce_scatter", "two_loops")
SIMILAR += ("ag_matmul", "ag_matmul_beside_sums", "ag_matmul_flat", "ag_matmul_flat_across", "ag_matmul_flat_chunked")
SIMILAR += ("matmul_rs_through_bcast",)


WITHOUT_MUTANTS = ("matmul_ar_unstreamed", "two_outputs", "halves")  # SMALL synchronises these programs only with TURNS, or not at all.
NAMES = [name for name in (*SEVERAL, *ONE_DEVICE, "keys_in_a_loop_by_p2p", "keys_in_a_loop_by_ring") if name not in WITHOUT_MUTANTS]
CASES = [pytest.param(SMALL, name, marks=[pytest.mark.slow] if name in SIMILAR else []) for name in NAMES]
CASES += [pytest.param(ONE_STREAM, "ag_matmul_ring", marks=pytest.mark.more), pytest.param(ONE_STREAM, "matmul_rs_ring")]


def of_variant(name: str, variant: Variant) -> Fusion:
    _, is_loop, algorithm = name.partition("keys_in_a_loop_by_")
    if is_loop:
        return keys_in_a_loop(variant.ranks, algorithm, hw.bf16)
    return fusion_of(name, variant.ranks, variant.chunks, hw.bf16)


@pytest.mark.parametrize(("variant", "name"), CASES, ids=str)
def test_dropped(variant: Variant, name: str) -> None:
    fusion = of_variant(name, variant)
    sizes = sizes_of(fusion, times=1)
    calls = [integer_arrays(fusion, sizes, seed) for seed in range(CALLS)]
    made = [(dropped, mutant) for dropped, mutant in mutants(lower(fusion, Options(streams=variant.streams))) if TURNS not in dropped]
    assert made or variant != SMALL
    for dropped, mutant in made:
        program = compiled(mutant, options=Options(check=False))
        if is_accepted(without_idle_waits(mutant)):
            assert not [seed for seed in range(SEEDS) if is_reported(program, calls, seed) or is_wrong(program, fusion, calls, seed)], (
                dropped
            )
        else:
            assert any(is_reported(program, calls, seed) for seed in range(SEEDS)), dropped
            assert any(is_wrong(program, fusion, calls, seed) for seed in range(SEEDS)), dropped


@pytest.mark.slow
@pytest.mark.parametrize("variant", MORE, ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_dropped_from_more_variants(name: str, variant: Variant) -> None:
    test_dropped(variant, name)


def test_dropped_order_of_channels() -> None:
    fusion = fusion_of("matmul_ar_ag", 3, 5, hw.bf16)
    calls = [integer_arrays(fusion, sizes_of(fusion, times=1), seed) for seed in range(CALLS)]
    rejected = {}
    for dropped, mutant in mutants(lower(fusion, Options())):
        if TURNS in dropped:
            with pytest.raises(ProgramError) as caught:
                check(mutant)
            rejected[dropped] = str(caught.value)
            program = compiled(mutant, options=Options(check=False))
            assert not any(is_wrong(program, fusion, calls, seed) for seed in range(20))
            assert any(is_reported(program, calls, seed) for seed in range(20))
    assert list(rejected) == ["1 wait channels_idle[0]", "2 record channels_idle[0]"]
    without_wait, without_record = rejected.values()
    assert "are over different channels, and nothing orders them on the rank: they can deadlock" in without_wait
    assert "wait channels_idle[0]: a wait whose record may not have run" in without_record


def without_idle_waits(mutant: HostProgram) -> HostProgram:
    """Removes waits for events that are never recorded. CUDA ignores such waits, and the check rejects them."""
    recorded = {i.event for i in tree.walk(mutant.body) if isinstance(i, ir.Record)}
    return replace(mutant, body=tree.rewrite(mutant.body, lambda i: () if isinstance(i, ir.Wait) and i.event not in recorded else None))


def is_accepted(mutant: HostProgram) -> bool:
    try:
        check(mutant)
    except ProgramError:
        return False
    return True


def is_reported(program: hw.Program, calls: list[Arrays], seed: int) -> bool:
    try:
        with seeded(seed, check_dependencies=True):
            program.run_in_flight(calls, poison=True)
    except ExecutionError as error:
        if "missing dependency" not in str(error):
            raise
        return True
    return False


def is_wrong(program: hw.Program, fusion: Fusion, calls: list[Arrays], seed: int) -> bool:
    with seeded(seed, check_dependencies=False):
        results = program.run_in_flight(calls, poison=True)
    try:
        for arrays, ranks in zip(calls, results, strict=True):
            expect(fusion, arrays, ranks, exact=True)
    except AssertionError:
        return True
    return False
