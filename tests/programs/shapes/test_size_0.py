"""Calls with sizes of 0 on each transport, and calls with empty slices."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import EXCHANGES, ONE_SIDED, expect, fusion_of, integer_arrays, sizes_of, with_transports
from cuda_here import nccl

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.build.cuda import gpus

LOOPS = ("ag_matmul_p2p", "ag_matmul_ring", "matmul_rs_ring", "matmul_ar", "gated_in_loops", "three_layers", "gradients")
NAMES = (*EXCHANGES, *LOOPS)
CASES = [(name, transport) for name in NAMES for transport in ("peer", "one_sided", "two_sided")] + [(name, "auto") for name in ONE_SIDED]
ON_GPUS = [("permutes", "peer"), ("exchanges", "two_sided"), ("mlp_put", "auto"), ("residual_put", "auto")]
HAS_GPUS = len(gpus()) >= 2 and nccl() >= 22900
on_gpus = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPUS, reason="needs 2 GPUs, and NCCL 2.29")]
PLACES = with_transports([("cpu", 2, name) for name in NAMES]) + [("cpu", 2, *case) for case in CASES if case[1] in ("two_sided", "auto")]
PLACES += [pytest.param("cpu", 3, *case, marks=pytest.mark.slow) for case in CASES]
PLACES += [pytest.param("cuda", 2, *case, marks=on_gpus) for case in ON_GPUS]


@pytest.mark.parametrize(("target", "ranks", "name", "transport"), PLACES)
def test_matches_numpy(target: str, ranks: int, name: str, transport: str) -> None:
    """At the first call, no memory is allocated yet. At later calls, memory for the sizes of earlier calls is allocated."""
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    program = hw.compile(fusion, target, options=hw.Options(transport=transport))
    some = sizes_of(program.host)
    none = dict.fromkeys(some, 0)
    for sizes in (none, *(some | {size: 0} for size in some), some, none):
        arrays = integer_arrays(fusion, sizes, seed=0)
        try:
            results = program.run(**arrays, ranks=True)
        except ArgumentError as error:
            if "there is no max of no elements" not in str(error):
                raise
        else:
            expect(fusion, arrays, results, exact=True)
    program.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_slices_of_a_small_dim(ranks: int, size: int) -> None:
    """Slices of a dim with few elements may be empty, as in NumPy. This also holds in the variant for uneven sizes."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f64["M@x", "N"], y=hw.f64["N", "M"])
    def sliced(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return x[1:] * 2, y[:, :-1] + 1, hw.reshape(x[1:], -1), hw.concat([x[1:], x], 0), hw.sum(x[1:], 0)

    x, y = np.arange(3.0 * size).reshape(size, 3), np.arange(3.0 * size).reshape(3, size)
    wanted = (x[1:] * 2, y[:, :-1] + 1, x[1:].ravel(), np.concatenate([x[1:], x]), x[1:].sum(0))
    for got, want in zip(hw.compile(sliced).run(x, y), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
