"""Quantisation to 8-bit floats: the granularities in SCALINGS, sharded rows and columns, fusion with preceding kernels, and matmuls of the
results."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.numpy_dtypes import cast

Array = np.ndarray[Any, Any]
LARGEST = {hw.f8e4m3: np.float32(448), hw.f8e5m2: np.float32(57344)}
SCALINGS = ("row", "tensor", "block", "block2d")
M, K = 384, 3072


def blocks(scaling: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Number of rows, and number of columns, of a block of elements with one scale."""
    return {"row": (1, shape[1]), "tensor": shape, "block": (1, 128), "block2d": (128, 128)}[scaling]


def quantized(x: Array, scaling: str, dtype: hw.DType = hw.f8e4m3, scale: Array | None = None) -> tuple[Array, Array]:
    r, c = blocks(scaling, x.shape)
    parts = x.astype(np.float32).reshape(x.shape[0] // r, r, x.shape[1] // c, c)
    own = np.maximum(np.abs(parts).max((1, 3)), np.float32(1e-12)) / LARGEST[dtype]
    by = (own if scale is None else scale)[:, None, :, None]
    return cast((parts / by).reshape(x.shape), dtype), own


def values(seed: int = 0) -> Array:
    x = np.random.default_rng(seed).standard_normal((M, K)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(seed + 1).integers(-20, 20, (M, 1)))
    x[5], x[7, :128] = 0, 1e-30
    return x.astype(ml_dtypes.bfloat16)


@cache
def quantized_by_all(dtype: hw.DType) -> list[Array]:
    return [array for scaling in SCALINGS for array in quantized(values(), scaling, dtype)]


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("dtype", [hw.f8e4m3, pytest.param(hw.f8e5m2, marks=pytest.mark.more)], ids=str)
def test_values_and_scales(dtype: hw.DType, ranks: int) -> None:
    """Maxima are exact, so values and scales of sharded rows and columns are bitwise equal to the reference."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16[f"{M}@x", K], z=hw.bf16[M, f"{K}@x"])
    def all_kinds(x: hw.Tensor, z: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return tuple(result for of in (x, z) for scaling in SCALINGS for result in hw.quantize(of, scaling, dtype))

    x = values()
    results = hw.compile(all_kinds).run(x=x, z=x)
    for got, want in zip(results, 2 * quantized_by_all(dtype), strict=True):
        assert got.shape == want.shape
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
def test_uneven_rows_and_columns(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], z=hw.f32["M", "K@x"])
    def uneven(x: hw.Tensor, z: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return tuple(result for of in (x, z) for scaling in ("row", "tensor") for result in hw.quantize(of, scaling))

    x = values()[:13, :37].astype(np.float32)
    wanted = [array for _ in range(2) for scaling in ("row", "tensor") for array in quantized(x, scaling)]
    for got, want in zip(hw.compile(uneven).run(x=x, z=x), wanted, strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_delayed_scales(scaling: str) -> None:
    """With delayed scaling, values are divided by the given scales. The program returns the scales of the current values for the next
    step."""
    r, c = blocks(scaling, (M, K))

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16[f"{M}@x", K], s=hw.f32[M // r, K // c])
    def delayed(x: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.quantize(x, scaling, scale=s)

    before, now = values(3), values()
    _, scale = quantized(before, scaling)
    got, own = hw.compile(delayed).run(x=now, s=scale)
    want, want_own = quantized(now, scaling, scale=scale)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(own, want_own)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("made", ["rms_norm", "swiglu"])
def test_quantisation_is_fused_with_its_producer(made: str, scaling: str) -> None:
    """The kernel that computes the values also quantises them, per row or with an earlier scale. With an earlier scale, this kernel also
    writes row maxima. A second kernel reduces the maxima."""

    @hw.fusion(x=hw.bf16["M", "K"], g=hw.bf16["M", "K"], w=hw.bf16["K"], s=hw.f32[1, 1])
    def fused(x: hw.Tensor, g: hw.Tensor, w: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y = hw.rms_norm(x, w) if made == "rms_norm" else hw.silu(x) * g
        return hw.quantize(y, scaling, scale=s if scaling == "tensor" else None)

    host = lower(fused, Options())
    reading = [kernel for kernel in host.kernels if any(p.type.shape == host.inputs[0].type.shape for p in kernel.inputs)]
    assert len(reading) == 1
    assert len(host.kernels) == (1 if scaling == "row" else 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_layer(scaling: str, ranks: int) -> None:
    """A norm, quantisation, a gather of 8-bit values, and a matmul with quantised weights are close to float64."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["64@x", 512], g=hw.bf16[512], w=hw.bf16["256@x", 512])
    def layer(x: hw.Tensor, g: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        a, s = hw.quantize(hw.rms_norm(x, g), scaling)
        b, t = hw.quantize(w, "block2d" if scaling == "block" else scaling)
        return hw.scaled_matmul(hw.reshard(a, 64, 512), b.T, s, t.T)

    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((64, 512), (256, 512)))
    g = np.ones(512, ml_dtypes.bfloat16)
    y = hw.compile(layer).run(x=x, g=g, w=w).astype(np.float64)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-6)
    exact = normed @ w.astype(np.float64).T
    # `deviation` is an upper bound of the standard deviation of sums whose terms are rounded twice to 4 bits.
    deviation = np.sqrt(2 * 512) * 2**-4 / np.sqrt(3) * np.sqrt(0.5)
    assert np.abs(y - exact).max() < 6 * deviation
    assert np.abs(y - exact).mean() < deviation
    if ranks > 1:
        assert re.search(r"all_gather (@\w+ )?%a ", str(lower(layer, Options(overlap="off"))))


