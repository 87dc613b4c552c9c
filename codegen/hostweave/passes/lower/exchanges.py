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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr, Var, opposite
from hostweave.passes.lower.steps import expr_of, rank_in_group
from hostweave.transports.transport import find_transport
from hostweave.types.size import CeilDiv, Factor, LocalSize, Size, product
from hostweave.types.tensor import BufferType

SIGNAL = 0  # the only number that all libraries with signals have
NUMBERS = 64  # of signals, for moves between meshes
MOST_TERMS = 8  # that a kernel adds up as operands of its own
SMALL = 1 << 15  # bytes: where one rank reads all, rather than its part of two readings, latency is what counts

Reduce = Callable[[Sequence[str], str], None]  # emits the reduction of terms, and of all along the last one's outermost dim, into a buffer


@dataclass(eq=False)
class Signals:
    """A process group with windows, seen from one of its ranks."""

    b: Builder
    axes: tuple[str, ...]  # of the present mesh

    def __post_init__(self) -> None:
        mesh = self.b.present_mesh
        self.rank, self.size = rank_in_group(mesh, self.axes), mesh.size_of(self.axes)
        self.channel = self.b.channel(self.axes, find_transport("one_sided"))

    def each(self, count: int, emit: Callable[[Var], None]) -> None:
        """A loop of its own."""
        assert count > 0
        index = Var(self.b.loop_index())
        with self.b.looped() as body:
            emit(index)
        self.b.emit(ir.For(index.name, Size(count), tuple(body)))

    def each_hop(self, emit: Callable[[Expr, Expr], None]) -> None:
        """For each peer, and its number among the peers of this rank."""
        if self.size == 2:
            emit((self.rank + 1) % self.size, Const(0))
        elif self.size > 2:
            self.each(self.size - 1, lambda hop: emit((self.rank + 1 + hop) % self.size, hop))

    def each_peer(self, emit: Callable[[Expr], None]) -> None:
        self.each_hop(lambda peer, _: emit(peer))

    def signal_to(self, peer: Expr, buffer: str, number: int = SIGNAL) -> None:
        self.b.emit(ir.Signal(number, peer, buffer, self.channel))

    def wait_for(self, peer: Expr, buffer: str, number: int = SIGNAL) -> None:
        self.b.emit(ir.WaitSignal(number, peer, buffer, self.channel))

    def signal(self, buffer: str) -> None:
        """To all peers."""
        self.each_peer(lambda peer: self.signal_to(peer, buffer))

    def wait(self, buffer: str) -> None:
        """For one signal of each peer."""
        self.each_peer(lambda peer: self.wait_for(peer, buffer))


class Exchange(Signals):
    """One communication of all ranks of a process group, whose buffers are contiguous."""

    def all_gather(self, src: str, dst: str, along: int | None = None, wants_own: bool = True) -> None:
        """Of the dim `along` blocks may differ in size."""
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

    def all_to_all(self, src: str, dst: str) -> None:
        blocks, src = self.by_rank(dst), self.by_rank(self.in_window(src))
        own = self.block(src, self.rank)
        self.read(src, lambda: self.copy(own, self.block(blocks, self.rank)), lambda peer: (own, self.block(blocks, peer)))

    def reduce_scatter(self, src: str, dst: str, reduce: Reduce, along: int | None = None) -> None:
        """The terms of others lie one after another; of the dim `along` blocks may differ in size."""
        shape, src = self.b.types[dst].shape, self.in_window(src)
        own = self.own_block(src, shape, along)
        terms = self.b.allocate_here(f"{dst}_terms", BufferType(self.b.types[dst].dtype, (Size(self.size - 1), *shape)))
        self.signal(src)
        self.each_hop(lambda peer, hop: self.take(peer, own, self.block(terms, hop)))
        self.signal(src)
        self.wait(src)
        own = self.b.reshape(own, shape, f"{src}_own")
        reduce((own, *apart(self.b, terms, terms)), dst)

    def all_reduce(self, src: str, dst: str, reduce: Reduce) -> None:
        """Each rank reduces its part, which the others read; where that is little, or ranks may not share it evenly, all of it."""
        type = self.b.types[dst]
        count = product(type.shape)
        part = count.divided_by(Size(self.size)) if count.coefficient % self.size == 0 and count.divisor == 1 else None
        if part is None or (count.is_int and int(count) * type.dtype.itemsize <= SMALL):
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(type.dtype, (Size(self.size), *type.shape)))
            self.all_gather(src, terms)
            reduce((terms,), dst)
            return
        reduced = self.b.allocate_here(f"{dst}_part", BufferType(type.dtype, (part,)))
        self.reduce_scatter(src, reduced, reduce)
        self.all_gather(reduced, dst)

    def reduce(self, src: str, dst: str, root: int, on_root: Callable[[], AbstractContextManager[None]], reduce: Reduce) -> None:
        """At root; that stands in a body of its own, of a mesh of such ranks."""
        others, elsewhere = [Const(rank) for rank in range(self.size) if rank != root], partial(ir.If, opposite(self.rank.equals(root)))
        src, type = self.in_window(src), self.b.types[dst]
        with self.b.inside(elsewhere):
            self.signal_to(Const(root), src)
        with on_root():
            terms = self.b.allocate_here(f"{dst}_terms", BufferType(type.dtype, (Size(self.size), *type.shape)))
            self.copy(src, self.block(terms, Const(root)))
            for peer in others:
                self.get(peer, src, self.block(terms, peer))
            reduce((terms,), dst)
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


