"""The pass software_pipeline: each stage has its own loop, and the second stage receives the next rows before it computes."""

from __future__ import annotations

from fusions_from_files import all_fusions, pipelines
from stages_of_passes import before_and_after, changes

from hostweave.host_ir import ir, tree
from hostweave.passes.host.software_pipeline import software_pipeline


def communications(*body: tree.Instruction) -> list[str]:
    return [type(i).__name__ for i in tree.walk(body) if isinstance(i, ir.Communication)]


def test_a_stage_receives_the_next_rows_before_it_computes() -> None:
    before, after = before_and_after(software_pipeline, pipelines(4, 4)["two_stages_streamed"])
    (loop,) = (i for i in before.body if isinstance(i, ir.For))
    first, second = (i.body for i in after.body if isinstance(i, ir.OnMesh) and communications(i))
    assert [type(i) for i in first] == [ir.For]
    assert communications(*first) == ["AllReduce", "Send"]
    ahead, of_second = second
    assert str(ahead).splitlines()[0] == "stream loop[0] {"
    assert communications(ahead) == ["Recv"]
    assert isinstance(of_second, ir.For)
    assert of_second.count == loop.count
    following, rest = of_second.body
    assert str(following).splitlines()[:2] == ["if %i < 3 {", "  stream loop[%i + 1] {"]
    assert communications(following) == ["Recv"]
    assert communications(rest) == ["AllReduce"]


def test_one_channel_has_nothing_to_gain() -> None:
    assert changes(software_pipeline, all_fusions(2, 4)["ag_matmul"]) == ""
