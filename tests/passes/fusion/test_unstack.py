"""The pass unstack replaces selects from a stack by the stacked values. Variances need two all-reduces."""

from __future__ import annotations

import pytest
from fusion_text import check, communications

import hostweave as hw
from hostweave.options import Options
from hostweave.passes.fusion.unstack import unstack
from hostweave.pipeline import lower

STACK = """%a_1: f32[1, M] = expand_dims(%a, axis=(0,))
        %b_1: f32[1, M] = expand_dims(%b, axis=(0,))
        %s: f32[2, M] = concat(%a_1, %b_1, axis=0)
        """


def test_a_select_from_a_stack_is_the_stacked_value() -> None:
    body = "%c: f32[M] = select(%s, axis=0, index=1)\n%d: f32[M] = select(%s, axis=0, index=0)\n%y: f32[M] = subtract(%c, %d)"
    check(unstack, "%a: f32[M], %b: f32[M]", STACK + body, "%y: f32[M] = subtract(%b, %a)")


@pytest.mark.parametrize(
    "body",
    [
        "%y: f32[M] = select(%s, axis=0, index=1)",  # returned
        "%c: f32[2] = select(%s, axis=1, index=1)\n%y: f32[2] = exp(%c)",
        "%t: f32[2, M] = exp(%s)\n%c: f32[M] = select(%t, axis=0, index=1)\n%y: f32[M] = exp(%c)",
    ],
)
def test_programs_that_the_pass_does_not_change(body: str) -> None:
    check(unstack, "%a: f32[M], %b: f32[M]", STACK + body, STACK + body)


def test_a_variance_takes_two_all_reduces() -> None:
    """The cases are a variance over two dims, a variance over a dim that two axes split, and a variance from means of means."""

    @hw.fusion(mesh=hw.Mesh(y=2, x=2), x=hw.f32["M@x", "N@y"], z=hw.f32["M", "N@y,x"])
    def f(x, z):
        return hw.var(x)

    @hw.fusion(mesh=hw.Mesh(y=2, x=2), z=hw.f32["M", "N@y,x"])
    def g(z):
        return hw.var(z, axis=1, keepdims=True)

    @hw.fusion(mesh=hw.Mesh(y=2, x=2), x=hw.f32["M@x", "N@y"])
    def of_means(x):
        distance = x - hw.mean(hw.mean(x, axis=1, keepdims=True), axis=0, keepdims=True)
        return hw.mean(hw.mean(distance * distance, axis=1), axis=0)

    assert [communications(program) for program in (f, g, of_means)] == [["all_reduce", "all_reduce"]] * 3


def test_a_variance_within_a_rank_is_one_kernel() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])
    def f(x):
        return hw.var(x, axis=1)

    assert len(lower(f, Options()).kernels) == 1
