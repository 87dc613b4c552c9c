"""Rewriting of host programs by rules, and by edits of single instructions, also inside other edited instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostweave.base.errors import Location
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const
from hostweave.host_ir.ir import HostProgram

PROGRAM = HostProgram.parse("""host @p(%x: f32[M]) -> (%y: f32[M]) mesh(x=1) streams(loop[2]) {
  fill %y with 0.0
  for %i in 0..2 {
    stream loop[%i] {
      fill %y with 0.0
      copy %x -> %y
    }
  }
}
""")


def the(kind: type[tree.Instruction]) -> tuple[int, tree.Instruction]:
    return next((number, i) for number, i in enumerate(tree.walk(PROGRAM.body)) if isinstance(i, kind))


def lines(body: tree.Body) -> list[str]:
    return [line.strip() for line in str(replace(PROGRAM, body=body)).splitlines()[1:-1]]


def test_edits_of_an_instruction_and_of_its_body() -> None:
    (at_loop, loop), (at_block, block), (at_copy, _) = the(ir.For), the(ir.OnStream), the(ir.Copy)
    edited = tree.edited(PROGRAM.body, {at_loop: (ir.Fork("loop"), loop), at_block: (block, ir.Join("loop")), at_copy: ()})
    assert lines(edited) == [
        "fill %y with 0.0",
        "fork loop",
        "for %i in 0..2 {",
        "stream loop[%i] {",
        "fill %y with 0.0",
        "}",
        "join loop",
        "}",
    ]


def test_an_edit_that_would_be_lost_is_refused() -> None:
    with pytest.raises(KeyError, match="an edit replaces an instruction in which others are edited"):
        tree.edited(PROGRAM.body, {the(ir.For)[0]: (), the(ir.Copy)[0]: ()})
    with pytest.raises(KeyError, match="an edit's instruction is not in the body"):
        tree.edited(PROGRAM.body, {len(list(tree.walk(PROGRAM.body))): ()})


def test_an_edit_changes_one_position() -> None:
    """The same instruction object may be at several positions, because a pass repeated the instruction."""
    fill = ir.Fill("y", 0.0)
    assert tree.edited((fill, fill), {1: ()}) == (fill,)
    again = (ir.OnStream("loop", Const(0), (fill,)),) * 2
    assert [len(i.body) for i in tree.edited(again, {3: ()}) if isinstance(i, ir.OnStream)] == [1, 0]


def test_a_rule_whose_result_compares_equal() -> None:
    """0.0 equals -0.0, and comparison ignores locations."""
    negative = tree.rewrite(PROGRAM.body, lambda i: replace(i, value=-i.value) if isinstance(i, ir.Fill) else None)
    assert [repr(i.value) for i in tree.walk(negative) if isinstance(i, ir.Fill)] == ["-0.0", "-0.0"]
    place = Location("elsewhere", 1)
    moved = tree.rewrite(PROGRAM.body, lambda i: replace(i, location=place))
    assert {i.location for i in tree.walk(moved)} == {place}


def test_a_rewrite_without_changes_returns_the_same_body() -> None:
    assert tree.rewrite(PROGRAM.body, lambda i: None) is PROGRAM.body
