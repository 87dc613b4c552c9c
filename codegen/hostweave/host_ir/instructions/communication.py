"""Communication instructions of the host IR. Buffers must be contiguous and have one dtype, except in a LaunchExchange."""

from dataclasses import dataclass
from typing import ClassVar

from hostweave.host_ir.expr import Expr
from hostweave.host_ir.tree import Body, Instruction, Launched, Read, Reads, T, Update, Write, Writes
from hostweave.types.blocks import Cuts, Route

EXCHANGE_RANKS = 8  # maximum number of ranks of an exchange: hw::kExchangeRanks
EXCHANGED = ("f16", "bf16", "f32")  # dtypes of terms that kernels can sum
EXCHANGE_BYTES = 512 << 10  # largest term of an all_reduce inside a kernel, in bytes: hw::kExchangeBytes
BLOCK_BYTES = 8 << 20  # largest total size of the blocks of an all_gather or reduce_scatter inside a kernel, in bytes: hw::kBlockBytes

Routes = tuple[Route, ...]
Sources = tuple[int | None, ...]  # for each rank of a process group, the index of the rank that sends to this rank, or None


class Communication(Instruction):
    """Moves data or signals between the ranks of a process group. Except in a LaunchExchange and in one-sided instructions, only buffers
    that the instruction reads are sent, and only buffers that the instruction writes are received."""

    channel: str
    blocks: ClassVar[str] = ""  # field of the buffer with one block per rank, if the other buffer has one block


class Collective(Communication):
    """A communication that all ranks of the process group issue, in the same order. If `sent_along` or `received_along` names a dim, the
    blocks are the ranks' shards of this dim, stored one after another. The last blocks may be short or empty. Otherwise all blocks have
    equal sizes, except in a CollectivePermute."""

    posts = "collective"
    sends_blocks: ClassVar[bool] = False  # True if receivers get different blocks of a sender's buffer
    sent_along: int | None = None  # dim of src that is split into blocks
    received_along: int | None = None  # dim of dst that is split into blocks

    @property
    def is_shared(self) -> bool:
        return self.sent_along is not None or self.received_along is not None

    @property
    def may_differ(self) -> bool:
        return self.is_shared


@dataclass(frozen=True)
class FromTo(Collective):
    src: Read
    dst: Write


class Reduction(Collective):
    """A collective that reduces the src of all ranks by `op`. A Barrier has a token instead of src."""

    op: str


class PointToPoint(Communication):
    """One or several sends or recvs. Each send matches a recv of its peer."""


@dataclass(frozen=True)
class Routed(PointToPoint):
    """Sends or receives blocks of a buffer by routes, as one group. `count` is the number of equal blocks of the buffer, or the cuts of its
    packed blocks."""

    count: int | Cuts
    routes: Routes
    channel: str
    grouped = True

    @property
    def packed(self) -> Cuts:
        return () if isinstance(self.count, int) else self.count


@dataclass(frozen=True)
class AllGather(FromTo):
    """dst receives the src of every rank, in process group order."""

    channel: str
    received_along: int | None = None
    syntax = "all_gather %{src} -> %{dst} along {received_along} on {channel}"
    in_place = "block of dst"
    blocks = "dst"


@dataclass(frozen=True)
class AllReduce(FromTo, Reduction):
    """dst = the reduction of every rank's src. dst may be src."""

    op: str
    channel: str
    syntax = "all_reduce {op} %{src} -> %{dst} on {channel}"
    in_place = "src"


@dataclass(frozen=True)
class LaunchExchange(Collective):
    """Launches a kernel that begins with a collective of the kernel's first input. A sum is in f32 and in rank order, and is rounded once.
    The kernel declares its first input with the shape of the collective's result. Blocks are equal and consecutive."""

    kind: ClassVar[str] = ""  # first op of the kernel

    kernel: Launched
    srcs: Reads
    dsts: Writes
    channel: str
    exchanges = True


class LaunchAllReduce(LaunchExchange):
    kind = "all_reduce"
    syntax = "launch_all_reduce @{kernel} {srcs} -> {dsts} on {channel}"


class LaunchReduceScatter(LaunchExchange):
    kind = "reduce_scatter"
    syntax = "launch_reduce_scatter @{kernel} {srcs} -> {dsts} on {channel}"


class LaunchAllGather(LaunchExchange):
    kind = "all_gather"
    syntax = "launch_all_gather @{kernel} {srcs} -> {dsts} on {channel}"


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
class Rooted(FromTo):
    """A collective in which the rank with index `root` in the process group is the only sender or the only receiver."""

    root: Expr
    channel: str


class Broadcast(Rooted):
    """dst = the src of the root."""

    syntax = "broadcast %{src} -> %{dst} from {root} on {channel}"
    in_place = "src"
    at_root = "src"


class BroadcastToOthers(Rooted):
    """On every rank except the root, dst = the src of the root. The root has no dst, and the other ranks need no src."""

    syntax = "broadcast_to_others %{src} to %{dst} from {root} on {channel}"
    at_root = "src"
    not_at_root = "dst"


@dataclass(frozen=True)
class Reduce(FromTo, Reduction):
    """On the root, dst = the reduction of every rank's src. Other ranks do not write dst."""

    op: str
    root: Expr
    channel: str
    syntax = "reduce {op} %{src} -> %{dst} to {root} on {channel}"
    in_place = "src"
    at_root = "dst"


class Gather(Rooted):
    """On the root, dst = the src of every rank, in process group order. Other ranks do not write dst. Posted as sends and recvs."""

    syntax = "gather %{src} -> %{dst} to {root} on {channel}"
    blocks = "dst"
    grouped = True
    at_root = "dst"


class Scatter(Rooted):
    """dst = this rank's block of the root's src. Other ranks do not use src. Posted as sends and recvs."""

    syntax = "scatter %{src} -> %{dst} from {root} on {channel}"
    blocks = "src"
    sends_blocks = True
    grouped = True
    at_root = "src"


@dataclass(frozen=True)
class AllToAll(FromTo):
    """Sends block i of src to rank i of the process group, and receives block i of dst from rank i. Posted as sends and recvs."""

    channel: str
    sent_along: int | None = None
    received_along: int | None = None
    syntax = "all_to_all %{src} along {sent_along} -> %{dst} along {received_along} on {channel}"
    sends_blocks = True
    grouped = True


@dataclass(frozen=True)
class CollectivePermute(FromTo):
    """On rank i of the process group, dst = the src of rank `sources[i]`. A rank without a source gets zeros. Each rank sends to at most
    one rank, which may be itself. Posted as sends and recvs."""

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
    """Ends after every rank of the process group has reached the barrier. Posted as an all_reduce of one element."""

    token: Update
    channel: str
    op = "sum"
    syntax = "barrier %{token} on {channel}"


@dataclass(frozen=True)
class Send(PointToPoint):
    """Sends src to `peer`, an index in the process group. Matches a recv of the peer."""

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
    """Sends the blocks of src whose routes begin at this rank, as a group. Matches the recv_blocks with the same routes. Several
    send_blocks with the same routes match the recv_blocks with these routes in order."""

    src: Read
    syntax = "send_blocks %{src} in {count} by {routes} on {channel}"
    posts = "send"


@dataclass(frozen=True)
class RecvBlocks(Routed):
    """Receives the blocks of dst whose routes end at this rank, as a group."""

    dst: Write
    syntax = "recv_blocks %{dst} in {count} by {routes} on {channel}"
    posts = "recv"


@dataclass(frozen=True)
class Group(Instruction):
    """Communications on one transport that are posted together."""

    body: Body
    syntax = "group {body}"
    grouped = True
