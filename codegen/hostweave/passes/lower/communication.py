"""From reshards to instructions: collectives on complete buffers or chunks, and the pipelines by shard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Expr, Rank
from hostweave.passes.lower.exchanges import SIGNAL, Exchange, Reduce
from hostweave.passes.lower.steps import Steps, expr_of, rank_in_group
from hostweave.types.blocks import Cut, Cuts, Transfer, is_in_order
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


@dataclass(frozen=True)
class Shards:
    """Who communicates, and which dim of the buffers holds a block a rank (None for all_reduce)."""

    mesh: Mesh
    axes: tuple[str, ...]
    dim: int | None = None
    is_uneven: bool = False  # blocks may differ in size

    @property
    def along(self) -> int | None:
        """The dim, where an instruction has to name it."""
        return self.dim if self.is_uneven else None

    def cuts(self, type: BufferType) -> Cuts:
        """How a tensor that all ranks share along the dim is cut."""
        return tuple(Cut(self.size if i == self.dim else 1, size) for i, size in enumerate(type.shape))

    @property
    def size(self) -> int:
        return self.mesh.size_of(self.axes)

    @property
    def rank(self) -> Expr:
        """This rank's number in its process group."""
        return rank_in_group(self.mesh, self.axes)


# --- collectives ------------------------------------------------------------------------------------------------------


def all_gather(b: Builder, src: str, dst: str, shards: Shards, steps: Steps | None, wants_own: bool = True) -> None:
    """`wants_own` says whether this rank's block of `dst` has to be there, too."""
    with destination_blocks(b, dst, shards, steps, b.types[src]) as landing:
        src = contiguous_source(b, src, steps)
        if b.transport.shares_memory:
            Exchange(b, shards.axes).all_gather(src, landing, shards.along, wants_own)
        else:
            b.emit(ir.AllGather(src, landing, b.channel(shards.axes), shards.along))


def gathered(b: Builder, src: str, wanted: str, shards: Shards, steps: Steps | None) -> str:
    """Memory with what each rank has of `src`, one after another."""
    type = b.types[src]
    shape = (Size(shards.size), *type.shape)
    if steps is None:
        terms = b.allocate_here(wanted, BufferType(type.dtype, shape))
    else:
        terms = b.select(b.allocate(wanted, BufferType(type.dtype, (steps.count, *shape))), 0, steps.block, f"{wanted}_{steps.index.name}")
    all_gather(b, src, terms, replace(shards, dim=0), steps)
    return terms


def reduce_scatter(b: Builder, src: str, dst: str, op: str, shards: Shards, steps: Steps | None, reduce: Reduce) -> None:
    blocks = source_blocks(b, src, shards, steps, b.types[dst])
    with packed_destination(b, dst, steps) as landing:
        if b.transport.shares_memory:
            Exchange(b, shards.axes).reduce_scatter(blocks, landing, reduce, shards.along)
        else:
            b.emit(ir.ReduceScatter(blocks, landing, op, b.channel(shards.axes), shards.along))


def all_reduce(b: Builder, src: str, dst: str, op: str, shards: Shards, steps: Steps | None, reduce: Reduce) -> None:
    with packed_destination(b, dst, steps) as landing:
        src = contiguous_source(b, src, steps)
        if b.transport.shares_memory:
            Exchange(b, shards.axes).all_reduce(src, landing, reduce)
        else:
            b.emit(ir.AllReduce(src, landing, op, b.channel(shards.axes)))


def all_to_all(b: Builder, src: str, dst: str, cut: Shards, joined: Shards, steps: Steps | None) -> None:
    """Dim `cut.dim` of src goes out block by block, and what comes in stands along dim `joined.dim` of dst."""
    blocks = source_blocks(b, src, cut, steps)
    with destination_blocks(b, dst, joined, steps) as landing:
        if b.transport.shares_memory:
            Exchange(b, cut.axes).all_to_all(blocks, landing)
        else:
            b.emit(ir.AllToAll(blocks, landing, b.channel(cut.axes), cut.along, joined.along))


def collective_permute(b: Builder, src: str, dst: str, sources: ir.Sources, axes: tuple[str, ...], steps: Steps | None) -> None:
    with packed_destination(b, dst, steps) as landing:
        src = contiguous_source(b, src, steps)
        if b.transport.shares_memory:
            Exchange(b, axes).collective_permute(src, landing, sources)
        else:
            b.emit(ir.CollectivePermute(src, landing, sources, b.channel(axes)))


