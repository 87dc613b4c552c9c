"""Sizes that need not be multiples of the number of ranks, and the warning for an int that prevents a loop."""

from __future__ import annotations

import pytest
from fusion_text import fusion

from hostweave.base.errors import OverlapWarning
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.passes.lower.uneven_sizes import uneven_sizes
from hostweave.pipeline import lower

GATHER = "%y: f32[M, K] pinned = reshard(%x)"


@pytest.mark.parametrize(
    ("inputs", "ops", "uneven"),
    [
        ("%x: f32[M@x, K]", "%y: f32[M@x, K] = negative(%x)", ("M",)),
        ("%x: f32[M@x, K]", GATHER, ("M",)),
        ("%x: f32[M@x, K]", "%y: f32[M, K@x] pinned = reshard(%x)", ("M", "K")),
        ("%x: f32[M@x, K]", GATHER.replace("pinned", "pinned stream(M, 8)"), ()),
        ("%x: f32[M@x, K]", GATHER.replace("pinned", "pinned stream(K, 2)"), ()),  # Loops need even shards.
        ("%x: f32[M@x, K@y]", "%y: f32[K@y] = mean(%x, axis=(0,))", ("M", "K")),
        ("%x: f32[M@x,y, K]", "%y: f32[M@x, K] pinned = reshard(%x)", ()),
        ("%x: f32[M@x, 4]", "%y: f32[M/2@x, 8] = reshape(%x)", ()),
    ],
)
def test_names(inputs: str, ops: str, uneven: tuple[str, ...]) -> None:
    assert lower(fusion(inputs, ops, mesh="x=4, y=2"), Options()).uneven == uneven


def test_a_stream_over_ints_that_ranks_share_unevenly() -> None:
    """The int size of the streamed dim is not a multiple of the number of ranks. So the op is not in a loop, and a warning is given."""
    with pytest.warns(OverlapWarning, match="4 ranks do not split the size 10 of dim 0 of %x_gathered evenly, so no loop is formed"):
        program = lower(fusion("%x: f32[10@x, K]", "%y: f32[10@x, K] stream(0, 2) = negative(%x)", mesh="x=4"), Options())
    assert "for %i" not in str(program)


def test_an_uneven_dim_is_gathered_before_it_is_merged() -> None:
    program = lower(fusion("%x: f32[10@x, 4]", "%y: f32[40@x] = reshape(%x)", mesh="x=4"), Options())
    assert "all_gather %x -> %x_gathered along 0 on x" in str(program)


def test_ints_that_may_be_uneven() -> None:
    program = lower(fusion("%x: f32[10@x, K]", "%y: f32[10, K] pinned = reshard(%x)", mesh="x=4"), Options())
    assert [str(size) for size in program.local_type(program.inputs[0]).shape] == ["local(10, x)", "K"]
    given = Fusion.parse("fusion @f(%x: f32[10@x]) mesh(x=4) {\n  %y: f32[10@x] = negative(%x)\n  return %y\n}\n")
    assert uneven_sizes(given, Options().transports[0]) == ()
