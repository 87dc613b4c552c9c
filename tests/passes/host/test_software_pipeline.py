"""The pass software_pipeline: the first communication of an iteration is issued before the rest of the previous iteration."""

from __future__ import annotations

from fusions_from_files import all_fusions, pipelines
from stages_of_passes import before_and_after, changes

from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Var
from hostweave.passes.host.software_pipeline import software_pipeline


def loop(program: ir.HostProgram) -> ir.For:
    (found,) = (i for i in tree.walk(program.body) if isinstance(i, ir.For))
    return found


def test_a_stage_receives_the_next_rows_before_it_computes() -> None:
    before, after = before_and_after(software_pipeline, pipelines(4, 4)["two_stages_streamed"])
    assert loop(after).count == loop(before).count + 1
    ahead, rest = loop(after).body
    assert isinstance(ahead, ir.If)
    assert isinstance(rest, ir.If)
    assert str(ahead.condition) == "%j < 4"
    assert [type(i).__name__ for i in tree.walk(ahead.body) if isinstance(i, ir.Communication)] == ["Recv"]
    assert str(rest.condition) == "%j > 0"
    assert isinstance(rest.body[0], ir.Let)
    assert rest.body[0].value == Var("j") - 1
    assert [type(i).__name__ for i in tree.walk(rest.body) if isinstance(i, ir.Communication)] == ["AllReduce", "Send", "AllReduce"]


def test_one_stream_and_one_channel_have_nothing_to_gain() -> None:
    assert changes(software_pipeline, all_fusions(2, 4)["ag_matmul"]) == ""
