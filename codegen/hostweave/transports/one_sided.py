"""One-sided transport: a rank puts into, gets from and signals registered windows of other ranks. Copy engines move the bytes."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="one_sided",
    carries=SIGNALS,
    template="window",
    library="NCCL",
    registers_arena=True,
    separate_graph_counters=True,
    since=(2, 29),
)
