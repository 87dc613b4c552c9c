"""How bytes travel on a channel: of each transport one file here, with the object `TRANSPORT`. Whoever needs to know asks it."""

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
)  # all transports; transport="auto" takes the first one that carries what is asked of a channel
DEFAULT = PREFERRED[0]
NAMES = tuple(sorted(PREFERRED))

# Capabilities of a transport: the traits `posts` of the instructions that go over it.
COLLECTIVES = frozenset({"collective"})
MESSAGES = frozenset({"send", "recv"})
SIGNALS = frozenset({"signal", "wait_signal", "get"})  # and puts, which signal


@dataclass(frozen=True)
class Transport:
    name: str
    carries: frozenset[str]  # what may be posted on it: the trait `posts` of instructions
    template: str  # the file of templates/instructions that has a macro for each instruction
    handle: str  # what a call takes of the channel, in C++
    library: str  # what makes the calls, for messages
    reduced_as: Mapping[str, str] = field(compare=False)  # the dtype that carries another one, which it cannot reduce
    posts_in_group: int  # the most calls that can be posted together
    holds_multiprocessors: bool  # its kernels occupy the device until others arrive: those of one channel at a time, in the order of issue
    is_rendezvous: bool  # a communication ends only after all others that take part in it have started
    shares_memory: bool = False  # ranks touch the memory of others: the arena of a program is registered with its channels
    graphs_apart: bool = False  # signals of CUDA graphs are counted apart from those of calls: all ranks capture a call, or none
    has_communicator: bool = True  # a communicator of the application can be its channel
    since: tuple[int, ...] = ()  # the first version of the library that has its calls, where not all have them
    reduces: frozenset[str] = frozenset({"sum", "prod", "min", "max", "avg"})  # for others the terms are gathered, and reduced by a kernel

    def why_not(self, machine: Machine) -> str:
        """Why ranks of a machine cannot communicate by it; "" if they can."""
        return dict(machine.refused).get(self.name, machine.no_peers if self.shares_memory else "")


def first_carrying(transports: Iterable[Transport], *needs: Set[str]) -> Transport | None:
    """The first transport that carries all of any one of these."""
    return next((transport for transport in transports if any(map(transport.carries.issuperset, needs))), None)


@cache
def find_transport(name: str) -> Transport:
    """The transport of that name, which is one of NAMES."""
    with importing:
        transport: Transport = import_module(f"hostweave.transports.{name}").TRANSPORT
    return transport
