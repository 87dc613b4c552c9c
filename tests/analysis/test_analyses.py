"""Tests that analyses and the verifier run only once for each program that a pass returns."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import ModuleType

import pytest
from fusions_from_files import fusions

import hostweave as hw
from hostweave import pipeline
from hostweave.analysis import def_use, live_ranges
from hostweave.check import channel_order, check
from hostweave.emit import render
from hostweave.host_ir import ir
from hostweave.host_ir.calls import bodies
from hostweave.pipeline import lower

SEEDS = fusions("seeds.py")


@pytest.mark.parametrize("name", SEEDS)
def test_once_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[object]] = defaultdict(list)

    def counted(module: ModuleType, function: str) -> None:
        compute = getattr(module, function)

        def once(program: ir.HostProgram, *args: object) -> object:
            found[f"{module.__name__}.{function}"].append(
                (program, *map(repr, args))
            )  # keeps the program alive, so that its id stays unique
            return compute(program, *args)

        monkeypatch.setattr(module, function, once)

    counted(def_use, "DefUse")
    counted(live_ranges, "_Walk")
    counted(pipeline, "verify_host")
    counted(channel_order, "instantiate")
    counted(check, "instantiate")
    stages: list[ir.HostProgram] = []
    host = lower(SEEDS[name], hw.Options(), lambda _, program: stages.append(program) if isinstance(program, ir.HostProgram) else None)
    check.check(host)
    render(host)
    for what, calls in found.items():
        assert max(Counter((id(program), *args) for program, *args in calls).values()) == 1, what
    changed = [stage for before, stage in zip([None, *stages], stages, strict=False) if stage != before]
    assert [id(program) for (program,) in found["hostweave.pipeline.verify_host"]] == list(map(id, changed))
    assert len(found["hostweave.analysis.live_ranges._Walk"]) == len(bodies(host))
