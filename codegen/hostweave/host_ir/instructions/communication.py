"""Instructions of the host IR that communicate: of contiguous buffers of one dtype."""

from dataclasses import dataclass
from typing import ClassVar

from hostweave.host_ir.expr import Expr
from hostweave.host_ir.tree import Body, Instruction, Launched, Read, Reads, T, Update, Write, Writes
from hostweave.types.blocks import Cuts, Route

EXCHANGE_RANKS = 8  # at most, whose kernels send each other what they add up: hw::kExchangeRanks
EXCHANGED = ("f16", "bf16", "f32")  # dtypes of that
EXCHANGE_BYTES = 512 << 10  # at most, of the term of one: hw::kExchangeBytes

Routes = tuple[Route, ...]
Sources = tuple[int | None, ...]  # for each rank of a process group the one that sends to it, by their numbers there


class Communication(Instruction):
    """Moves data between the ranks of a channel's process group. A rank that writes has it from those that read."""

    channel: str
    blocks: ClassVar[str] = ""  # the field whose buffer has a block for each rank of the process group, where the other one has just one


class Collective(Communication):
    """All ranks of the process group issue it, in the same order.

    One that names a dim has the shares of that dim that ranks hold as blocks, packed, which may differ in size: the last ones are
    short or empty. Else blocks are equal.
    """

    posts = "collective"
    sends_blocks: ClassVar[bool] = False  # a rank that receives gets its own block of what each sender has
    sent_along: int | None = None  # the dim of src that its blocks share
    received_along: int | None = None  # and that of dst

    @property
    def is_shared(self) -> bool:
        return self.sent_along is not None or self.received_along is not None

    @property
    def may_differ(self) -> bool:
        """Whether ranks may send different numbers of elements."""
        return self.is_shared


@dataclass(frozen=True)
class FromTo(Collective):
    """What ranks have in src goes into the dst of ranks."""

    src: Read
    dst: Write


class Reduction(Collective):
    """What the ranks send becomes one, by `op`."""

    op: str


class PointToPoint(Communication):
    """A send meets the recv of its peer."""


class Routed(PointToPoint):
    """Blocks that go by routes, `count` equal ones or those of a packed tensor: sends or recvs in a group."""

    count: int | Cuts
    routes: Routes
    grouped = True

    @property
    def packed(self) -> Cuts:
        return () if isinstance(self.count, int) else self.count


@dataclass(frozen=True)
class AllGather(FromTo):
    """dst holds the src of every rank of the process group, in process group order."""

    channel: str
    received_along: int | None = None
    syntax = "all_gather %{src} -> %{dst} along {received_along} on {channel}"
    in_place = "block of dst"
    blocks = "dst"


@dataclass(frozen=True)
class AllReduce(FromTo, Reduction):
    """dst = the reduction of every rank's src. src may be dst."""

    op: str
    channel: str
    syntax = "all_reduce {op} %{src} -> %{dst} on {channel}"
    in_place = "src"


@dataclass(frozen=True)
class LaunchAllReduce(Collective):
    """Runs a kernel of the program that begins with an all_reduce of its first input: the ranks' kernels send each other that.

    Their terms are added up in f32 in the order of ranks, and rounded once.
    """

    kernel: Launched
    srcs: Reads
    dsts: Writes
    channel: str
    syntax = "launch_all_reduce @{kernel} {srcs} -> {dsts} on {channel}"
    exchanges = True


@dataclass(frozen=True)
class ReduceScatter(FromTo, Reduction):
    """dst = this rank's block of the reduction of every rank's src."""

    op: str
    channel: str
    sent_along: int | None = None
    syntax = "reduce_scatter {op} %{src} along {sent_along} -> %{dst} on {channel}"
    in_place = "block of src"
    blocks = "src"
    sends_blocks = True


@dataclass(frozen=True)
class Broadcast(FromTo):
    """dst = the src of the rank whose coordinate in the process group is root."""

    root: Expr
    channel: str
    syntax = "broadcast %{src} -> %{dst} from {root} on {channel}"
    in_place = "src"
    at_root = "src"


