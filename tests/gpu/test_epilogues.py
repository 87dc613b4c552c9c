"""cuBLASLt epilogues on one GPU, compared with NumPy in float64. cuBLASLt must have an algorithm for every shape."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from compiled_fusions import compiled, expect, lowered, random_arrays

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.tensor import DType

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]
SIZES = [(1, 1, 1), (1, 64, 1), (1, 4096, 512), (5, 1, 3), (3, 0, 4), (3, 7, 1), (33, 65, 129), (256, 512, 128)]


@cache
def epilogues(t: DType) -> Fusion:
    @hw.fusion(x=t["M", "K"], w=t["K", "N"], wt=t["N", "K"], b=t["N"], r=t["M", "N"], z=t[2, "M", "K"])
    def epilogues(x, w, wt, b, r, z):  # type: ignore[no-untyped-def]
        g = hw.matmul(z, wt.T)
        return (  # The operands of the matmuls differ. Equal matmuls would be computed only once, and then have no epilogue.
            hw.matmul(x, w) + b,
            hw.relu(hw.matmul(z[0], w)),
            hw.relu(hw.linear(x, wt, b)),
            hw.gelu(hw.matmul(z, w), approximate="tanh"),
            hw.gelu(g + b, approximate="tanh"),
            hw.matmul(z[1], w) * 0.5 + r,
            hw.relu(hw.matmul(z[0], wt.T) + r + b),
        )

    return epilogues


@pytest.mark.parametrize("dtype", [hw.f32, hw.f16, hw.bf16], ids=str)
def test_matches_numpy(dtype: DType) -> None:
    fusion = epilogues(dtype)
    assert len(lowered(fusion).kernels) == (2 if dtype == hw.f32 else 0)  # The gelu of cuBLASLt is too inaccurate for f32.
    for m, k, n in SIZES:
        arrays = random_arrays(fusion, {"M": m, "K": k, "N": n}, seed=m + k + n)
        expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True))


def test_operands_that_are_not_aligned() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    for dtype, torch_dtype in ((hw.f32, torch.float32), (hw.bf16, torch.bfloat16)):
        fusion = epilogues(dtype)
        arrays = random_arrays(fusion, {"M": 24, "K": 40, "N": 48}, seed=0)
        tensors = {}
        for name, array in arrays.items():
            memory = torch.zeros(array.size + 1, dtype=torch_dtype, device="cuda:0")
            tensors[name] = memory[1:].view(array.shape).copy_(torch.from_numpy(array.astype(np.float32)))
        results = compiled(fusion, "cuda").run(**tensors)
        expect(fusion, arrays, [tuple(y.float().cpu().numpy().astype(arrays["x"].dtype) for y in results)])


@pytest.mark.parametrize("dtype", [hw.f32, hw.f16, hw.bf16], ids=str)
def test_relu_of_nan_is_nan(dtype: DType) -> None:
    fusion = epilogues(dtype)
    arrays = random_arrays(fusion, {"M": 4, "K": 8, "N": 16}, seed=0)
    arrays["x"][1] = arrays["z"][:, 1] = np.nan
    results = compiled(fusion, "cuda").run(**arrays)
    for y in (results[1], results[2], results[6]):
        assert np.isnan(y[1].astype(np.float32)).all()
        assert not np.isnan(y[0].astype(np.float32)).any()
