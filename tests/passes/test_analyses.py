"""What a stage's analyses and its verifier cost: each is run once for each program that a pass made."""

from __future__ import annotations

from collections import Counter

import pytest
from example_programs import fusions

import hostweave as hw
from hostweave import pipeline
from hostweave.analysis import def_use
from hostweave.host_ir import ir
from hostweave.pipeline import lower

SEEDS = fusions("seeds.py")


@pytest.mark.parametrize("name", SEEDS)
def test_once_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[ir.HostProgram] = []
    verified: list[ir.HostProgram] = []
    stages: list[ir.HostProgram] = []
    find, verify = def_use.DefUse._visit, pipeline.verify_host

    def visit(uses: def_use.DefUse, body: ir.Body, around: tuple[def_use.Place, ...]) -> None:
        if not around:
            analysed.append(uses.program)
        find(uses, body, around)

    def verify_once(program: ir.HostProgram) -> None:
        verified.append(program)
        verify(program)

    monkeypatch.setattr(def_use.DefUse, "_visit", visit)
    monkeypatch.setattr(pipeline, "verify_host", verify_once)
    lower(SEEDS[name], hw.Options(), lambda _, program: stages.append(program) if isinstance(program, ir.HostProgram) else None)
    assert max(Counter(map(id, analysed)).values()) == 1
    changed = [stage for before, stage in zip([None, *stages], stages, strict=False) if stage != before]
    assert list(map(id, verified)) == list(map(id, changed))
