"""Invariants of the host IR between passes. If a pass violates an invariant, lowering raises ProgramError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import host_text
import pytest

import hostweave as hw
from hostweave import pipeline
from hostweave.analysis.facts import conditions_are_open, kernels_are_single, nothing_is_freed, updates_are_in_place
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import FACTS, PASSES, facts_at

KERNELS = """\
kernel @update(%x: f32[M, K], %row: f32[1, K]) {
  %iota_M: i64[M] = iota()
  %fill: i64[] = fill(value=0)
  %start: i64[] = start(%fill, %iota_M)
  %y: f32[M, K] = dynamic_update_slice(%x, %row, %start, %iota_M, axes=(0,))
}
"""
TWICE = """\
kernel @twice(%x: f32[M, K]) {
  %rows: f32[M] = sum(%x, axis=(1,))
  %y: f32[K] = sum(%x, axis=(0,))
}
"""
BROKEN: dict[str, tuple[Callable[[HostProgram], None], str, str]] = {
    "two index spaces": (kernels_are_single, TWICE, "kernel @twice: %y is reduced over other dims; split it"),
    "freed early": (
        nothing_is_freed,
        "host @f(%x: f32[4]) -> (%y: f32[4]) mesh(x=1) {\n  %h = allocate f32[4]\n  deallocate %h\n  copy %x -> %y\n}\n",
        "%h is deallocated before plan_memory; remove the deallocate",
    ),
    "updated elsewhere": (
        updates_are_in_place,
        KERNELS + "host @f(%x: f32[M, K], %row: f32[1, K]) -> (%y: f32[M, K]) mesh(x=1) {\n  launch @update %x, %row -> %y\n}\n",
        "%y updates %x, which is in other memory; copy %x to %y first",
    ),
    "a constant condition": (
        conditions_are_open,
        "host @f(%x: f32[4]) -> (%y: f32[4]) mesh(x=1) {\n  if 1 {\n    copy %x -> %y\n  }\n}\n",
        "the condition is constant; write the body or buffer that it selects",
    ),
    "a loop of one iteration": (
        conditions_are_open,
        "host @f(%x: f32[4]) -> (%y: f32[4]) mesh(x=1) {\n  for %i in 0..1 {\n    copy %x -> %y\n  }\n}\n",
        "the loop runs once; replace the loop by its body",
    ),
}
IDENTITY = "host @f(%x: f32[4]) -> (%y: f32[4]) mesh(x=1) {\n  copy %x -> %y\n}\n"


@pytest.mark.parametrize("case", BROKEN)
def test_each_fact_is_verified(case: str) -> None:
    fact, text, message = BROKEN[case]
    program = host_text.parse(text if "host @" in text else text + IDENTITY)
    with pytest.raises(ProgramError) as caught:
        fact(program)
    assert message in str(caught.value)
    fact(host_text.parse(IDENTITY))


def test_all_facts_have_a_broken_program() -> None:
    assert {fact for fact, *_ in FACTS} == {fact for fact, *_ in BROKEN.values()}


def test_facts_hold_between_their_passes() -> None:
    names = [apply.__name__ for apply in PASSES]
    for fact, first, end in FACTS:
        span = range(names.index(first.__name__), names.index(end.__name__) if end else len(names))
        assert [number for number, name in enumerate(names) if fact in facts_at(name)] == list(span)
    assert facts_at("input") == []


def test_the_pipeline_refuses_a_pass_that_breaks_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the pass sink_views by a pass that deallocates a buffer. Only later passes may deallocate."""

    def sink_views(program: ir.HostProgram, options: hw.Options) -> ir.HostProgram:
        (name,) = (name for i in tree.walk(program.body) for name in tree.names(i, "allocate"))
        return replace(program, body=(*program.body, ir.Deallocate(name)))

    passes = tuple(sink_views if apply.__name__ == "sink_views" else apply for apply in PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)

    @hw.fusion(x=hw.f32[4, 4])
    def product(x: Any) -> Any:
        return hw.matmul(hw.matmul(x, x), x)

    assert isinstance(product, Fusion)
    with pytest.raises(ProgramError, match="is deallocated before plan_memory"):
        pipeline.lower(product, hw.Options())


def test_a_pass_returns_an_unchanged_program_itself() -> None:
    """Analyses are cached on the program, on its ops and on its kernels. The cached analyses stay valid if a pass returns the same object.
    An equal copy would be analysed and verified again."""

    @hw.block(x=hw.f32["M", "K"], w=hw.f32["K", "K@x"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.relu(hw.matmul(x, w)) + 1

    @hw.fusion(mesh=hw.Mesh(x=4), x=hw.f32["M@x", "K"], w=hw.f32["K", "K@x"])
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(layer(layer(x, w), w), "M", "K")

    before: list[Fusion | HostProgram] = []

    def observe(name: str, stage: Fusion | HostProgram) -> None:
        if before and str(stage) == str(before[-1]):
            assert stage is before[-1], name
        before.append(stage)

    pipeline.lower(f, hw.Options(), observe)
    assert len({*map(id, before)}) < len(PASSES) / 2
