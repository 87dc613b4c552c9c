"""Each rank computes only its shard of an iota, and does not slice the whole iota."""

from __future__ import annotations

import numpy as np
import pytest

import hostweave as hw
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.pipeline import lower

IDS = 6


@hw.fusion(mesh=hw.Mesh(tp=4), table=hw.f32["V@tp", 3], ids=hw.i32[IDS], x=hw.f32["S@tp", 8])
def numbered(table: hw.Tensor, ids: hw.Tensor, x: hw.Tensor) -> tuple[hw.Tensor, ...]:
    """A lookup in a sharded table, a mask of sharded rows, and the indices of the rows as a result."""
    rows = hw.iota(x, 0)
    return hw.embedding(ids, table), hw.where(rows[:, None] >= hw.iota(x, 1), x, 0.0), hw.reshard(rows + 1, "S@tp")


def test_no_kernel_computes_the_whole_iota() -> None:
    host = lower(numbered, Options())
    launches = [i for i in tree.walk(host.body) if tree.names(i, "launch")]
    assert len(launches) == 4  # The launches are the lookup, its all_reduce, the mask and the indices.
    assert not any(isinstance(i, ir.Slice) for i in tree.walk(host.body))
    offsets = {str(size) for kernel in host.kernels for size in kernel.sizes}
    assert offsets == {"first(V, tp)", "first(S, tp)"}


@pytest.mark.parametrize(("vocabulary", "rows"), [(10, 7), (16, 8), (3, 2)])
def test_results(vocabulary: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    table, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((vocabulary, 3), (rows, 8)))
    ids = rng.integers(0, vocabulary, IDS).astype(np.int32)
    found, masked, numbers = hw.compile(numbered, target="cpu").run(table, ids, x)
    assert np.array_equal(found, table[ids])
    assert np.array_equal(masked, np.where(np.arange(rows)[:, None] >= np.arange(8), x, 0))
    assert np.array_equal(numbers, np.arange(1, rows + 1))
