"""Calls in `prepare` that describe the live ranges of temporaries to the arena."""

from hostweave.analysis.live_ranges import Begin, CallEvent, End, JoinEvent, MemoryEvent, MemoryEvents, OnRanks
from hostweave.emit.context import ProgramContext, Temporary
from hostweave.emit.layout import lay_out


def arena_plan(events: MemoryEvents, context: ProgramContext) -> str:
    """C++ that describes the live ranges of a body's temporaries to the arena. The body must already be emitted."""
    groups: list[list[Temporary]] = []
    _take_turns(events, context, groups, {})
    shared = "".join(f"// - {', '.join(buffer.member for buffer in group)}\n" for group in groups if len(group) > 1)
    return ("// The live ranges of these buffers are disjoint, so they may share bytes:\n" + shared if shared else "") + _plan(
        events, context
    )


def calls_functions(events: MemoryEvents) -> bool:
    """True if the plan of a body calls the plans of functions."""
    return any(isinstance(event, CallEvent) or (isinstance(event, OnRanks) and calls_functions(event.events)) for event in events)


def _take_turns(events: MemoryEvents, context: ProgramContext, groups: list[list[Temporary]], used: dict[Temporary, int]) -> None:
    """Assigns each buffer to the first group without a live buffer, because buffers of a group may share bytes. Buffers in windows have
    separate groups. `used` maps each live buffer to the index of its group. A buffer of a pool of streams stays live until the pool is
    joined."""
    for event in events:
        match event:
            case Begin():
                buffer = context.temporaries[event]
                free = (i for i, group in enumerate(groups) if i not in used.values() and group[0].in_window == buffer.in_window)
                used[buffer] = next(free, len(groups))
                groups += [[]] if used[buffer] == len(groups) else []
                groups[used[buffer]].append(buffer)
            case End(begin) if begin.place.stream is None:
                used.pop(context.temporaries[begin], None)
            case JoinEvent(stream):
                for buffer in [buffer for buffer in used if buffer.pool == context.streams[stream]]:
                    del used[buffer]
            case OnRanks(_, inner):
                _take_turns(inner, context, groups, used)


def _plan(events: MemoryEvents, context: ProgramContext) -> str:
    """C++ of the events. Joins two events of one mesh if only events of other ranks are between the two."""
    result: list[MemoryEvent] = []
    for event in events:
        at = len(result) - 1
        while at >= 0 and _are_disjoint(result[at], event):
            at -= 1
        if isinstance(event, OnRanks) and at >= 0 and isinstance(last := result[at], OnRanks) and last.mesh == event.mesh:
            result[at] = OnRanks(event.mesh, (*last.events, *event.events))
        else:
            result.append(event)
    return "".join(_told(event, context) for event in result)


def _are_disjoint(one: MemoryEvent, other: MemoryEvent) -> bool:
    """True if no rank has both events."""
    return isinstance(one, OnRanks) and isinstance(other, OnRanks) and {*one.mesh.all_ranks}.isdisjoint(other.mesh.all_ranks)


def _told(event: MemoryEvent, context: ProgramContext) -> str:
    match event:
        case Begin():
            buffer = context.temporaries[event]
            context.integers.used |= buffer.sizes
            arguments = filter(None, (buffer.member, buffer.count, buffer.pool))
            return f"memory.allocate{'_window' if buffer.in_window else ''}({', '.join(arguments)});\n"
        case End(begin):
            return f"memory.free({context.temporaries[begin].member});\n"
        case JoinEvent(stream):
            return f"memory.join({context.streams[stream]});\n"
        case OnRanks(mesh, inner):
            return lay_out("branch", condition=context.flag(mesh), body=_plan(inner, context))
        case CallEvent(function):
            return f"{context.memory_of[function]}(sizes, memory);\n"
