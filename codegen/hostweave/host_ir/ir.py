"""The host IR: what the CPU of one rank does, in order. One program for all ranks; the rank is a run-time value.

Each instruction is one dataclass. The `syntax` line drives printer and parser. The roles of its fields (what it defines, reads, frees,
forks) and its traits are all that analyses, passes and the check ask for, so that a new instruction needs no edit in any of them.
An instruction outside every `stream` block runs on the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attention import attended
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.host_ir.expr import Const, Expr
from hostweave.host_ir.strides import _reshaped_strides, _with, strided, strides_of
from hostweave.host_ir.tree import (
    Alias,
    Allocated,
    Awaited,
    Body,
    Called,
    Forked,
    Freed,
    Guarded,
    Index,
    Instruction,
    Joined,
    Launched,
    Read,
    Reads,
    Recorded,
    RemoteRead,
    RemoteWrite,
    Stream,
    Update,
    Viewed,
    Write,
    Writes,
    walk,
)
from hostweave.transports.transport import Transport
from hostweave.types.blocks import Cuts, boxes
from hostweave.types.mesh import Mesh
from hostweave.types.rank_sizes import Sizes
from hostweave.types.routes import Route
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, TensorType

T = TypeVar("T")

MAX_WORDS = 3  # ops that the name of a kernel lists
Routes = tuple[Route, ...]
Sources = tuple[int | None, ...]  # for each rank of a process group the one that sends to it, by their numbers there


# --- memory and views -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocate(Instruction):
    """Memory of this call, in the program's arena."""

    out: Allocated
    type: BufferType
    calls = False
    syntax = "%{out} = allocate {type}"

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        return {self.out: self.type}


@dataclass(frozen=True)
class AllocateWindow(Allocate):
    """Memory of this call that peers read and write: it has the same offset in the arena of every rank."""

    syntax = "%{out} = allocate_window {type}"
    in_window = True


@dataclass(frozen=True)
class Deallocate(Instruction):
    src: Freed
    syntax = "deallocate %{src}"


@dataclass(frozen=True)
class View(Instruction):
    """Elements of a buffer under another shape: pointer arithmetic at most."""

    out: Viewed
    src: Alias
    calls = False

    def type_of(self, source: BufferType) -> BufferType:
        """The type of what it defines. Raises ValueError where there is no such view."""
        raise NotImplementedError

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        return {self.out: self.type_of(types[self.src])}

    @property
    def offset(self) -> Expr:
        """Where it begins along its dim, in steps of what it takes there."""
        return Const(0)

    def stride(self, source: BufferType) -> Size:
        """The elements between one such step and the next."""
        return Size()


class Piece(View):
    """Some indices of a dim."""

    dim: int

    @property
    def span(self) -> tuple[int, Expr, Size]:
        raise NotImplementedError

    @property
    def offset(self) -> Expr:
        return self.span[1]

    def stride(self, source: BufferType) -> Size:
        return strides_of(source)[self.dim]


@dataclass(frozen=True)
class Select(Piece):
    """One index of a dim, which is dropped. Pointer arithmetic."""

    dim: int
    index: Expr
    syntax = "%{out} = select %{src}[{dim}: {index}]"

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size]:
        return self.dim, self.index, source.shape[self.dim]

    def type_of(self, source: BufferType) -> BufferType:
        shape, strides, dim = source.shape, strides_of(source), self.dim
        return strided(source, shape[:dim] + shape[dim + 1 :], strides[:dim] + strides[dim + 1 :])

    @property
    def span(self) -> tuple[int, Expr, Size]:
        return self.dim, self.index, Size()


@dataclass(frozen=True)
class Chunk(View):
    """The index-th of `count` equal chunks of a dim. Pointer arithmetic."""

    dim: int
    index: Expr
    count: Size
    syntax = "%{out} = chunk %{src}[{dim}: {index} of {count}]"

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size]:
        return self.dim, self.index, self.count

    def type_of(self, source: BufferType) -> BufferType:
        if self.count == Size(0):
            raise ValueError("a dim is cut into at least one chunk: write the number of them")
        chunk = source.shape[self.dim].divided_by(self.count)
        if chunk is None or (not chunk.factors and chunk.divisor != 1):
            raise ValueError(f"cannot cut {source.shape[self.dim]} into {self.count} chunks")
        return strided(source, _with(source.shape, self.dim, chunk), strides_of(source))

    @property
    def offset(self) -> Expr:
        return self.index

    def stride(self, source: BufferType) -> Size:
        return self.type_of(source).shape[self.dim] * strides_of(source)[self.dim]


