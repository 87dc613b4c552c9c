"""Signals between the ranks of a process group."""

from collections.abc import Callable

from hostweave.communication.dataflow import rank_in_group
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr
from hostweave.transports.transport import SIGNALS
from hostweave.types.size import Size

SIGNAL = 0  # the only signal number that all supported versions of the communication library have


class Signals:
    """Emits the signals and waits of one rank, on a one-sided channel of its process group."""

    def __init__(self, b: Builder, axes: tuple[str, ...]):
        """`axes` are axes of the current mesh of the builder."""
        self.b, self.mesh, self.axes = b, b.present_mesh, axes
        self.rank, self.size = rank_in_group(self.mesh, axes), self.mesh.size_of(axes)
        self.channel = b.channel(axes, SIGNALS)

    def each_hop(self, emit: Callable[[Expr, Expr], None]) -> None:
        """Emits code for each peer. `emit` gets the index of the peer in the process group, and among the peers of this rank."""
        if self.size == 2:
            emit((self.rank + 1) % self.size, Const(0))
        elif self.size > 2:
            with self.b.loop(Size(self.size - 1)) as hop:
                emit((self.rank + 1 + hop) % self.size, hop)

    def each_peer(self, emit: Callable[[Expr], None]) -> None:
        self.each_hop(lambda peer, _: emit(peer))

    def signal_to(self, peer: Expr, buffer: str, state: str, number: int = SIGNAL) -> None:
        self.b.emit(ir.Signal(number, peer, buffer, state, self.channel))

    def wait_for(self, peer: Expr, buffer: str, state: str, number: int = SIGNAL) -> None:
        self.b.emit(ir.WaitSignal(number, peer, buffer, state, self.channel))

    def signal(self, buffer: str, state: str) -> None:
        """Emits a signal to each peer. `ir.SIGNAL_STATES` lists the states."""
        self.each_peer(lambda peer: self.signal_to(peer, buffer, state))

    def wait(self, buffer: str, state: str) -> None:
        self.each_peer(lambda peer: self.wait_for(peer, buffer, state))
