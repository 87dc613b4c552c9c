"""The pass order_stages: simulated time of a pipeline that is written in two orders, and results."""

from __future__ import annotations

import pytest
from compiled_fusions import compiled, expect, fusion_of, integer_arrays
from interpret import interpret

import hostweave as hw
from hostweave.check.check import check
from hostweave.check.match_collectives import match_communications
from hostweave.check.simulate import instantiate
from hostweave.host_ir import ir
from hostweave.pipeline import lower


def pipeline(stages: int, batches: int, order: str, ranks: int = 1) -> hw.Fusion:
    """Pipeline with one matmul per stage, forward and backward. In the order `naive`, micro-batches run one after another. In the order
    `gpipe`, all forward passes come first."""
    mesh = hw.Mesh(x=stages * ranks)
    on = [mesh.ranks(range(stage * ranks, (stage + 1) * ranks)) for stage in range(stages)]
    weights = {f"w{stage}": hw.f32["N", "N"].on(on[stage]) for stage in range(stages)}
    rows = "M@x" if ranks > 1 else "M"

    @hw.fusion(mesh=mesh, **{f"x{batch}": hw.f32[rows, "N"].on(on[0]) for batch in range(batches)}, **weights)
    def steps(**given):  # type: ignore[no-untyped-def]
        def forward(h, stage):  # type: ignore[no-untyped-def]
            h = hw.clip(hw.matmul(h, given[f"w{stage}"]), -1, 1)
            return hw.reshard(h, rows, "N", mesh=on[stage + 1]) if stage + 1 < stages else h

        def backward(g, stage):  # type: ignore[no-untyped-def]
            g = hw.clip(hw.matmul(g, given[f"w{stage}"].T), -1, 1)
            return hw.reshard(g, rows, "N", mesh=on[stage - 1]) if stage else g

        hs = [given[f"x{batch}"] for batch in range(batches)]
        passes = [(forward, range(stages)), (backward, range(stages - 1, -1, -1))]
        if order == "naive":
            for batch in range(batches):
                for step, through in passes:
                    for stage in through:
                        hs[batch] = step(hs[batch], stage)
        else:
            for step, through in passes:
                for stage in through:
                    hs = [step(h, stage) for h in hs]
        return tuple(hs)

    return steps


def units(program: ir.HostProgram) -> float:
    """Simulated time. A matmul takes one unit, and other ops take no time. A rank runs one op at a time. A transfer waits for both
    ranks."""
    instances = instantiate(program, {"M": 2, "N": 3})
    partners: dict[int, set[int]] = {}
    for meeting in match_communications(instances):
        ids = {id(operation) for operation in meeting.operations}
        for one in ids:
            partners.setdefault(one, set()).update(ids)
    waiting = {rank: list(operations[::-1]) for rank, operations in enumerate(instances.ranks)}
    clocks, posted = dict.fromkeys(waiting, 0.0), dict[int, float]()
    while any(waiting.values()):
        moved = False
        for rank, operations in waiting.items():
            while operations:
                parts = [id(part) for part in operations[-1].communications]
                posted |= {part: clocks[rank] for part in parts if part not in posted}
                wanted = {other for part in parts for other in partners[part]}
                if not wanted <= posted.keys():
                    break
                clocks[rank] = max(clocks[rank], *(posted[other] for other in wanted), 0.0)
                clocks[rank] += isinstance(operations.pop().instruction, ir.Matmul)
                moved = True
        assert moved, "the ranks wait for each other"
    return max(clocks.values())


@pytest.mark.parametrize("order", ["naive", "gpipe"])
def test_stages_are_busy(order: str) -> None:
    """The optimal time for 4 stages and 8 micro-batches of unit cost is 22."""
    fusion = pipeline(4, 8, order)
    assert units(lower(fusion, hw.Options())) <= 1.1 * 22
    if order == "naive":
        assert units(lower(fusion, hw.Options(overlap="off"))) >= 2 * 22


@pytest.mark.parametrize("ranks", [1, 2])
def test_results(ranks: int) -> None:
    """Results with the transports auto and one_sided. With 2 ranks per stage, also results of several calls in flight."""
    fusion = pipeline(3, 3, "naive", ranks)
    for options in (hw.Options(), hw.Options(transport="one_sided")):
        program = lower(fusion, options)
        check(program)
        arrays = integer_arrays(program, {"M": 4, "N": 3}, seed=ranks)
        results = [tuple(rank.get(output.name) for output in program.outputs) for rank in interpret(program, arrays)]
        expect(fusion, arrays, results, exact=True)
    if ranks == 1:
        return
    calls = [integer_arrays(fusion, {"M": 8, "N": 3}, seed) for seed in range(3)]
    for arrays, results in zip(calls, compiled(fusion).run_in_flight(calls), strict=True):
        expect(fusion, arrays, results, exact=True)


def test_programs_that_the_pass_does_not_change() -> None:
    """The pass changes nothing if there is only one micro-batch, if ops use `.stream`, or if overlap is off."""

    def stage(fusion: hw.Fusion, **options: object) -> tuple[object, object]:
        stages = {}
        lower(fusion, hw.Options(**options), lambda name, stage: stages.setdefault(name, stage))  # type: ignore[arg-type]
        return stages["overlap_communication"], stages["order_stages"]

    for fusion, options in ((pipeline(3, 1, "naive"), {}), (pipeline(3, 2, "naive"), {"overlap": "off"})):
        before, after = stage(fusion, **options)
        assert before == after
    streamed = fusion_of("two_stages_streamed", 4, 3, hw.bf16)
    before, after = stage(streamed)
    assert before == after
    before, after = stage(pipeline(3, 2, "naive"))
    assert sorted(map(str, before.ops)) == sorted(map(str, after.ops))  # type: ignore[attr-defined]
    assert before != after
