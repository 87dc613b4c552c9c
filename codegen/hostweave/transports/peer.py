"""Transport peer: ranks of one host copy to and from each other's memory, and signal with words that streams write and await."""

from hostweave.transports.transport import SIGNALS, Transport

TRANSPORT = Transport(
    name="peer",
    carries=SIGNALS,
    template="peer",
    handle="comm()",
    library="CUDA",
    reduced_as={},
    posts_in_group=1,
    holds_multiprocessors=False,
    is_rendezvous=False,
    shares_memory=True,
    has_communicator=False,
)
