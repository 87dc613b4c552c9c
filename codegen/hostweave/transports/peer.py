"""Peer transport: ranks of one host copy to and from mapped memory of each other. Signals are words that streams write and wait for."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="peer",
    carries=SIGNALS,
    template="peer",
    library="CUDA",
    registers_arena=True,
    has_communicator=False,
)
