"""Random programs with values of several dtypes."""

from __future__ import annotations

import pytest
from fusion_properties import IGNORED, computes, seed_ranges
from random_dtypes import with_dtypes


def is_right(seed: int) -> bool:
    generator, fusion, options = with_dtypes(seed)
    return computes(generator, fusion, seed, options)


@pytest.mark.parametrize("seeds", seed_ranges(112, 8000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_dtypes(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.6 * len(seeds)
