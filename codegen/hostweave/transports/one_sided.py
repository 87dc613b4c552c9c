"""One-sided transport: ranks write and read the windows of others, and signal them. Copy engines move the bytes."""

from hostweave.transports.transport import COLLECTIVES, Transport

TRANSPORT = Transport(
    name="one_sided",
    carries=frozenset({"signal", "wait_signal", "get"}),
    template="window",
    handle="comm()",
    library="NCCL",
    algorithms=COLLECTIVES | {"put", "get", "ring"},
    reduced_as={},
    posts_in_group=1,
    holds_multiprocessors=False,
    has_windows=True,
    is_rendezvous=False,
)
