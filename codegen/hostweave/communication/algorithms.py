"""Table of all algorithms of chunk loops, and functions that search the table."""

from collections.abc import Iterable, Iterator

from hostweave.communication import broadcast, p2p, put, ring, slices
from hostweave.communication.algorithm import Algorithm
from hostweave.fusion_ir.choice import Alternative, Choice
from hostweave.options import Options
from hostweave.transports.transport import SIGNALS, Transport

# The first algorithm that supports a reshard is the default.
ALGORITHMS: tuple[Algorithm, ...] = (
    *(p2p.GATHER, broadcast.BROADCAST, put.GATHER, ring.GATHER),
    *(p2p.SCATTER, put.SCATTER, ring.SCATTER, broadcast.REDUCE),
    *slices.ALGORITHMS,
)
NAMES = tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))


def algorithms_of(kind: str, options: Options) -> Iterator[tuple[Algorithm, Transport]]:
    """Algorithms for one kind of reshard, each with the preferred transport that supports it."""
    for algorithm in ALGORITHMS:
        if algorithm.kind == kind and (transport := options.transport_carrying(*algorithm.needs)):
            yield algorithm, transport


def choosable(kind: str, options: Options, is_even: bool) -> Iterator[Algorithm]:
    """Algorithms that the compiler may choose. `is_even`: all shards are known to be equal."""
    for algorithm, transport in algorithms_of(kind, options):
        if not transport.why_not(options.figures) and transport.takes_shards(is_even, are_on_all_ranks=True):
            yield algorithm


def find_algorithm(kind: str, name: str) -> Algorithm:
    return next(algorithm for algorithm in ALGORITHMS if (algorithm.kind, algorithm.name) == (kind, name))


def need_optional_transport(choices: Iterable[Choice], options: Options) -> bool:
    return any(choice.chosen.chunks and transport_of(choice.chosen, options).is_optional for choice in choices)


def transport_of(alternative: Alternative, options: Options) -> Transport:
    needs = next((algorithm.needs for algorithm in ALGORITHMS if algorithm.name == alternative.algorithm), (SIGNALS,))
    transport = options.transport_carrying(*needs)
    assert transport
    return transport
