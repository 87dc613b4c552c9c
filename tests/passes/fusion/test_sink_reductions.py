"""The pass sink_reductions: a reduction moves past linear ops if the move saves bytes or communications."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
from fusion_text import check, communications, fusion
from fusions_from_files import fusions

import hostweave as hw
from hostweave.base.min_cut import min_cut
from hostweave.fusion_ir.resharding import cost
from hostweave.options import Options
from hostweave.passes.fusion.sink_reductions import sink_reductions
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, Partial

TWO = "%p: bf16[M, K@x], %v: bf16[K@x, N], %q: bf16[M, L@x], %w: bf16[L@x, N]"
PRODUCTS = """%a_partial: bf16[M, N] partial(sum, x) = matmul(%p, %v)
        %a: bf16[M, N] = reshard(%a_partial)
        %b_partial: bf16[M, N] partial(sum, x) = matmul(%q, %w)
        %b: bf16[M, N] = reshard(%b_partial)
        """
TERMS = """%a: bf16[M, N] partial(sum, x) = matmul(%p, %v)
        %b: bf16[M, N] partial(sum, x) = matmul(%q, %w)
        """

# For each name: inputs, and the ops before and after the pass.
CASES = {
    "two products are added and reduced once": (
        TWO,
        PRODUCTS + "%y: bf16[M, N] = add(%a, %b)",
        TERMS
        + """%y_partial: bf16[M, N] partial(sum, x) = add(%a, %b)
        %y: bf16[M, N] = reshard(%y_partial)""",
    ),
    "two scattered products are subtracted as partial sums, and scattered once": (
        TWO,
        PRODUCTS.replace("a: bf16[M,", "a: bf16[M@x,").replace("b: bf16[M,", "b: bf16[M@x,") + "%y: bf16[M@x, N] = subtract(%a, %b)",
        TERMS
        + """%y_partial: bf16[M, N] partial(sum, x) = subtract(%a, %b)
        %y: bf16[M@x, N] = reshard(%y_partial)""",
    ),
    "a reshard that is the only consumer of a sum reduces it": (
        TWO,
        PRODUCTS
        + """%h: bf16[M, N] = add(%a, %b)
        %y: bf16[M, N@x] pinned = reshard(%h)""",
        TERMS
        + """%h: bf16[M, N] partial(sum, x) = add(%a, %b)
        %y: bf16[M, N@x] pinned = reshard(%h)""",
    ),
    "a sliced factor is replaced by the factor before the slice": (
        TWO + ", %f: bf16[M, N]",
        PRODUCTS.replace("a: bf16[M,", "a: bf16[M@x,").replace("b: bf16[M,", "b: bf16[M@x,")
        + """%f_sliced: bf16[M@x, N] = reshard(%f)
        %c: bf16[M@x, N] = multiply(%a, %f_sliced)
        %y: bf16[M@x, N] = add(%b, %c)""",
        TERMS
        + """%f_sliced: bf16[M@x, N] = reshard(%f)
        %c: bf16[M, N] partial(sum, x) = multiply(%a, %f)
        %y_partial: bf16[M, N] partial(sum, x) = add(%b, %c)
        %y: bf16[M@x, N] = reshard(%y_partial)""",
    ),
    "reductions move past views, quotients and casts to wider dtypes": (
        TWO + ", %n: f32[]",
        PRODUCTS
        + """%t: bf16[N, M] = permute_dims(%a, axes=(1, 0))
        %u: bf16[N, M] = permute_dims(%b, axes=(1, 0))
        %h: bf16[2*N, M] = concat(%t, %u, axis=0)
        %f: f32[2*N, M] = astype(%h)
        %r: f32[2*M*N] = reshape(%f)
        %d: f32[2*M*N] = divide(%r, %n)
        %y: f32[] = sum(%d, axis=(0,))""",
        TERMS
        + """%t: bf16[N, M] partial(sum, x) = permute_dims(%a, axes=(1, 0))
        %u: bf16[N, M] partial(sum, x) = permute_dims(%b, axes=(1, 0))
        %h: bf16[2*N, M] partial(sum, x) = concat(%t, %u, axis=0)
        %f: f32[2*N, M] partial(sum, x) = astype(%h)
        %r: f32[2*M*N] partial(sum, x) = reshape(%f)
        %d: f32[2*M*N] partial(sum, x) = divide(%r, %n)
        %y_partial: f32[] partial(sum, x) = sum(%d, axis=(0,))
        %y: f32[] = reshard(%y_partial)""",
    ),
    "sums over two dims that two axes shard become one reduction": (
        "%p: f32[M@y, K@x], %v: f32[K@x, N]",
        """%a_partial: f32[M@y, N] partial(sum, x) = matmul(%p, %v)
        %a: f32[M@y, N] = reshard(%a_partial)
        %y_partial: f32[N] partial(sum, y) = sum(%a, axis=(0,))
        %y: f32[N] = reshard(%y_partial)""",
        """%a: f32[M@y, N] partial(sum, x) = matmul(%p, %v)
        %y_partial: f32[N] partial(sum, x, y) = sum(%a, axis=(0,))
        %y: f32[N] = reshard(%y_partial)""",
    ),
}

# For each name: inputs, and a program that the pass does not change.
KEPT = {
    "the reduction does not move if it would reduce as many bytes": (
        TWO,
        PRODUCTS
        + """%c: bf16[M, N] = negative(%a)
        %d: bf16[M, N] = relu(%b)
        %y: bf16[M, N] = maximum(%c, %d)""",
    ),
    "a value that is not partial is not added to a partial sum": (
        TWO + ", %r: bf16[M, N]",
        PRODUCTS.partition("%b_partial")[0] + "%y: bf16[M, N] = add(%a, %r)",
    ),
    "a cast to a narrower dtype follows the reduction": (
        "%p: f32[M, K@x], %v: f32[K@x, N]",
        """%a_partial: f32[M, N] partial(sum, x) = matmul(%p, %v)
        %a: f32[M, N] = reshard(%a_partial)
        %y: bf16[M, N] = astype(%a)""",
    ),
    "a reduced value with a nonlinear consumer": (
        TWO,
        PRODUCTS
        + """%c: bf16[M, N] = relu(%a)
        %d: bf16[M, N] = relu(%b)
        %h: bf16[M, N] = add(%a, %b)
        %e: bf16[M, N] = maximum(%c, %d)
        %y: bf16[M, N] = maximum(%h, %e)""",
    ),
    "a value with a stated stream": (
        TWO,
        PRODUCTS.replace("a: bf16[M, N] =", "a: bf16[M, N] stream(M, 2) =") + "%y: bf16[M, N] = add(%a, %b)",
    ),
    "a value with a stated sharding": (
        TWO,
        PRODUCTS.replace("a: bf16[M, N] =", "a: bf16[M, N] pinned =") + "%y: bf16[M, N] = add(%a, %b)",
    ),
    "a maximum of sums differs from the sum of maxima": (
        TWO,
        PRODUCTS
        + """%c: bf16[] = max(%a, axis=(0, 1))
        %d: bf16[] = max(%b, axis=(0, 1))
        %y: bf16[] = add(%c, %d)""",
    ),
    "a product of two partial sums": (TWO, PRODUCTS + "%y: bf16[M, N] = multiply(%a, %b)"),
}


@pytest.mark.parametrize("case", CASES)
def test_reductions_that_move(case: str) -> None:
    check(sink_reductions, *CASES[case], mesh="x=4, y=2")


@pytest.mark.parametrize("case", KEPT)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    inputs, program = KEPT[case]
    check(sink_reductions, inputs, program, program, mesh="x=4, y=2")


def test_gradients_of_three_projections_are_scattered_once() -> None:
    names = ("q", "k", "v")
    inputs = {f"d{n}": hw.bf16["S", "B", "F@tp"] for n in names} | {f"w{n}": hw.bf16["E", "F@tp"] for n in names}

    @hw.fusion(mesh=hw.Mesh(tp=4), **inputs)
    def dx(dq, dk, dv, wq, wk, wv):
        return hw.reshard(dq @ wq.T + dk @ wk.T + dv @ wv.T, "S@tp", "B", "E")

    assert communications(dx) == ["reduce_scatter"]


def test_gradients_of_two_micro_batches_are_reduced_once() -> None:
    @hw.fusion(mesh=hw.Mesh(dp=4), x0=hw.bf16["M@dp", "K"], x1=hw.bf16["M@dp", "K"], d0=hw.bf16["M@dp", "N"], d1=hw.bf16["M@dp", "N"])
    def dw(x0, x1, d0, d1):
        return (x0.T @ d0 + x1.T @ d1) * 0.5

    assert communications(dw) == ["all_reduce"]


def test_the_backward_pass_of_swiglu_reduces_the_gradient_of_its_input_once() -> None:
    program = fusions("transformer.py")["swiglu_backward_tp"]
    # One all-reduce is for the gradient of the input, and three are for the gradients of the weights.
    assert communications(program) == ["all_reduce"] * 4


def test_the_sizes_decide() -> None:
    """The pass reduces the sum over a dim, or the result of the matmul, whichever has fewer bytes."""
    program = fusion(
        "%p: f32[M, K@x], %v: f32[K@x, N]",
        """%a_partial: f32[M, N] partial(sum, x) = matmul(%p, %v)
        %a: f32[M, N] = reshard(%a_partial)
        %h: f32[L, M, N] = broadcast_to(%a)
        %y: f32[L, N] = sum(%h, axis=(1,))""".replace("L", "16"),
    )
    few, many = ([op.kind for op in sink_reductions(program, Options(sizes={"M": m})).ops] for m in (8, 64))
    assert few == ["matmul", "reshard", "broadcast_to", "sum"]
    assert many == ["matmul", "broadcast_to", "sum", "reshard"]


def test_costs() -> None:
    mesh = Mesh(x=4)
    terms = replace(hw.f32["M"], partial=Partial("sum", ("x",)))
    assert cost(terms, hw.f32["M"], mesh, {"M": 100}) == (600, 1)
    assert cost(terms, hw.f32["M@x"], mesh, {"M": 100}) == (300, 1)
    assert cost(hw.f32["M"], hw.f32["M@x"], mesh, {"M": 100}) == (Fraction(0), 0)
    both = replace(terms, dims=(Dim(Size.of("M") + Size.of("N")), Dim(Size(10), ("x",))), partial=None)
    assert cost(both, replace(both, dims=tuple(Dim(size) for size in both.shape)), mesh, {"M": 100}) == (4 * 4196 * Fraction(10, 4) * 3, 1)


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_cheaper(seed: int) -> None:
    random = Random(seed)
    nodes = list(range(6))
    edges = [(a, b, random.randint(0, 9)) for a in nodes for b in nodes if a != b and random.random() < 0.5]
    inner = nodes[1:-1]
    sides = [{0, *some} for count in range(len(inner) + 1) for some in combinations(inner, count)]

    def cut(side: set[int]) -> int:
        return sum(capacity for a, b, capacity in edges if a in side and b not in side)

    least = min(map(cut, sides))
    best = min_cut(edges, 0, 5)
    assert cut(best) == least
    assert all(best <= side for side in sides if cut(side) == least)
