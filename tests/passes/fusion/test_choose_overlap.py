"""The pass choose_overlap: the ops, chunks and algorithms of chunk loops."""

from __future__ import annotations

from typing import Any

import pytest
from fusion_text import check, fusion

from hostweave.base.errors import OverlapWarning, ProgramError
from hostweave.options import Options
from hostweave.passes.fusion.choose_overlap import choose_overlap

GATHER = ("%x: f32[M@x, K], %w: f32[K, N]", "%g: f32[M, K] = all_gather(%x, dim=0, axes=(x))\n%y: f32[M, N] stream({}) = matmul(%g, %w)")
SCATTER = (
    "%x: f32[M, K@x], %w: f32[K@x, N]",
    "%h: f32[M, N] partial(sum, x) = matmul(%x, %w)\n%y: f32[M@x, N] stream({}) = reduce_scatter(%h, dim=0, axes=(x), reduction=sum)",
)

# For each case: a program, the arguments of `stream`, the header of the loop that the pass makes, and the streams of the program's two
# values after the pass.
STATED = [
    (GATHER, "M, 8", "8 chunks by_shard local_first", "M, p2p", "M"),
    (GATHER, "M, 16", "16 chunks by_shard local_first", "M, p2p", "M"),
    (GATHER, "M", "M indices by_shard local_first", "M, p2p", "M"),
    (GATHER, "M, 3", "3 chunks across_shards", "M, all_gather", "M"),
    (GATHER, "M, 8, ring", "8 chunks by_shard local_first", "M, ring", "M"),
    (GATHER, "M, 8, broadcast", "8 chunks by_shard", "M, broadcast", "M"),
    (GATHER, "M, 8, all_gather", "8 chunks across_shards", "M, all_gather", "M"),
    (GATHER, "M, 8, across_shards", "8 chunks across_shards", "M, all_gather", "M"),
    (GATHER, "M, 8, by_shard", "8 chunks by_shard local_first", "M, p2p", "M"),
    (GATHER, "N, 8", "8 chunks across_shards", None, "N"),
    (SCATTER, "M, 8", "8 chunks by_shard local_last", "M", "M, p2p"),
    (SCATTER, "M, 3", "3 chunks across_shards", "M", "M, reduce_scatter"),
    (SCATTER, "M, 8, ring", "8 chunks by_shard local_last", "M", "M, ring"),
    (SCATTER, "M, 8, reduce_scatter", "8 chunks across_shards", "M", "M, reduce_scatter"),
    (SCATTER, "N, 8", "8 chunks across_shards", "N", "N, reduce_scatter"),
]


@pytest.mark.parametrize(("program", "stated", "loop", "first", "second"), STATED)
def test_steps(program: tuple[str, str], stated: str, loop: str, first: str | None, second: str) -> None:
    inputs, ops = program
    head, rest = ops.format(second).split(" = ", 1)
    tail, last = rest.split("\n")
    after = f"loop {loop} {{\n{head} stream({first}) = {tail}\n{last}\n}}" if first else f"{head} = {tail}\nloop {loop} {{\n{last}\n}}"
    check(choose_overlap, inputs, ops.format(stated), after)


