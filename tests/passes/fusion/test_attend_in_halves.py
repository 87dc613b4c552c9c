"""The pass attend_in_halves: causal attention of rows in zigzag becomes two ops, one per half of the rows."""

from __future__ import annotations

import pytest
from fusion_text import check, fusion

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.options import Options
from hostweave.passes.fusion.attend_in_halves import attend_in_halves

ROWS = "%q: bf16[2, S@zigzag(x), 64], %k: bf16[2, S@x, 64]"
ATTENTION = "%y: bf16[2, S@zigzag(x), 64] = attention(%q, %k, %k, scale=0.125, causal=bottom_right)"
HALVES = """
    %q_by_rank: bf16[2, S@x, 64] = renumber(%q, axis=1, sources=(0, 3, 1, 2))
    %q_pieces: bf16[2, 2@x, 2, S/4, 64] = reshape(%q_by_rank)
    %q_first_piece: bf16[2, 2@x, S/4, 64] = select(%q_pieces, axis=2, index=0)
    %q_first_rows: bf16[2, S/2@x, 64] = reshape(%q_first_piece)
    %q_second_piece: bf16[2, 2@x, S/4, 64] = select(%q_pieces, axis=2, index=1)
    %q_second_rows: bf16[2, S/2@x, 64] = reshape(%q_second_piece)
    %k_in_order: bf16[2, S, 64] = reshard(%k)
    %k_in_order_lower_half: bf16[2, S/2, 64] = slice(%k_in_order, axis=1, start=0, step=1)
    %y_first: bf16[2, S/2@x, 64] = attention(%q_first_rows, %k_in_order_lower_half, %k_in_order_lower_half, causal=top_left, scale=0.125)
    %y_second: bf16[2, S/2@x, 64] = attention(%q_second_rows, %k_in_order, %k_in_order, causal=bottom_right, reversed=2, scale=0.125)
    %y_first_piece: bf16[2, 2@x, 1, S/4, 64] = reshape(%y_first)
    %y_second_piece: bf16[2, 2@x, 1, S/4, 64] = reshape(%y_second)
    %y_pieces: bf16[2, 2@x, 2, S/4, 64] = concat(%y_first_piece, %y_second_piece, axis=2)
    %y_by_rank: bf16[2, S@x, 64] = reshape(%y_pieces)
    %y: bf16[2, S@zigzag(x), 64] = renumber(%y_by_rank, axis=1, sources=(0, 2, 3, 1))
"""


def test_halves() -> None:
    check(attend_in_halves, ROWS, ATTENTION, HALVES, mesh="x=2")


@pytest.mark.parametrize(
    "op",
    [
        ATTENTION.replace(", causal=bottom_right", ""),
        ATTENTION.replace("S@zigzag(x)", "S@x"),
    ],
)
def test_ops_that_the_pass_does_not_change(op: str) -> None:
    inputs = ROWS if "zigzag" in op else ROWS.replace("zigzag(x)", "x")
    given = fusion(inputs, op, mesh="x=2")
    assert attend_in_halves(given, Options()) == given


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("%y: f32[S@x] = renumber(%x, axis=0, sources=(0, 1, 3, 2))", r"sources=\(0, 1, 3, 2\) do not convert f32\[S@zigzag\(x\)\]"),
        ("%y: f32[S@x] = renumber(%x, axis=0, sources=(0, 2, 3, 1))", r"a change to or from zigzag needs \(0, 3, 1, 2\)"),
        (
            "%y: f32[S@zigzag(x)] = renumber(%x, axis=0, sources=(0, 3, 1, 2))",
            r"do not convert f32\[S@zigzag\(x\)\] to f32\[S@zigzag\(x\)\]",
        ),
    ],
)
def test_wrong_numbers(made: str, why: str) -> None:
    with pytest.raises(ProgramError, match=why):
        verify_fusion(fusion("%x: f32[S@zigzag(x)]", made, mesh="x=2"), after="insert_reshards")
