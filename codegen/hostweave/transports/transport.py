"""Transports: the way in which a channel moves bytes. Each transport is one file here, with an object `TRANSPORT` that answers all
questions about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from hostweave.base.forks import importing
from hostweave.types.machine import Machine

PREFERRED = (
    "two_sided",
    "peer",
    "one_sided",
)  # all transports; transport="auto" takes the first transport that supports the instructions of the channel
DEFAULT = PREFERRED[0]
NAMES = tuple(sorted(PREFERRED))

# Kinds of instructions that a transport may support (their `posts`).
COLLECTIVES = frozenset({"collective"})
MESSAGES = frozenset({"send", "recv"})
SIGNALS = frozenset({"signal", "wait_signal", "get"})  # a put includes a signal


@dataclass(frozen=True)
class Transport:
    name: str
    carries: frozenset[str]  # supported communications: values of the trait `posts` of instructions
    template: str  # file in templates/instructions with one macro per instruction
    handle: str  # C++ expression of the channel's handle that calls take
    library: str  # name of the library that communicates, for messages
    reduced_as: Mapping[str, str] = field(compare=False)  # dtypes that it cannot reduce, each with the dtype that is reduced instead
    posts_in_group: int  # largest number of calls in one group
    # its kernels occupy multiprocessors until the peers arrive, so kernels of a channel run one at a time, in issue order
    holds_multiprocessors: bool
    is_rendezvous: bool  # a communication ends only after all participants have started it
    registers_arena: bool = False  # a program's arena is registered with its channels, because ranks access each other's memory
    graphs_apart: bool = False  # signals of CUDA graphs have separate counters: either all ranks capture a call, or none
    has_communicator: bool = True  # an existing communicator of the application can serve as its channel
    since: tuple[int, ...] = ()  # first version of the library that has the calls, if not all have them
    # other reductions gather the terms and reduce them in a kernel
    reduces: frozenset[str] = frozenset({"sum", "prod", "min", "max", "avg"})

    def why_not(self, machine: Machine) -> str:
        """Reason why ranks of a machine cannot use this transport; "" if they can."""
        return dict(machine.refused).get(self.name, machine.no_peers if self.is_optional else "")

    @property
    def is_optional(self) -> bool:
        """True if ranks may find at run time that they cannot use it, so that a program on another transport runs instead."""
        return self.registers_arena

    def takes_shards(self, are_even: bool, are_on_all_ranks: bool) -> bool:
        """True if a chunk loop may move shards with these two properties. Registered memory has the same layout on all ranks."""
        return not self.registers_arena or (are_even and are_on_all_ranks)


def first_carrying(transports: Iterable[Transport], *needs: Set[str]) -> Transport | None:
    """Returns the first transport that supports every communication of some set in `needs`, or None."""
    return next((transport for transport in transports if any(map(transport.carries.issuperset, needs))), None)


@cache
def find_transport(name: str) -> Transport:
    """Returns the transport with that name, one of NAMES."""
    with importing:
        transport: Transport = import_module(f"hostweave.transports.{name}").TRANSPORT
    return transport
