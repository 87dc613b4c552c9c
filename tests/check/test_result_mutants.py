"""The check of results detects each mathematical error in a host program that f64 detects. `pytest -m slow` tries many more."""

from __future__ import annotations

from collections import Counter

import pytest
from compiled_fusions import fusion_of
from math_mutants import CAUGHT, MISSED, judged, mutants, subjects
from random_fusions import IGNORED

import hostweave as hw
from hostweave.options import Options
from hostweave.pipeline import lower


def expect_caught(count: int, ranks: int, seed: int, every: int = 1) -> None:
    verdicts: Counter[str] = Counter()
    missed = []
    for kind, where, verdict in judged(count, list(subjects(ranks))[::every], seed):
        verdicts[verdict] += 1
        if verdict == MISSED:
            missed.append(f"{kind}: {where}")
    assert missed == []
    assert verdicts[CAUGHT] > verdicts.total() / 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning", *IGNORED)
def test_mutants_are_caught() -> None:
    expect_caught(120, 4, seed=0, every=9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.filterwarnings("ignore::RuntimeWarning", *IGNORED)
def test_more_mutants_are_caught(seed: int) -> None:
    expect_caught(2000, (2, 3, 4, 8)[seed % 4], seed)


def test_mutants_are_of_all_kinds() -> None:
    found = {
        kind for name in ("epilogues", "two_layers", "stages") for kind, *_ in mutants(lower(fusion_of(name, 4, 3, hw.f32), Options()))
    }
    assert {"another order of operands", "another scale", "another reduction", "a stale buffer", "a missing instruction"} <= found
