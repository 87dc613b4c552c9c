"""Live ranges of temporaries, as calls of the arena's plan in `prepare`."""

from collections.abc import Iterable
from itertools import groupby

from hostweave.analysis.live_ranges import Begin, Called, End, Joined, OnRanks, Step, Steps
from hostweave.emit.context import ProgramContext, Temporary
from hostweave.emit.layers import Words, rolled
from hostweave.emit.layout import lay_out


def arena_plan(steps: Steps, context: ProgramContext) -> str:
    """C++ that describes the live ranges of a body to the arena. Call it after the body has been emitted.

    A comment above it lists the buffers that may share bytes at any size. Buffers that several calls use one per call are
    registered in a loop.
    """
    groups: list[list[Temporary]] = []
    _take_turns(steps, context, groups, {})
    shared = "".join(f"// - {', '.join(_members(group))}\n" for group in groups if len(group) > 1)
    return ("// Disjoint live ranges, so these may share bytes:\n" + shared if shared else "") + _plan(steps, context)


def calls_functions(steps: Steps) -> bool:
    """True if the plan passes the sizes on, to the plans of functions."""
    return any(isinstance(step, Called) or (isinstance(step, OnRanks) and calls_functions(step.steps)) for step in steps)


def _members(group: list[Temporary]) -> Iterable[str]:
    """Names of the buffers of a group. Elements of one array are written together: `x_[1, 3, 5]`."""
    for name, members in groupby(group, lambda buffer: buffer.element.array if buffer.element else buffer.member):
        numbers = [str(buffer.element.index) for buffer in members if buffer.element]
        yield f"{name}[{', '.join(numbers)}]" if numbers else name


def _take_turns(steps: Steps, context: ProgramContext, groups: list[list[Temporary]], used: dict[Temporary, int]) -> None:
    """Assigns each buffer to the first group that has no live buffer, as in colouring an interval graph.

    `used` maps each live buffer to its group. A stream's buffer stays live until the streams are joined.
    """
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
    """C++ of these steps. Equal calls that follow one another become a loop."""
    units: list[Words] = [()]
    has_called = False
    for step in steps:
        if has_called and isinstance(step, Begin | Called):
            units.append(())
        has_called = isinstance(step, Called) or (has_called and isinstance(step, End))
        units[-1] += _told(step, context)
    return rolled(units, context.index)


def _told(step: Step, context: ProgramContext) -> Words:
    """C++ of one step of the plan."""
    match step:
        case Begin() | End():
            buffer = context.temporaries[step.of if isinstance(step, End) else step]
            if isinstance(step, End):
                lines = lay_out("memory_free", member=buffer.member)
            else:
                count, pool, in_window = buffer.count, buffer.pool, buffer.in_window
                context.integers.used |= buffer.sizes
                lines = lay_out("memory_allocate", member=buffer.member, count=count, pool=pool, in_window=in_window)
            before, _, after = lines.partition(buffer.member)
            return (before, buffer.element, after) if buffer.element else (lines,)
        case Joined(stream):
            return (lay_out("memory_join", pool=context.streams[stream]),)
        case OnRanks(mesh, inner):
            return (lay_out("branch", condition=context.flag(mesh), body=_plan(inner, context)),)
        case Called(function):
            return (lay_out("memory_call", function=context.memory_of[function]),)