def test_mistakes() -> None:
    def fails(message: str, scaling: str = "row", dtype: hw.DType = hw.f8e4m3, **types: hw.TensorType) -> None:
        given = {"x": hw.bf16["M", 256]} | types
        with_scale = (
            (lambda x, s: hw.quantize(x, scaling, dtype, s)) if types.keys() >= {"s"} else (lambda x: hw.quantize(x, scaling, dtype))
        )
        with pytest.raises(ProgramError, match=message):
            hw.fusion(**given)(with_scale)

    fails(r"there is no scaling 'rows'; did you mean row\?", scaling="rows")
    fails("bf16.* is not a dtype of 8-bit floats; use hw.f8e4m3", dtype=hw.bf16)
    fails("i32.* is not a tensor of floats", x=hw.i32["M", 256])
    fails(r"128 does not divide dim 1 of \[M, 200\]; pad it", scaling="block", x=hw.bf16["M", 200])
    fails("block2d needs 2; use hw.reshape", scaling="block2d", x=hw.bf16[128, 128, 128])
    fails(r"the scale is f32\[M, 2\], but .* needs f32\[M, 1\]; reshape or cast it", s=hw.f32["M", 2])


def test_gathers_do_not_split_the_kernel() -> None:
    """One kernel computes values and scales, even if both are gathered in one group, or if the gather is pipelined with matmuls."""

    @hw.fusion(mesh=hw.Mesh(x=8), x=hw.bf16["M@x", 8192], g=hw.bf16[8192], w=hw.f8e4m3["7168@x", 8192], t=hw.f32["7168@x", 1])
    def layer(x: hw.Tensor, g: hw.Tensor, w: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        a, s = hw.quantize(hw.rms_norm(x, g), "row")
        return hw.scaled_matmul(a, w.T, s, t.T)

    grouped = lower(layer, Options(overlap="off"))
    assert len(grouped.kernels) == 1
    assert "  group {\n    all_gather %a -> %a_gathered along 0 on x\n    all_gather %s -> %s_gathered along 0 on x\n  }" in str(grouped)
    looped = lower(layer, Options(sizes={"M": 32768}))
    assert len(looped.kernels) == 1
    assert str(looped).count("fork loop") == 1
