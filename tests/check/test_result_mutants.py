"""Random mutants of host programs: the check rejects each mutant whose f64 results are wrong. `pytest -m slow` tests many more."""

from __future__ import annotations

from collections import Counter

import pytest
from compiled_fusions import fusion_of
from fusion_properties import IGNORED
from fusions_from_files import exchange_fusions, fusions_of_features
from math_mutants import CAUGHT, MISSED, Subject, judged, mutants, subjects, training_subjects

import hostweave as hw
from hostweave.check.check import check
from hostweave.check.results.arithmetic import RANDOM_EXP
from hostweave.check.results.inputs import random_inputs
from hostweave.options import Options
from hostweave.pipeline import lower


def expect_caught(count: int, ranks: int, seed: int, programs: slice = slice(None)) -> None:
    verdicts: Counter[str] = Counter()
    missed = []
    for kind, where, verdict in judged(count, list(subjects(ranks))[programs], seed):
        verdicts[verdict] += 1
        if verdict == MISSED:
            missed.append(f"{kind}: {where}")
    assert missed == []
    assert verdicts[CAUGHT] > verdicts.total() / 2


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.more) for first in (9, 18))])
@pytest.mark.filterwarnings("ignore::RuntimeWarning", *IGNORED)
def test_mutants_are_caught(first: int) -> None:
    expect_caught(20, 4, seed=0, programs=slice(first, None, 27))


@pytest.mark.parametrize("name", fusions_of_features())
@pytest.mark.filterwarnings("ignore::RuntimeWarning", *IGNORED)
def test_mutants_of_a_feature_are_caught(name: str) -> None:
    subject = Subject(name, fusions_of_features(3)[name])
    verdicts = list(judged(20, [subject]))
    assert [f"{kind}: {where}" for kind, where, verdict in verdicts if verdict == MISSED] == []
    assert sum(verdict == CAUGHT for *_, verdict in verdicts) >= 4
    assert check(subject.host, fusion=subject.fusion) == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.filterwarnings("ignore::RuntimeWarning", *IGNORED)
def test_more_mutants_are_caught(seed: int) -> None:
    expect_caught(2000, (2, 3, 4, 8)[seed % 4], seed)


@pytest.mark.slow
@pytest.mark.extra("torch")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", *IGNORED)
def test_mutants_of_training_programs_are_caught() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    missed = [f"{kind}: {where}" for kind, where, verdict in judged(60, list(training_subjects(2))) if verdict == MISSED]
    assert missed == []


def test_blocks_of_squares_differ_from_their_transposes() -> None:
    """The check detects a wrong order of blocks even if the matrix is square and each block is one row or column."""
    found = [verdicts_on_blocks(name) for name in ("two_axes", "reduce_scatter")]
    assert all(verdict != MISSED for verdicts in found for verdict in verdicts)
    assert CAUGHT in found[0]


def test_sums_in_the_check_have_more_than_one_element() -> None:
    """A sum over a single element equals a maximum, so the check cannot distinguish the two."""
    subject = Subject("two_axes", fusion_of("two_axes", 4, 3, hw.f32))
    assert {subject.judge(made) for kind, _, made in mutants(subject.host) if kind == "another op"} == {CAUGHT}


def test_integers_reduced_by_xor_have_many_bits() -> None:
    """For a program with very many elements, the check uses only one set of inputs. This set must distinguish xor from or."""
    subject = Subject("permutes", exchange_fusions(8)["permutes"])
    found = [made for kind, where, made in mutants(subject.host) if kind == "another op" and "reduce_xor" in where]
    assert [subject.judge(made) for made in found] == [CAUGHT, CAUGHT]


def test_each_input_is_tried_with_both_signs() -> None:
    """Each float has opposite signs in the first two sets of inputs. If `abs` is missing or replaced by a negation, the result is wrong
    for one sign."""
    fusion = hw.fusion(x=hw.f32[()], y=hw.f32["M"])(lambda x, y: -x * y)
    for values in random_inputs(fusion, {"M": 40}, 3, RANDOM_EXP, {}).values():
        assert ((values.value[0] < 0) != (values.value[1] < 0)).all()


def verdicts_on_blocks(name: str) -> list[str]:
    subject = Subject(name, fusion_of(name, 3, 3, hw.f32))
    return [subject.judge(made) for kind, _, made in mutants(subject.host) if kind == "another order of blocks"]


def test_mutants_are_of_all_kinds() -> None:
    found = {
        kind for name in ("epilogues", "two_layers", "stages") for kind, *_ in mutants(lower(fusion_of(name, 4, 3, hw.f32), Options()))
    }
    assert {"another order of operands", "another scale", "another reduction", "a stale buffer", "a missing instruction"} <= found