@dataclass(frozen=True)
class Slice(Piece):
    """`size` indices of a dim from `start` on. Pointer arithmetic."""

    dim: int
    size: Size
    start: Expr
    syntax = "%{out} = slice %{src}[{dim}: {size} from {start}]"

    def type_of(self, source: BufferType) -> BufferType:
        return strided(source, _with(source.shape, self.dim, self.size), strides_of(source))

    @property
    def span(self) -> tuple[int, Expr, Size]:
        return self.dim, self.start, self.size


@dataclass(frozen=True)
class Strided(Slice):
    """`size` indices of a dim from `start` on, `step` apart. Pointer arithmetic."""

    step: int
    syntax = "%{out} = strided %{src}[{dim}: {size} from {start} by {step}]"

    def type_of(self, source: BufferType) -> BufferType:
        if self.step < 1:
            raise ValueError(f"the step is {self.step}: it must be at least 1")
        strides, dim = strides_of(source), self.dim
        return strided(source, _with(source.shape, dim, self.size), _with(strides, dim, strides[dim] * self.step))

    @property
    def span(self) -> tuple[int, Expr, Size]:
        return self.dim, self.start, (self.size - 1) * self.step + 1


@dataclass(frozen=True)
class Reshape(View):
    """The same elements in the same order under another shape. No call."""

    shape: tuple[Size, ...]
    syntax = "%{out} = reshape %{src} to {shape}"
    shows = "in order"

    def type_of(self, source: BufferType) -> BufferType:
        return strided(source, self.shape, _reshaped_strides(source.shape, strides_of(source), self.shape))


@dataclass(frozen=True)
class Permute(View):
    """Dim i of the result is dim `order[i]` of the source. No call."""

    order: tuple[int, ...]
    syntax = "%{out} = permute %{src} by {order}"
    shows = "all"

    def type_of(self, source: BufferType) -> BufferType:
        if sorted(self.order) != list(range(len(source.shape))):
            raise ValueError("the order must name each of its dims once")
        strides = strides_of(source)
        return strided(source, tuple(source.shape[i] for i in self.order), tuple(strides[i] for i in self.order))


@dataclass(frozen=True)
class Choose(View):
    """One of two buffers of one type: `src` where the condition is true. No call."""

    condition: Expr
    other: Alias
    syntax = "%{out} = choose %{src} if {condition} else %{other}"

    @property
    def chosen_by(self) -> Expr:
        return self.condition

    def type_of(self, source: BufferType) -> BufferType:
        return source

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        if types[self.other] != types[self.src]:
            raise ValueError(f"%{self.other} is {types[self.other]}: choose between buffers of one type and layout")
        return super().defined(types)


# --- compute ----------------------------------------------------------------------------------------------------------


class Compute(Instruction):
    """Work of this rank alone."""

    work = "compute"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        """What it writes, by NumPy, from a rank's sizes and what it reads (small floats as f32). A launch does what its kernel says."""
        raise NotImplementedError


@dataclass(frozen=True)
class Matmul(Compute):
    """dst = activation(scale * a b + accumulate + bias), rounded once. Equivalent to cublasLtMatmul with its epilogue.

    The product is over the last two dims, leading dims broadcast as NumPy does. `accumulate` is of dst's type and may be dst, the bias
    a vector along dst's columns; there is at most one of each.
    """

    a: Read
    b: Read
    dst: Write
    precision: str = ""  # "tf32": f32 operands are rounded to TF32 first
    scale: float = 1.0
    accumulate: Reads = ()
    bias: Reads = ()
    activation: str = ""  # one of ACTIVATIONS
    syntax = "matmul %{a}, %{b} in {precision} scaled {scale} accumulate {accumulate} bias {bias} activation {activation} -> %{dst}"
    in_place = "accumulate"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        a, b, *added = reads
        total = sum(added, np.matmul(a, b) * a.dtype.type(self.scale))
        return (OPS[self.activation].numpy(np, total) if self.activation else total,)


