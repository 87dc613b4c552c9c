"""The live ranges that `prepare` passes to the arena."""

from __future__ import annotations

from hostweave.analysis.live_ranges import Begin, Branch, Called, End, Joined, OnRanks, Step, Steps
from hostweave.emit import views
from hostweave.emit.shared import Shared
from hostweave.host_ir.expr import opposite


def arena_plan(steps: Steps, shared: Shared) -> views.Body:
    """After the body has been emitted."""
    return tuple(_told(step, shared) for step in steps)


def _told(step: Step, shared: Shared) -> views.InstructionView:
    match step:
        case Begin(allocate):
            buffer = shared.temporaries[id(allocate)]
            return views.Reserve(buffer.member, buffer.count, buffer.pool)
        case End(begin):
            return views.Free(shared.temporaries[id(begin.allocate)].member)
        case Joined(stream):
            return views.Joined(shared.streams[stream].member)
        case OnRanks(mesh, inner):
            return views.PlannedIf(shared.flag(mesh), arena_plan(inner, shared), ())
        case Called(block):
            return views.MemoryOf(shared.memory_of[block])
        case Branch(condition, then, otherwise):
            taken, not_taken = arena_plan(then, shared), arena_plan(otherwise, shared)
            if not taken:
                condition, taken, not_taken = opposite(condition), not_taken, ()
            return views.PlannedIf(shared.integers.expr(condition), taken, not_taken)
