"""The pass share_equal_ops: equal ops are computed once. Some ops are never shared, such as user kernels and ops in chunk loops. The
pass drop_unit_axes removes mesh axes of one rank."""

from __future__ import annotations

import pytest
from fusion_text import check, communications

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.passes.fusion.drop_unit_axes import drop_unit_axes
from hostweave.passes.fusion.share_equal_ops import share_equal_ops
from hostweave.pipeline import lower

X = "%x: f32[M@x, K], %s: f32[K]"

# For each name: inputs, and the ops before and after the pass.
CASES = {
    "equal ops, and equal ops on their results": (
        X,
        """%a: f32[M@x, K] = multiply(%x, %s)
        %b: f32[M@x, K] = multiply(%x, %s)
        %c: f32[M@x] = max(%a, axis=(1,))
        %d: f32[M@x] = max(%b, axis=(1,))
        %y: f32[M@x] = add(%c, %d)""",
        """%a: f32[M@x, K] = multiply(%x, %s)
        %c: f32[M@x] = max(%a, axis=(1,))
        %y: f32[M@x] = add(%c, %c)""",
    ),
    "steps of reshards": (
        X,
        """%a: f32[M, K] pinned = all_gather(%x, dim=0, axes=(x))
        %b: f32[M, K] = all_gather(%x, dim=0, axes=(x))
        %y: f32[M, K] = add(%a, %b)""",
        """%a: f32[M, K] pinned = all_gather(%x, dim=0, axes=(x))
        %y: f32[M, K] = add(%a, %a)""",
    ),
    "sharded indices of a dim": (
        X,
        """%i: i64[M] = iota()
        %a: i64[M@x] = shard(%i, dim=0, axes=(x))
        %j: i64[M] = iota()
        %b: i64[M@x] = shard(%j, dim=0, axes=(x))
        %y: i64[M@x] = add(%a, %b)""",
        """%i: i64[M] = iota()
        %a: i64[M@x] = shard(%i, dim=0, axes=(x))
        %y: i64[M@x] = add(%a, %a)""",
    ),
    "a returned duplicate becomes a copy": (
        X,
        """%a: f32[M@x, K] = multiply(%x, %s)
        %y: f32[M@x, K] = multiply(%x, %s)""",
        """%a: f32[M@x, K] = multiply(%x, %s)
        %y: f32[M@x, K] = copy(%a)""",
    ),
}

