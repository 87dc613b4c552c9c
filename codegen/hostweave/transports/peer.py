"""Peer transport: copies between GPUs of one host. A signal is a word of memory that streams write or wait for."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="peer",
    carries=SIGNALS,
    template="peer",
    library="CUDA",
    registers_arena=True,
    has_communicator=False,
)
