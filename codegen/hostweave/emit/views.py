"""Instructions as the templates see them: strings, with all decisions made. `template` names the template's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstructionView:
    template: ClassVar[str]


Body = tuple[InstructionView, ...]


@dataclass(frozen=True)
class Select(InstructionView):
    template = "select"
    type: str  # const auto* or auto*
    name: str
    base: str
    offset: str


@dataclass(frozen=True)
class Chunk(Select):
    template = "chunk"


@dataclass(frozen=True)
class Slice(Select):
    template = "slice"


@dataclass(frozen=True)
class Strided(Select):
    template = "strided"


@dataclass(frozen=True)
class Allocate(InstructionView):
    """The buffer of the present stream."""

    template = "allocate"
    type: str
    name: str
    base: str
    index: str


@dataclass(frozen=True)
class Matmul(InstructionView):
    template = "matmul"
    plan: str
    a: str
    b: str
    dst: str
    stream: str
    terms: tuple[str, ...]  # what is added to the product


@dataclass(frozen=True)
class Launch(InstructionView):
    template = "launch"
    launch: str  # the function
    kernel: str
    grid: str
    stream: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Copy(InstructionView):
    template = "copy"
    dst: str
    src: str
    bytes: str
    stream: str


@dataclass(frozen=True)
class CopyRows(InstructionView):
    template = "copy_rows"
    dst: str
    dst_pitch: str
    src: str
    src_pitch: str
    bytes: str
    rows: str
    stream: str


@dataclass(frozen=True)
class Fill(InstructionView):
    """With zeros."""

    template = "fill"
    dst: str
    bytes: str
    stream: str


@dataclass(frozen=True)
class AllGather(InstructionView):
    template = "all_gather"
    src: str
    dst: str
    count: str
    dtype: str
    channel: str
    stream: str


@dataclass(frozen=True)
class AllReduce(AllGather):
    template = "all_reduce"
    op: str


@dataclass(frozen=True)
class ReduceScatter(AllReduce):
    template = "reduce_scatter"


@dataclass(frozen=True)
class Broadcast(AllGather):
    template = "broadcast"
    root: str


@dataclass(frozen=True)
class BroadcastToOthers(Broadcast):
    """A broadcast in place on the root, whose buffer is only read."""

    template = "broadcast_to_others"
    place: str  # of this rank in the channel
    kept: str  # the root's buffer, as one that could be written


@dataclass(frozen=True)
class Reduce(AllReduce):
    template = "reduce"
    root: str


@dataclass(frozen=True)
class AllToAll(AllGather):
    """Stands in a group. The block of each `peer` begins `offset` elements into a buffer."""

    template = "all_to_all"
    peer: str
    offset: str


@dataclass(frozen=True)
class Gather(AllToAll):
    template = "gather"
    root: str


@dataclass(frozen=True)
class Scatter(Gather):
    template = "scatter"


@dataclass(frozen=True)
class CollectivePermute(AllGather):
    """Stands in a group."""

    template = "collective_permute"
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    bytes: str


@dataclass(frozen=True)
class Send(InstructionView):
    template = "send"
    buffer: str
    count: str
    dtype: str
    peer: str
    channel: str
    stream: str


@dataclass(frozen=True)
class Recv(Send):
    template = "recv"


@dataclass(frozen=True)
class SendBlocks(InstructionView):
    """Stands in a group."""

    template = "send_blocks"
    buffer: str
    count: str
    dtype: str
    routes: str
    rank: str
    route: str
    sent: str  # how far into the buffer the block of a route begins
    received: str
    channel: str
    stream: str


@dataclass(frozen=True)
class RecvBlocks(SendBlocks):
    template = "recv_blocks"


@dataclass(frozen=True)
class Group(InstructionView):
    template = "group"
    body: Body
    braces: bool  # more follows in the same scope


@dataclass(frozen=True)
class OnStream(InstructionView):
    template = "stream"
    pool: str
    index: str
    body: Body
    braces: bool


@dataclass(frozen=True)
class Fork(InstructionView):
    template = "fork"
    pool: str


@dataclass(frozen=True)
class Join(InstructionView):
    template = "join"
    pool: str


@dataclass(frozen=True)
class Record(InstructionView):
    template = "record"
    events: str
    index: str
    stream: str


@dataclass(frozen=True)
class Wait(InstructionView):
    template = "wait"
    events: str
    index: str
    stream: str


@dataclass(frozen=True)
class Let(InstructionView):
    template = "let"
    name: str
    value: str


@dataclass(frozen=True)
class For(InstructionView):
    template = "for"
    index: str
    count: str
    body: Body


@dataclass(frozen=True)
class If(InstructionView):
    template = "if"
    condition: str
    body: Body
    orelse: Body


@dataclass(frozen=True)
class Call(InstructionView):
    template = "call"
    function: str
    arguments: tuple[str, ...]


# --- the plan of the arena --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reserve(InstructionView):
    template = "memory_allocate"
    member: str
    count: str
    pool: str = ""  # of streams that have one each


@dataclass(frozen=True)
class Free(InstructionView):
    template = "memory_free"
    member: str


@dataclass(frozen=True)
class Joined(InstructionView):
    template = "memory_join"
    pool: str


@dataclass(frozen=True)
class MemoryOf(InstructionView):
    """Of a block that is called."""

    template = "memory_call"
    function: str


@dataclass(frozen=True)
class PlannedIf(If):
    """By sizes."""
