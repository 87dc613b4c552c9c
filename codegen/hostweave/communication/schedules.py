"""All schedules of chunk loops, and functions that select schedules by the options."""

from collections.abc import Iterable, Iterator

from hostweave.communication import broadcast, p2p, put, ring, slices
from hostweave.communication.schedule import Schedule
from hostweave.fusion_ir.choice import Alternative, Choice
from hostweave.options import Options
from hostweave.transports.transport import SIGNALS, Transport

# The first schedule that supports a reshard is the default.
SCHEDULES: tuple[Schedule, ...] = (
    *(p2p.GATHER, broadcast.BROADCAST, put.GATHER, ring.GATHER),
    *(p2p.SCATTER, put.SCATTER, ring.SCATTER, broadcast.REDUCE),
    *slices.SCHEDULES,
)
NAMES = tuple(dict.fromkeys(schedule.name for schedule in SCHEDULES))


def schedules_of(kind: str, options: Options) -> Iterator[tuple[Schedule, Transport]]:
    """Schedules for one kind of reshard, each with the first transport of the options that supports it."""
    for schedule in SCHEDULES:
        if schedule.kind == kind and (transport := options.transport_carrying(*schedule.needs)):
            yield schedule, transport


def choosable(kind: str, options: Options, is_even: bool) -> Iterator[Schedule]:
    """Schedules that the compiler may choose on the machine of the options. `is_even` is True if all sizes are known to divide evenly."""
    for schedule, transport in schedules_of(kind, options):
        if not transport.why_not(options.figures) and transport.takes_shards(is_even, are_on_all_ranks=True):
            yield schedule


def find_schedule(kind: str, name: str) -> Schedule:
    return next(schedule for schedule in SCHEDULES if (schedule.kind, schedule.name) == (kind, name))


def need_optional_transport(choices: Iterable[Choice], options: Options) -> bool:
    """True if a chosen alternative needs a transport that some ranks may be unable to use."""
    return any(choice.chosen.chunks and transport_of(choice.chosen, options).is_optional for choice in choices)


def transport_of(alternative: Alternative, options: Options) -> Transport:
    """Transport of an alternative: of its schedule, or of the puts or gets of a communication outside of loops."""
    needs = next((schedule.needs for schedule in SCHEDULES if schedule.name == alternative.algorithm), (SIGNALS,))
    transport = options.transport_carrying(*needs)
    assert transport
    return transport
