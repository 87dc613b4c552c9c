"""The pass permute_after_resharding: reshards of permuted tensors, and the cost of a matmul with a transposed shard."""

from __future__ import annotations

import pytest
from fusion_text import check

import hostweave as hw
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.passes.fusion.permute_after_resharding import permute_after_resharding
from hostweave.pipeline import lower

INPUTS = "%x: f32[M@x, K], %v: f32[M, K@x], %w: f32[K, M@x], %z: f32[M, N@x], %p: f32[K@x, M, A, B], %u: f32[S@x, H, 64], %all: f32[K, N]"
TURNED = "%t: f32[K, M@x] = permute_dims(%x, axes=(1, 0))"
# For each name: the ops before and after the pass.
CASES = {
    "a gather": (
        f"""{TURNED}
        %t_gathered: f32[K, M] = reshard(%t)
        %y: f32[K, N@x] = matmul(%t_gathered, %z)""",
        f"""{TURNED}
        %x_gathered: f32[M, K] = reshard(%x)
        %t_gathered: f32[K, M] = permute_dims(%x_gathered, axes=(1, 0))
        %y: f32[K, N@x] = matmul(%t_gathered, %z)""",
    ),
    "a value that an earlier reshard has gathered is transposed": (
        f"""%g: f32[M, K] = reshard(%x)
        %h: f32[M, N] stream(M, 8) = matmul(%g, %all)
        {TURNED}
        %y: f32[K, M] pinned = reshard(%t)""",
        f"""%g: f32[M, K] = reshard(%x)
        %h: f32[M, N] stream(M, 8) = matmul(%g, %all)
        {TURNED}
        %y: f32[K, M] pinned = permute_dims(%g, axes=(1, 0))""",
    ),
    "two reshards in a row, the first of a partial sum": (
        """%s: f32[M, A, B] partial(sum, x) = sum(%p, axis=(0,))
        %t: f32[B, M, A] partial(sum, x) = permute_dims(%s, axes=(2, 0, 1))
        %r: f32[B, M@x, A] = reshard(%t)
        %y: f32[B@x, M, A] = reshard(%r)""",
        """%s: f32[M, A, B] partial(sum, x) = sum(%p, axis=(0,))
        %t: f32[B, M, A] partial(sum, x) = permute_dims(%s, axes=(2, 0, 1))
        %s_resharded: f32[M@x, A, B] = reshard(%s)
        %r: f32[B, M@x, A] = permute_dims(%s_resharded, axes=(2, 0, 1))
        %s_resharded_resharded: f32[M, A, B@x] = reshard(%s_resharded)
        %y: f32[B@x, M, A] = permute_dims(%s_resharded_resharded, axes=(2, 0, 1))""",
    ),
}
SAME = {
    "a loop could use blocks of the outermost dim": """%t: f32[K@x, M] = permute_dims(%v, axes=(1, 0))
        %g: f32[K, M] = reshard(%t)
        %y: f32[K, N@x] = matmul(%g, %z)""",
    "a slice is a view": """%t: f32[M@x, K] = permute_dims(%w, axes=(1, 0))
        %y: f32[M@x, K@y] = reshard(%t)""",
    "a loop that the user stated": f"""{TURNED}
        %g: f32[K, M] = reshard(%t)
        %y: f32[K, M] stream(K, 8) = negative(%g)""",
    "keys of an attention, which a loop could gather": """%t: f32[H, S@x, 64] = permute_dims(%u, axes=(1, 0, 2))
        %k: f32[H, S, 64] = reshard(%t)
        %v_2: f32[H, S, 64] = reshard(%t)
        %y: f32[H, S@x, 64] = attention(%t, %k, %v_2, scale=0.125, causal=top_left)""",
}


@pytest.mark.parametrize("case", CASES)
def test_permutations_that_move(case: str) -> None:
    check(permute_after_resharding, INPUTS, *CASES[case])


@pytest.mark.parametrize("case", SAME)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    check(permute_after_resharding, INPUTS, SAME[case], SAME[case], mesh="x=8, y=2")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_product_with_a_transposed_shard_costs_its_gather(ranks: int) -> None:
    """The gradient of a weight needs a gather of the operand that is transposed, but no copy and no kernel, even with several heads."""
    mesh, f32 = hw.Mesh(x=ranks), hw.f32
    fusions = (
        hw.fusion(mesh=mesh, x=f32["M@x", "K"], dh=f32["M", "N@x"])(lambda x, dh: hw.matmul(x.T, dh)),
        hw.fusion(mesh=mesh, x=f32["M@x", "H", "K"], dh=f32["H", "M", "N@x"])(lambda x, dh: hw.matmul(hw.permute_dims(x, (1, 2, 0)), dh)),
    )
    for fusion in fusions:
        calls = [i for i in tree.walk(lower(fusion, Options()).body) if i.calls and not isinstance(i, ir.Allocate)]
        assert [type(i) for i in calls] == [ir.AllGather, ir.Matmul]
