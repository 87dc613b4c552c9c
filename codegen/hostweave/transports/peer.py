"""Peer transport: GPUs of one host copy to and from each other's mapped memory. A signal is a word that streams write or wait for."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="peer",
    carries=SIGNALS,
    template="peer",
    library="CUDA",
    registers_arena=True,
    has_communicator=False,
)
