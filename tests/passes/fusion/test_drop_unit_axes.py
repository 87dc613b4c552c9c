"""The pass drop_unit_axes removes mesh axes with one rank from types."""

from __future__ import annotations

from typing import Any

from stages_of_passes import changes

import hostweave as hw
from hostweave.passes.fusion.drop_unit_axes import drop_unit_axes
from hostweave.pipeline import lower


def summed(mesh: hw.Mesh) -> hw.Fusion:
    @hw.fusion(mesh=mesh, x=hw.f32["M@a", "K@b"], w=hw.f32["K@b", "N"])
    def summed(x: Any, w: Any) -> Any:
        return hw.reshard(hw.matmul(x, w), "M@a", "N")

    return summed


def test_an_axis_of_one_rank_is_removed() -> None:
    fusion = summed(hw.Mesh(a=2, b=1))
    assert (
        changes(drop_unit_axes, fusion)
        == """\
- fusion @summed(%x: f32[M@a, K@b], %w: f32[K@b, N]) mesh(a=2, b=1) {
+ fusion @summed(%x: f32[M@a, K], %w: f32[K, N]) mesh(a=2, b=1) {
"""
    )
    assert "all_reduce" not in str(lower(fusion, hw.Options()))


def test_an_axis_of_several_ranks_stays() -> None:
    assert changes(drop_unit_axes, summed(hw.Mesh(a=2, b=2))) == ""
    assert "all_reduce" in str(lower(summed(hw.Mesh(a=2, b=2)), hw.Options()))


def test_zigzag_along_one_rank_stays_in_order() -> None:
    @hw.fusion(mesh=hw.Mesh(cp=1, x=2), x=hw.f32["S@zigzag(cp)", "K@x"])
    def doubled(x: Any) -> Any:
        return x * 2

    assert "+ fusion @doubled(%x: f32[S, K@x])" in changes(drop_unit_axes, doubled)