@dataclass(frozen=True)
class BroadcastToOthers(FromTo):
    """On every rank of the process group but the root, dst = the src of the root, which keeps it.

    In place on the root. The root needs no dst, and no other rank a src: they may be on two meshes.
    """

    root: Expr
    channel: str
    syntax = "broadcast_to_others %{src} to %{dst} from {root} on {channel}"
    at_root = "src"
    not_at_root = "dst"


@dataclass(frozen=True)
class Reduce(FromTo, Reduction):
    """At root, dst = the reduction of every rank's src; elsewhere dst is not touched."""

    op: str
    root: Expr
    channel: str
    syntax = "reduce {op} %{src} -> %{dst} to {root} on {channel}"
    in_place = "src"
    at_root = "dst"


@dataclass(frozen=True)
class Gather(FromTo):
    """At root, dst holds the src of every rank, in process group order; elsewhere it is not touched. Sends and recvs in a group."""

    root: Expr
    channel: str
    syntax = "gather %{src} -> %{dst} to {root} on {channel}"
    blocks = "dst"
    grouped = True
    at_root = "dst"


@dataclass(frozen=True)
class Scatter(FromTo):
    """dst = this rank's block of the src of root; elsewhere src is not touched. Sends and recvs in a group."""

    root: Expr
    channel: str
    syntax = "scatter %{src} -> %{dst} from {root} on {channel}"
    blocks = "src"
    sends_blocks = True
    grouped = True
    at_root = "src"


@dataclass(frozen=True)
class AllToAll(FromTo):
    """Block i of src goes to the i-th rank of the process group, and block i of dst comes from it. Sends and recvs in a group."""

    channel: str
    sent_along: int | None = None
    received_along: int | None = None
    syntax = "all_to_all %{src} along {sent_along} -> %{dst} along {received_along} on {channel}"
    sends_blocks = True
    grouped = True


@dataclass(frozen=True)
class CollectivePermute(FromTo):
    """dst = the src of the rank that `sources` names for this one's number in the process group; a rank without a source gets zeros.

    A collective permute: a rank sends to at most one other, itself included. A send and a recv in a group.
    """

    sources: Sources
    channel: str
    syntax = "collective_permute %{src} -> %{dst} from {sources} on {channel}"
    grouped = True

    def senders(self, rank_in_group: int, readers: tuple[T, ...]) -> tuple[T, ...]:
        source = self.sources[rank_in_group]
        return () if source is None else (readers[source],)

    @property
    def may_differ(self) -> bool:
        return True


@dataclass(frozen=True)
class Barrier(Reduction):
    """Ends when every rank of the process group has come here. An all_reduce of one element, which no rank needs."""

    token: Update
    channel: str
    op = "sum"
    syntax = "barrier %{token} on {channel}"


@dataclass(frozen=True)
class Send(PointToPoint):
    """Meets the recv of the peer, given by its coordinate in the process group."""

    src: Read
    peer: Expr
    channel: str
    syntax = "send %{src} to {peer} on {channel}"
    posts = "send"


@dataclass(frozen=True)
class Recv(PointToPoint):
    dst: Write
    peer: Expr
    channel: str
    syntax = "recv %{dst} from {peer} on {channel}"
    posts = "recv"


@dataclass(frozen=True)
class SendBlocks(Routed):
    """Of src, which holds blocks one after another, those that the routes have this rank send. Sends in a group.

    The blocks are `count` equal ones, or those of a packed tensor. The recv_blocks of the same routes meet it, in their order.
    """

    src: Read
    count: int | Cuts
    routes: Routes
    channel: str
    syntax = "send_blocks %{src} in {count} by {routes} on {channel}"
    posts = "send"


@dataclass(frozen=True)
class RecvBlocks(Routed):
    """Into dst, which gets blocks one after another, those that the routes have this rank receive. Recvs in a group."""

    dst: Write
    count: int | Cuts
    routes: Routes
    channel: str
    syntax = "recv_blocks %{dst} in {count} by {routes} on {channel}"
    posts = "recv"


@dataclass(frozen=True)
class Group(Instruction):
    """Communications of one transport, posted together."""

    body: Body
    syntax = "group {body}"
    grouped = True
