"""The host IR: what the CPU of one rank does, in order. One program for all ranks; the rank is a run-time value.

Each instruction is one dataclass. The `syntax` line drives printer and parser. The roles of its fields (what it defines, reads, frees,
forks) and its traits are all that analyses, passes and the check ask for, so that a new instruction needs no edit in any of them.
An instruction outside every `stream` block runs on the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import prod
from typing import Annotated, Any, ClassVar, Concatenate, ParamSpec, TypeVar, get_origin, get_type_hints

from hostweave.base.errors import Location
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.host_ir.expr import Const, Expr
from hostweave.transports.transport import Transport
from hostweave.types.blocks import Cuts, boxes
from hostweave.types.mesh import Mesh
from hostweave.types.rank_sizes import Sizes
from hostweave.types.routes import Route
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, TensorType

T = TypeVar("T")

# The roles of fields: what the instruction does to what they name. `names` finds it.
Allocated = Annotated[str, "allocate"]  # the name of memory that the instruction defines
Viewed = Annotated[str, "view"]  # of a view
Index = Annotated[str, "index"]  # the name of an integer that it introduces
Read = Annotated[str, "read"]  # a buffer whose bytes it reads
Reads = Annotated[tuple[str, ...], "read"]
Write = Annotated[str, "write"]
Writes = Annotated[tuple[str, ...], "write"]
Update = Annotated[str, "update"]  # reads and writes
Alias = Annotated[str, "alias"]  # a buffer that is named but whose bytes are not touched
Freed = Annotated[str, "free"]  # the same, of memory whose bytes others may have from here on
Launched = Annotated[str, "launch"]  # a kernel
Called = Annotated[str, "call"]  # a function
Forked = Annotated[str, "fork"]  # streams
Joined = Annotated[str, "join"]
Stream = Annotated[str, "stream"]  # the stream of the field `index`, on which its body runs
Recorded = Annotated[str, "record"]  # the event of the field `index`
Awaited = Annotated[str, "wait"]

INCLUDED = {"update": ("read", "write"), "allocate": ("define",), "view": ("define",), "free": ("alias",)}  # what a role is besides
NAMED = ("define", "index", "read", "write", "alias")  # of buffers and indices


@dataclass(frozen=True)
class Instruction:
    """What is asked of instructions stands here and on the classes below: effects by the roles of fields, traits as class variables."""

    syntax: ClassVar[str] = ""  # the words before a field are left out with it where it has its default value
    calls: ClassVar[bool] = True  # False: it names memory or an integer, and nothing runs
    shows: ClassVar[str] = ""  # of a view of all elements: "all", or "in order" where they are in their order
    copies: ClassVar[bool] = False  # it is nothing where src and dst are the same bytes
    work: ClassVar[str] = ""  # of this rank alone, on the stream that it stands on: to "compute", or to "move" what is there
    orders: ClassVar[bool] = False  # streams, one after another: no work is moved past it
    grouped: ClassVar[bool] = False  # it posts sends and recvs in a group
    posts: ClassVar[str] = ""  # of a communication: send, recv or collective, each of which meets its own in order
    at_root: ClassVar[str] = ""  # the field whose buffer only the root of a collective touches
    not_at_root: ClassVar[str] = ""  # and the one that only the others do
    takes_block: ClassVar[bool] = False  # of what each rank sends, a rank gets the block of its number in the process group
    in_place: ClassVar[str] = ""  # whose bytes dst may have: the field "src" or "accumulate", or the own "block of src", "block of dst"
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    # What an instruction of no class in particular says of itself.

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        """The types of what it defines, from those of the buffers before it. Raises ValueError where there is no such view."""
        return {}

    @property
    def span(self) -> tuple[int, Expr, Size] | None:
        """Of a view of some indices of a dim: the dim, the first one, and over how many they spread."""
        return None

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size] | None:
        """Of a view of one of equal chunks: the dim, the number of the chunk, and how many there are."""
        return None

    @property
    def chosen_by(self) -> Expr | None:
        """Whether a view of one of two buffers is of the first that it names or of the second one; None: it has one."""
        return None

    def senders(self, rank_in_group: int, readers: tuple[T, ...]) -> tuple[T, ...]:
        """Those whose data a rank of the process group gets from a communication, of all that read."""
        return readers

    @property
    def packed(self) -> Cuts:
        """How a tensor is cut whose blocks, one after another, are in what it names; nothing where none is."""
        return ()

    @property
    def ranks(self) -> Mesh | None:
        """Whose ranks alone do its body, along whose axes; None: those that come to it. What the body allocates stays."""
        return None

    @property
    def trips(self) -> Size | None:
        """How many times its body runs, one after another; None: once."""
        return None

    @property
    def condition_of_body(self) -> Expr | None:
        """Whether its first body runs or the second one; None: each."""
        return None


Body = tuple[Instruction, ...]
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
class Strided(Piece):
    """`size` indices of a dim from `start` on, `step` apart. Pointer arithmetic."""

    dim: int
    size: Size
    start: Expr
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


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """An input or output: its global type, of which each rank holds the part that HostProgram.local_type says."""

    name: str
    type: TensorType


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

    def local_type(self, parameter: Parameter) -> BufferType:
        return BufferType(parameter.type.dtype, parameter.type.local_shape(self.mesh, self.uneven))

    def symbols(self) -> tuple[str, ...]:
        """The names of the symbolic sizes, in order of first appearance in the inputs and outputs."""
        return _symbols(self)


# --- generic access ---------------------------------------------------------------------------------------------------


def per_kind(function: Callable[[type[Instruction]], T]) -> Callable[[type[Instruction]], T]:
    """`function`, worked out once for each kind of instruction."""
    known: dict[type[Instruction], T] = {}

    def look_up(kind: type[Instruction]) -> T:
        if kind not in known:
            known[kind] = function(kind)
        return known[kind]

    return look_up


@per_kind
def roles(kind: type[Instruction]) -> dict[str, str]:
    """The role of every field that has one, by the field's name."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(kind) if get_origin(hints[f.name]) is Annotated}


