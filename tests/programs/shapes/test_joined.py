"""Concat and pad inside kernels, compared with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, lowered

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.runtime.cpu import seeded
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

SIZES = ({"M": 13, "N": 16, "V": 7, "P": 5}, {"M": 1, "N": 7, "V": 3, "P": 0})
TOLERANCE = {"f64": 1e-13, "f32": 2e-5, "bf16": 3e-2}  # absolute and relative: values are about 1


def joined(ranks: int, t: DType) -> Fusion:
    """Concats of values with a common operand, concats of concats, and concats along dims of size 1."""
    rows = dict.fromkeys(("x", "z"), t["M@x", 4, "N"])

    @hw.fusion(mesh=hw.Mesh(x=ranks), **rows, c=t["M@x", 1, "N"], s=t["M@x", 1, "N"], w=t["N"])
    def joined(x, z, c, s, w):  # type: ignore[no-untyped-def]
        turned = hw.concat([x * c - z * s, z * c + x * s], axis=-1)
        nested = hw.concat([hw.concat([hw.exp(x), z], axis=-1) * 2, hw.sin(w) + x, hw.concat([z, z * x], axis=-1)], axis=-1)
        stacked = hw.concat([hw.expand_dims(x * z, 0), hw.expand_dims(c + z, 0), hw.expand_dims(x, 0)], axis=0) - s
        outer = hw.concat([x[:, :1] * w, z[:, 1:], c + w, x - s], axis=1) * hw.cos(w)
        below = (hw.concat([x[:, 0] * 2, z[:, 0], x[:, 1]], axis=-1) > 0, hw.concat([w[:1], hw.exp(w), w[1:] * w[1:]], axis=0))
        inner = hw.concat([x[:, 1:3, :2], z[:, :2, :3], x[:, 1:3, 5:]], axis=2)
        written = hw.concat([x[:, :1], inner, x[:, 3:]], axis=1) * 2  # `inner` is a concat along another dim.
        return turned, nested, stacked, outer, *below, written

    return joined


def reduced(ranks: int, t: DType) -> Fusion:
    """Concats that are reduced, that contain a lookup, or that an in-place update writes. Also pads of computed values."""

    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        x=t["M@x", 32],
        y=t["M@x", 32],
        v=t[96],
        cache=t["M@x", 9, 64],
        ids=hw.i32["M@x"],
        table=t["V", 32],
        short=t["P", 6],
    )
    def reduced(x, y, v, cache, ids, table, short):  # type: ignore[no-untyped-def]
        row = hw.concat([hw.exp(x), y, x * y], axis=1)
        sums = hw.sum(hw.concat([x * 2, y], axis=0), axis=0), hw.sum(hw.concat([short, short * 2], axis=0), axis=0)
        padded = hw.pad(x * 2, (3, 5), value=1) + 1, hw.pad(short * short, (1, 2, 0, 3), value=-1) * 2
        updated = hw.dynamic_update_slice(cache, hw.concat([-y, x], axis=1)[:, None] * 2, (0, 3, 0))
        found = hw.concat([hw.take(table, ids, axis=0), x * 2], axis=1) + 1
        counted = hw.concat([hw.iota(x, 1, hw.i64), hw.iota(x, 1, hw.i64) * 2], axis=0) + 1
        return hw.rms_norm(row, v), hw.softmax(row), *sums, *padded, updated, found, counted, hw.concat([ids, ids * 2], axis=0) + 1

    return reduced


def arrays_of(fusion: Fusion, sizes: dict[str, int]) -> dict[str, Any]:
    random = np.random.default_rng(0)

    def drawn(value: Any) -> Any:
        shape = tuple(size.bind(sizes) for size in value.type.shape)
        is_float = value.type.dtype.kind == "float"
        return (random.uniform(-1, 1, shape) if is_float else random.integers(0, sizes["V"], shape)).astype(numpy_dtype(value.type.dtype))

    return {value.name: drawn(value) for value in fusion.inputs}


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(2, hw.bf16), *(pytest.param(ranks, t, marks=pytest.mark.slow) for ranks, t in ((1, hw.f64), (3, hw.bf16), (4, hw.f32), (8, hw.f32)))],
    ids=str,
)
@pytest.mark.parametrize("make", [joined, reduced], ids=lambda make: make.__name__)
def test_matches_numpy(make: Callable[[int, DType], Fusion], ranks: int, dtype: DType) -> None:
    """Rows may be uneven, or fewer than the ranks. Some sizes of parts can be vectorised."""
    fusion, allowed = make(ranks, dtype), TOLERANCE[dtype.name]
    for sizes in SIZES:
        arrays = arrays_of(fusion, sizes)
        wanted = run_reference(fusion, arrays)
        with seeded(0):
            results = compiled(fusion).run(**arrays)
        for output, got, want in zip(lowered(fusion).outputs, results, wanted, strict=True):
            np.testing.assert_allclose(got.astype(want.dtype), want, allowed, allowed, err_msg=f"{output.name} at {sizes}")


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="needs a GPU")
@pytest.mark.parametrize("make", [joined, reduced], ids=lambda make: make.__name__)
def test_on_a_gpu(make: Callable[[int, DType], Fusion]) -> None:
    fusion = make(1, hw.bf16)
    for sizes in SIZES:
        arrays = arrays_of(fusion, sizes)
        results = compiled(fusion, "cuda").run(**arrays)
        for got, want in zip(results, run_reference(fusion, arrays), strict=True):
            np.testing.assert_allclose(got.astype(want.dtype), want, TOLERANCE["bf16"], TOLERANCE["bf16"], err_msg=str(sizes))


def test_a_part_is_computed_only_where_it_is_used() -> None:
    """One kernel computes the concat of a rotary embedding, and the ops before and after the concat. Nothing is copied."""

    @hw.fusion(x=hw.bf16["M", 4, 32], c=hw.bf16["M", 1, 32], s=hw.bf16["M", 1, 32])
    def turned(x, c, s):  # type: ignore[no-untyped-def]
        return x * c + hw.concat([-x[..., 16:], x[..., :16]], axis=-1) * s

    host = lowered(turned)
    assert len(host.kernels) == 1
    assert not [i for i in tree.walk(host.body) if isinstance(i, ir.Copy)]
