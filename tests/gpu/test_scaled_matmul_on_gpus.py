"""Scaled matmuls of 8-bit floats on GPUs. Results are close to float64. For some scales, the results are as accurate as the results of
torch._scaled_mm."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.build.cuda import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]
# (M, K, N). Kernels for few rows support M up to 16. These kernels have 256 or 512 threads per block. K may be smaller than one
# step of all warps.
SIZES = [(1, 4096, 512), (4, 128, 128), (5, 3584, 4096), (8, 4096, 28672), (9, 14336, 4096), (13, 128, 256)]
SIZES += [(16, 1792, 256), (17, 8192, 1280), (256, 128, 128), (2048, 3584, 8192)]
OUT = {hw.bf16: 2.0**-8, hw.f32: 0.0}  # rounding of the result


def bound(k: int, out: hw.DType, exact: Any, terms: Any) -> Any:
    """Bound of the error of each element. The result is rounded. Each step of 32 products keeps 14 bits of its largest term.

    `terms` [M, N] are the sums of the absolute values of the products. DeepSeek-V3 (arXiv:2412.19437, 3.3.2) measured the 14 bits on
    Hopper.
    """
    return OUT[out] * abs(exact) + k / 32 * 2.0**-13 * terms


def product(kind: str, k: int, n: int, out: hw.DType) -> hw.Fusion:
    scales: dict[str, Any] = {
        "tensor": ((1, 1), (1, 1)),
        "row": (("M", 1), (n, 1)),
        "vectors": (("M", k // 128), (n, k // 128)),
        "blocks": (("M", k // 128), (n // 128, k // 128)),
    }

    @hw.fusion(a=hw.f8e4m3["M", k], w=hw.f8e4m3[n, k], s=hw.f32[scales[kind][0]], t=hw.f32[scales[kind][1]], b=out[n])
    def product(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor, b: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y = hw.scaled_matmul(a, w.T, s, t.T, out_dtype=out)
        return y, hw.relu(hw.scaled_matmul(-a, w.T, s, t.T, out_dtype=out) + b)

    return product


@pytest.mark.parametrize("out", OUT, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "row", "vectors", "blocks"])
def test_as_close_as_torch(kind: str, out: hw.DType) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    for m, k, n in SIZES:
        torch.manual_seed(m + k)
        program = hw.compile(product(kind, k, n, out), target="cuda")
        is_composed = kind != "tensor" and not gpus()[0].arch.startswith("sm_90")
        assert ("composed" in program.explain()) == is_composed
        dtype = torch.bfloat16 if out == hw.bf16 else torch.float32
        a, w = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
        of_a = {"tensor": (1, 1), "row": (m, 1)}.get(kind, (m, k // 128))
        of_w = {"tensor": (1, 1), "row": (n, 1), "vectors": (n, k // 128)}.get(kind, (n // 128, k // 128))
        s, t = (torch.rand(shape, device="cuda") + 0.01 for shape in (of_a, of_w))
        bias = torch.randn(n, device="cuda").to(dtype)
        y, ended = program.run(a=a, w=w, s=s, t=t, b=bias)

        def wide(x: Any, scale: Any) -> Any:
            blocks = [size // count for size, count in zip(x.shape, scale.shape, strict=True)]
            return x.double() * scale.double().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)

        exact, terms = wide(a, s) @ wide(w, t).T, wide(a, s).abs() @ wide(w, t).abs().T
        assert ((y.double() - exact).abs() <= bound(k, out, exact, terms)).all()
        end = torch.relu(-exact + bias.double())
        assert ((ended.double() - end).abs() <= 2 * bound(k, out, exact.abs() + bias.double().abs(), terms)).all()
        if kind == "tensor" or (kind == "row" and out == hw.bf16):
            theirs = torch._scaled_mm(a, w.T, scale_a=s, scale_b=t.T, out_dtype=dtype)
            error = float((y.double() - exact).abs().max() / exact.abs().max())
            assert error <= 1.01 * float((theirs.double() - exact).abs().max() / exact.abs().max()) + 2.0**-20


def test_quantised_and_transposed_by_one_kernel() -> None:
    random = np.random.default_rng(0)

    @hw.fusion(x=hw.bf16["M", 264], s=hw.f32[1, 1])
    def both(x: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        values, _ = hw.quantize(x, "tensor", scale=s)
        return values, values.T

    program = hw.compile(both, target="cuda")
    for rows in (1, 100, 1024):
        x = random.standard_normal((rows, 264)).astype(ml_dtypes.bfloat16)
        values, turned = program.run(x=x, s=np.full((1, 1), 0.25, np.float32))
        wanted = (x.astype(np.float32) * 4).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(values.view(np.uint8), wanted)
        np.testing.assert_array_equal(turned.view(np.uint8), wanted.T)


def test_two_gpus() -> None:
    """A put loop gathers the rows of an operand, and the scales of the rows."""
    if len(gpus()) < 2:
        pytest.skip("needs two GPUs")
    k, n, m = 2048, 1024, 512

    @hw.fusion(mesh=hw.Mesh(x=2), a=hw.f8e4m3["M@x", k], w=hw.f8e4m3[n, k], s=hw.f32["M@x", 1], t=hw.f32[n, 1])
    def gathered(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        return hw.scaled_matmul(a, w.T, s, t.T, out_dtype=hw.f32).stream("M", 4, algorithm="put")

    random = np.random.default_rng(0)
    a, w = (random.standard_normal((rows, k)).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n))
    s, t = (random.random((rows, 1)).astype(np.float32) for rows in (m, n))
    wide = a.astype(np.float64) * s, w.astype(np.float64) * t
    exact, terms = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    y = hw.compile(gathered, target="cuda").run(a=a, w=w, s=s, t=t)
    assert (np.abs(y - exact) <= bound(k, hw.f32, exact, terms)).all()


@pytest.mark.parametrize("algorithm", ["put", "p2p", "ring"])
def test_quantised_rows_are_sent_with_their_scales(algorithm: str) -> None:
    """Values and scales are gathered together. Each row contains 8, and powers of 2 below 8, so rows are quantised exactly."""
    if len(gpus()) < 2:
        pytest.skip("needs two GPUs")
    k, n, m = 2048, 1024, 512

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", k], w=hw.f8e4m3[n, k], t=hw.f32[1, n])
    def gathered(x: hw.Tensor, w: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        a, s = hw.quantize(x, "row")
        return hw.scaled_matmul(a, w.T, s, t, out_dtype=hw.f32).stream("M", 2, algorithm=algorithm)

    random = np.random.default_rng(0)
    x, w = (np.exp2(random.integers(-3, 4, (rows, k))).astype(np.float32) for rows in (m, n))
    t = random.random((1, n)).astype(np.float32)
    exact = x.astype(np.float64) @ w.T * t
    y = hw.compile(gathered, target="cuda").run(x=x, w=w.astype(ml_dtypes.float8_e4m3fn), t=t)
    assert (np.abs(y - exact) <= bound(k, hw.f32, exact, exact)).all()
