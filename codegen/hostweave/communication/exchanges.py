"""Communication outside of loops on one-sided channels: ranks read each other's windows, and signals say when.

    all_gather %x -> %y on x

of two ranks becomes

    copy %x -> %x_packed                               # a window, where %x lies in none
    signal 0 at 1 - rank.x for %x_packed on x          # it is there
    copy %x_packed -> %y_own
    wait_signal 0 from 1 - rank.x for %x_packed on x
    get %x_packed at 1 - rank.x -> %y_i on x
    signal 0 at 1 - rank.x for %x_packed on x          # it has been read
    wait_signal 0 from 1 - rank.x for %x_packed on x   # and so has this rank's, which may be written again

What lies in no window, as an input does, is not copied to one for a gather; it is put to where the others want it:

    signal 0 at 1 - rank.x for %y on x                 # it may be written
    copy %x -> %y_own
    wait_signal 0 from 1 - rank.x for %y on x
    put %x -> %y_own at 1 - rank.x signal 0 on x
    wait_signal 0 from 1 - rank.x for %y on x

Each rank signals before it waits, so that no order of ranks stops another one, and waits for all before it signals again: in a CUDA graph
a signal is not given before its receiver has waited for the one before. Of what is reduced a rank reads the others' terms of its part,
which a kernel adds to its own term where that lies; few elements it reads all, and adds them up in the order of ranks, so that all ranks
round alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from hostweave.communication.packing import Reduction, apart
from hostweave.communication.signals import SIGNAL, Signals
from hostweave.communication.steps import expr_of
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const, Expr, opposite
from hostweave.types.size import LocalSize, Size, product
from hostweave.types.tensor import BufferType

SMALL = 1 << 15  # bytes: where one rank reads all, rather than its part of two readings, latency is what counts


class Exchange(Signals):
    """Communication of all ranks of a process group by reading and writing each other's memory, as `Posted` does it by collectives."""

    takes_uneven = False  # in an all_to_all, where a block depends on two ranks

    def all_gather(self, src: str, dst: str, along: int | None = None, wants_own: bool = True) -> None:
        puts = self.lies_in_window(dst) and not self.lies_in_window(src)
        src = src if puts else self.in_window(src)
        shape, is_outside = self.b.types[src].shape, self.b.is_outside(src) and self.b.is_outside(dst)
        with self.b.outermost() if is_outside else nullcontext():
            own = self.own_block(dst, shape, along)

        def copy_own() -> None:
            if wants_own:
                (self.b.copy_aside if is_outside else self.copy)(src, own)

        if puts:
            self.write(src, own, dst, copy_own)
        else:
            self.read(src, copy_own, lambda peer: (src, self.block(self.by_rank(dst, shape), peer) if along is None else dst), along)

    def all_to_all(self, src: str, dst: str, cut_along: int | None, joined_along: int | None) -> None:
        blocks, src = self.by_rank(dst), self.by_rank(self.in_window(src))
        own = self.block(src, self.rank)
        self.read(src, lambda: self.copy(own, self.block(blocks, self.rank)), lambda peer: (own, self.block(blocks, peer)))

    def reduce_scatter(self, src: str, dst: str, reduction: Reduction, along: int | None = None) -> None:
        """The terms of others lie one after another."""
        shape, src = self.b.types[dst].shape, self.in_window(src)
        is_outside = self.b.is_outside(src) and self.b.is_outside(dst)
        with self.b.outermost() if is_outside else nullcontext():
            block = self.own_block(src, shape, along)
            own = self.b.reshape(block, shape, f"{src}_own")
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(self.b.types[dst].dtype, (Size(self.size - 1), *shape)))
        self.signal(src)
        self.each_hop(lambda peer, hop: self.take(peer, block, self.block(terms, hop)))
        self.signal(src)
        self.wait(src)

        def add() -> None:
            reduction.emit((own, *apart(self.b, terms, terms)), dst)

        self.b.sum_later(add) if is_outside else add()

    def all_reduce(self, src: str, dst: str, reduction: Reduction) -> None:
        """Each rank reduces its part, which the others read; where that is little, or ranks may not share it evenly, all of it."""
        type = self.b.types[dst]
        count = product(type.shape)
        part = count.divided_by(Size(self.size)) if count.coefficient % self.size == 0 and count.divisor == 1 else None
        if part is None or (count.is_int and int(count) * type.dtype.itemsize <= SMALL):
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(type.dtype, (Size(self.size), *type.shape)))
            self.all_gather(src, terms)
            reduction.emit((terms,), dst)
            return
        reduced = self.b.allocate_here(f"{dst}_part", BufferType(type.dtype, (part,)))
        self.reduce_scatter(src, reduced, reduction)
        self.all_gather(reduced, dst)

    def reduce(self, src: str, dst: str, reduction: Reduction, root: int, on_root: Callable[[], AbstractContextManager[None]]) -> None:
        others, elsewhere = [Const(rank) for rank in range(self.size) if rank != root], partial(ir.If, opposite(self.rank.equals(root)))
        src, type = self.in_window(src), self.b.types[dst]
        with self.b.inside(elsewhere):
            self.signal_to(Const(root), src)
        with on_root():
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(type.dtype, (Size(self.size), *type.shape)))
            self.copy(src, self.block(terms, Const(root)))
            for peer in others:
                self.get(peer, src, self.block(terms, peer))
            reduction.emit((terms,), dst)
        with self.b.inside(elsewhere):
            self.wait_for(Const(root), src)

    def collective_permute(self, src: str, dst: str, sources: ir.Sources) -> None:
        distances = {None if source is None else (rank - source) % self.size for rank, source in enumerate(sources)}
        src = self.in_window(src)
        if distances == {0}:
            self.keep(src, dst)
        elif len(distances) == 1 and (distance := distances.pop()) is not None:  # all ranks do the same
            receiver = (self.rank + distance) % self.size
            self.signal_to(receiver, src)
            self.get((self.rank - distance) % self.size, src, dst)
            self.wait_for(receiver, src)
        else:
            self.permute(src, dst, sources)

    def permute(self, src: str, dst: str, sources: ir.Sources) -> None:
        """Each rank by itself."""
        receivers = {source: rank for rank, source in enumerate(sources) if source is not None}
        for rank, source in enumerate(sources):
            receiver = receivers.get(rank, rank)
            with self.b.inside(partial(ir.If, self.rank.equals(rank))):
                if receiver != rank:
                    self.signal_to(Const(receiver), src)
                if source is None:
                    self.b.emit(ir.Fill(dst, 0.0))
                elif source == rank:
                    self.keep(src, dst)
                else:
                    self.get(Const(source), src, dst)
                if receiver != rank:
                    self.wait_for(Const(receiver), src)

    # --- what these are made of ---

    def read(self, src: str, copy_own: Callable[[], None], taken: Callable[[Expr], tuple[str, str]], along: int | None = None) -> None:
        """From each peer the part of its `src`, and to where, that `taken` names: to the peer's block of a dim `along`."""
        self.signal(src)
        copy_own()
        self.each_peer(lambda peer: self.take(peer, *taken(peer), along))
        self.signal(src)
        self.wait(src)

    def write(self, src: str, own: str, dst: str, copy_own: Callable[[], None]) -> None:
        """To each peer `src`, where it has this rank's `own` block of `dst`."""
        self.signal(dst)
        copy_own()
        self.wait(dst)
        self.each_peer(lambda peer: self.b.emit(ir.Put(src, own, peer, SIGNAL, self.channel)))
        self.wait(dst)

    def take(self, peer: Expr, src: str, dst: str, along: int | None = None) -> None:
        """Once the peer says that it is there."""
        self.wait_for(peer, src)
        self.b.emit(ir.Get(src, peer, dst, self.channel, along))

    def get(self, peer: Expr, src: str, dst: str) -> None:
        """And then tells it."""
        self.take(peer, src, dst)
        self.signal_to(peer, src)

    def copy(self, src: str, dst: str) -> None:
        self.b.emit(ir.Copy(self.b.reshape(src, self.b.types[dst].shape, f"{src}_own"), dst))

    def keep(self, src: str, dst: str) -> None:
        """A copy of as much on this rank, whose sizes may have other names: what it holds along other axes."""
        self.b.emit(ir.Copy(self.b.first(src, self.b.types[dst].shape, f"{src}_own"), dst))

    def lies_in_window(self, name: str) -> bool:
        """Whether it is all of what lies in a window, or will: a part may begin elsewhere on a peer."""
        return self.b.is_in_window(self.b.memory_of(name))

    def in_window(self, src: str) -> str:
        """`src`, or a copy of it where it lies in no window."""
        if self.lies_in_window(src):
            return src
        packed = self.b.allocate_here(f"{src}_packed", self.b.types[src])
        self.b.emit(ir.Copy(src, packed))
        return packed

    def by_rank(self, name: str, block: tuple[Size, ...] | None = None) -> str:
        """The view of a buffer with one block a rank outermost; itself where nobody says what a `block` is."""
        shape = (Size(self.size), *(block or self.b.types[name].shape[1:]))
        return self.b.reshape(name, shape, f"{name}_by_rank")

    def block(self, by_rank: str, rank: Expr) -> str:
        return self.b.select(by_rank, 0, rank, f"{by_rank.removesuffix('_by_rank')}_block")

    def own_block(self, packed: str, block: tuple[Size, ...], along: int | None) -> str:
        """This rank's block of a buffer with one of each rank, one after another; they share its dim `along` where that is one."""
        if along is None:
            return self.block(self.by_rank(packed, block), self.rank)
        shape = self.b.types[packed].shape
        rows = self.b.reshape(packed, (shape[along], *shape[:along], *shape[along + 1 :]), f"{packed}_rows")
        own = Size(1, (LocalSize(shape[along], self.axes, self.b.mesh),))
        own_rows = self.b.slice(rows, 0, own, self.rank * expr_of(shape[along].ceil_div(self.size)), f"{packed}_own")
        return self.b.reshape(own_rows, block, f"{packed}_block")
