"""Sums of squares of few and of many rows, and lookups in a sharded table, on GPUs."""

from __future__ import annotations

import numpy as np
import pytest

import hostweave as hw
from hostweave.build.cuda import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]


@pytest.mark.parametrize("rows", [1, 4, 5, 300])
def test_sum_of_squares(rows: int) -> None:
    program = hw.compile(hw.fusion(x=hw.f32["M", 4096])(lambda x: hw.sum(x * x)), target="cuda")
    x = np.random.default_rng(0).standard_normal((rows, 4096)).astype(np.float32)
    np.testing.assert_allclose(program.run(x), np.sum(x.astype(np.float64) ** 2), rtol=1e-5)


@pytest.mark.skipif(len(gpus()) < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("vocabulary", [10, 11, 1])
def test_lookup_in_a_sharded_table(vocabulary: int) -> None:
    specs = {"table": hw.f32["V@tp", 64], "ids": hw.i32["T"]}
    program = hw.compile(hw.fusion(mesh=hw.Mesh(tp=2), **specs)(lambda table, ids: hw.embedding(ids, table)), target="cuda")
    rng = np.random.default_rng(0)
    table, ids = rng.standard_normal((vocabulary, 64)).astype(np.float32), rng.integers(0, vocabulary, 9).astype(np.int32)
    np.testing.assert_array_equal(program.run(table, ids), table[ids])
