"""One-sided transport: a rank writes to and reads from registered windows of other ranks, and signals these ranks. Copy engines move the
bytes."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="one_sided",
    carries=SIGNALS,
    template="window",
    library="NCCL",
    registers_arena=True,
    graphs_on_all_ranks=True,
    since=(2, 29),
)
