"""Random attention programs, on 1 to 8 ranks.

Results are compared with a tolerance of 2e-4. Other random programs have smaller rounding errors, so attention has a separate file.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fusion_properties import seed_ranges
from interpret import interpret
from random_attention import REFUSED, Case

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.tensor import block_of, holds


def is_right(seed: int) -> bool:
    """Returns True if the program of this seed runs, and False if it is refused for a known reason. Fails on wrong results, and on refusals
    for unknown reasons."""
    case = Case(seed)
    try:
        fusion = case.fusion()
        known = {name for value in fusion.inputs for size in value.type.shape for name in size.symbols}
        sizes = case.random.choice([{}, {name: size for name, size in case.sizes.items() if name in known}])
        host = lower(fusion, Options(transport=case.random.choice(["auto", "one_sided"]), sizes=sizes))
        assert HostProgram.parse(str(host)) == host
        check(host, fusion=fusion)
        arrays = case.arrays(fusion, seed)
        ranks = interpret(host, arrays)
    except (ArgumentError, ProgramError) as error:
        if any(why in str(error) for why in REFUSED):
            return False
        raise
    with np.errstate(all="ignore"):
        wanted = run_reference(fusion, arrays)
    for parameter, want in zip(host.outputs, wanted, strict=True):
        for rank, results in enumerate(ranks):
            if holds(parameter.type, host.mesh, rank):
                block = want[block_of(parameter.type, host.mesh, rank, want.shape)]
                message = f"seed {seed}, rank {rank}\n{fusion}"
                np.testing.assert_allclose(results[parameter.name], block, rtol=2e-4, atol=2e-4, err_msg=message)
    return True


@pytest.mark.parametrize("seeds", seed_ranges(40, 6000), ids=str)
def test_random_attention(seeds: range) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hw.errors.OverlapWarning)
        assert sum(map(is_right, seeds)) > 0.6 * len(seeds)
