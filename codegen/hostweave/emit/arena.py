"""The live ranges that `prepare` passes to the arena."""

from collections.abc import Iterable
from itertools import groupby

from hostweave.analysis.live_ranges import Begin, Called, End, Joined, OnRanks, Step, Steps
from hostweave.emit.context import ProgramContext, Temporary
from hostweave.emit.layers import Words, rolled
from hostweave.emit.layout import lay_out


def arena_plan(steps: Steps, context: ProgramContext) -> str:
    """After the body has been emitted; under a comment that says which buffers may share bytes at any size.

    What calls of a function have in turn is told in a loop.
    """
    groups: list[list[Temporary]] = []
    _take_turns(steps, context, groups, {})
    shared = "".join(f"// - {', '.join(_members(group))}\n" for group in groups if len(group) > 1)
    return ("// Never in use at once, so that they may share bytes:\n" + shared if shared else "") + _plan(steps, context)


def _members(group: list[Temporary]) -> Iterable[str]:
    """Elements of an array together: `x_[1, 3, 5]`."""
    for name, members in groupby(group, lambda buffer: buffer.element.array if buffer.element else buffer.member):
        numbers = [str(buffer.element.index) for buffer in members if buffer.element]
        yield f"{name}[{', '.join(numbers)}]" if numbers else name


def _take_turns(steps: Steps, context: ProgramContext, groups: list[list[Temporary]], used: dict[Temporary, int]) -> None:
    """Puts each buffer into the first group of which none is in use, as interval graphs are coloured. `used` has the group of each
    buffer that is: one of a stream until the streams are joined."""
    for step in steps:
        match step:
            case Begin():
                buffer = context.temporaries[step]
                free = (i for i, group in enumerate(groups) if i not in used.values() and group[0].in_window == buffer.in_window)
                used[buffer] = next(free, len(groups))
                groups += [[]] if used[buffer] == len(groups) else []
                groups[used[buffer]].append(buffer)
            case End(begin) if begin.place.stream is None:
                used.pop(context.temporaries[begin], None)
            case Joined(stream):
                for buffer in [buffer for buffer in used if buffer.pool == context.streams[stream]]:
                    del used[buffer]
            case OnRanks(_, inner):
                _take_turns(inner, context, groups, used)


def _plan(steps: Steps, context: ProgramContext) -> str:
    units: list[Words] = [()]
    has_called = False
    for step in steps:
        if has_called and isinstance(step, Begin | Called):
            units.append(())
        has_called = isinstance(step, Called) or (has_called and isinstance(step, End))
        units[-1] += _told(step, context)
    return rolled(units, context.index)


def _told(step: Step, context: ProgramContext) -> Words:
    match step:
        case Begin() | End():
            buffer = context.temporaries[step.of if isinstance(step, End) else step]
            if isinstance(step, End):
                lines = lay_out("memory_free", member=buffer.member)
            else:
                count, pool, in_window = buffer.count, buffer.pool, buffer.in_window
                lines = lay_out("memory_allocate", member=buffer.member, count=count, pool=pool, in_window=in_window)
            before, _, after = lines.partition(buffer.member)
            return (before, buffer.element, after) if buffer.element else (lines,)
        case Joined(stream):
            return (lay_out("memory_join", pool=context.streams[stream]),)
        case OnRanks(mesh, inner):
            return (lay_out("branch", condition=context.flag(mesh), body=_plan(inner, context)),)
        case Called(function):
            return (lay_out("memory_call", function=context.memory_of[function]),)
