"""A transport is how a channel transfers data. Each other file of this folder defines one `TRANSPORT`."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from hostweave.base.forks import importing
from hostweave.types.machine import Machine

# preferred ones first
PREFERRED = ("two_sided", "peer", "one_sided")
DEFAULT = PREFERRED[0]
NAMES = tuple(sorted(PREFERRED))

# Sets of values of the trait `posts` of `host_ir.tree.Instruction`.
COLLECTIVES = frozenset({"collective"})
MESSAGES = frozenset({"send", "recv"})
SIGNALS = frozenset({"signal", "wait_signal", "get"})  # a put includes a signal


@dataclass(frozen=True)
class Transport:
    name: str
    carries: frozenset[str]  # values of the trait `posts` that the transport supports
    template: str  # file in templates/instructions
    library: str  # communication library, for messages
    # dtype that the transport cannot reduce -> dtype for the reduction
    reduced_as: Mapping[str, str] = field(default_factory=dict, compare=False)
    posts_in_group: int = 1  # most calls in one group
    # Kernels of the transport occupy multiprocessors until the peers arrive. So communications of such channels must not run concurrently.
    holds_multiprocessors: bool = False
    is_rendezvous: bool = False  # a communication ends only after all ranks have started it
    registers_arena: bool = False  # ranks access each other's arenas, which are registered with the channel
    graphs_on_all_ranks: bool = False  # either all ranks run a call as a CUDA graph, or none does
    has_communicator: bool = True  # can use a communicator of the application
    since: tuple[int, ...] = ()  # first version of the library that has the transport, or ()
    # Reductions of the library. For others, a rank gathers the terms, and a kernel reduces them.
    reduces: frozenset[str] = frozenset({"sum", "prod", "min", "max", "avg"})

    def why_not(self, machine: Machine) -> str:
        """Reason why ranks of a machine cannot use this transport, or ""."""
        return dict(machine.refused).get(self.name, machine.no_peers if self.is_optional else "")

    @property
    def is_optional(self) -> bool:
        """True if some machines cannot use the transport. They run a variant of the program on another transport."""
        return self.registers_arena

    def takes_shards(self, are_even: bool, are_on_all_ranks: bool) -> bool:
        """True if a chunk loop can move such shards: registered memory has the same layout on all ranks."""
        return not self.registers_arena or (are_even and are_on_all_ranks)


def first_carrying(transports: Iterable[Transport], *needs: Set[str]) -> Transport | None:
    """The first transport that supports all of at least one set in `needs`, or None."""
    return next((transport for transport in transports if any(map(transport.carries.issuperset, needs))), None)


@cache
def find_transport(name: str) -> Transport:
    with importing:
        transport: Transport = import_module(f"hostweave.transports.{name}").TRANSPORT
    return transport
