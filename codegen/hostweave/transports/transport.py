"""A transport is how a channel transfers data."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from hostweave.types.machine import Machine

# Sets of values of the trait `posts` of `host_ir.tree.Instruction`.
COLLECTIVES = frozenset({"collective"})
MESSAGES = frozenset({"send", "recv"})
SIGNALS = frozenset({"signal", "wait_signal", "get"})  # a put includes a signal
REDUCTIONS = ("sum", "prod", "min", "max", "avg")  # reductions of collectives


@dataclass(frozen=True)
class Transport:
    name: str
    carries: frozenset[str]  # values of the trait `posts` that the transport supports
    template: str  # file in templates/instructions
    library: str  # name of the communication library in errors
    # dtype that the transport cannot reduce -> dtype for the reduction
    reduced_as: Mapping[str, str] = field(default_factory=dict, compare=False)
    posts_in_group: int = 1  # maximum number of calls in one group
    # Kernels of the transport occupy multiprocessors until the peers arrive. So communications on channels of the transport must not run
    # concurrently.
    holds_multiprocessors: bool = False
    is_rendezvous: bool = False  # a communication ends only after all ranks have started it
    registers_arena: bool = False  # ranks access each other's arenas, which are registered with the channel
    puts_from_windows: bool = False  # the library puts only registered memory
    graphs_on_all_ranks: bool = False  # either all ranks run a call as a CUDA graph, or none does
    has_communicator: bool = True  # can use a communicator of the application
    since: tuple[int, ...] = ()  # first version of the library that has the transport, or ()
    # Reductions of the library. For any other reduction, a rank gathers the terms, and a kernel reduces the terms.
    reduces: frozenset[str] = frozenset(REDUCTIONS)

    def why_not(self, machine: Machine) -> str:
        """Reason why ranks of a machine cannot use this transport, or ""."""
        return dict(machine.refused).get(self.name, machine.no_peers if self.is_optional else "")

    @property
    def is_optional(self) -> bool:
        """True if some machines cannot use the transport. On these machines, a variant of the program uses another transport."""
        return self.registers_arena

    def takes_shards(self, are_even: bool, are_on_all_ranks: bool) -> bool:
        """True if a chunk loop can move shards with these two properties. Registered memory needs the same layout on all ranks."""
        return not self.registers_arena or (are_even and are_on_all_ranks)


def first_carrying(transports: Iterable[Transport], *needs: Set[str]) -> Transport | None:
    """The first transport that supports every value of one of the sets `needs`, or None."""
    return next((transport for transport in transports if any(map(transport.carries.issuperset, needs))), None)


_TRANSPORTS = (  # preferred ones first
    # NCCL collectives, and send with a matching recv.
    Transport(
        name="two_sided",
        carries=COLLECTIVES | MESSAGES,
        template="nccl",
        library="NCCL",
        reduced_as={"bool": "u8", "i16": "i32", "u16": "u32", "f8e4m3": "f32", "f8e5m2": "f32"},
        posts_in_group=2048,
        holds_multiprocessors=True,
        is_rendezvous=True,
        graphs_on_all_ranks=True,
    ),
    # Copies between GPUs of one host. A signal is a word of memory that streams write or wait for.
    Transport(
        name="peer",
        carries=SIGNALS,
        template="peer",
        library="CUDA",
        registers_arena=True,
        has_communicator=False,
    ),
    # NCCL's puts and signals between registered windows of ranks. Gets copy from windows of peers.
    Transport(
        name="one_sided",
        carries=SIGNALS,
        template="window",
        library="NCCL",
        registers_arena=True,
        puts_from_windows=True,
        graphs_on_all_ranks=True,
        since=(2, 29),
    ),
)
PREFERRED = tuple(transport.name for transport in _TRANSPORTS)
DEFAULT = PREFERRED[0]
NAMES = tuple(sorted(PREFERRED))
find_transport = {transport.name: transport for transport in _TRANSPORTS}.__getitem__
