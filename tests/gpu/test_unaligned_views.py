"""Operands and results that begin at addresses that cuDNN or cuBLASLt do not support, on one GPU. Hostweave copies them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.build.cuda import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]


@pytest.mark.parametrize("first", [4, 5])
def test_attention(first: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    last = first + 64

    @hw.fusion(q=hw.bf16[2, 4, 256, 80], k=hw.bf16[2, 4, 256, 80], v=hw.bf16[2, 4, 256, 80])
    def attend(q, k, v):  # type: ignore[no-untyped-def]
        q, k, v = (x[..., first:last] for x in (q, k, v))
        y, lse = hw.attention(q, k, v, "top_left")
        gradients = hw.attention_backward(q, k, v, y, q, lse, "top_left")
        return hw.concat([q[..., :first], y, q[..., : 16 - first]], -1), *gradients

    given = [torch.randn(2, 4, 256, 80, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x[..., first:last].float().requires_grad_() for x in given)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.backward(q.detach())
    whole, *gradients = hw.compile(attend, target="cuda").run(*given)
    for got, want in zip((whole[..., first:last], *gradients), (y, q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(got.float(), want, rtol=0.03, atol=0.03 * want.abs().max().item())


def test_scaled_matmul() -> None:
    @hw.fusion(a=hw.f8e4m3[64, 528], b=hw.f8e4m3[256, 528], c=hw.f8e4m3[64, 520], x=hw.bf16[64, 4], s=hw.f32[1, 1])
    def products(a, b, c, x, s):  # type: ignore[no-untyped-def]
        shifted = hw.scaled_matmul(a[:, 8:520], b[:, 8:520].T, s, s, out_dtype=hw.bf16)
        pitched = hw.scaled_matmul(c[:, :512], b[:, :512].T, s, s, out_dtype=hw.bf16)
        return hw.concat([x, shifted, pitched, x], -1)

    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((64, 528), (256, 528), (64, 520)))
    x, s = np.zeros((64, 4), ml_dtypes.bfloat16), np.ones((1, 1), np.float32)
    y = hw.compile(products, target="cuda").run(a, b, c, x, s).astype(np.float32)

    def expect(got: Any, of_a: Any, of_b: Any) -> None:
        want = of_a.astype(np.float32) @ of_b.astype(np.float32).T
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-8 * abs(want).max())

    expect(y[:, 4:260], a[:, 8:520], b[:, 8:520])
    expect(y[:, 260:516], c[:, :512], b[:, :512])


@pytest.mark.parametrize("dtype", [hw.f16, hw.bf16], ids=str)
def test_products_of_16_bits_with_results_of_32_bits(dtype: hw.DType) -> None:
    """Loading the kernels of such a matmul must not write f32 at an address that is not a multiple of 4."""

    @hw.fusion(a=hw.f8e5m2[64, 512], b=hw.f8e5m2[512, 256], s=hw.f32[64, 1], t=hw.f32[1, 256], x=dtype[64, 512], w=dtype[512, 256])
    def products(a, b, s, t, x, w):  # type: ignore[no-untyped-def]
        return hw.scaled_matmul(a, b, s, t, out_dtype=hw.f32), hw.matmul(x, w)

    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(ml_dtypes.float8_e5m2) for shape in ((64, 512), (512, 256)))
    s, t = np.ones((64, 1), np.float32), np.ones((1, 256), np.float32)
    of = {hw.f16: np.float16, hw.bf16: ml_dtypes.bfloat16}[dtype]
    y, z = hw.compile(products, target="cuda").run(a, b, s, t, a.astype(of), b.astype(of))
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-3 * abs(want).max())
    np.testing.assert_allclose(z.astype(np.float32), want, rtol=0, atol=2.0**-7 * abs(want).max())
