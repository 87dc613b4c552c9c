"""The pass insert_reshards makes the shardings of producers and consumers agree, and reduces partial results."""

from __future__ import annotations

import pytest
from fusion_text import check

from hostweave.passes.fusion.insert_reshards import insert_reshards

# For each name: inputs, and the ops before and after the pass.
CASES = {
    "no reshard if all shardings agree": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        "%y: f32[M@x, N] = matmul(%x, %w)",
        "%y: f32[M@x, N] = matmul(%x, %w)",
    ),
    "a gather for a streamed dim": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        "%y: f32[M, N] stream(M, 8) = matmul(%x, %w)",
        """%x_gathered: f32[M, K] = reshard(%x)
        %y: f32[M, N] stream(M, 8) = matmul(%x_gathered, %w)""",
    ),
    "the first operand is gathered if one axis shards both operands": (
        "%x: f32[M@x, K], %w: f32[K, N@x]",
        "%y: f32[M, N@x] = matmul(%x, %w)",
        """%x_gathered: f32[M, K] = reshard(%x)
        %y: f32[M, N@x] = matmul(%x_gathered, %w)""",
    ),
    "an operand is sliced along K if K is sharded in the other operand": (
        "%x: f32[M, K@x], %w: f32[K, N]",
        "%y: f32[M, N] = matmul(%x, %w)",
        """%w_sliced: f32[K@x, N] = reshard(%w)
        %y_partial: f32[M, N] partial(sum, x) = matmul(%x, %w_sliced)
        %y: f32[M, N] = reshard(%y_partial)""",
    ),
    "weights are gathered if the same axis shards their dim K and the rows": (
        "%x: f32[M@x, K], %w: f32[K@x, N]",
        "%y: f32[M@x, N] = matmul(%x, %w)",
        """%w_gathered: f32[K, N] = reshard(%w)
        %y: f32[M@x, N] = matmul(%x, %w_gathered)""",
    ),
    "each rank computes the indices of its rows": (
        "%x: f32[M@x, K]",
        """%rows: i32[M] = iota()
        %columns: i32[K] = iota()
        %rows_expanded: i32[M@x, 1] = reshape(%rows)
        %mask: bool[M@x, K] = less(%rows_expanded, %columns)
        %zeros: f32[M, K] = fill(value=0.0)
        %y: f32[M@x, K] = where(%mask, %x, %zeros)
        %z: f32[M@x, K] = where(%mask, %zeros, %x)""",
        """%rows: i32[M] = iota()
        %columns: i32[K] = iota()
        %rows_sliced: i32[M@x] = iota()
        %rows_expanded: i32[M@x, 1] = reshape(%rows_sliced)
        %mask: bool[M@x, K] = less(%rows_expanded, %columns)
        %zeros: f32[M, K] = fill(value=0.0)
        %zeros_sliced: f32[M@x, K] = fill(value=0.0)
        %y: f32[M@x, K] = where(%mask, %x, %zeros_sliced)
        %z: f32[M@x, K] = where(%mask, %zeros_sliced, %x)""",
    ),
    "each rank computes its shard of indices that the user reshards": (
        "%x: f32[M@x, K]",
        """%rows: i32[M] = iota()
        %rows_resharded: i32[M@x] = reshard(%rows)
        %rows_expanded: i32[M@x, 1] = reshape(%rows_resharded)
        %mask: bool[M@x, 1] = greater(%rows_expanded, 4)
        %y: f32[M@x, K] = where(%mask, %x, 0.0)""",
        """%rows: i32[M] = iota()
        %rows_sliced: i32[M@x] = iota()
        %rows_expanded: i32[M@x, 1] = reshape(%rows_sliced)
        %mask: bool[M@x, 1] = greater(%rows_expanded, 4)
        %y: f32[M@x, K] = where(%mask, %x, 0.0)""",
    ),
    "a reshard of the user without a name is named after its last step, but not if it is a result": (
        "%x: f32[M@x, K]",
        """%x_reshaped: f32[M@x, K, 1] = reshape(%x)
        %x_resharded: f32[M, K, 1] = reshard(%x_reshaped)
        %x_resharded_resharded: f32[M, K@x, 1] = reshard(%x_resharded)
        %x_resharded_2: f32[M, K@x] = reshape(%x_resharded_resharded)
        %y_resharded: f32[M, K] = reshard(%x_resharded_2)""",
        """%x_reshaped: f32[M@x, K, 1] = reshape(%x)
        %x_gathered: f32[M, K, 1] = reshard(%x_reshaped)
        %x_gathered_sliced: f32[M, K@x, 1] = reshard(%x_gathered)
        %x_resharded_2: f32[M, K@x] = reshape(%x_gathered_sliced)
        %y_resharded: f32[M, K] = reshard(%x_resharded_2)""",
    ),
    "both operands are gathered for a streamed dim": (
        "%x: f32[M@x, K], %w: f32[K@x, N]",
        "%y: f32[M, N] stream(M, 8) = matmul(%x, %w)",
        """%x_gathered: f32[M, K] = reshard(%x)
        %w_gathered: f32[K, N] = reshard(%w)
        %y: f32[M, N] stream(M, 8) = matmul(%x_gathered, %w_gathered)""",
    ),
    "a partial result is resharded to the propagated sharding": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        """%h: f32[M@x, N] = matmul(%x, %w)
        %y: f32[M@x, N] = relu(%h)""",
        """%h_partial: f32[M, N] partial(sum, x) = matmul(%x, %w)
        %h: f32[M@x, N] = reshard(%h_partial)
        %y: f32[M@x, N] = relu(%h)""",
    ),
    "a partial result that the user reshards": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        """%h: f32[M@x, N] = matmul(%x, %w)
        %y: f32[M@x, N] pinned stream(M, 8) = reshard(%h)""",
        """%h: f32[M, N] partial(sum, x) = matmul(%x, %w)
        %y: f32[M@x, N] pinned stream(M, 8) = reshard(%h)""",
    ),
    "a partial result that is streamed before it is resharded": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        """%h: f32[M, N] stream(M, 8) = matmul(%x, %w)
        %y: f32[M@x, N] pinned = reshard(%h)""",
        """%h_partial: f32[M, N] partial(sum, x) = matmul(%x, %w)
        %h: f32[M, N] stream(M, 8) = reshard(%h_partial)
        %y: f32[M@x, N] pinned = reshard(%h)""",
    ),
    "other reductions": (
        "%x: f32[M@x, K@y]",
        """%a: f32[] = max(%x, axis=(0, 1))
        %b: f32[K@y] = prod(%x, axis=(0,))
        %c: f32[1, K@y] = mean(%x, axis=(0,), keepdims=true)
        %d: f32[K@y] = multiply(%a, %b)
        %y: f32[1, K@y] = add(%c, %d)""",
        """%a_partial: f32[] partial(max, x, y) = max(%x, axis=(0, 1))
        %a: f32[] = reshard(%a_partial)
        %b_partial: f32[K@y] partial(prod, x) = prod(%x, axis=(0,))
        %b: f32[K@y] = reshard(%b_partial)
        %c_partial: f32[1, K@y] partial(sum, x) = mean(%x, axis=(0,), keepdims=true, count=M)
        %c: f32[1, K@y] = reshard(%c_partial)
        %d: f32[K@y] = multiply(%a, %b)
        %y: f32[1, K@y] = add(%c, %d)""",
    ),
    "dtypes that NCCL cannot reduce are cast before a reduction, also in a loop": (
        "%x: f8e4m3[M@x, K], %b: bool[M@x, K]",
        """%s: f8e4m3[K] stream(K, 2) = sum(%x, axis=(0,))
        %m: bool[K@x] = max(%b, axis=(0,))
        %n: bool[K@x] pinned = reshard(%m)
        %l: bool[K@x] = logical_not(%n)""",
        """%x_f32: f32[M@x, K] = astype(%x)
        %s_partial: f32[K] partial(sum, x) = sum(%x_f32, axis=(0,))
        %s_f32: f32[K] stream(K, 2) = reshard(%s_partial)
        %s: f8e4m3[K] stream(K, 2) = astype(%s_f32)
        %b_u8: u8[M@x, K] = astype(%b)
        %m: u8[K] partial(max, x) = max(%b_u8, axis=(0,))
        %n_u8: u8[K@x] = reshard(%m)
        %n: bool[K@x] pinned = astype(%n_u8)
        %l: bool[K@x] = logical_not(%n)""",
    ),
    "equal reshards of one tensor are shared": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        """%a: f32[M, N] stream(M, 8) = matmul(%x, %w)
        %b: f32[M, K] stream(M, 8) = negative(%x)
        %y: f32[M, N] = matmul(%b, %w)
        %z: f32[M, N] = add(%a, %y)""",
        """%x_gathered: f32[M, K] = reshard(%x)
        %a: f32[M, N] stream(M, 8) = matmul(%x_gathered, %w)
        %b: f32[M, K] stream(M, 8) = negative(%x_gathered)
        %y: f32[M, N] = matmul(%b, %w)
        %z: f32[M, N] = add(%a, %y)""",
    ),
    "names that already exist": (
        "%x: f32[M@x, K], %x_gathered: f32[K, N]",
        "%y: f32[M, N] stream(M, 8) = matmul(%x, %x_gathered)",
        """%x_gathered_2: f32[M, K] = reshard(%x)
        %y: f32[M, N] stream(M, 8) = matmul(%x_gathered_2, %x_gathered)""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    check(insert_reshards, *CASES[case], mesh="x=8, y=2")
