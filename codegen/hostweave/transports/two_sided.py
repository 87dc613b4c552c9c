"""Two-sided transport: NCCL's collectives, and a send that meets a recv."""

from hostweave.transports.transport import COLLECTIVES, Transport

TRANSPORT = Transport(
    name="two_sided",
    carries=frozenset({"collective", "send", "recv"}),
    template="nccl",
    handle="comm()",
    library="NCCL",
    algorithms=COLLECTIVES | {"p2p", "ring", "broadcast", "reduce", "transfer"},
    reduced_as={"bool": "u8", "i16": "i32", "u16": "u32", "f8e4m3": "f32", "f8e5m2": "f32"},
    posts_in_group=2048,
    holds_multiprocessors=True,
    has_windows=False,
    is_rendezvous=True,
)
