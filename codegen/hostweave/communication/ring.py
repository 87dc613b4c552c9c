"""Schedule ring: each rank passes on to the next one what it has received from the one before."""

from hostweave.communication.schedule import FIRST, LAST, Schedule
from hostweave.transports.transport import MESSAGES, SIGNALS

GATHER = Schedule("ring", "all_gather", (MESSAGES, SIGNALS), FIRST)
SCATTER = Schedule("ring", "reduce_scatter", (MESSAGES, SIGNALS), LAST)
