"""Options(tf32=True) on one GPU: less accurate than f32, within a bound."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import compiled, random_arrays

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.options import Options

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]


def test_tf32() -> None:
    """In TF32, operands have 11 significant bits, and sums have 24."""

    @hw.fusion(x=hw.f32["M", "K"], w=hw.f32["K", "N"], b=hw.f32["N"])
    def product(x, w, b):  # type: ignore[no-untyped-def]
        return hw.matmul(x, w), hw.relu(hw.matmul(x, w) + b)

    arrays = random_arrays(product, {"M": 256, "K": 512, "N": 256}, seed=0)
    exact = arrays["x"].astype(np.float64) @ arrays["w"].astype(np.float64)
    errors = []
    for options in (Options(), Options(tf32=True)):
        y, ended = compiled(product, "cuda", options).run(**arrays)
        errors.append(np.abs(y - exact).max() / np.sqrt(512))
        assert np.abs(ended - np.maximum(exact + arrays["b"], 0)).max() / np.sqrt(512) < 2 * errors[-1]
    assert errors[0] < 1e-5 < errors[1] < 5e-3
