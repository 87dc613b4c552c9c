"""The pass propagate_sharding infers shardings forward, and then backward into dims without a sharding."""

from __future__ import annotations

import pytest
from fusion_text import check

from hostweave.passes.fusion.propagate_sharding import propagate_sharding

# For each name: inputs, and the ops before and after the pass.
CASES = {
    "forward through a matmul": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        "%y: f32[M, N] = matmul(%x, %w)",
        "%y: f32[M@x, N] = matmul(%x, %w)",
    ),
    "through pointwise ops and broadcasts": (
        "%x: f32[M, N@x], %b: f32[N], %c: f32[1, N]",
        """%h: f32[M, N] = add(%b, %x)
        %y: f32[M, N] = multiply(%h, %c)""",
        """%h: f32[M, N@x] = add(%b, %x)
        %y: f32[M, N@x] = multiply(%h, %c)""",
    ),
    "through views": (
        "%x: f32[M@x, K]",
        """%a: f32[M, 1, K] = expand_dims(%x, axis=(1,))
        %b: f32[K, 1, M] = permute_dims(%a, axes=(2, 1, 0))
        %c: f32[2, K, 1, M] = broadcast_to(%b)
        %y: f32[2*K, M] = reshape(%c)""",
        """%a: f32[M@x, 1, K] = expand_dims(%x, axis=(1,))
        %b: f32[K, 1, M@x] = permute_dims(%a, axes=(2, 1, 0))
        %c: f32[2, K, 1, M@x] = broadcast_to(%b)
        %y: f32[2*K, M@x] = reshape(%c)""",
    ),
    "if a dim is split, its axes shard the outermost part": (
        "%x: f32[M@x, K]",
        """%a: f32[16, M/16, K] = reshape(%x)
        %y: f32[M, K] = reshape(%a)""",
        """%a: f32[16@x, M/16, K] = reshape(%x)
        %y: f32[M@x, K] = reshape(%a)""",
    ),
    "a part that the ranks do not divide is not sharded": (
        "%x: f32[M@x, K]",
        "%y: f32[4, M/4, K] = reshape(%x)",
        "%y: f32[4, M/4, K] = reshape(%x)",
    ),
    "reductions keep the other dims": (
        "%x: f32[M@x, K]",
        "%y: f32[M] = sum(%x, axis=(1,))",
        "%y: f32[M@x] = sum(%x, axis=(1,))",
    ),
    "a partial result has no sharding yet": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        "%y: f32[M, N] = matmul(%x, %w)",
        "%y: f32[M, N] = matmul(%x, %w)",
    ),
    "if one axis shards both operands of a matmul, the result is sharded like the second": (
        "%x: f32[M@x, K], %w: f32[K, N@x]",
        "%y: f32[M, N] = matmul(%x, %w)",
        "%y: f32[M, N@x] = matmul(%x, %w)",
    ),
    "two axes of one mesh": (
        "%x: f32[M@x, K], %w: f32[K, N@y]",
        "%y: f32[M, N] = matmul(%x, %w)",
        "%y: f32[M@x, N@y] = matmul(%x, %w)",
    ),
    "only the streamed dim becomes unsharded": (
        "%x: f32[M@x, K], %w: f32[K, N@y]",
        "%y: f32[M, N] stream(M, 8) = matmul(%x, %w)",
        "%y: f32[M, N@y] stream(M, 8) = matmul(%x, %w)",
    ),
    "a stated sharding is kept": (
        "%x: f32[M@x, K]",
        """%h: f32[M, K] pinned = reshard(%x)
        %y: f32[M, K] = negative(%h)""",
        """%h: f32[M, K] pinned = reshard(%x)
        %y: f32[M, K] = negative(%h)""",
    ),
    "backward through a chain": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        """%h: f32[M, N] = matmul(%x, %w)
        %z: f32[M, N] = relu(%h)
        %y: f32[M@x, N] pinned = reshard(%z)""",
        """%h: f32[M@x, N] = matmul(%x, %w)
        %z: f32[M@x, N] = relu(%h)
        %y: f32[M@x, N] pinned = reshard(%z)""",
    ),
    "backward from a matmul whose other operand is sharded along the summed dim": (
        "%x: f32[M, K], %v: f32[K, J], %w: f32[J@x, N]",
        """%h: f32[M, J] = matmul(%x, %v)
        %y: f32[M, N] = matmul(%h, %w)""",
        """%h: f32[M, J@x] = matmul(%x, %v)
        %y: f32[M, N] = matmul(%h, %w)""",
    ),
    "not backward if consumers state different shardings": (
        "%x: f32[M, K]",
        """%h: f32[M, K] = negative(%x)
        %a: f32[M@x, K] pinned = reshard(%h)
        %b: f32[M, K] pinned = reshard(%h)
        %y: f32[M@x, K] = add(%a, %b)""",
        """%h: f32[M, K] = negative(%x)
        %a: f32[M@x, K] pinned = reshard(%h)
        %b: f32[M, K] pinned = reshard(%h)
        %y: f32[M@x, K] = add(%a, %b)""",
    ),
    "not backward in zigzag into a part of a dim, because the sharding would not follow from the dim": (
        "%x: f32[16*M@zigzag(x)]",
        """%h: f32[M, 16] = reshape(%x)
        %y: f32[M@zigzag(x), 16] pinned = reshard(%h)""",
        """%h: f32[M, 16] = reshape(%x)
        %y: f32[M@zigzag(x), 16] pinned = reshard(%h)""",
    ),
    "a mesh axis of one rank is propagated like any other axis": (
        "%x: f32[1, K]",
        """%h: f32[1, K] = negative(%x)
        %y: f32[1@z, K] pinned = reshard(%h)""",
        """%h: f32[1@z, K] = negative(%x)
        %y: f32[1@z, K] pinned = reshard(%h)""",
    ),
    "not backward into a dim that a broadcast adds": (
        "%b: f32[N]",
        """%h: f32[8, N] = broadcast_to(%b)
        %y: f32[8@x, N] pinned = reshard(%h)""",
        """%h: f32[8, N] = broadcast_to(%b)
        %y: f32[8@x, N] pinned = reshard(%h)""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    check(propagate_sharding, *CASES[case], mesh="x=8, y=2, z=1")
