"""Instructions of the host IR for streams, events, control flow and meshes."""

from dataclasses import dataclass

from hostweave.host_ir.expr import Expr
from hostweave.host_ir.tree import Awaited, Body, Called, Forked, Index, Instruction, Joined, Reads, Recorded, StreamPool, Writes
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size


@dataclass(frozen=True)
class OnStream(Instruction):
    """Runs the body on stream `index % count` of the pool."""

    stream: StreamPool
    index: Expr
    body: Body
    syntax = "stream {stream}[{index}] {body}"


@dataclass(frozen=True)
class Fork(Instruction):
    """Makes the streams of the pool wait for the caller's stream."""

    stream: Forked
    first: int | None = None  # number of streams that wait, from index 0; None: all
    syntax = "fork {stream} first {first}"
    orders = True


@dataclass(frozen=True)
class Join(Instruction):
    """Makes the caller's stream wait for the streams of the pool."""

    stream: Joined
    first: int | None = None
    syntax = "join {stream} first {first}"
    orders = True


@dataclass(frozen=True)
class Record(Instruction):
    """Records the event on the current stream (cudaEventRecord)."""

    event: Recorded
    index: Expr
    syntax = "record {event}[{index}]"
    orders = True


@dataclass(frozen=True)
class Wait(Instruction):
    """Makes the current stream wait for the latest record of the event in this call (cudaStreamWaitEvent)."""

    event: Awaited
    index: Expr
    syntax = "wait {event}[{index}]"
    orders = True


@dataclass(frozen=True)
class Mark(Instruction):
    """Records the time at which the current stream reaches the mark. Only `Program.timeline` builds programs with marks."""

    syntax = "mark"
    orders = True
    marks = True


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
    """Runs a function of the program on the caller's stream."""

    function: Called
    srcs: Reads
    dsts: Writes
    syntax = "call @{function} {srcs} -> {dsts}"


@dataclass(frozen=True)
class OnMesh(Instruction):
    """Runs the body only on the ranks of a mesh. Coordinates in the body refer to this mesh. Allocations
    outside of nested bodies are visible after this body."""

    mesh: Mesh
    body: Body
    syntax = "on {mesh} {body}"

    @property
    def ranks(self) -> Mesh:
        return self.mesh
