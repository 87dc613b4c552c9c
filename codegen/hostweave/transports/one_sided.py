"""One-sided transport: a rank puts into, gets from and signals registered windows of other ranks. Copy engines move the bytes."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="one_sided",
    carries=SIGNALS,
    template="window",
    handle="comm()",
    library="NCCL",
    reduced_as={},
    posts_in_group=1,
    holds_multiprocessors=False,
    is_rendezvous=False,
    registers_arena=True,
    separate_graph_counters=True,
    since=(2, 29),
)