_FIELDS: dict[tuple[type[Instruction], tuple[str, ...]], tuple[str, ...]] = {}  # of a class, those of some roles


def _fields_of(instruction: Instruction, wanted: tuple[str, ...]) -> tuple[str, ...]:
    key = type(instruction), wanted
    if key not in _FIELDS:
        found = roles(type(instruction)).items()
        _FIELDS[key] = tuple(name for name, role in found if not {role, *INCLUDED.get(role, ())}.isdisjoint(wanted))
    return _FIELDS[key]


def names(instruction: Instruction, *wanted: str) -> tuple[str, ...]:
    """The names in the fields of the wanted roles, and of those that include them."""
    if not (fields := _fields_of(instruction, wanted)):
        return ()
    found: list[str] = []
    for name in fields:
        value = getattr(instruction, name)
        found.extend(value) if isinstance(value, tuple) else found.append(value)
    return tuple(found)


def with_names(instruction: Instruction, new: Mapping[str, str], *wanted: str) -> Instruction:
    """The same under new names, as far as there are, in the fields of the wanted roles; itself where that changes none."""
    changed: dict[str, Any] = {}
    for name in _fields_of(instruction, wanted):
        old = getattr(instruction, name)
        changed[name] = tuple(new.get(each, each) for each in old) if isinstance(old, tuple) else new.get(old, old)
    return replace(instruction, **changed) if any(getattr(instruction, name) != value for name, value in changed.items()) else instruction


Slot = tuple[str, Expr]  # a stream or event: the name of its pool, and which it is


def slot(instruction: Instruction, role: str) -> Slot | None:
    """The stream on which its body runs, the event that it records or that it waits for; None where it has no field of the role."""
    return next(((pool, getattr(instruction, "index")) for pool in names(instruction, role)), None)  # noqa: B009


def expressions(instruction: Instruction) -> list[Expr]:
    return [value for value in vars(instruction).values() if isinstance(value, Expr)]


def with_expressions(instruction: Instruction, change: Callable[[Expr], Expr]) -> Instruction:
    """The same with each expression changed; itself where none is."""
    given = {name: value for name, value in vars(instruction).items() if isinstance(value, Expr)}
    changed: dict[str, Any] = {name: new for name, value in given.items() if (new := change(value)) != value}
    return replace(instruction, **changed) if changed else instruction


@per_kind
def _body_fields(kind: type[Instruction]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.name in ("body", "orelse"))


def bodies(instruction: Instruction) -> tuple[Body, ...]:
    return tuple([getattr(instruction, name) for name in _body_fields(type(instruction))])


def with_bodies(instruction: Instruction, change: Callable[[Body], Body]) -> Instruction:
    """The same with each body in it changed; itself where none is."""
    inner = {name: (body := getattr(instruction, name), change(body)) for name in _body_fields(type(instruction))}
    changed = {name: new for name, (old, new) in inner.items() if new is not old}
    return replace(instruction, **changed) if changed else instruction  # type: ignore[arg-type]


def together(instructions: Iterable[Instruction]) -> Body:
    """Neighbours on one mesh in one `on` body."""
    result: list[Instruction] = []
    for i in instructions:
        if i.ranks and result and result[-1].ranks == i.ranks:
            result[-1] = with_bodies(result[-1], lambda body, i=i: body + bodies(i)[0])  # type: ignore[misc]
        else:
            result.append(i)
    return tuple(result)


