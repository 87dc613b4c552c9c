"""Emits each collective of a process group as one instruction."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from hostweave.communication.one_sided_collectives import OneSidedCollectives
from hostweave.communication.packing import TermReduction
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const
from hostweave.transports.transport import COLLECTIVES, SIGNALS


class LibraryCollectives:
    """Emits the collectives of a process group for contiguous buffers. If blocks may differ in size, `along` is the dim that is split into
    the ranks' blocks."""

    takes_uneven = True

    def __init__(self, b: Builder, axes: tuple[str, ...]):
        self.b, self.channel = b, b.channel(axes)

    def all_gather(self, src: str, dst: str, along: int | None = None, wants_own: bool = True) -> None:
        """The library writes this rank's block of `dst` even without `wants_own`."""
        self.b.emit(ir.AllGather(src, dst, self.channel, along))

    def reduce_scatter(self, src: str, dst: str, reduction: TermReduction, along: int | None = None) -> None:
        self.b.emit(ir.ReduceScatter(src, dst, reduction.op, self.channel, along))

    def all_reduce(self, src: str, dst: str, reduction: TermReduction) -> None:
        self.b.emit(ir.AllReduce(src, dst, reduction.op, self.channel))

    def all_to_all(self, src: str, dst: str, cut_along: int | None, joined_along: int | None) -> None:
        self.b.emit(ir.AllToAll(src, dst, self.channel, cut_along, joined_along))

    def collective_permute(self, src: str, dst: str, sources: ir.Sources) -> None:
        self.b.emit(ir.CollectivePermute(src, dst, sources, self.channel))

    def reduce(self, src: str, dst: str, reduction: TermReduction, root: int, on_root: Callable[[], AbstractContextManager[None]]) -> None:
        """All ranks issue the reduction to rank `root`."""
        self.b.emit(ir.Reduce(src, dst, reduction.op, Const(root), self.channel))


def collectives_on(b: Builder, axes: tuple[str, ...]) -> LibraryCollectives | OneSidedCollectives:
    return LibraryCollectives(b, axes) if b.carrying(COLLECTIVES, SIGNALS).carries >= COLLECTIVES else OneSidedCollectives(b, axes)
