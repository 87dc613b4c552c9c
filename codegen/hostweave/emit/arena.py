"""The live ranges that `prepare` passes to the arena."""

from __future__ import annotations

from hostweave.analysis.live_ranges import Begin, Called, End, Joined, OnRanks, Step, Steps
from hostweave.emit.context import ProgramContext
from hostweave.emit.templates import lay_out


def arena_plan(steps: Steps, context: ProgramContext) -> str:
    """After the body has been emitted."""
    return "".join(_told(step, context) for step in steps)


def _told(step: Step, context: ProgramContext) -> str:
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
