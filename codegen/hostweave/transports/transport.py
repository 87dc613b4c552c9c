"""How bytes travel on a channel: of each transport one file here, with the object `TRANSPORT`. Whoever needs to know asks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "transport")))
DEFAULT = "two_sided"  # of the channels that lowering makes
COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"})


@dataclass(frozen=True)
class Transport:
    name: str
    carries: frozenset[str]  # what may be posted on it: the trait `posts` of instructions
    template: str  # the file of templates/instructions that has a macro for each instruction
    handle: str  # what a call takes of the channel, in C++
    library: str  # what makes the calls, for messages
    algorithms: frozenset[str]  # of chunk loops
    reduced_as: Mapping[str, str] = field(compare=False)  # the dtype that carries another one, which it cannot reduce
    posts_in_group: int  # the most calls that can be posted together
    holds_multiprocessors: bool  # its kernels occupy the device until others arrive: those of one channel at a time, in the order of issue
    has_windows: bool  # ranks touch the memory of others, which the arena of a program registers with its channels
    is_rendezvous: bool  # a communication ends only after all others that take part in it have started
    reduces: frozenset[str] = frozenset({"sum", "prod", "min", "max", "avg"})  # for others the terms are gathered, and reduced by a kernel


@cache
def find_transport(name: str) -> Transport:
    """The transport of that name, which is one of NAMES."""
    transport: Transport = import_module(f"hostweave.transports.{name}").TRANSPORT
    return transport


def transport_of(algorithm: str, usual: str = DEFAULT) -> str:
    """The name of the transport on which a chunk loop of this algorithm communicates: the usual one where that can."""
    return next(name for name in (usual, *NAMES) if algorithm in find_transport(name).algorithms)