# For each name: inputs, and a program that the pass does not change.
KEPT = {
    "other attributes, numbers and types": (
        X,
        """%a: f32[K] = sum(%s, axis=())
        %b: f32[1] = sum(%s, axis=(0,), keepdims=true)
        %c: f32[K] = multiply(%s, 0.0)
        %d: f32[K] = multiply(%s, -0.0)
        %e: f32[K@x] = shard(%s, dim=0, axes=(x))
        %f: f32[K@y] = shard(%s, dim=0, axes=(y))
        %g: f32[K] = add(%c, %d)
        %y: f32[K] = add(%g, %a)""",
    ),
    "ops without operands": (
        "%x: f32[N, N]",
        """%a: i32[N] = iota()
        %b: i32[N] = iota()
        %c: i32[N, 1] = expand_dims(%a, axis=(1,))
        %d: i32[1, N] = expand_dims(%b, axis=(0,))
        %e: bool[N, N] = less(%c, %d)
        %y: f32[N, N] = where(%e, %x, 0.0)""",
    ),
    "results and operands of a loop": (
        X,
        """%a: f32[M@x, K] = multiply(%x, %s)
        %b: f32[M@x, K] = multiply(%x, %s)
        %c: f32[M@x, K] stream(M, 2) = negative(%a)
        %d: f32[M@x, K] stream(M, 2) = negative(%a)
        %e: f32[M@x, K] = add(%c, %d)
        %y: f32[M@x, K] = add(%e, %b)""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ops_that_are_shared(case: str) -> None:
    inputs, before, after = CASES[case]
    check(share_equal_ops, inputs, before, after, mesh="x=2, y=2")


@pytest.mark.parametrize("case", KEPT)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    inputs, program = KEPT[case]
    check(share_equal_ops, inputs, program, program, mesh="x=2, y=2")


def kinds_after(program: Fusion, name: str) -> list[str]:
    stages: dict[str, Fusion] = {}
    lower(program, Options(), lambda at, stage: stages.setdefault(at, stage))
    return [op.kind for op in stages[name].ops]


SOURCE = "__global__ void twice(const float* x, float* y, int64_t n) { for (int64_t i : hw::over_grid(n)) y[i] = 2 * x[i]; }"


def test_calls_are_shared_and_kernels_of_the_user_are_not() -> None:
    @hw.block(x=hw.f32["M"])
    def root(x):
        return hw.sqrt(x), hw.exp(x)

    @hw.block(x=hw.f32["M"])
    def doubled(x):
        return hw.kernel(SOURCE, "twice", "M", [x, hw.f32["M"], "M"])

    @hw.fusion(x=hw.f32["M"])
    def f(x):
        first, second = root(x), root(x)
        return first[0] + second[0] + first[1] * second[1] + doubled(x) + doubled(x) + doubled(x)

    kinds = kinds_after(f, "share_equal_ops")
    assert (kinds.count("call"), kinds.count("output")) == (1 + 3, 1)

    @hw.fusion(x=hw.f32["M"])
    def g(x):
        return hw.kernel(SOURCE, "twice", "M", [x, hw.f32["M"], "M"]) + hw.kernel(SOURCE, "twice", "M", [x, hw.f32["M"], "M"])

    assert kinds_after(g, "share_equal_ops").count("kernel") == 2


UNITS = {
    "types, partial sums and reshards": (
        "%x: f32[M@a,x, K@b], %w: f32[K@b, N]",
        """%s: f32[M@x,a, N] partial(sum, b) = matmul(%x, %w)
        %y: f32[M@x, N@a] pinned = reshard(%s)""",
        """%s: f32[M@x, N] = matmul(%x, %w)
        %y: f32[M@x, N] pinned = reshard(%s)""",
    ),
    "reshard steps become reshards if axes of one rank shard the tensors": (
        "%x: f32[M@a,x, K]",
        """%h: f32[M@a, K] = all_gather(%x, dim=0, axes=(x))
        %y: f32[M, K@a] = all_to_all(%h, dim=0, to=1, axes=(a))""",
        """%h: f32[M, K] = reshard(%x)
        %y: f32[M, K] = reshard(%h)""",
    ),
    "steps over axes of several ranks stay": (
        "%x: f32[M@x, K]",
        "%y: f32[M, K] = all_gather(%x, dim=0, axes=(x))",
        "%y: f32[M, K] = all_gather(%x, dim=0, axes=(x))",
    ),
}


@pytest.mark.parametrize("case", UNITS)
def test_unit_axes(case: str) -> None:
    inputs, before, after = UNITS[case]
    check(drop_unit_axes, inputs, before, after, mesh="a=1, x=2, b=1")


def test_an_axis_of_one_rank_needs_no_communication() -> None:
    @hw.fusion(mesh=hw.Mesh(x=1, tp=2), x=hw.f32["M@x", "K@tp"], w=hw.f32["K@tp", "N"])
    def f(x, w):
        y = hw.reshard(x @ w, "M", "N")
        z = (hw.reshard(x, "M", "K") @ hw.reshard(w, "K", "N@x")).stream("M", 2)
        return y, hw.sum(y, axis=0), hw.max(z, axis="M")

    assert communications(f) == ["all_reduce", "all_gather", "all_gather"]

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def g(x, w):
        return hw.matmul(x, w).stream("M", 2, algorithm="ring")

    assert communications(g) == []


def test_kernels_of_the_user_name_no_axes_of_one_rank() -> None:
    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M@x"])
    def f(x):
        return hw.kernel(SOURCE, "twice", "M@x", [x, hw.f32["M@x"], "M@x"]) * 2

    host = lower(f, Options())
    assert [str(parameter.type) for parameter in host.inputs] == ["f32[M]"]
    assert str(host).startswith("user_kernel @twice = twice(in f32[M], out f32[M], size M) grid(M) ")
