"""Matmuls of up to 8 rows by Hostweave's kernels, and of 9 rows by cuBLASLt. One GPU, compared with NumPy in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from compiled_fusions import compiled, expect, random_arrays

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.tensor import DType

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]
SIZES = [
    *((rows, 2056, 328) for rows in range(1, 10)),
    (1, 130, 65),
    (8, 34, 1000),
    (3, 6, 4),
    (5, 14336, 72),
    (7, 2056, 4000),  # For these sizes, the kernel uses pairs of large thread blocks.
    (2, 8, 40000),
    (6, 4096, 1024),
]


@cache
def products(t: DType) -> Fusion:
    @hw.fusion(x=t["M", "K"], w=t["K", "N"], wt=t["N", "K"], b=t["N"], r=t["M", "N"], z=t[2, "M", "K"], v=t[2, "K", "N"])
    def products(x, w, wt, b, r, z, v):  # type: ignore[no-untyped-def]
        return (
            hw.matmul(x, w) + r,
            hw.matmul(x, wt.T) * 0.5 + b,
            hw.matmul(z, w),  # For few rows, one kernel computes the products of the batch.
            hw.matmul(z, v),
            hw.silu(hw.matmul(z[0], w)) * hw.matmul(z[0], v[1]),
            hw.silu(hw.matmul(z[1], wt.T)) * r + b,
            hw.maximum(hw.matmul(x, w), hw.matmul(x, v[0])) - hw.matmul(x, v[1]),
            hw.matmul(x[:, ::2], w[::2]),  # Both operands are copied, because the slices are not contiguous.
        )

    return products


def scaled(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scales weights so that a product is about as large as its first operand. The exp of the GPU is less accurate for large arguments."""
    k = arrays["x"].shape[-1]
    return {name: (array * k**-0.5).astype(array.dtype) if name in ("w", "wt", "v") else array for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", [hw.f32, hw.f16, hw.bf16], ids=str)
def test_matches_numpy(dtype: DType) -> None:
    fusion = products(dtype)
    for m, k, n in SIZES:
        arrays = scaled(random_arrays(fusion, {"M": m, "K": k, "N": n}, seed=m + k + n))
        expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True))


def test_results_do_not_change() -> None:
    fusion = products(hw.bf16)
    arrays = scaled(random_arrays(fusion, {"M": 4, "K": 4096, "N": 512}, seed=0))
    first, second = (compiled(fusion, "cuda").run(**arrays) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
