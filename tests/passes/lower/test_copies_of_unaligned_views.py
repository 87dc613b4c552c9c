"""Attention and scaled matmuls of views: cuDNN and cuBLASLt need rows at multiples of 16 bytes, so lowering copies other views."""

from __future__ import annotations

import pytest

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.machine import H200


def copies(fusion: Fusion) -> list[str]:
    lines = str(lower(fusion, Options(machine=H200))).splitlines()
    return [line.strip() for line in lines if line.strip().startswith("copy ") and "_part" not in line]


@pytest.mark.parametrize(("dtype", "first", "is_aligned"), [("bf16", 8, True), ("bf16", 4, False), ("f16", 5, False), ("f32", 1, True)])
def test_attention(dtype: str, first: int, is_aligned: bool) -> None:
    @hw.fusion(x=getattr(hw, dtype)[2, 4, 256, 80])
    def attend(x):  # type: ignore[no-untyped-def]
        q = x[..., first : first + 64]
        y, lse = hw.attention(q, q, q)
        return hw.concat([q[..., :first], y, q[..., : 16 - first]], -1), *hw.attention_backward(q, q, q, y, q, lse)

    assert bool(copies(attend)) == (not is_aligned)


@pytest.mark.parametrize(("first", "width", "is_aligned"), [(0, 528, True), (16, 528, True), (8, 528, False), (0, 520, False)])
def test_scaled_matmul(first: int, width: int, is_aligned: bool) -> None:
    @hw.fusion(a=hw.f8e4m3[64, width], b=hw.f8e4m3[256, width], s=hw.f32[1, 1])
    def product(a, b, s):  # type: ignore[no-untyped-def]
        return hw.scaled_matmul(a[:, first : first + 512], b[:, first : first + 512].T, s, s)

    assert bool(copies(product)) == (not is_aligned)


@pytest.mark.parametrize(("before", "is_aligned"), [(8, True), (4, False)])
def test_results_in_parts_of_a_concat(before: int, is_aligned: bool) -> None:
    @hw.fusion(a=hw.f8e4m3[64, 512], b=hw.f8e4m3[512, 256], s=hw.f32[1, 1], x=hw.bf16[64, before], y=hw.bf16[64, 8 - before % 8])
    def product(a, b, s, x, y):  # type: ignore[no-untyped-def]
        return hw.concat([x, hw.scaled_matmul(a, b, s, s, out_dtype=hw.bf16), y], -1)

    assert any("_packed ->" in line for line in copies(product)) == (not is_aligned)