@dataclass(frozen=True)
class Attention(Compute):
    """dst = softmax(scale * q kT) v, by blocks of scores. q is [..., H, S, E], k [..., G, T, E], v [..., G, T, F], dst [..., H, S, F].

    Head h of the queries is of group h / (H / G). With a `diagonal` row i sees columns up to i + diagonal, and with a window only the
    last so many of them. `lse`, contiguous [..., H, S] of f32, gets the logarithms of the sums of exp. The elements of a row of all else
    lie side by side.
    """

    q: Read
    k: Read
    v: Read
    scale: float
    dst: Write
    diagonal: Expr | None = None
    window: int | None = None
    lse: Writes = ()
    syntax = "attention %{q}, %{k}, %{v} scaled {scale} diagonal {diagonal} window {window} -> %{dst} lse {lse}"
    library = "attention"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        diagonal = self.diagonal.value if isinstance(self.diagonal, Const) else None  # an execution has its value
        return attended(np, reads, self.scale, diagonal, self.window or 0)[: 1 + len(self.lse)]


@dataclass(frozen=True)
class Launch(Compute):
    """Runs a kernel of the program, or one of the user's, whose buffers are contiguous."""

    kernel: Launched
    srcs: Reads
    dsts: Writes
    syntax = "launch @{kernel} {srcs} -> {dsts}"


@dataclass(frozen=True)
class Copy(Compute):
    """dst = src, of one shape and dtype, strided or not."""

    src: Read
    dst: Write
    syntax = "copy %{src} -> %{dst}"
    work = "move"
    copies = True

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return reads


@dataclass(frozen=True)
class Pack(Compute):
    """dst holds the blocks of src, which is cut along its dims: one after another in row-major order, each row-major in itself."""

    src: Read
    dst: Write
    cuts: Cuts
    syntax = "pack %{src} -> %{dst} in {cuts}"
    work = "move"

    @property
    def packed(self) -> Cuts:
        return self.cuts

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return (reads[0].ravel()[self.order(np, sizes)].reshape(reads[0].shape),)

    def order(self, np: Any, sizes: Sizes) -> Any:
        """Of each element of the blocks the place that it has in the tensor."""
        shape = [cut.held.bind(sizes) for cut in self.cuts]
        places = np.arange(prod(shape)).reshape(shape)
        return np.concatenate([places[box].ravel() for box in boxes(self.cuts, sizes)])


@dataclass(frozen=True)
class Unpack(Pack):
    """dst is what pack has made src of."""

    syntax = "unpack %{src} -> %{dst} in {cuts}"

    def order(self, np: Any, sizes: Sizes) -> Any:
        return np.argsort(super().order(np, sizes))


@dataclass(frozen=True)
class Fill(Compute):
    """Every element of dst = value, which the dtype must represent."""

    dst: Write
    value: float
    syntax = "fill %{dst} with {value}"
    work = "move"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return (self.value,)


# --- communication: contiguous buffers of one dtype -------------------------------------------------------------------


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
    sent_along: int | None = None  # the dim of src that its blocks share
    received_along: int | None = None  # and that of dst

    @property
    def is_shared(self) -> bool:
        return self.sent_along is not None or self.received_along is not None

    @property
    def may_differ(self) -> bool:
        """Whether ranks may send different numbers of elements."""
        return self.is_shared


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
class AllGather(Collective):
    """dst holds the src of every rank of the process group, in process group order."""

    src: Read
    dst: Write
    channel: str
    received_along: int | None = None
    syntax = "all_gather %{src} -> %{dst} along {received_along} on {channel}"
    in_place = "block of dst"
    blocks = "dst"


@dataclass(frozen=True)
class AllReduce(Reduction):
    """dst = the reduction of every rank's src. src may be dst."""

    src: Read
    dst: Write
    op: str
    channel: str
    syntax = "all_reduce {op} %{src} -> %{dst} on {channel}"
    in_place = "src"


