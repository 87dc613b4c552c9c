"""hw.collective_permute is a communication if each rank has one block. Otherwise, blocks are gathered if needed, and copied locally."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from compiled_fusions import expect, integer_arrays

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.pipeline import lower


def exchanges(ranks: int) -> Fusion:
    down: Sequence[int | None] = [None, *range(ranks - 1)]
    around = [(rank + 1) % ranks for rank in range(ranks)]

    @hw.fusion(mesh=hw.Mesh(dp=2 if ranks < 8 else 1, tp=ranks), x=hw.f32["M@tp", "N"], w=hw.f32["N", "K"])
    def exchanges(x, w):
        shifted = hw.collective_permute(x, "M", down)  # The first block has no source, so it becomes zeros.
        gathered = hw.collective_permute(x, 0, [1, 0, None, 2, 5, 4])  # No axis has 6 ranks.
        columns = hw.collective_permute(x, "N", [2, None, 0])  # Each rank has all blocks.
        product = hw.matmul(hw.collective_permute(x, 0, around), w).stream("K", chunks=2)
        streamed = hw.collective_permute(x + x, 0, around).stream("N", chunks=3)
        stated = hw.collective_permute(hw.reshard(w, "N@tp", "K"), 0, around)
        return shifted, gathered, columns, product, streamed, stated

    return exchanges


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
def test_every_rank(ranks: int) -> None:
    fusion = exchanges(ranks)
    program = hw.compile(fusion)
    assert Fusion.parse(str(fusion)) == fusion
    if ranks > 1:
        assert program.host_ir.count("collective_permute %") == 4
    for seed, times in enumerate((1, 2)):
        arrays = integer_arrays(fusion, {"M": 6 * ranks * times, "N": 6 * ranks, "K": 4}, seed)
        expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)
    program.close()


def test_a_sharding_with_one_block_per_rank_is_kept() -> None:
    @hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.f32["M@dp,tp", "N"])
    def both(x):
        return hw.collective_permute(x, 0, [3, None, 1, 0]), hw.collective_permute(x, 0, [1, 0])

    stages: dict[str, str] = {}
    lower(both, Options(), lambda name, stage: stages.setdefault(name, str(stage)))
    assert (
        stages["decompose_reshards"].partition("{\n")[2]
        == """\
  %x_permuted: f32[M@dp,tp, N] = collective_permute(%x, axis=0, sources=(3, -1, 1, 0))
  %x_gathered: f32[M@dp, N] = all_gather(%x, dim=0, axes=(tp))
  %x_permuted_2: f32[M@dp, N] = collective_permute(%x_gathered, axis=0, sources=(1, 0))
  return %x_permuted, %x_permuted_2
}
"""
    )
    assert "collective_permute %x -> %x_permuted from [3, none, 1, 0] on dp_tp" in stages["serialize_channels"]
    assert "uneven" not in stages["serialize_channels"]  # All blocks have the same size.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: hw.collective_permute(x, 0, [0, 2]),
            "collective_permute: sources=(0, 2): each must be one of 2 blocks, from 0 on, or None (-1 in text) for zeros",
        ),
        (
            lambda x: hw.collective_permute(x, 0, []),
            "collective_permute: sources=(): each must be one of 0 blocks, from 0 on, or None (-1 in text) for zeros",
        ),
        (
            lambda x: hw.collective_permute(x, 0, [-1, 0]),
            "collective_permute: sources=[-1, 0]: -1 is not a block; write None for a block of zeros",
        ),
        (
            lambda x: hw.collective_permute(x, 0, [0, 0]),
            "collective_permute: sources=(0, 0): a block is named more than once; use hw.concat to repeat a block",
        ),
        (
            lambda x: hw.collective_permute(x, 1, [None, 0, 1]),
            "collective_permute: 3 blocks do not divide dim 1 of f32[M@x, 8]; give a number of sources that divides it",
        ),
        (
            lambda x: hw.collective_permute(x, 2, [0]),
            "collective_permute: f32[M@x, 8] has no dim 2: dims go from 0 to 1",
        ),
        (
            lambda x: hw.collective_permute(x, 0, [1, 0]).stream("M", chunks=2),
            "stream: dim 0 of f32[M, 8] is permuted by a collective_permute, so no loop can iterate over it; stream an earlier tensor",
        ),
    ],
)
def test_impossible_permutations(make: Callable[[hw.Tensor], hw.Tensor], message: str) -> None:
    with pytest.raises(ProgramError) as caught:

        @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", 8])
        def program(x):
            return make(x)

    assert str(caught.value).partition(": ")[2] == message


def test_blocks_that_ranks_cannot_share() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])
    def program(x):
        return hw.collective_permute(x, 0, [1, 0])

    with pytest.raises(hw.base.errors.ArgumentError, match="cannot be divided evenly by 2 ranks along x; pad it to 6"):
        hw.compile(program).run(x=np.ones((5, 2), np.float32))
