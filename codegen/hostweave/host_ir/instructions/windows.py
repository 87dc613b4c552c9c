"""Instructions of the host IR by which a rank reads and writes the memory of others, and signals that order them."""

from dataclasses import dataclass

from hostweave.host_ir.expr import Expr
from hostweave.host_ir.instructions.communication import Communication
from hostweave.host_ir.tree import Guarded, Read, RemoteRead, RemoteWrite, Write


class OneSided(Communication):
    """What a rank does with the windows of a peer, given by its coordinate in the process group, and the signals that order it.

    A signal has a number, and is counted: the n-th wait for the signals of one peer and number, in the order in which the host issues
    them, ends when the n-th of them is there. What peers touch lies in windows, at the place that it has on this rank.
    """

    peer: Expr
    received_along: int | None = None  # the dim of dst of which the peer's block is written


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
    """dst = what src is on the peer; where the ranks share a dim of dst, its block of that, of which it has more or less than others."""

    src: RemoteRead
    peer: Expr
    dst: Write
    channel: str
    received_along: int | None = None
    syntax = "get %{src} at {peer} -> %{dst} along {received_along} on {channel}"
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
