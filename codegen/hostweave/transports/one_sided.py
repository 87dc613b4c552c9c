"""One-sided transport of NCCL: puts, gets and signals between registered windows of ranks."""

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