def apart(b: Builder, terms: str, name: str) -> list[str]:
    """Few terms along an outermost dim as operands of a kernel each, so that it goes on to what takes their sum, whatever that reduces."""
    count = int(b.types[terms].shape[0])
    return [b.select(terms, 0, Const(i), f"{name}_{i}") for i in range(count)] if count < MOST_TERMS else [terms]


def with_reached(part: ir.HostProgram, functions: Mapping[str, ir.HostProgram]) -> ir.HostProgram:
    """Of the parameters that may lie in windows those that peers do reach, also in functions that are called, are said to."""
    named = [name for i in tree.walk(part.body) for name in tree.names(i, "remote_read", "remote_write")]
    for i in tree.walk(part.body):
        for function in tree.names(i, "call"):
            pairs = zip(tree.names(i, "read"), functions[function].inputs, strict=True)
            named += [name for name, parameter in pairs if parameter.in_window]
    roots = roots_of(part.body, named)
    inputs, outputs = (
        tuple(replace(p, in_window=p.in_window and p.name in roots) for p in parameters) for parameters in (part.inputs, part.outputs)
    )
    return replace(part, inputs=inputs, outputs=outputs)


def roots_of(body: tree.Body, names: Iterable[str]) -> set[str]:
    """The memory behind views."""
    roots = tree.AliasRoots()
    for i in tree.walk(body):
        roots.define(i)
    return {root for name in names for root in roots.all_of(name)}


def _window(b: Builder, name: str, type: BufferType) -> Iterator[tree.Instruction]:
    """Memory of one size on all ranks: where some have less than others, as much as those have, of which a view is what they need."""
    count, mesh = product(type.shape), b.present_mesh
    shared = [part for part in count.factors if isinstance(part, LocalSize)]
    parts: dict[Factor, Size] = {part: Size(1, (CeilDiv(part.size, part.ranks_in(mesh)),)) for part in shared}
    if not parts:
        yield ir.AllocateWindow(name, type)
        return
    window, own = b.name(f"{name}_window"), b.name(f"{name}_elements")
    yield ir.AllocateWindow(window, BufferType(type.dtype, (count.replaced(parts),)))
    yield ir.Slice(own, window, 0, count, Const(0))
    yield ir.Reshape(name, own, type.shape)


def with_windows(b: Builder) -> tree.Body:
    """The body in which what peers read or write, and what is put from, lies in windows, which all ranks have."""
    body = b.body()
    named = [name for i in tree.walk(body) if isinstance(i, ir.OneSided) for name in tree.names(i, "read", "remote_write")]
    roots = roots_of(body, named)
    on_some: list[tree.Instruction] = []
    made: set[tree.Instruction] = set()

    def moved(i: tree.Instruction) -> tree.Instruction | tree.Body | None:
        if i.ranks and (windows := [inner for inner in tree.bodies(i)[0] if inner in made]):
            on_some.extend(windows)
            i = tree.with_bodies(i, lambda inner: tuple(each for each in inner if each not in made))
            return i if any(tree.bodies(i)) else ()
        (name,) = tree.names(i, "allocate") or ("",)
        if name not in roots:
            return None
        window = tuple(replace(each, location=i.location) for each in _window(b, name, i.defined({})[name]))
        made.update(window)
        return window

    rest = tree.rewrite(body, moved)
    return (*on_some, *rest)
