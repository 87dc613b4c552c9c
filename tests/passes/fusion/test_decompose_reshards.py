"""The pass decompose_reshards: a reshard becomes communications and local slices. A reshard without effect is removed or becomes a copy."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
from fusion_text import check, fusion

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.resharding import ReshardStep, plan, reshard_step
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.options import Options
from hostweave.passes.fusion.decompose_reshards import decompose_reshards
from hostweave.passes.fusion.insert_reshards import insert_reshards
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.pipeline import level_of
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Partial, TensorType, f32

TURNED = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)  # transposition of 8 x 2 ranks to 2 x 8

# For each name: inputs, and the ops before and after the pass.
CASES = {
    "all_gather": (
        "%x: f32[M@x, K]",
        "%y: f32[M, K] pinned = reshard(%x)",
        "%y: f32[M, K] pinned = all_gather(%x, dim=0, axes=(x))",
    ),
    "shard": (
        "%x: f32[M, K]",
        "%y: f32[M@x, K] pinned = reshard(%x)",
        "%y: f32[M@x, K] pinned = shard(%x, dim=0, axes=(x))",
    ),
    "all_reduce": (
        "%x: f32[M@x, K]",
        """%s: f32[K] partial(sum, x) = sum(%x, axis=(0,))
        %y: f32[K] = reshard(%s)""",
        """%s: f32[K] partial(sum, x) = sum(%x, axis=(0,))
        %y: f32[K] = all_reduce(%s, axes=(x), reduction=sum)""",
    ),
    "reduce_scatter": (
        "%x: f32[M@x, K]",
        """%s: f32[K] partial(sum, x) = sum(%x, axis=(0,))
        %y: f32[K@x] = reshard(%s)""",
        """%s: f32[K] partial(sum, x) = sum(%x, axis=(0,))
        %y: f32[K@x] = reduce_scatter(%s, dim=0, axes=(x), reduction=sum)""",
    ),
    "a slice before a gather": (
        "%x: f32[M@x, K]",
        "%y: f32[M, K@y] pinned = reshard(%x)",
        """%y_sliced: f32[M@x, K@y] = shard(%x, dim=1, axes=(y))
        %y: f32[M, K@y] pinned = all_gather(%y_sliced, dim=0, axes=(x))""",
    ),
    "another axis on the same dim: a slice precedes the permutation, which then sends small blocks": (
        "%x: f32[M@x, K]",
        "%y: f32[M@y, K] pinned = reshard(%x)",
        f"""%y_sliced: f32[M@x,y, K] = shard(%x, dim=0, axes=(y))
        %y_permuted: f32[M@y,x, K] = permute_shards(%y_sliced, axes=(x, y), sources={TURNED})
        %y: f32[M@y, K] pinned = all_gather(%y_permuted, dim=0, axes=(x))""",
    ),
    "a streamed dim along which the producer cannot be split into chunks": (
        "%x: f32[M, K]",
        """%j: f32[2*M, K] = concat(%x, %x, axis=0)
        %y: f32[2*M, K] pinned stream(0, 2) = reshard(%j)""",
        """%j: f32[2*M, K] = concat(%x, %x, axis=0)
        %y: f32[2*M, K] pinned stream(0, 2) = copy(%j)""",
    ),
    "a streamed dim along which the producer can be split into chunks": (
        "%x: f32[M, K]",
        """%j: f32[2*M, K] = concat(%x, %x, axis=0)
        %y: f32[2*M, K] pinned stream(1, 2) = reshard(%j)""",
        "%y: f32[2*M, K] pinned stream(K, 2) = concat(%x, %x, axis=0)",
    ),
    "an axis that moves to another dim": (
        "%x: f32[M@x, K]",
        "%y: f32[M, K@x] pinned = reshard(%x)",
        "%y: f32[M, K@x] pinned = all_to_all(%x, dim=0, to=1, axes=(x))",
    ),
    "only the outer axis of a dim is gathered": (
        "%x: f32[M@x,y, K]",
        "%y: f32[M@y, K] pinned = reshard(%x)",
        f"""%y_permuted: f32[M@y,x, K] = permute_shards(%x, axes=(x, y), sources={TURNED})
        %y: f32[M@y, K] pinned = all_gather(%y_permuted, dim=0, axes=(x))""",
    ),
    "two dims at once: the slice comes first, because it makes the value smaller": (
        "%x: f32[M@x, K]",
        "%z: f32[M, K@y,x] pinned = reshard(%x)",
        """%z_sliced: f32[M@x, K@y] = shard(%x, dim=1, axes=(y))
        %z: f32[M, K@y,x] pinned = all_to_all(%z_sliced, dim=0, to=1, axes=(x))""",
    ),
    "a computed value is sliced, although it could be computed in slices": (
        "%x: f32[M, K]",
        """%h: f32[M, K] = negative(%x)
        %y: f32[M@x, K] pinned = reshard(%h)""",
        """%h: f32[M, K] = negative(%x)
        %y: f32[M@x, K] pinned = shard(%h, dim=0, axes=(x))""",
    ),
    "equal reshards are shared": (
        "%x: f32[M@x, K]",
        """%a: f32[M, K] pinned = reshard(%x)
        %b: f32[M, K] pinned = reshard(%x)
        %y: f32[M, K] = add(%a, %b)""",
        """%a: f32[M, K] pinned = all_gather(%x, dim=0, axes=(x))
        %y: f32[M, K] = add(%a, %a)""",
    ),
    "a step that is part of two reshards": (
        "%x: f32[M@x, K@y]",
        """%a: f32[M, K] pinned = reshard(%x)
        %b: f32[M, K@y] pinned = reshard(%x)
        %c: f32[M, K@y] = negative(%b)
        %d: f32[M, K] pinned = reshard(%c)
        %y: f32[M, K] = add(%a, %d)""",
        """%a_gathered: f32[M, K@y] = all_gather(%x, dim=0, axes=(x))
        %a: f32[M, K] pinned = all_gather(%a_gathered, dim=1, axes=(y))
        %c: f32[M, K@y] = negative(%a_gathered)
        %d: f32[M, K] pinned = all_gather(%c, dim=1, axes=(y))
        %y: f32[M, K] = add(%a, %d)""",
    ),
    "an unused communication": (
        "%x: f32[M@x, K]",
        """%a: f32[M, K] pinned = reshard(%x)
        %y: f32[M@x, K] = negative(%x)""",
        "%y: f32[M@x, K] = negative(%x)",
    ),
    "only the inner axis of a dim is gathered": (
        "%x: f32[M@x,y, K]",
        "%y: f32[M@x, K] pinned = reshard(%x)",
        "%y: f32[M@x, K] pinned = all_gather(%x, dim=0, axes=(y))",
    ),
    "two dims": (
        "%x: f32[M@x, K@y]",
        "%z: f32[M, K] pinned = reshard(%x)",
        """%z_gathered: f32[M, K@y] = all_gather(%x, dim=0, axes=(x))
        %z: f32[M, K] pinned = all_gather(%z_gathered, dim=1, axes=(y))""",
    ),
    "a partial over two axes, scattered over one": (
        "%x: f32[M@x,y, K]",
        """%s: f32[K] partial(sum, x, y) = sum(%x, axis=(0,))
        %z: f32[K@y] = reshard(%s)""",
        """%s: f32[K] partial(sum, x, y) = sum(%x, axis=(0,))
        %z_scattered: f32[K@y,x] = reduce_scatter(%s, dim=0, axes=(y, x), reduction=sum)
        %z: f32[K@y] = all_gather(%z_scattered, dim=0, axes=(x))""",
    ),
    "no change: the producer takes the name and the stream": (
        "%x: f32[M@x, K]",
        """%h: f32[M@x, K] = negative(%x)
        %y: f32[M@x, K] pinned stream(M, 2) = reshard(%h)""",
        "%y: f32[M@x, K] pinned stream(M, 2) = negative(%x)",
    ),
    "a reshard to the same sharding, of a value with other uses": (
        "%x: f32[M@x, K]",
        """%h: f32[M@x, K] = negative(%x)
        %g: f32[M@x, K] pinned = reshard(%h)
        %y: f32[M@x, K] = add(%g, %h)""",
        """%h: f32[M@x, K] = negative(%x)
        %y: f32[M@x, K] = add(%h, %h)""",
    ),
    "two reshards to the same sharding, one of them returned": (
        "%x: f32[M@x, K]",
        """%h: f32[M@x, K] = negative(%x)
        %g: f32[M@x, K] pinned = reshard(%h)
        %y: f32[M@x, K] pinned = reshard(%h)
        %z: f32[M@x, K] = add(%g, %h)
        return %z, %y""",
        """%y: f32[M@x, K] pinned = negative(%x)
        %z: f32[M@x, K] = add(%y, %y)
        return %z, %y""",
    ),
    "a reshard to the same sharding, of an input, becomes a copy": (
        "%x: f32[M@x, K]",
        "%y: f32[M@x, K] pinned = reshard(%x)",
        "%y: f32[M@x, K] pinned = copy(%x)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    check(decompose_reshards, *CASES[case], mesh="x=8, y=2")


@pytest.mark.parametrize("case", [case for case in CASES if "stream" not in CASES[case][2]])
def test_steps_that_a_program_states_stay_as_they_are(case: str) -> None:
    """The text of a fusion may state communications and local slices. Passes keep these ops, and add no ops."""
    inputs, _, after = CASES[case]
    program = fusion(inputs, after, mesh="x=8, y=2")
    for apply in (propagate_sharding, insert_reshards, decompose_reshards):
        program = apply(program, Options())
        verify_fusion(program, after=level_of(apply.__name__))
    assert [op.kind for op in program.ops] == [op.kind for op in fusion(inputs, after, mesh="x=8, y=2").ops]


@pytest.mark.parametrize("stated", ["", "pinned "])
@pytest.mark.parametrize("read_first", [True, False])
def test_equal_moves_of_uneven_blocks_by_gets_are_shared(stated: str, read_first: bool) -> None:
    """Gets need equal blocks, so a whole value is moved, and sliced after the move. Two equal moves share both steps."""
    source, target = "on mesh(x=2 of ranks 0, 1)", "on mesh(x=2 of ranks 2, 3)"
    lines = [
        f"%a: f32[7@x, K] {target} {stated}= reshard(%x)",
        f"%e: f32[7@x, K] {target} = exp(%a)",
        f"%b: f32[7@x, K] {target} pinned = reshard(%x)",
        f"%y: f32[7@x, K] {target} = add(%b, %e)",
        f"%z: f32[7@x, K] {target} = add(%a, %y)",
    ]
    lines[1:3] = lines[1:3] if read_first else lines[2:0:-1]
    result = decompose_reshards(fusion(f"%x: f32[7, K] {source}", "\n".join(lines), mesh="x=4"), Options(transport="peer"))
    verify_fusion(result, after="decompose_reshards")
    assert [op.kind for op in result.ops].count("transfer") == 1


def test_a_partial_sum_is_sharded_along_other_axes_before_it_is_reduced() -> None:
    inputs = "%x: f32[M@x, K]"
    body = """%s: f32[K] partial(sum, x) = sum(%x, axis=(0,))
        %y: f32[K@y] = reshard(%s)"""
    result = decompose_reshards(fusion(inputs, body, mesh="x=8, y=2"), Options())
    assert [op.kind for op in result.ops[1:]] == ["shard", "all_reduce"]


def test_costs() -> None:
    """The chosen steps transfer no more elements than a single step, or than two steps through one of the types."""
    mesh = Mesh(x=4, y=2)
    types = [f32["M@x", "N"], f32["M@y", "N"], f32["M@x,y", "N"], f32["M", "N@y,x"], f32["M@y", "N@x"], f32["M", "N"], f32["M@x", "N@y"]]
    sizes = {"M": 64, "N": 1024}

    def cost(source: TensorType, steps: tuple[ReshardStep, ...]) -> Fraction:
        total = Fraction(0)
        for step in steps:
            total += step.received(prod(Fraction(e.coefficient * sizes[e.symbols[0]], e.divisor) for e in source.local_shape(mesh)), mesh)
            source = step.applied(source, mesh)
        return total

    for source in types:
        for target in types:
            best = cost(source, plan(source, target, mesh, sizes, None))
            if (direct := reshard_step(source, target, mesh)) is not None:
                assert best <= cost(source, (direct,))
            for middle in types:
                first, second = reshard_step(source, middle, mesh), reshard_step(middle, target, mesh)
                if first and second:
                    assert best <= cost(source, (first, second)), f"{source} to {target} through {middle}"


def test_a_reduced_value_cannot_become_partial() -> None:
    source, target = f32["M"], replace(f32["M"], partial=Partial("sum", ("x",)))
    with pytest.raises(ProgramError) as caught:
        plan(source, target, Mesh(x=2), {}, None)
    assert str(caught.value) == "reshard: f32[M] cannot become f32[M] partial(sum, x): no steps lead to partial(sum, x); remove it"


def test_a_returned_value_with_other_uses_keeps_its_name() -> None:
    before = """%a: f32[M@x, K] = exp(%x)
        %b: f32[M@x, K] = negative(%a)
        %y: f32[M@x, K] pinned = reshard(%a)
        %z: f32[M@x, K] = add(%b, %a)"""
    given = replace(fusion("%x: f32[M@x, K]", before), outputs=("y", "z"))
    ops = [str(op).partition(" = ")[2] for op in decompose_reshards(given, Options()).ops]
    assert ops == ["exp(%x)", "negative(%y)", "add(%b, %y)"]
