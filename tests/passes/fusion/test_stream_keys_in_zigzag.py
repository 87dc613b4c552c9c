"""The pass stream_keys_in_zigzag: pieces of rows are numbered in the order of the ranks, and causal attention gathers keys in a loop."""

from __future__ import annotations

from typing import Any

import pytest
from stages_of_passes import before_and_after, changes

import hostweave as hw
from hostweave.passes.fusion.stream_keys_in_zigzag import stream_keys_in_zigzag

KNOWN = hw.Options(sizes={"S": 8192})


def attending(causal: str | None = "top_left") -> hw.Fusion:
    rows = hw.bf16[8, "S@zigzag(cp)", 64]

    @hw.fusion(mesh=hw.Mesh(cp=2), q=rows, k=rows, v=rows)
    def attending(q: Any, k: Any, v: Any) -> Any:
        return hw.attention(q, k, v, causal)[0]

    return attending


def test_pieces_are_renumbered_before_and_after_attention() -> None:
    _, after = before_and_after(stream_keys_in_zigzag, attending(), KNOWN)
    assert [str(op) for op in after.ops] == [
        "%y_rows: bf16[8, S@cp, 64] = renumber(%q, axis=1, sources=(0, 3, 1, 2))",
        "%y_keys: bf16[8, S@cp, 64] = renumber(%k, axis=1, sources=(0, 3, 1, 2))",
        "%y_values: bf16[8, S@cp, 64] = renumber(%v, axis=1, sources=(0, 3, 1, 2))",
        "%k_gathered: bf16[8, S, 64] stream(S, 2, put) = reshard(%y_keys)",
        "%v_gathered_2: bf16[8, S, 64] stream(S, 2, put) = reshard(%y_values)",
        "%y_attention: bf16[8, S@cp, 64] = attention(%y_rows, %k_gathered, %v_gathered_2, scale=0.125, causal=top_left, pieces=4)",
        "%y: bf16[8, S@zigzag(cp), 64] = renumber(%y_attention, axis=1, sources=(0, 2, 3, 1))",
    ]
    (choice,) = after.choices
    assert str(choice).startswith("choice %k_gathered of @attending predicted: put(2) ")


@pytest.mark.parametrize(
    ("fusion", "options"),
    [(attending(), hw.Options()), (attending(None), KNOWN), (attending(), hw.Options(sizes={"S": 8192}, overlap="off"))],
    ids=["size unknown", "not causal", "no overlap"],
)
def test_programs_that_the_pass_does_not_change(fusion: hw.Fusion, options: hw.Options) -> None:
    assert changes(stream_keys_in_zigzag, fusion, options) == ""


def test_without_gain_attention_is_not_pipelined() -> None:
    _, after = before_and_after(stream_keys_in_zigzag, attending(), hw.Options(sizes={"S": 16}))
    assert [op.kind for op in after.ops] == ["attention"]
    assert [choice.chosen.algorithm for choice in after.choices] == ["none"]
    assert stream_keys_in_zigzag(after, hw.Options(sizes={"S": 16})) == after  # The fusion has the choice.
