"""One-sided instructions of the host IR: puts, gets, and the signals that order them."""

from dataclasses import dataclass

from hostweave.host_ir.expr import Expr
from hostweave.host_ir.instructions.communication import Communication
from hostweave.host_ir.tree import Guarded, Read, RemoteRead, RemoteWrite, Write

SIGNAL_COUNTERS = 64  # counters per peer, numbered from 0
# States of a buffer that a signal can announce. `free`: the receiver of the signal may write the sender's buffer. `ready`: the receiver may
# read the sender's buffer. `read`: the sender has read the receiver's buffer. `written`: the sender has written the receiver's buffer.
SIGNAL_STATES = ("free", "ready", "read", "written")


class OneSided(Communication):
    """An access to the window of a peer, or a signal or wait that orders accesses to windows. `peer` is an index in the process group.

    Each pair of sender and receiver has separate counters. The n-th wait that a host issues for a counter waits for the n-th signal.
    Buffers that peers access are in windows, at the same offset on all ranks.
    """

    peer: Expr
    received_along: int | None = None  # dim of dst that is split into one block per rank; only the peer's block is written


class Signalled(OneSided):
    """Sends a signal that announces `state`, or waits for such a signal. `signal` is the number of the counter."""

    signal: int
    state: str


@dataclass(frozen=True)
class Put(Signalled):
    """Writes src to dst on the peer, then sends a signal."""

    src: Read
    dst: RemoteWrite
    peer: Expr
    signal: int
    channel: str
    syntax = "put %{src} -> %{dst} at {peer} signal {signal} on {channel}"
    state = "written"
    posts = "signal"


@dataclass(frozen=True)
class Get(OneSided):
    """dst = the src of the peer. With `received_along`, writes only the peer's block of dst. Blocks may differ in size."""

    src: RemoteRead
    peer: Expr
    dst: Write
    channel: str
    received_along: int | None = None
    syntax = "get %{src} at {peer} -> %{dst} along {received_along} on {channel}"
    posts = "get"


@dataclass(frozen=True)
class OfBuffer(Signalled):
    """A signal about a buffer, or a wait for such a signal. `SIGNAL_STATES` lists the states."""

    signal: int
    peer: Expr
    buffer: Guarded
    state: str
    channel: str


class Signal(OfBuffer):
    """Signals the state of a buffer to the peer."""

    syntax = "signal {signal} at {peer} that %{buffer} is {state} on {channel}"
    posts = "signal"


class WaitSignal(OfBuffer):
    """Makes the current stream wait for the peer's next signal with number `signal`. The signal announces `state`."""

    syntax = "wait_signal {signal} from {peer} until %{buffer} is {state} on {channel}"
    posts = "wait_signal"