# For each name: inputs, and the ops before and after the pass.
LOOPS = {
    "a reduction over a sharded dim, its reshard, and the matmul before the reduction": (
        "%x: f32[4, 8@x, M, K], %w: f32[8@x, K, N]",
        """%h: f32[4, 8@x, M, N] = matmul(%x, %w)
        %s: f32[4, M, N] partial(sum, x) = sum(%h, axis=(1,))
        %y: f32[4, M, N] stream(0) = all_reduce(%s, axes=(x), reduction=sum)""",
        """loop 4 indices across_shards {
          %h: f32[4, 8@x, M, N] stream(0) = matmul(%x, %w)
          %s: f32[4, M, N] partial(sum, x) stream(0) = sum(%h, axis=(1,))
          %y: f32[4, M, N] stream(0, all_reduce) = all_reduce(%s, axes=(x), reduction=sum)
        }""",
    ),
    "the producer of a matmul's operand stays outside of the loop": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        """%a: f32[M, K@x] = relu(%x)
        %h: f32[M, N] partial(sum, x) = matmul(%a, %w)
        %y: f32[M, N] stream(M, 4) = all_reduce(%h, axes=(x), reduction=sum)""",
        """%a: f32[M, K@x] = relu(%x)
        loop 4 chunks across_shards {
          %h: f32[M, N] partial(sum, x) stream(M) = matmul(%a, %w)
          %y: f32[M, N] stream(M, all_reduce) = all_reduce(%h, axes=(x), reduction=sum)
        }""",
    ),
    "the producer of a gathered value joins a loop across shards": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        """%a: f32[M@x, K] = relu(%x)
        %g: f32[M, K] = all_gather(%a, dim=0, axes=(x))
        %y: f32[M, N] stream(M, 3) = matmul(%g, %w)""",
        """loop 3 chunks across_shards {
          %a: f32[M@x, K] stream(M) = relu(%x)
          %g: f32[M, K] stream(M, all_gather) = all_gather(%a, dim=0, axes=(x))
          %y: f32[M, N] stream(M) = matmul(%g, %w)
        }""",
    ),
    "the producer of a gathered value stays outside of a loop by shard": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        """%a: f32[M@x, K] = relu(%x)
        %g: f32[M, K] = all_gather(%a, dim=0, axes=(x))
        %y: f32[M, N] stream(M, 8) = matmul(%g, %w)""",
        """%a: f32[M@x, K] = relu(%x)
        loop 8 chunks by_shard local_first {
          %g: f32[M, K] stream(M, p2p) = all_gather(%a, dim=0, axes=(x))
          %y: f32[M, N] stream(M) = matmul(%g, %w)
        }""",
    ),
    "gathers of two operands of one op join the loop together": (
        "%a: f32[M@x, K], %b: f32[M@x, K]",
        """%ag: f32[M, K] = all_gather(%a, dim=0, axes=(x))
        %bg: f32[M, K] = all_gather(%b, dim=0, axes=(x))
        %y: f32[M, K] stream(M, 8) = add(%ag, %bg)""",
        """loop 8 chunks by_shard local_first {
          %ag: f32[M, K] stream(M, p2p) = all_gather(%a, dim=0, axes=(x))
          %bg: f32[M, K] stream(M, p2p) = all_gather(%b, dim=0, axes=(x))
          %y: f32[M, K] stream(M) = add(%ag, %bg)
        }""",
    ),
    "independent gathers have separate loops": (
        "%a: f32[M@x, K], %b: f32[M@x, K]",
        """%ag: f32[M, K] = all_gather(%a, dim=0, axes=(x))
        %bg: f32[M, K] = all_gather(%b, dim=0, axes=(x))
        %y: f32[M, K] stream(M, 8) = negative(%ag)
        %z: f32[M, K] stream(M, 8) = multiply(%bg, %y)""",
        """loop 8 chunks by_shard local_first {
          %ag: f32[M, K] stream(M, p2p) = all_gather(%a, dim=0, axes=(x))
          %y: f32[M, K] stream(M) = negative(%ag)
        }
        loop 8 chunks by_shard local_first {
          %bg: f32[M, K] stream(M, p2p) = all_gather(%b, dim=0, axes=(x))
          %z: f32[M, K] stream(M) = multiply(%bg, %y)
        }""",
    ),
    "an operand that is gathered as a whole precedes the loop": (
        "%x: f32[M@x, K], %w: f32[K@x, N]",
        """%xg: f32[M, K] = all_gather(%x, dim=0, axes=(x))
        %wg: f32[K, N] = all_gather(%w, dim=0, axes=(x))
        %y: f32[M, N] stream(M, 8) = matmul(%xg, %wg)""",
        """%wg: f32[K, N] = all_gather(%w, dim=0, axes=(x))
        loop 8 chunks by_shard local_first {
          %xg: f32[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
          %y: f32[M, N] stream(M) = matmul(%xg, %wg)
        }""",
    ),
    "matmuls of one gathered value share a loop if they have equal chunks": (
        "%x: f32[M@x, K], %v: f32[K, N], %w: f32[K, N]",
        """%g: f32[M, K] = all_gather(%x, dim=0, axes=(x))
        %a: f32[M, N] stream(M, 8) = matmul(%g, %v)
        %s: f32[M, N] = relu(%a)
        %b: f32[M, N] stream(M, 8) = matmul(%g, %w)
        %y: f32[M, N] = add(%s, %b)""",
        """loop 8 chunks by_shard local_first {
          %g: f32[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
          %a: f32[M, N] stream(M) = matmul(%g, %v)
          %b: f32[M, N] stream(M) = matmul(%g, %w)
        }
        %s: f32[M, N] = relu(%a)
        %y: f32[M, N] = add(%s, %b)""",
    ),
    "an op that reads the same chunk of the first result joins the loop": (
        "%x: f32[M@x, K], %w: f32[K, K]",
        """%g: f32[M, K] = all_gather(%x, dim=0, axes=(x))
        %a: f32[M, K] stream(M, 8) = matmul(%g, %w)
        %y: f32[M, K] stream(M, 8) = add(%g, %a)""",
        """loop 8 chunks by_shard local_first {
          %g: f32[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
          %a: f32[M, K] stream(M) = matmul(%g, %w)
          %y: f32[M, K] stream(M) = add(%g, %a)
        }""",
    ),
    "a streamed consumer joins the preceding loop": (
        "%x: f32[M@x, K], %w: f32[K, N]",
        """%g: f32[M, K] stream(M, 8) = all_gather(%x, dim=0, axes=(x))
        %a: f32[M, N] stream(M, 8) = matmul(%g, %w)
        %y: f32[M, N] stream(M, 8) = relu(%a)""",
        """loop 8 chunks by_shard local_first {
          %g: f32[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
          %a: f32[M, N] stream(M) = matmul(%g, %w)
          %y: f32[M, N] stream(M) = relu(%a)
        }""",
    ),
    "a consumer of a reduce-scatter by shard is outside of the loop, because the reduction ends after the loop": (
        "%x: f32[M, K@x], %w: f32[K@x, N]",
        """%h: f32[M, N] partial(sum, x) = matmul(%x, %w)
        %s: f32[M@x, N] stream(M, 8) = reduce_scatter(%h, dim=0, axes=(x), reduction=sum)
        %y: f32[M@x, N] stream(M, 8) = relu(%s)""",
        """loop 8 chunks by_shard local_last {
          %h: f32[M, N] partial(sum, x) stream(M) = matmul(%x, %w)
          %s: f32[M@x, N] stream(M, p2p) = reduce_scatter(%h, dim=0, axes=(x), reduction=sum)
        }
        loop 8 chunks across_shards {
          %y: f32[M@x, N] stream(M) = relu(%s)
        }""",
    ),
    "producers of a local slice of the streamed dim do not join its loop, and views alone form no loop": (
        "%x: f32[M, K@x]",
        """%s: f32[M] partial(sum, x) = sum(%x, axis=(1,))
        %r: f32[M] = all_reduce(%s, axes=(x), reduction=sum)
        %y: f32[M@x] stream(M, 4) = shard(%r, dim=0, axes=(x))""",
        """%s: f32[M] partial(sum, x) = sum(%x, axis=(1,))
        %r: f32[M] = all_reduce(%s, axes=(x), reduction=sum)
        %y: f32[M@x] = shard(%r, dim=0, axes=(x))""",
    ),
    "a matmul of replicated tensors": (
        "%x: f32[B, M, K], %w: f32[K, N]",
        "%y: f32[B, M, N] stream(B) = matmul(%x, %w)",
        "loop B indices across_shards {\n%y: f32[B, M, N] stream(B) = matmul(%x, %w)\n}",
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loop(case: str) -> None:
    check(choose_overlap, *LOOPS[case])


NOT_HERE = "is not possible here; the all_gather of %g can use "
GATHER_CAN = f"{NOT_HERE}p2p (by_shard), broadcast (by_shard), put (by_shard), ring (by_shard), all_gather (across_shards)"
ERRORS: list[tuple[tuple[str, str], str, str]] = [
    (GATHER, "M, 3, p2p", f"text:3: stream of %y: algorithm='p2p' {NOT_HERE}all_gather (across_shards)"),
    (
        GATHER,
        "M, 3, by_shard",
        f"text:3: stream of %y: chunking='by_shard' {NOT_HERE}all_gather (across_shards)",
    ),
    (
        GATHER,
        "M, 8, across_shards, p2p",
        f"text:3: stream of %y: chunking='across_shards', algorithm='p2p' {GATHER_CAN}",
    ),
    (GATHER, "M, 8, reduce_scatter", f"text:3: stream of %y: algorithm='reduce_scatter' {GATHER_CAN}"),
    (
        SCATTER,
        "M, 8, broadcast",
        "text:3: stream of %y: algorithm='broadcast' is not possible here; the reduce_scatter of %y can use "
        "p2p (by_shard), put (by_shard), ring (by_shard), reduce (by_shard), reduce_scatter (across_shards)",
    ),
    (GATHER, "M, 8, Ring", "text:3: stream of %y: there is no algorithm='Ring'; did you mean ring?"),
    (
        GATHER,
        "M, 8, mail",
        "text:3: stream of %y: there is no algorithm='mail'; use one of p2p, broadcast, put, ring, reduce, all_gather, reduce_scatter, "
        "all_to_all, all_reduce, collective_permute, transfer",
    ),
    (
        GATHER,
        "N, 8, p2p",
        "text:3: stream of %y: algorithm='p2p' is not possible here; no op of the loop communicates, so leave the algorithm out",
    ),
]


@pytest.mark.parametrize(("program", "stated", "message"), ERRORS)
def test_error(program: tuple[str, str], stated: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        choose_overlap(fusion(program[0], program[1].format(stated)), Options())
    assert str(caught.value) == message


def test_gathers_with_another_number_of_shards_precede_the_loop() -> None:
    """Each iteration uses a slice of every shard. So all operands of the loop must have the same number of shards."""
    check(
        choose_overlap,
        "%x: f32[M@dp], %w: f32[M@dp,tp]",
        """%g: f32[M] = all_gather(%x, dim=0, axes=(dp))
        %h: f32[M] = all_gather(%w, dim=0, axes=(dp, tp))
        %y: f32[M] stream(M, 3) = add(%g, %h)""",
        """%h: f32[M] = all_gather(%w, dim=0, axes=(dp, tp))
        loop 3 chunks across_shards {
          %g: f32[M] stream(M, all_gather) = all_gather(%x, dim=0, axes=(dp))
          %y: f32[M] stream(M) = add(%g, %h)
        }""",
        mesh="dp=2, tp=2",
    )


def test_an_op_outside_of_the_loop_reads_the_whole_gathered_value() -> None:
    check(
        choose_overlap,
        "%x: f32[M@x, K], %w: f32[K, K]",
        """%g: f32[M, K] = all_gather(%x, dim=0, axes=(x))
        %a: f32[M, K] stream(M, 8) = matmul(%g, %w)
        %b: f32[K, M] = permute_dims(%g, axes=(1, 0))""",
        """loop 8 chunks by_shard local_first {
          %g: f32[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
          %a: f32[M, K] stream(M) = matmul(%g, %w)
        }
        %b: f32[K, M] = permute_dims(%g, axes=(1, 0))""",
    )


OTHERS = {
    "comes first": "",
    "has other chunks": "%b: f32[M, K] stream(M, 16) = matmul(%g, %w)",
    "is streamed over another dim": "%b: f32[M, K] stream(K, 8) = matmul(%g, %w)",
    "needs all of the first result": "%c: f32[K] = sum(%a, axis=(0,))\n%b: f32[M, K] stream(M, 8) = add(%g, %c)",
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_gather_with_another_consumer_is_not_in_the_loop(other: str) -> None:
    """An op before the loop needs the whole gathered value, or two consumers cannot share a loop. The gather precedes the loop, and a
    warning is given."""
    first = "%b: f32[M, K] = matmul(%g, %w)" if other == "comes first" else ""
    before = f"""%g: f32[M, K] = all_gather(%x, dim=0, axes=(x))
        {first}
        %a: f32[M, K] stream(M, 8) = matmul(%g, %w)
        {OTHERS[other]}
        %y: f32[M, K] = add(%a, %b)"""
    with pytest.warns(OverlapWarning) as caught:
        after = choose_overlap(fusion("%x: f32[M@x, K], %w: f32[K, K]", before), Options())
    assert [op.result.stream for op in after.ops if op.result.name == "g"] == [None]
    assert (caught[0].filename, caught[0].lineno) == ("text", 4)
    assert str(caught[0].message) == (
        "stream of %a overlaps nothing: the all_gather of %x is before the loop, because its result is used by %b too; "
        "stream all users over the same dim, in equal chunks, so that no user needs a whole result of another"
    )


def refused(inputs: str, ops: str) -> Any:
    with pytest.raises(ProgramError) as caught:
        choose_overlap(fusion(inputs, ops), Options())
    return str(caught.value)


def test_chunks_by_shard_of_a_sharded_dim_are_refused() -> None:
    assert refused("%x: f32[M@x, K]", "%y: f32[M@x, K] stream(M, 8, by_shard) = negative(%x)") == (
        "text:2: stream of %y: chunking='by_shard' is not possible, because "
        "a rank holds only one block of f32[M@x, K]; use chunking='across_shards'"
    )


@pytest.mark.parametrize(
    ("inputs", "ops", "why"),
    [
        (
            "%x: f32[10@x, K]",
            "%g: f32[10, K] = all_gather(%x, dim=0, axes=(x))\n%y: f32[10, K] stream(0, 4) = negative(%g)",
            "3: stream of %y overlaps nothing: 8 ranks do not split the size 10 of dim 0 of %g evenly",
        ),
        (
            "%x: f32[10@x, K]",
            "%y: f32[10@x, K] stream(0, 2) = negative(%x)",
            "2: stream of %y overlaps nothing: 8 ranks do not split the size 10 of dim 0 of %y evenly",
        ),
        (
            "%x: f32[8, 10@x]",
            "%g: f32[8, 10] stream(0, 2) = all_gather(%x, dim=1, axes=(x))",
            "2: stream of %g overlaps nothing: 8 ranks do not split the size 10 of dim 1 of %g evenly",
        ),
    ],
)
def test_no_loop_over_uneven_shards(inputs: str, ops: str, why: str) -> None:
    with pytest.warns(OverlapWarning) as caught:
        made = choose_overlap(fusion(inputs, ops), Options())
    assert [f"{each.lineno}: {each.message}" for each in caught] == [f"{why}, so no loop is formed; pad the dim so that the split is even"]
    assert not any(op.result.stream for op in made.ops)