@dataclass(frozen=True)
class ReduceScatter(Reduction):
    """dst = this rank's block of the reduction of every rank's src."""

    src: Read
    dst: Write
    op: str
    channel: str
    sent_along: int | None = None
    syntax = "reduce_scatter {op} %{src} along {sent_along} -> %{dst} on {channel}"
    takes_block = True
    in_place = "block of src"
    blocks = "src"


@dataclass(frozen=True)
class Broadcast(Collective):
    """dst = the src of the rank whose coordinate in the process group is root."""

    src: Read
    dst: Write
    root: Expr
    channel: str
    syntax = "broadcast %{src} -> %{dst} from {root} on {channel}"
    in_place = "src"
    at_root = "src"


@dataclass(frozen=True)
class BroadcastToOthers(Collective):
    """On every rank of the process group but the root, dst = the src of the root, which keeps it.

    In place on the root. The root needs no dst, and no other rank a src: they may be on two meshes.
    """

    src: Read
    dst: Write
    root: Expr
    channel: str
    syntax = "broadcast_to_others %{src} to %{dst} from {root} on {channel}"
    at_root = "src"
    not_at_root = "dst"


@dataclass(frozen=True)
class Reduce(Reduction):
    """At root, dst = the reduction of every rank's src; elsewhere dst is not touched."""

    src: Read
    dst: Write
    op: str
    root: Expr
    channel: str
    syntax = "reduce {op} %{src} -> %{dst} to {root} on {channel}"
    in_place = "src"
    at_root = "dst"


@dataclass(frozen=True)
class Gather(Collective):
    """At root, dst holds the src of every rank, in process group order; elsewhere it is not touched. Sends and recvs in a group."""

    src: Read
    dst: Write
    root: Expr
    channel: str
    syntax = "gather %{src} -> %{dst} to {root} on {channel}"
    blocks = "dst"
    grouped = True
    at_root = "dst"


@dataclass(frozen=True)
class Scatter(Collective):
    """dst = this rank's block of the src of root; elsewhere src is not touched. Sends and recvs in a group."""

    src: Read
    dst: Write
    root: Expr
    channel: str
    syntax = "scatter %{src} -> %{dst} from {root} on {channel}"
    blocks = "src"
    takes_block = True
    grouped = True
    at_root = "src"


@dataclass(frozen=True)
class AllToAll(Collective):
    """Block i of src goes to the i-th rank of the process group, and block i of dst comes from it. Sends and recvs in a group."""

    src: Read
    dst: Write
    channel: str
    sent_along: int | None = None
    received_along: int | None = None
    syntax = "all_to_all %{src} along {sent_along} -> %{dst} along {received_along} on {channel}"
    takes_block = True
    grouped = True


@dataclass(frozen=True)
class CollectivePermute(Collective):
    """dst = the src of the rank that `sources` names for this one's number in the process group; a rank without a source gets zeros.

    A collective permute: a rank sends to at most one other, itself included. A send and a recv in a group.
    """

    src: Read
    dst: Write
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


class OneSided(Communication):
    """What a rank does with the windows of a peer, given by its coordinate in the process group, and the signals that order it.

    A signal has a number, and is counted: the n-th wait for the signals of one peer and number, in the order in which the host issues
    them, ends when the n-th of them is there. What peers touch lies in windows, at the place that it has on this rank.
    """

    peer: Expr


class Signalled(OneSided):
    """Raises a signal, or waits for one."""

    signal: int


@dataclass(frozen=True)
class Put(Signalled):
    """Writes src to where dst is on the peer, then signals that. src need not lie in a window."""

    src: Read
    dst: RemoteWrite
    peer: Expr
    signal: int
    channel: str
    syntax = "put %{src} -> %{dst} at {peer} signal {signal} on {channel}"
    posts = "signal"


@dataclass(frozen=True)
class Get(OneSided):
    """dst = what src is on the peer."""

    src: RemoteRead
    peer: Expr
    dst: Write
    channel: str
    syntax = "get %{src} at {peer} -> %{dst} on {channel}"
    posts = "get"


