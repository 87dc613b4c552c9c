"""Schedules broadcast and reduce: in every step the owner of a block sends it to all, or gets the sum of it."""

from hostweave.communication.schedule import Schedule
from hostweave.transports.transport import COLLECTIVES

BROADCAST = Schedule("broadcast", "all_gather", (COLLECTIVES,))
REDUCE = Schedule("reduce", "reduce_scatter", (COLLECTIVES,))
