"""Collectives on one-sided channels. A rank reads the windows of its peers between two signals.

    all_gather %x -> %y on x                           # on two ranks

becomes

    copy %x -> %x_packed                               # if %x is not in a window
    signal 0 at 1 - rank.x that %x_packed is ready on x          # the peer may read
    copy %x_packed -> %y_own
    wait_signal 0 from 1 - rank.x until %x_packed is ready on x
    get %x_packed at 1 - rank.x -> %y_i on x
    signal 0 at 1 - rank.x that %x_packed is read on x
    wait_signal 0 from 1 - rank.x until %x_packed is read on x   # this rank's window may be written again

If the result of a gather is in a window and the operand is not, each rank puts its operand into the rank's block of each peer's result:

    signal 0 at 1 - rank.x that %y is free on x                  # the peer may write
    copy %x -> %y_own
    wait_signal 0 from 1 - rank.x until %y is free on x
    put %x -> %y_own at 1 - rank.x signal 0 on x
    wait_signal 0 from 1 - rank.x until %y is written on x

A rank signals its peers before it waits, so ranks cannot block each other. In a CUDA graph, a second signal blocks the sender until the
receiver has waited for the first signal. A collective therefore waits for a peer before it signals this peer again.

In a reduce_scatter, a rank gets the terms of its block, and a kernel reduces them. In a reduce, the root gets all terms. An all_reduce is a
reduce_scatter and an all_gather. If the tensor is small or has no equal blocks, each rank instead gets all terms, and reduces them in rank
order. The results of all ranks are therefore equal.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from hostweave.communication.dataflow import expr_of
from hostweave.communication.packing import TermReduction, copied, split_terms
from hostweave.communication.signals import SIGNAL, Signals
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const, Expr, opposite
from hostweave.types.size import LocalSize, Size, product
from hostweave.types.tensor import BufferType

# Largest size at which an all_reduce with equal blocks has one round of reads. Latency dominates such an all_reduce.
ONE_ROUND_BYTES = 1 << 15


class OneSidedCollectives(Signals):
    """One-sided transfers with the interface of `LibraryCollectives`."""

    takes_uneven = False  # In an all_to_all, the size of an uneven block would depend on its sender and its receiver.

    def all_gather(self, src: str, dst: str, along: int | None = None, wants_own: bool = True) -> None:
        puts = self.lies_in_window(dst) and not self.lies_in_window(src)
        src = src if puts else self.in_window(src)
        shape, is_outside = self.b.types[src].shape, self.b.is_outside(src) and self.b.is_outside(dst)
        with self.b.outside() if is_outside else nullcontext():
            own = self.own_block(dst, shape, along)

        def copy_own() -> None:
            if wants_own:
                (self.b.copy_aside if is_outside else self.copy)(src, own)

        if puts:
            self.signal(dst, "free")
            copy_own()
            self.wait(dst, "free")
            self.each_peer(lambda peer: self.b.emit(ir.Put(src, own, peer, SIGNAL, self.channel)))
            self.wait(dst, "written")
        else:
            self.get_from_all(
                src, copy_own, lambda peer: (src, self.block(self.by_rank(dst, shape), peer) if along is None else dst), along
            )

    def all_to_all(self, src: str, dst: str, cut_along: int | None, joined_along: int | None) -> None:
        blocks, src = self.by_rank(dst), self.by_rank(self.in_window(src))
        own = self.block(src, self.rank)
        self.get_from_all(src, lambda: self.copy(own, self.block(blocks, self.rank)), lambda peer: (own, self.block(blocks, peer)))

    def reduce_scatter(self, src: str, dst: str, reduction: TermReduction, along: int | None = None) -> None:
        shape, src = self.b.types[dst].shape, self.in_window(src)
        is_outside = self.b.is_outside(src) and self.b.is_outside(dst)
        with self.b.outside() if is_outside else nullcontext():
            block = self.own_block(src, shape, along)
            own = self.b.reshape(block, shape, f"{src}_own")
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(self.b.types[dst].dtype, (Size(self.size - 1), *shape)))
        self.signal(src, "ready")
        self.each_hop(lambda peer, hop: self.wait_and_get(peer, block, self.block(terms, hop)))
        self.signal(src, "read")
        self.wait(src, "read")

        def add() -> None:
            reduction.emit((own, *split_terms(self.b, terms, terms)), dst)

        self.b.sum_later(add) if is_outside else add()

    def all_reduce(self, src: str, dst: str, reduction: TermReduction) -> None:
        """Emits a reduce_scatter and an all_gather. If the tensor is small or has no equal blocks, each rank reduces all terms instead."""
        type = self.b.types[dst]
        count = product(type.shape)
        block = count.divided_by(Size(self.size)) if count.coefficient % self.size == 0 and count.divisor == 1 else None
        if block is None or (count.is_int and int(count) * type.dtype.itemsize <= ONE_ROUND_BYTES):
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(type.dtype, (Size(self.size), *type.shape)))
            self.all_gather(src, terms)
            reduction.emit((terms,), dst)
            return
        reduced = self.b.allocate_here(f"{dst}_part", BufferType(type.dtype, (block,)))
        self.reduce_scatter(src, reduced, reduction)
        self.all_gather(reduced, dst)

    def reduce(self, src: str, dst: str, reduction: TermReduction, root: int, on_root: Callable[[], AbstractContextManager[None]]) -> None:
        other_ranks = [Const(rank) for rank in range(self.size) if rank != root]
        elsewhere = partial(ir.If, opposite(self.rank.equals(root)))
        src, type = self.in_window(src), self.b.types[dst]
        with self.b.inside(elsewhere):
            self.signal_to(Const(root), src, "ready")
        with on_root():
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(type.dtype, (Size(self.size), *type.shape)))
            self.copy(src, self.block(terms, Const(root)))
            for peer in other_ranks:
                self.get(peer, src, self.block(terms, peer))
            reduction.emit((terms,), dst)
        with self.b.inside(elsewhere):
            self.wait_for(Const(root), src, "read")

    def collective_permute(self, src: str, dst: str, sources: ir.Sources) -> None:
        distances = {None if source is None else (rank - source) % self.size for rank, source in enumerate(sources)}
        src = self.in_window(src)
        if distances == {0}:
            self.copy_locally(src, dst)
            return
        if len(distances) == 1 and (distance := distances.pop()) is not None:  # All sources are at the same distance.
            ahead = (self.rank + distance) % self.size
            self.signal_to(ahead, src, "ready")
            self.get((self.rank - distance) % self.size, src, dst)
            self.wait_for(ahead, src, "read")
            return
        receivers = {source: rank for rank, source in enumerate(sources) if source is not None}
        for rank, source in enumerate(sources):
            receiver = receivers.get(rank, rank)
            with self.b.inside(partial(ir.If, self.rank.equals(rank))):
                if receiver != rank:
                    self.signal_to(Const(receiver), src, "ready")
                if source is None:
                    self.b.emit(ir.Fill(dst, 0.0))
                elif source == rank:
                    self.copy_locally(src, dst)
                else:
                    self.get(Const(source), src, dst)
                if receiver != rank:
                    self.wait_for(Const(receiver), src, "read")

    def get_from_all(
        self, src: str, copy_own: Callable[[], None], buffers_of_peer: Callable[[Expr], tuple[str, str]], along: int | None = None
    ) -> None:
        """Emits gets from each peer, between signals. `buffers_of_peer` returns the source on the peer, and the destination here. With
        `along`, a get writes only the peer's block of the destination."""
        self.signal(src, "ready")
        copy_own()
        self.each_peer(lambda peer: self.wait_and_get(peer, *buffers_of_peer(peer), along))
        self.signal(src, "read")
        self.wait(src, "read")

    def wait_and_get(self, peer: Expr, src: str, dst: str, along: int | None = None) -> None:
        self.wait_for(peer, src, "ready")
        self.b.emit(ir.Get(src, peer, dst, self.channel, along))

    def get(self, peer: Expr, src: str, dst: str) -> None:
        """Emits a wait for the peer's signal, a get, and a signal that the peer's buffer has been read."""
        self.wait_and_get(peer, src, dst)
        self.signal_to(peer, src, "read")

    def copy(self, src: str, dst: str) -> None:
        self.b.emit(ir.Copy(self.b.reshape(src, self.b.types[dst].shape, f"{src}_own"), dst))

    def copy_locally(self, src: str, dst: str) -> None:
        """Emits a local copy. Copies a view of `src` with the sizes of `dst`, because equal local sizes may name different mesh axes."""
        self.b.emit(ir.Copy(self.b.first(src, self.b.types[dst].shape, f"{src}_own"), dst))

    def lies_in_window(self, name: str) -> bool:
        """True if the buffer is a whole parameter or allocation that is or will be in a window. A part could have different offsets on
        different ranks."""
        return self.b.is_in_window(self.b.memory_of(name))

    def in_window(self, src: str) -> str:
        return src if self.lies_in_window(src) else copied(self.b, src, None)

    def by_rank(self, name: str, block: tuple[Size, ...] | None = None) -> str:
        """View of a buffer as one block per rank. `block` is the shape of a block, by default the dims after the first dim."""
        shape = (Size(self.size), *(block or self.b.types[name].shape[1:]))
        return self.b.reshape(name, shape, f"{name}_by_rank")

    def block(self, by_rank: str, rank: Expr) -> str:
        return self.b.select(by_rank, 0, rank, f"{by_rank.removesuffix('_by_rank')}_block")

    def own_block(self, packed: str, block: tuple[Size, ...], along: int | None) -> str:
        """View of this rank's block. With `along`, the blocks may differ in size."""
        if along is None:
            return self.block(self.by_rank(packed, block), self.rank)
        shape = self.b.types[packed].shape
        rows = self.b.reshape(packed, (shape[along], *shape[:along], *shape[along + 1 :]), f"{packed}_rows")
        own = Size(1, (LocalSize(shape[along], self.axes, self.b.mesh),))
        own_rows = self.b.slice(rows, 0, own, self.rank * expr_of(shape[along].ceil_div(self.size)), f"{packed}_own")
        return self.b.reshape(own_rows, block, f"{packed}_block")