def walk(body: Body) -> Iterator[Instruction]:
    """Every instruction, outer before inner, in program order."""
    for instruction in body:
        yield instruction
        for inner in bodies(instruction):
            yield from walk(inner)


def of_kind(table: Mapping[type[Instruction], T], kind: type[Instruction]) -> T:
    """What a table has for a class of instructions, or for the nearest class above it."""
    return next(table[base] for base in kind.__mro__ if base in table)


Outcome = Instruction | Body | None  # of a rule: None keeps, () deletes, a tuple replaces
Edits = Mapping[int, Instruction | Body]  # by the numbers of instructions in `walk`


def rewrite(body: Body, rule: Callable[[Instruction], Outcome]) -> Body:
    """Applies `rule` to every instruction, inner before outer: it sees what has become of a body inside. Itself where nothing changes."""
    result: list[Instruction] = []
    for old in body:
        new = with_bodies(old, lambda inner: rewrite(inner, rule))
        outcome = rule(new)
        result.extend((new,) if outcome is None else outcome if isinstance(outcome, tuple) else (outcome,))
    return unless_same(body, result)


def edited(body: Body, edits: Edits) -> Body:
    """Replaces the instructions of these numbers. What an edit keeps of its instruction has the edits inside of it, too.

    Raises KeyError for an edit that would have no effect: the body has no such instruction, or it stands in one that is replaced.
    """
    walked = 0

    def after(body: Body) -> Body:
        nonlocal walked
        result: list[Instruction] = []
        for old in body:
            number, walked = walked, walked + 1
            new, edit = with_bodies(old, after), edits.get(number, (old,))
            edit = (edit,) if isinstance(edit, Instruction) else edit
            if not any(i is old for i in edit) and not edits.keys().isdisjoint(range(number + 1, walked)):
                raise KeyError(f"an edit replaces an instruction in which others are edited: {old}")
            result.extend(new if i is old else i for i in edit)
        return unless_same(body, result)

    result = after(body)
    if outside := [edit for number, edit in edits.items() if not 0 <= number < walked]:
        raise KeyError(f"an edit names no instruction of the body; it gives {outside[0]}")
    return result


def unless_same(body: Body, result: list[Instruction]) -> Body:
    """What has become of a body; the body itself where that is the same."""
    is_same = len(result) == len(body) and all(new is old for new, old in zip(result, body, strict=True))
    return body if is_same else tuple(result)


# --- types of views ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def row_major(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """The strides of a contiguous buffer, in elements."""
    strides: list[Size] = []
    step = Size()
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def strides_of(buffer: BufferType) -> tuple[Size, ...]:
    return row_major(buffer.shape) if buffer.strides is None else buffer.strides


def strided(buffer: BufferType, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> BufferType:
    """A view's type, without strides where it is contiguous. The stride of a dim of size 1 has no effect."""
    contiguous = all(e == Size() or s == c for e, s, c in zip(shape, strides, row_major(shape), strict=True))
    return BufferType(buffer.dtype, shape, None if contiguous else strides)


def _with(values: tuple[Size, ...], dim: int, value: Size) -> tuple[Size, ...]:
    """The same with another one for a dim."""
    return (*values[:dim], value, *values[dim + 1 :])


def _reshaped_strides(shape: tuple[Size, ...], strides: tuple[Size, ...], wanted: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides of the same elements under another shape: each run of dims that is split or merged must be contiguous in itself."""
    result: list[Size] = []
    source = [(e, s) for e, s in zip(shape, strides, strict=True) if e != Size()]
    i = 0
    target = list(wanted)
    j = 0
    while j < len(target):
        if target[j] == Size():
            result.append(Size())
            j += 1
            continue
        if i == len(source):
            raise ValueError("a reshape keeps the number of elements")
        have, want = source[i][0], target[j]
        i_end, j_end = i + 1, j + 1
        while have != want:  # grow the smaller side; where names hide which that is, the target first
            grow_source = _whole(want.divided_by(have)) or j_end == len(target)
            if grow_source and i_end < len(source) and source[i_end - 1][1] == source[i_end][1] * source[i_end][0]:
                have, i_end = have * source[i_end][0], i_end + 1
            elif not grow_source:
                want, j_end = want * target[j_end], j_end + 1
            else:
                raise ValueError("these dims are not contiguous in memory, or the number of elements differs")
        step = source[i_end - 1][1]
        run: list[Size] = []
        for size in reversed(target[j:j_end]):
            run.append(step)
            step = step * size
        result.extend(reversed(run))
        i, j = i_end, j_end
    if i != len(source):
        raise ValueError("a reshape keeps the number of elements")
    return tuple(result)


def _whole(quotient: Size | None) -> bool:
    return quotient is not None and quotient.divisor == 1


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
