"""The ops of each chunk loop, and the results that are written into the memory of other values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.communication.chunk_loops import shards
from hostweave.communication.steps import Dataflow
from hostweave.fusion_ir.ir import ChunkLoop, Fusion
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.passes.lower.lower_to_host import lower_to_host
from hostweave.passes.lower.placement import placement_of
from hostweave.pipeline import PASSES, lower


def parsed(inputs: str, ops: str) -> Fusion:
    body = "".join(f"  {line.strip()}\n" for line in ops.strip().splitlines())
    return Fusion.parse(f"fusion @f({inputs}) mesh(x=4) {{\n{body}  return %y\n}}\n")


def flow(inputs: str, ops: str) -> Dataflow:
    """Dataflow of a fusion after the passes that precede lower_to_host."""
    fusion = parsed(inputs, ops)
    for apply in PASSES[: PASSES.index(lower_to_host)]:
        fusion = apply(fusion, Options())
    return Dataflow(fusion)


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


def names_of(flow: Dataflow) -> list[list[str]]:
    return [[op.result.name for op in (item.ops if isinstance(item, ChunkLoop) else (item,))] for item in flow.fusion.body]


@pytest.mark.parametrize("case", LOOPS)
def test_loops(case: str) -> None:
    ops, loops = LOOPS[case]
    assert names_of(flow("%x: f32[M, N]", ops)) == loops


def test_a_gather_joins_the_loop_of_its_consumer() -> None:
    gather = flow("%x: f32[M@x, K], %w: f32[K, N]", "%y: f32[M, N] pinned stream(M, 8) = matmul(%x, %w)")
    (loop,) = gather.fusion.body
    assert isinstance(loop, ChunkLoop)
    assert loop.by_block
    assert loop.communication is loop.ops[0]
    assert shards(gather, loop.ops) == 4
    assert (str(loop.steps), loop.drops_dim) == ("8", False)


def test_operands_are_computed_in_the_result() -> None:
    """If a matmul computes an operand of a concat, all operands are written to slices of the result. A concat of pointwise results is one
    kernel."""
    for first in ("matmul(%x, %x)", "exp(%x)"):
        ops = f"%a: f32[M, M] = negative(%x)\n%b: f32[M, M] = {first}\n%y: f32[2*M, M] = concat(%a, %b, axis=0)"
        placement = placement_of(flow("%x: f32[M, M]", ops))
        parts = {name: (op.result.name, number) for name, (op, number) in placement.parts.items()}
        assert (parts, placement.by_kernel) == (({"a": ("y", 0), "b": ("y", 1)}, set()) if "matmul" in first else ({}, {"y"}))


def test_an_operand_with_another_use_has_separate_memory() -> None:
    joined = flow("%x: f32[M, M]", "%a: f32[M, M] = negative(%x)\n%b: f32[M, M] = matmul(%a, %a)\n%y: f32[2*M, M] = concat(%a, %b, axis=0)")
    assert list(placement_of(joined).parts) == ["b"]


def test_a_returned_view_determines_the_layout_of_its_operand() -> None:
    turned = flow("%x: f32[M, N]", "%h: f32[M, N] = negative(%x)\n%y: f32[N, M] = permute_dims(%h, axes=(1, 0))")
    assert {name: op.result.name for name, op in placement_of(turned).inverse_view.items()} == {"h": "y"}


def test_a_value_used_only_in_its_loop_has_memory_for_one_chunk() -> None:
    streamed = flow("%x: f32[M, N]", "%h: f32[M, N] stream(M, 4) = negative(%x)\n%y: f32[M, N] stream(M, 4) = exp(%h)")
    assert placement_of(streamed).within_loops == {"h"}


def test_a_value_transposed_in_its_loop_has_memory_for_all_chunks() -> None:
    """The transpose is a view of the whole value, so the value is stored for all chunks."""
    ops = """
        %h: f32[M, N] stream(N, 4) = negative(%x)
        %t: f32[N, M] stream(N, 4) = permute_dims(%h, axes=(1, 0))
        %y: f32[N, M] stream(N, 4) = exp(%t)
    """
    turned = flow("%x: f32[M, N]", ops)
    assert names_of(turned) == [["h", "t", "y"]]
    assert placement_of(turned).within_loops == {"t"}


def test_a_short_loop_forks_the_streams_that_it_uses() -> None:
    """A loop with few iterations forks and joins only the streams that it uses. The check detects a missing fork or join."""
    fusion = parsed("%x: f32[M, N]", "%h: f32[M, N] stream(M, 2) = negative(%x)\n%y: f32[M, N] stream(M, 6) = exp(%h)")
    host = lower(fusion, Options())
    assert [i.first for i in host.body if isinstance(i, ir.Fork | ir.Join)] == [2, 2, None, None]
    check(host)
    for kind in (ir.Fork, ir.Join):
        fewer = tree.rewrite(host.body, lambda i, kind=kind: replace(i, first=1) if isinstance(i, kind) and i.first else None)  # type: ignore[misc]
        with pytest.raises(ProgramError):
            check(replace(host, body=fewer))
