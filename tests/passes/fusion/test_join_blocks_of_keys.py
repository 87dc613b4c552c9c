"""The pass join_blocks_of_keys: each rank attends to its local keys. The results of the ranks are combined by log-sum-exps. Queries must be
replicated, and keys sharded in blocks."""

from __future__ import annotations

from typing import Any

import pytest
from stages_of_passes import before_and_after, changes

import hostweave as hw
from hostweave.passes.fusion.join_blocks_of_keys import join_blocks_of_keys
from hostweave.pipeline import lower


def attending(queries: hw.TensorType, causal: str | None = None, keys: str = "T@cp") -> hw.Fusion:
    @hw.fusion(mesh=hw.Mesh(cp=2), q=queries, k=hw.f32[2, keys, 16], v=hw.f32[2, keys, 16])
    def attending(q: Any, k: Any, v: Any) -> Any:
        return hw.attention(q, k, v, causal)[0]

    return attending


def test_one_attention_becomes_one_for_each_block_of_keys() -> None:
    _, after = before_and_after(join_blocks_of_keys, attending(hw.f32[2, "S", 16]))
    first, second, third, *_, last = map(str, after.ops)
    assert first == "%y_blocks: f32[2@cp, 2, S, 16] = attention(%q, %k, %v, scale=0.25, blocks=2)"
    assert second == "%y_lse: f32[2@cp, 2, S] = attention_lse(%q, %k, scale=0.25, blocks=2)"
    assert third == "%y_lses: f32[2, 2, S] = reshard(%y_lse)"
    assert last.startswith("%y: f32[2, S, 16] = ")
    host = str(lower(attending(hw.f32[2, "S", 16]), hw.Options()))
    assert "all_gather %y_lse" in host
    assert "all_gather %k" not in host


@pytest.mark.parametrize(
    "fusion", [attending(hw.f32[2, "S@cp", 16]), attending(hw.f32[2, "S", 16], keys="T@zigzag(cp)")], ids=["sharded queries", "zigzag"]
)
def test_keys_are_gathered_for_sharded_queries_and_zigzag_keys(fusion: hw.Fusion) -> None:
    assert changes(join_blocks_of_keys, fusion) == ""
    assert "all_gather %k" in str(lower(fusion, hw.Options()))


def test_each_block_of_keys_has_a_causal_mask() -> None:
    assert "causal=top_left, blocks=2)" in changes(join_blocks_of_keys, attending(hw.f32[2, "S", 16], "top_left"))
