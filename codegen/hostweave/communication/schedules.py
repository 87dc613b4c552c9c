"""All schedules of chunk loops, and which of them options allow."""

from collections.abc import Iterator

from hostweave.communication import broadcast, p2p, put, ring, slices
from hostweave.communication.schedule import Schedule
from hostweave.fusion_ir.choice import Way
from hostweave.options import Options
from hostweave.transports.transport import SIGNALS, Transport

# Of one kind the first one that fits is the default.
SCHEDULES: tuple[Schedule, ...] = (
    *(p2p.GATHER, broadcast.BROADCAST, put.GATHER, ring.GATHER),
    *(p2p.SCATTER, put.SCATTER, ring.SCATTER, broadcast.REDUCE),
    *slices.SCHEDULES,
)
NAMES = tuple(dict.fromkeys(schedule.name for schedule in SCHEDULES))


def schedules_of(kind: str, options: Options) -> Iterator[tuple[Schedule, Transport]]:
    """Those of reshards of one kind for which the options have a transport."""
    for schedule in SCHEDULES:
        if schedule.kind == kind and (transport := options.transport_carrying(*schedule.needs)):
            yield schedule, transport


def find_schedule(kind: str, name: str) -> Schedule:
    return next(schedule for schedule in SCHEDULES if (schedule.kind, schedule.name) == (kind, name))


def transport_of(way: Way, options: Options) -> Transport:
    """The transport of what was chosen: of a schedule, or, outside of loops, of copies by put or get."""
    needs = next((schedule.needs for schedule in SCHEDULES if schedule.name == way.algorithm), (SIGNALS,))
    transport = options.transport_carrying(*needs)
    assert transport
    return transport
