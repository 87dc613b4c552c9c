"""The pass attend_by_blocks: attention runs in the loop that gathers its keys, and keys and values are sent in one message."""

from __future__ import annotations

from typing import Any

from stages_of_passes import before_and_after, changes

import hostweave as hw
from hostweave.check.check import check
from hostweave.passes.fusion.attend_by_blocks import attend_by_blocks
from hostweave.pipeline import lower


def attending(chunks: int, of_values: int | None = None, algorithm: str = "p2p") -> hw.Fusion:
    keys = hw.f32[2, "T@cp", 16]

    @hw.fusion(mesh=hw.Mesh(cp=2), q=hw.f32[2, "S@cp", 16], k=keys, v=keys)
    def attending(q: Any, k: Any, v: Any) -> Any:
        k = hw.reshard(k, 2, "T", 16).stream("T", chunks=chunks, algorithm=algorithm)
        v = hw.reshard(v, 2, "T", 16).stream("T", chunks=of_values or chunks, algorithm=algorithm)
        return hw.attention(q, k, v)[0]

    return attending


def test_keys_and_values_are_one_gather_whose_chunks_are_attended_to() -> None:
    _, after = before_and_after(attend_by_blocks, attending(2))
    assert [str(op) for op in after.ops[:6]] == [
        "%y_kv: f32[2, T@cp, 32] = concat(%k, %v, axis=2)",
        "%k_2: f32[2, T, 32] stream(T, 2, p2p) = all_gather(%y_kv, dim=1, axes=(cp))",
        "%y_keys: f32[2, T, 16] stream(T, 2) = slice(%k_2, axis=2, start=0, step=1)",
        "%y_values: f32[2, T, 16] stream(T, 2) = slice(%k_2, axis=2, start=16, step=1)",
        "%y_blocks: f32[2, 2, S@cp, 16] stream(0, 2) = attention(%q, %y_keys, %y_values, scale=0.25, blocks=2)",
        "%y_lse: f32[2, 2, S@cp] stream(0, 2) = attention_lse(%q, %y_keys, scale=0.25, blocks=2)",
    ]
    host = str(lower(attending(2), hw.Options()))
    assert host.count("recv ") == 1


def test_chunks_other_than_blocks_of_ranks_are_not_changed() -> None:
    assert changes(attend_by_blocks, attending(4)) == ""
    assert changes(attend_by_blocks, attending(2, 4)) == ""


def test_slices_of_every_shard_are_not_blocks() -> None:
    """A collective gathers a slice of every shard in each iteration."""
    assert changes(attend_by_blocks, attending(2, algorithm="all_gather")) == ""
    check(lower(attending(2, algorithm="all_gather"), hw.Options()), fusion=attending(2, algorithm="all_gather"))
