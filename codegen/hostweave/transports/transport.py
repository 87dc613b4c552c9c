"""The class Transport: how a channel transfers data. Each other file of this folder defines one `TRANSPORT`."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from hostweave.base.forks import importing
from hostweave.types.machine import Machine

# all transports, the preferred one first
PREFERRED = ("two_sided", "peer", "one_sided")
DEFAULT = PREFERRED[0]
NAMES = tuple(sorted(PREFERRED))

# Sets of kinds of instructions: values of the trait `posts` of `host_ir.tree.Instruction`.
COLLECTIVES = frozenset({"collective"})
MESSAGES = frozenset({"send", "recv"})
SIGNALS = frozenset({"signal", "wait_signal", "get"})  # a put includes a signal


@dataclass(frozen=True)
class Transport:
    name: str
    carries: frozenset[str]  # supported instructions, as values of their trait `posts`
    template: str  # file in templates/instructions with one macro per instruction
    library: str  # name of the communication library, for messages
    # dtype that the transport cannot reduce -> dtype to which it is cast for the reduction
    reduced_as: Mapping[str, str] = field(default_factory=dict, compare=False)
    posts_in_group: int = 1  # maximum number of calls in one group
    # kernels of the transport occupy multiprocessors until the peers arrive; to avoid deadlocks, such channels run one communication after
    # another
    holds_multiprocessors: bool = False
    is_rendezvous: bool = False  # a communication ends only after all participants have started it
    registers_arena: bool = False  # the arena is registered with the channel, so that ranks can access each other's memory
    graphs_on_all_ranks: bool = False  # either all ranks run a call as a CUDA graph, or none does
    has_communicator: bool = True  # the channel can use an existing communicator of the application
    since: tuple[int, ...] = ()  # first sufficient version of the library; empty if every version is
    # supported reductions; for any other reduction, a rank gathers the terms, and a kernel reduces them
    reduces: frozenset[str] = frozenset({"sum", "prod", "min", "max", "avg"})

    def why_not(self, machine: Machine) -> str:
        """Reason why ranks of a machine cannot use this transport, or "" if they can."""
        return dict(machine.refused).get(self.name, machine.no_peers if self.is_optional else "")

    @property
    def is_optional(self) -> bool:
        """True if some machines cannot use the transport. Such machines run a variant of the program on another transport."""
        return self.registers_arena

    def takes_shards(self, are_even: bool, are_on_all_ranks: bool) -> bool:
        """True if a chunk loop on this transport can move such shards. Registered memory must have the same layout on all ranks."""
        return not self.registers_arena or (are_even and are_on_all_ranks)


def first_carrying(transports: Iterable[Transport], *needs: Set[str]) -> Transport | None:
    """Returns the first transport that supports all instructions of at least one of the sets in `needs`, or None."""
    return next((transport for transport in transports if any(map(transport.carries.issuperset, needs))), None)


@cache
def find_transport(name: str) -> Transport:
    with importing:
        transport: Transport = import_module(f"hostweave.transports.{name}").TRANSPORT
    return transport
