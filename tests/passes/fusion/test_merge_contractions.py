"""The pass merge_contractions. If reshapes merge equal dims of both operands, in the same order, into the inner dim of a matmul, the matmul
becomes a contraction over these dims."""

from __future__ import annotations

import pytest
from fusion_text import check, communications

import hostweave as hw
from hostweave.passes.fusion.merge_contractions import merge_contractions

X_Y = "%x: f32[S, B@dp, E], %dy: f32[S, B@dp, F]"
RESULT = """%x_permuted: f32[E, S, B@dp] = permute_dims(%x, axes=(2, 0, 1))
        %y: f32[E, F] = matmul(%x_permuted, %dy, contracted=2)"""

# For each name: inputs, and the ops before and after the pass.
CASES = {
    "a transpose of a reshape": (
        X_Y,
        """%x_2d: f32[S*B, E] = reshape(%x)
        %x_t: f32[E, S*B] = permute_dims(%x_2d, axes=(1, 0))
        %dy_2d: f32[S*B, F] = reshape(%dy)
        %y: f32[E, F] = matmul(%x_t, %dy_2d)""",
        RESULT,
    ),
    "a reshape of a transpose": (
        X_Y,
        """%x_t: f32[E, S, B] = permute_dims(%x, axes=(2, 0, 1))
        %x_2d: f32[E, S*B] = reshape(%x_t)
        %dy_2d: f32[S*B, F] = reshape(%dy)
        %y: f32[E, F] = matmul(%x_2d, %dy_2d)""",
        RESULT,
    ),
    "other dims stay merged": (
        "%x: f32[S, B, H@tp, 2], %dy: f32[S, B, F]",
        """%x_2d: f32[B*S, 2*H] = reshape(%x)
        %x_t: f32[2*H, B*S] = permute_dims(%x_2d, axes=(1, 0))
        %dy_2d: f32[B*S, F] = reshape(%dy)
        %y: f32[2*H, F] = matmul(%x_t, %dy_2d)""",
        """%x_permuted: f32[H@tp, 2, S, B] = permute_dims(%x, axes=(2, 3, 0, 1))
        %x_reshaped: f32[2*H@tp, S, B] = reshape(%x_permuted)
        %y: f32[2*H, F] = matmul(%x_reshaped, %dy, contracted=2)""",
    ),
}

# For each name: inputs, and a program that the pass does not change.
KEPT = {
    "dims in another order": (
        "%x: f32[S, B, E], %dy: f32[B, S, F]",
        """%x_2d: f32[B*S, E] = reshape(%x)
        %x_t: f32[E, B*S] = permute_dims(%x_2d, axes=(1, 0))
        %dy_2d: f32[B*S, F] = reshape(%dy)
        %y: f32[E, F] = matmul(%x_t, %dy_2d)""",
    ),
    "one operand alone": (
        "%x: f32[S, B, E], %w: f32[B*S, F]",
        """%x_2d: f32[B*S, E] = reshape(%x)
        %x_t: f32[E, B*S] = permute_dims(%x_2d, axes=(1, 0))
        %y: f32[E, F] = matmul(%x_t, %w)""",
    ),
    "merged rows": (
        "%x: f32[S, B, E], %w: f32[E, F]",
        """%x_2d: f32[B*S, E] = reshape(%x)
        %y: f32[B*S, F] = matmul(%x_2d, %w)""",
    ),
    "a reshape that splits a dim": (
        "%x: f32[12, E], %dy: f32[12, F]",
        """%x_3d: f32[3, 4, E] = reshape(%x)
        %x_t: f32[3, E, 4] = permute_dims(%x_3d, axes=(0, 2, 1))
        %dy_3d: f32[3, 4, F] = reshape(%dy)
        %y: f32[3, E, F] = matmul(%x_t, %dy_3d)""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_matmuls_that_become_contractions(case: str) -> None:
    inputs, before, after = CASES[case]
    check(merge_contractions, inputs, before.replace("S*B", "B*S"), after, mesh="dp=2, tp=2")


@pytest.mark.parametrize("case", KEPT)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    inputs, program = KEPT[case]
    check(merge_contractions, inputs, program, program, mesh="dp=2, tp=2")


def test_weight_gradients_need_no_gather() -> None:
    @hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.bf16["S", "B@dp", "E"], dy=hw.bf16["S", "B@dp", "F@tp"])
    def gradients(x, dy):
        dw = hw.reshape(x, "S*B", "E").T @ hw.reshape(dy, "S*B", "F")
        return dw, hw.einsum("sbe,sbf->fe", x, dy), hw.tensordot(dy, x, (("S", "B"), ("S", "B"))) * 2

    assert communications(gradients) == ["all_reduce"] * 2  # Two of the three gradients are the same op.
