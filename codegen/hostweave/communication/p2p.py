"""Schedule p2p: in every step each rank sends a block to one rank while it receives from another."""

from hostweave.communication.schedule import FIRST, LAST, Schedule
from hostweave.transports.transport import MESSAGES

GATHER = Schedule("p2p", "all_gather", (MESSAGES,), FIRST, tried=(1,))
SCATTER = Schedule("p2p", "reduce_scatter", (MESSAGES,), LAST, tried=(1,))