def source_blocks(b: Builder, src: str, shards: Shards, steps: Steps | None, block: BufferType | None = None) -> str:
    """Memory with a block of `src` a rank, one after another."""
    if shards.is_uneven:
        return packed_source(b, contiguous_source(b, src, steps), shards.cuts(b.types[src]), steps)
    return contiguous_source(b, equal_blocks(b, src, shards, block), steps)


@contextmanager
def destination_blocks(b: Builder, dst: str, shards: Shards, steps: Steps | None, block: BufferType | None = None) -> Iterator[str]:
    """Memory for a block of `dst` a rank, one after another, which are put where they belong afterwards."""
    view = dst if shards.is_uneven else equal_blocks(b, dst, shards, block)
    with packed_destination(b, view, steps) as landing:
        cuts = shards.cuts(b.types[dst])
        if not shards.is_uneven or is_in_order(cuts):
            yield landing
            return
        packed = temporary(b, landing, steps)
        yield packed
        b.emit(ir.Unpack(packed, landing, cuts))


def packed_source(b: Builder, src: str, cuts: Cuts, steps: Steps | None) -> str:
    """Memory with the blocks of a contiguous `src`: its own where they lie in order."""
    if is_in_order(cuts):
        return src
    packed = temporary(b, src, steps)
    b.emit(ir.Pack(src, packed, cuts))
    return packed


def equal_blocks(b: Builder, full: str, shards: Shards, block: BufferType | None) -> str:
    """The view of `full` with one block a rank outermost, as collectives lay them out; `full` itself where it already is.

    It has a dim of their number there where nobody says what a `block` is.
    """
    dim, shape, blocks = shards.dim, b.types[full].shape, full
    assert dim is not None
    if block and b.is_contiguous(full) and all(size == Size() for size in shape[:dim]):
        return full
    if not block or len(shape) == len(block.shape):  # one dim still has the blocks of all ranks
        blocks = b.split(full, dim, Size(shards.size), f"{full}_blocks")
    return b.permute(blocks, (dim, *(i for i in range(len(b.types[blocks].shape)) if i != dim)), f"{full}_by_rank")


def contiguous_source(b: Builder, src: str, steps: Steps | None) -> str:
    """`src`, or a contiguous copy of it where it is not."""
    if b.is_contiguous(src):
        return src
    packed = temporary(b, src, steps)
    b.emit(ir.Copy(src, packed))
    return packed


@contextmanager
def packed_destination(b: Builder, dst: str, steps: Steps | None) -> Iterator[str]:
    """`dst`, or contiguous memory that is copied to it afterwards where it is not."""
    if b.is_contiguous(dst):
        yield dst
        return
    packed = temporary(b, dst, steps)
    yield packed
    b.emit(ir.Copy(packed, dst))


def temporary(b: Builder, like: str, steps: Steps | None) -> str:
    """Contiguous memory of the shape of `like`: its own in every iteration."""
    type = b.types[like]
    if steps is None:
        return b.allocate_here(f"{like}_packed", type)
    ring = b.allocate(f"{like.removesuffix('_' + steps.index.name)}_packed", BufferType(type.dtype, (steps.count, *type.shape)))
    return b.select(ring, 0, steps.block, f"{like}_packed")


# --- to other meshes --------------------------------------------------------------------------------------------------


def blocks_to_send(b: Builder, src: str, blocks: Transfer, cuts: Cuts | None, steps: Steps | None) -> str:
    """Memory that holds the blocks of `src` one after the other: its own, or a copy's."""
    in_order = contiguous_source(b, src if cuts else cut(b, src, blocks.sent), steps)
    in_order = b.memory_of(packed_source(b, in_order, cuts, steps) if cuts else in_order)
    if steps is not None or b.is_memory(in_order):
        return in_order
    packed = temporary(b, in_order, steps)  # a view of this mesh cannot be named where both meshes post together
    b.emit(ir.Copy(in_order, packed))
    return packed


@contextmanager
def blocks_to_receive(b: Builder, dst: Callable[[], str], blocks: Transfer, cuts: Cuts | None, steps: Steps | None) -> Iterator[str]:
    """Memory for the blocks of `dst()` one after the other, copied to it afterwards where it is not its own."""
    by_block = dst() if cuts else cut(b, dst(), blocks.received)
    if b.is_contiguous(by_block) and (cuts is None or is_in_order(cuts)):
        yield b.memory_of(by_block)
        return
    landing = temporary(b, by_block, steps)
    yield landing
    if cuts is None:
        b.emit(ir.Copy(landing, cut(b, dst(), blocks.received)))  # other views where an `on` body has ended meanwhile
        return
    with packed_destination(b, dst(), steps) as target:
        b.emit(ir.Unpack(landing, target, cuts))


