"""Two-sided transport: NCCL collectives, and send with a matching recv."""

from hostweave.transports.transport import COLLECTIVES, MESSAGES, Transport

TRANSPORT = Transport(
    name="two_sided",
    carries=COLLECTIVES | MESSAGES,
    template="nccl",
    library="NCCL",
    reduced_as={"bool": "u8", "i16": "i32", "u16": "u32", "f8e4m3": "f32", "f8e5m2": "f32"},
    posts_in_group=2048,
    holds_multiprocessors=True,
    is_rendezvous=True,
    graphs_on_all_ranks=True,
)
