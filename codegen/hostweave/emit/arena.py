"""The live ranges that `prepare` passes to the arena."""

from __future__ import annotations

from hostweave.analysis.live_ranges import Begin, Branch, Called, End, Joined, OnRanks, Step, Steps
from hostweave.emit.context import ProgramContext
from hostweave.emit.layers import Words, rolled
from hostweave.emit.templates import lay_out
from hostweave.host_ir.expr import opposite


def arena_plan(steps: Steps, context: ProgramContext) -> str:
    """After the body has been emitted. What calls of a function have in turn is told in a loop."""
    units: list[Words] = [()]
    has_called = False
    for step in steps:
        if has_called and isinstance(step, Begin | Called):
            units.append(())
        has_called = isinstance(step, Called) or (has_called and isinstance(step, End))
        units[-1] += _told(step, context)
    return rolled(units, context.index)


def _told(step: Step, context: ProgramContext) -> Words:
    buffer = context.temporaries[id(step.allocate)] if isinstance(step, Begin) else None
    if isinstance(step, End):
        buffer = context.temporaries[id(step.of.allocate)]
    lines = _lines(step, context)
    if buffer is None or buffer.element is None:
        return (lines,)
    before, _, after = lines.partition(buffer.member)
    return before, buffer.element, after


def _lines(step: Step, context: ProgramContext) -> str:
    match step:
        case Begin(allocate):
            buffer = context.temporaries[id(allocate)]
            return lay_out("memory_allocate", member=buffer.member, count=buffer.count, pool=buffer.pool)
        case End(begin):
            return lay_out("memory_free", member=context.temporaries[id(begin.allocate)].member)
        case Joined(stream):
            return lay_out("memory_join", pool=context.streams[stream].member)
        case OnRanks(mesh, inner):
            return lay_out("branch", condition=context.flag(mesh), body=arena_plan(inner, context))
        case Called(block):
            return lay_out("memory_call", function=context.memory_of[block])
        case Branch(condition, then, otherwise):
            taken, not_taken = arena_plan(then, context), arena_plan(otherwise, context)
            if not taken:
                condition, taken, not_taken = opposite(condition), not_taken, ""
            return lay_out("branch", condition=context.integers.expr(condition), body=taken, orelse=not_taken)