@dataclass(frozen=True)
class Signal(Signalled):
    """Tells the peer that it may read the buffer, or write it: a credit."""

    signal: int
    peer: Expr
    buffer: Guarded
    channel: str
    syntax = "signal {signal} at {peer} for %{buffer} on {channel}"
    posts = "signal"


@dataclass(frozen=True)
class WaitSignal(Signalled):
    """The current stream waits for the peer's next signal of this number: what it says of the buffer is true then."""

    signal: int
    peer: Expr
    buffer: Guarded
    channel: str
    syntax = "wait_signal {signal} from {peer} for %{buffer} on {channel}"
    posts = "wait_signal"


@dataclass(frozen=True)
class Group(Instruction):
    """Communications of one transport, posted together."""

    body: Body
    syntax = "group {body}"
    grouped = True


# --- streams and events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnStream(Instruction):
    """The body runs on stream `index % count` of the named streams."""

    stream: Stream
    index: Expr
    body: Body
    syntax = "stream {stream}[{index}] {body}"


@dataclass(frozen=True)
class Fork(Instruction):
    """The named streams wait for what the caller's stream holds."""

    stream: Forked
    syntax = "fork {stream}"
    orders = True


@dataclass(frozen=True)
class Join(Instruction):
    """The caller's stream waits for what the named streams hold."""

    stream: Joined
    syntax = "join {stream}"
    orders = True


@dataclass(frozen=True)
class Record(Instruction):
    """The event marks what the current stream holds now. Equivalent to cudaEventRecord."""

    event: Recorded
    index: Expr
    syntax = "record {event}[{index}]"
    orders = True


@dataclass(frozen=True)
class Wait(Instruction):
    """The current stream waits for the event as last recorded in this call. Equivalent to cudaStreamWaitEvent."""

    event: Awaited
    index: Expr
    syntax = "wait {event}[{index}]"
    orders = True


# --- control ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Let(Instruction):
    out: Index
    value: Expr
    syntax = "%{out} = {value}"
    calls = False


@dataclass(frozen=True)
class For(Instruction):
    out: Index
    count: Size
    body: Body
    syntax = "for %{out} in 0..{count} {body}"

    @property
    def trips(self) -> Size:
        return self.count


@dataclass(frozen=True)
class If(Instruction):
    condition: Expr
    body: Body
    orelse: Body = ()
    syntax = "if {condition} {body}{orelse}"

    @property
    def condition_of_body(self) -> Expr:
        return self.condition


@dataclass(frozen=True)
class Call(Instruction):
    """Runs a function of the program, which forks from the caller's stream and joins it by itself."""

    function: Called
    srcs: Reads
    dsts: Writes
    syntax = "call @{function} {srcs} -> {dsts}"


@dataclass(frozen=True)
class OnMesh(Instruction):
    """The ranks of a mesh do the body, the others nothing. Inside, axes are those of that mesh. What it allocates stays."""

    mesh: Mesh
    body: Body
    syntax = "on {mesh} {body}"

    @property
    def ranks(self) -> Mesh:
        return self.mesh


ACTIVATIONS = ("relu", "gelu_tanh")  # ops that a matmul may end with
FEW_ROWS = 8  # at most, of products that a kernel computes: hw::kFewRows
PRODUCTS = 4  # at most, of such a kernel: hw::kProducts


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """An input or output: its global type, of which each rank holds the part that HostProgram.local_type says.

    An output may lie in the memory of an input of its type, which is donated: that is overwritten.
    """

    name: str
    type: TensorType
    memory: str = ""  # the name of that input


