"""Measured timelines. A copy of the program has a mark before and after every instruction with work."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, random_arrays, sizes_of
from fusions_from_files import all_fusions, more_fusions, one_sided_fusions, pipelines

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.check.check import check
from hostweave.check.match_collectives import match_communications
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import minimal_sizes
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import tree
from hostweave.host_ir.ir import HostProgram
from hostweave.timeline.measure import marked, measured
from hostweave.timeline.report import Report
from hostweave.types.machine import H200

PROGRAMS: Mapping[str, Fusion] = {
    **all_fusions(4, 2, hw.f32),
    **more_fusions(4, hw.f32),
    **one_sided_fusions(4, hw.f32),
    **pipelines(4, 2, hw.f32),
}
P2P = """host @p2p(%x: f32[M@x, K], %w: f32[K, N]) -> (%y: f32[M, N]) mesh(x=2) channels(x: x two_sided) streams(loop[2]) {
  fork loop
  for %i in 0..2 {
    %p = (rank.x + %i) % 2
    stream loop[%i] {
      %x_gathered = allocate f32[M/2, K]
      if %p != rank.x {
        group {
          recv %x_gathered from %p on x
          send %x to (rank.x - %i) % 2 on x
        }
      }
      %y_i = chunk %y[0: %p of 2]
      %x_chunk = choose %x if %p == rank.x else %x_gathered
      matmul %x_chunk, %w -> %y_i
    }
  }
  join loop
}
"""


def test_marks_are_around_all_instructions_with_work() -> None:
    text = str(marked(HostProgram.parse(P2P)))
    group = "group {\n          recv %x_gathered from %p on x\n          send %x to (rank.x - %i) % 2 on x\n        }"
    expected = P2P.replace(group, f"mark\n        {group}\n        mark")
    expected = expected.replace("matmul %x_chunk, %w -> %y_i", "mark\n      matmul %x_chunk, %w -> %y_i\n      mark")
    assert text == expected
    assert str(HostProgram.parse(text)) == text


@pytest.mark.parametrize("name", PROGRAMS)
def test_marks_do_not_change_results(name: str) -> None:
    host = compiled(PROGRAMS[name]).host
    with_marks = marked(host)
    assert HostProgram.parse(str(with_marks)) == with_marks
    check(with_marks, minimal_sizes(with_marks))
    assert not any(i.marks for i in host.instructions())
    marks = [i.marks for i in tree.walk(with_marks.body)]
    assert sum(marks) % 2 == 0


def test_a_program_that_is_not_measured_has_no_marks() -> None:
    program = hw.compile(HostProgram.parse(P2P))
    before = program.source
    x, w = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
    program.timeline(x, w, repetitions=1)
    assert program.source == before
    assert "mark" not in before
    assert "HW_CHECK(hw::mark(stream));" in program.variants.marked().compiled.sources["program.cpp"]


# --- on the CPU target ------------------------------------------------------------------------------------------------


def of_each_kind() -> dict[str, Fusion]:
    """Programs with loops, collectives, functions, puts, and tensors on some of the ranks."""
    names = (
        "ag_matmul_p2p",
        "matmul_rs_ring",
        "matmul_ar_two_axes",
        "halves",
        "gradients",
        "ag_matmul_pull",
        "mlp_put",
        "two_stages_streamed",
    )
    return {"layers": layers(), **{name: PROGRAMS[name] for name in names}}


def layers() -> Fusion:
    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E", "E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.relu(hw.matmul(x, w))

    w = hw.f32["E", "E"]

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], w_0=w, w_1=w, w_2=w)
    def layers(x: hw.Tensor, w_0: hw.Tensor, w_1: hw.Tensor, w_2: hw.Tensor) -> hw.Tensor:
        for each in (w_0, w_1, w_2):
            x = layer(x, each)
        return hw.reshard(x, "M", "E")

    return layers


@pytest.mark.parametrize("name", of_each_kind())
def test_times_of_the_cpu_target(name: str) -> None:
    fusion = of_each_kind()[name]
    program = compiled(fusion)
    report = program.timeline(**random_arrays(fusion, sizes_of(fusion), 1), warmups=1, repetitions=3)
    assert report.measured
    expect_in_order(report)
    assert report.measured.basis == "measured on cpu, the median of 3 calls"


def expect_in_order(report: Report) -> None:
    predicted, found = report.predicted, report.measured
    assert found
    for one, other in zip(predicted.events, found.events, strict=True):
        assert (one.rank, one.stream, one.name, one.instruction, one.sent, one.after) == (
            *(other.rank, other.stream, other.name, other.instruction, other.sent, other.after),
        )
    by_stream: dict[tuple[int, str], list[Any]] = {}
    for event in found.events:
        assert 0 <= event.start <= event.end
        assert all(found.events[earlier].end <= event.end + 1 for earlier in event.after)  # The two events may be of different ranks.
        assert all(found.events[other].start <= event.end + 1 for other in event.meets)
        by_stream.setdefault((event.rank, event.stream), []).append(event)
    for events in by_stream.values():
        assert all(one.end <= then.start + 1 for one, then in pairwise(events))
    assert found.micros > 0
    assert report.differences
    assert all(d.measured > 0 and d.count > 0 for d in report.differences)


def test_the_report_of_predicted_and_measured_times() -> None:
    program = hw.compile(HostProgram.parse(P2P))
    x, w = np.ones((64, 32), np.float32), np.ones((32, 16), np.float32)
    report = program.timeline(x, w=w, repetitions=3)
    assert [d.name for d in report.differences] == ["matmul y_i", "recv x_gathered, send x"]
    assert [d.count for d in report.differences] == [4, 2]
    assert report.measured
    assert report.error == report.predicted.micros / report.measured.micros - 1
    text = str(report)
    assert "measured on cpu, the median of 3 calls" in text
    assert "  matmul y_i: predicted " in text
    page = report.html()
    assert "rank 0, predicted, loop[0]" in page
    assert "rank 1, measured, loop[1]" in page
    assert "<td>matmul y_i</td><td>4</td>" in page
    assert page.index("rank 0, predicted, loop[0]") < page.index("rank 0, measured, loop[0]") < page.index("rank 1, predicted, loop[0]")


def test_inputs_that_are_bound() -> None:
    program = hw.compile(HostProgram.parse(P2P)).bind(w=np.ones((32, 16), np.float32))
    assert program.timeline(np.ones((64, 32), np.float32), repetitions=1).measured


def test_a_size_that_loops_do_not_divide() -> None:
    fusion = hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])(lambda x, w: hw.reshard(hw.matmul(x, w), "M", "N"))
    program = hw.compile(fusion)
    report = program.timeline(np.ones((7, 8), np.float32), np.ones((8, 4), np.float32), repetitions=1)
    assert report.measured
    assert len(report.measured.events) == len(report.predicted.events) > 0


def test_mistakes() -> None:
    program = hw.compile(HostProgram.parse(P2P))
    x, w = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
    with pytest.raises(ArgumentError, match="p2p: timeline: warmups=3, repetitions=0: give ints: at least 0 warmups and 1 repetition"):
        program.timeline(x, w, repetitions=0)


# --- clocks of ranks --------------------------------------------------------------------------------------------------


def test_ranks_are_shifted_until_no_receive_precedes_its_send() -> None:
    """The clocks say that rank 1 receives before rank 0 sends. If rank 1 is shifted by at least 90 us, the receive follows the send."""
    program, sizes = HostProgram.parse(P2P), {"M": 4, "K": 8, "N": 4}
    operations = instantiate(marked(program), sizes)
    assert len(match_communications(operations)) == 2
    own = [[0.0, 0.01, 0.2, 0.21, 0.21, 0.22], [0.0, 0.01, 0.02, 0.11, 0.11, 0.12]]  # ms: matmul, group, matmul
    found = measured(program, sizes, H200, "measured", own)
    starts = [[round(event.start, 3) for event in found.of_rank(rank)] for rank in (0, 1)]
    assert starts == [[0.0, 200.0, 210.0], [90.0, 110.0, 200.0]]