def cut(b: Builder, whole: str, cuts: tuple[int, ...]) -> str:
    """The view of `whole` with the blocks of all dims outermost, in row-major order; one block is `whole`, or the chunk of a loop."""
    if set(cuts) <= {1}:
        return whole
    shape: list[Size] = []
    outer: list[int] = []
    inner: list[int] = []
    for size, blocks in zip(b.types[whole].shape, cuts, strict=True):
        if blocks > 1:
            outer.append(len(shape))
            shape.append(Size(blocks))
        inner.append(len(shape))
        shape.append(size // blocks)
    return b.permute(b.reshape(whole, tuple(shape), f"{whole}_blocks"), (*outer, *inner), f"{whole}_by_block")


def send(b: Builder, src: str, blocks: Transfer, cuts: Cuts | None, distance: int | None) -> tree.Instruction:
    """All sends of this rank; to the rank that is so much further, where each block goes that far."""
    if distance is not None:
        return ir.Send(src, _neighbor(distance), b.channel_of_all)
    return ir.SendBlocks(src, cuts or prod(blocks.sent), blocks.routes, b.channel_of_all)


def recv(b: Builder, dst: str, blocks: Transfer, cuts: Cuts | None, distance: int | None) -> tree.Instruction:
    """All that this rank receives."""
    if distance is not None:
        return ir.Recv(dst, _neighbor(-distance), b.channel_of_all)
    return ir.RecvBlocks(dst, cuts or prod(blocks.received), blocks.routes, b.channel_of_all)


def _neighbor(distance: int) -> Expr:
    return Rank() + distance if distance >= 0 else Rank() - -distance


# --- by block ---------------------------------------------------------------------------------------------------------


def scatter_reduce(b: Builder, src: str, dst: str, op: str, shards: Shards, steps: Steps) -> None:
    """The owner of the step's block gets the reduction; on the others dst is not touched."""
    is_packed = not b.is_contiguous(dst)
    arriving = temporary(b, dst, steps) if is_packed else dst
    b.emit(ir.Reduce(contiguous_source(b, src, steps), arriving, op, steps.owned_by, b.channel(shards.axes)))
    if is_packed:
        branch(b, steps.owned_by.equals(shards.rank), lambda: b.emit(ir.Copy(arriving, dst)))


def swap(b: Builder, src: str, receiver: Expr, dst: str, sender: Expr, shards: Shards, steps: Steps) -> None:
    """Sends one block while another arrives; what the step's owner would send to itself is copied."""

    def exchange() -> None:
        with packed_destination(b, dst, steps) as landing:
            channel = b.channel(shards.axes)
            group(b, ir.Recv(landing, sender, channel), ir.Send(contiguous_source(b, src, steps), receiver, channel))

    branch(b, steps.owned_by.equals(shards.rank), lambda: b.emit(ir.Copy(src, dst)), exchange)


def pass_on(b: Builder, src: str, next_dst: Callable[[], str], shards: Shards, steps: Steps, event: str) -> None:
    """In a ring: sends to the next rank while what a later step uses arrives, which the event of this step marks."""

    def exchange() -> None:
        rank, size, channel, arriving = shards.rank, shards.size, b.channel(shards.axes), next_dst()
        if b.transport.shares_memory:  # it has one place on all ranks
            b.emit(ir.Put(src, src, (rank + 1) % size, SIGNAL, channel))
            b.emit(ir.WaitSignal(SIGNAL, (rank - 1) % size, arriving, channel))
        else:
            group(b, ir.Recv(arriving, (rank - 1) % size, channel), ir.Send(src, (rank + 1) % size, channel))
        b.emit(ir.Record(event, steps.index))

    branch(b, steps.index.less(expr_of(steps.count) - expr_of(steps.subchunks)), exchange)


def group(b: Builder, *communications: tree.Instruction) -> None:
    with b.inside(ir.Group):
        for communication in communications:
            b.emit(communication)


def branch(b: Builder, condition: Expr, then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    with b.nested() as taken:
        then()
    with b.nested() as not_taken:
        if otherwise:
            otherwise()
    b.emit(ir.If(condition, tuple(taken), tuple(not_taken)))