@dataclass(frozen=True)
class Kernel:
    """A fused run of pointwise and reduction ops on local tensors, row-major in the eyes of the ops.

    `ends` says why it does not go on with what uses its results.
    """

    name: str
    inputs: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    returned: tuple[str, ...] = ()  # the names of its results, where that is more than the last value
    ends: str = field(default="", compare=False)

    @property
    def results(self) -> tuple[Parameter, ...]:
        values = {op.result.name: op.result for op in self.ops}
        return tuple(Parameter(name, values[name].type) for name in self.returned or (self.ops[-1].result.name,))

    @property
    def telling_name(self) -> str:
        """A name that lists the ops, if they are few, and the results: `negative_multiply_y`, or `fused_y`."""
        words, results = [op.kind for op in self.ops], [result.name for result in self.results]
        if len(words) > MAX_WORDS:
            words = ["fused"]
        elif results[0].startswith(f"{words[-1]}_"):  # it is named after the op already
            words.pop()
        return "_".join([*words, *results, *([] if words else ["kernel"])])


@dataclass(frozen=True)
class Function:
    """Instructions that are called: a function. What it allocates is there once, and its calls use it one after another."""

    name: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    body: Body


@dataclass(frozen=True)
class Channel:
    """`tp: tp two_sided`: a communicator of the ranks of a mesh that differ only along some axes, with how bytes travel on it."""

    name: str
    mesh: Mesh  # the program's, or one of some of its ranks
    axes: tuple[str, ...]
    transport: Transport

    @property
    def size(self) -> int:
        """The number of ranks of a process group."""
        return self.mesh.size_of(self.axes)

    @property
    def takes_turns(self) -> bool:
        """Whether what is posted on it and on another such channel must not run at the same time on a device."""
        return self.size > 1 and self.transport.holds_multiprocessors


@dataclass(frozen=True)
class Streams:
    """`ring[4]`: four streams, walked round robin."""

    name: str
    count: int


@dataclass(frozen=True)
class Events:
    name: str
    count: int


@dataclass(frozen=True)
class HostProgram:
    name: str
    mesh: Mesh
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    channels: tuple[Channel, ...] = ()
    streams: tuple[Streams, ...] = ()
    events: tuple[Events, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    body: Body = ()
    uneven: tuple[str, ...] = ()  # sizes that need not divide: of M a rank holds `local(M, x)`, not `M/8`
    functions: tuple[Function, ...] = ()  # a function stands before those that call it
    user_kernels: tuple[UserKernel, ...] = ()

    def __str__(self) -> str:
        from hostweave.host_ir.text import print_host

        return print_host(self)

    @staticmethod
    def parse(text: str) -> HostProgram:
        """The host program that `text` prints. Raises ParseError with a line and column."""
        from hostweave.host_ir.text import parse_host

        return parse_host(text)

    def channel(self, name: str) -> Channel:
        return next(channel for channel in self.channels if channel.name == name)

    @property
    def libraries(self) -> frozenset[str]:
        """What it is linked with beside what all programs are."""
        return frozenset(i.library for body in (self.body, *(f.body for f in self.functions)) for i in walk(body) if i.library)

    def local_type(self, parameter: Parameter) -> BufferType:
        return parameter.type.local(self.mesh, self.uneven)

    def symbols(self) -> tuple[str, ...]:
        """The names of the symbolic sizes, in order of first appearance in the inputs and outputs."""
        return _symbols(self)


P = ParamSpec("P")


def analysis(compute: Callable[Concatenate[HostProgram, P], T]) -> Callable[Concatenate[HostProgram, P], T]:
    """`compute`, run once a program: what it finds is kept with the program, which never changes, and is not to be changed either."""

    def once(program: HostProgram, /, *args: P.args, **kwargs: P.kwargs) -> T:
        known: dict[object, T] = program.__dict__.setdefault("_analyses", {})
        key = compute, args, tuple(kwargs.items())
        if key not in known:
            known[key] = compute(program, *args, **kwargs)
        return known[key]

    return once


@analysis
def _symbols(program: HostProgram) -> tuple[str, ...]:
    shapes = [size for p in (*program.inputs, *program.outputs) for size in p.type.shape]
    return tuple(dict.fromkeys(name for size in shapes for name in size.symbols))


@analysis
def buffer_types(program: HostProgram) -> dict[str, BufferType]:
    """The local type of every buffer and view by name."""
    types = {p.name: program.local_type(p) for p in (*program.inputs, *program.outputs)}
    for instruction in walk(program.body):
        types.update(instruction.defined(types))
    return types
