"""The ops of each chunk loop, and the parts of a loop whose chunks differ in size."""

from __future__ import annotations

import pytest
from fusion_text import flow, names_in_loops

from hostweave.communication.chunk_loops import EvenLoop, even_loops, shards
from hostweave.fusion_ir.ir import ChunkLoop
from hostweave.types.size import Size

LOOPS = {
    "adjacent ops with equal chunks share a loop": (
        "%h: f32[M, N] stream(M, 4) = negative(%x)\n%y: f32[M, N] stream(M, 4) = exp(%h)",
        [["h", "y"]],
    ),
    "ops with different numbers of chunks have separate loops": (
        "%h: f32[M, N] stream(M, 4) = negative(%x)\n%y: f32[M, N] stream(M, 8) = exp(%h)",
        [["h"], ["y"]],
    ),
    "an op that reads more than its chunk follows the loop": (
        "%h: f32[M, N] stream(M, 4) = negative(%x)\n%y: f32[N, M] stream(N, 4) = permute_dims(%h, axes=(1, 0))",
        [["h"], ["y"]],
    ),
    "a view that would split a loop precedes the loop": (
        "%h: f32[M, N] stream(M, 4) = negative(%x)\n%v: f32[N, M] = permute_dims(%x, axes=(1, 0))\n"
        "%y: f32[M, M] stream(0, 4) = matmul(%h, %v)",
        [["v"], ["h", "y"]],
    ),
    "a view of the result of a loop follows the loop": (
        "%h: f32[M, N] stream(M, 4) = negative(%x)\n%v: f32[N, M] = permute_dims(%h, axes=(1, 0))\n%y: f32[N, M] stream(M, 4) = exp(%v)",
        [["h"], ["v"], ["y"]],
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loops(case: str) -> None:
    ops, loops = LOOPS[case]
    assert names_in_loops(flow("%x: f32[M, N]", ops)) == loops


def test_a_gather_joins_the_loop_of_its_consumer() -> None:
    gather = flow("%x: f32[M@x, K], %w: f32[K, N]", "%y: f32[M, N] pinned stream(M, 8) = matmul(%x, %w)")
    (loop,) = gather.fusion.body
    assert isinstance(loop, ChunkLoop)
    assert loop.by_block
    assert loop.communication is loop.ops[0]
    assert shards(gather, loop.ops) == 4
    assert (str(loop.trips), loop.drops_dim) == ("8", False)


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"),
    [
        ("M", 3, [EvenLoop(Size(3))]),  # Sizes of calls are multiples of the number of chunks.
        (9, 3, [EvenLoop(Size(3))]),
        (8, 3, [EvenLoop(Size(2), Size(3)), EvenLoop(Size(1), Size(2), start=6)]),
        (2, 3, [EvenLoop(Size(2), Size(1))]),
    ],
)
def test_parts_of_a_loop(rows: int | str, chunks: int, expected: list[EvenLoop]) -> None:
    streamed = flow(f"%x: f32[{rows}, N]", f"%y: f32[{rows}, N] stream(0, {chunks}) = exp(%x)")
    (loop,) = streamed.fusion.body
    assert isinstance(loop, ChunkLoop)
    assert [*even_loops(streamed, loop)] == expected
