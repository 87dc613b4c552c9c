"""Packs buffers, because communication needs contiguous memory with one block per rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hostweave.communication.dataflow import LoopIteration
from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr
from hostweave.types.blocks import Cut, Cuts, is_in_order
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

MIN_STACKED_TERMS = 8  # minimum number of terms that a reduction kernel reads as one stacked operand


@dataclass(frozen=True)
class TermReduction:
    """A reduction, such as `sum`. `emit(terms, dst)` emits the kernel that reduces terms. The last buffer in `terms` may contain several
    terms, stacked along its outermost dim."""

    op: str
    emit: Callable[[Sequence[str], str], None]


@dataclass(frozen=True)
class Shards:
    """The ranks that communicate, and the dim along which a buffer has one block per rank, or None."""

    mesh: Mesh
    axes: tuple[str, ...]
    dim: int | None = None
    is_uneven: bool = False  # True if blocks may differ in size

    @property
    def along(self) -> int | None:
        """Field `along` of instructions: the dim if blocks may differ in size, otherwise None."""
        return self.dim if self.is_uneven else None

    def cuts(self, type: BufferType) -> Cuts:
        return tuple(Cut(self.size if i == self.dim else 1, size) for i, size in enumerate(type.shape))

    @property
    def size(self) -> int:
        return self.mesh.size_of(self.axes)


def source_blocks(b: Builder, src: str, shards: Shards, iteration: LoopIteration | None, block: BufferType | None = None) -> str:
    """Contiguous memory with the blocks of `src`, in rank order."""
    if shards.is_uneven:
        return packed_source(b, contiguous_source(b, src, iteration), shards.cuts(b.types[src]), iteration)
    return contiguous_source(b, equal_blocks(b, src, shards, block), iteration)


@contextmanager
def destination_blocks(
    b: Builder, dst: str, shards: Shards, iteration: LoopIteration | None, block: BufferType | None = None
) -> Iterator[str]:
    """Contiguous memory for the blocks of `dst`, in rank order. On exit, unpacks the blocks to `dst`."""
    view = dst if shards.is_uneven else equal_blocks(b, dst, shards, block)
    with packed_destination(b, view, iteration) as landing:
        cuts = shards.cuts(b.types[dst])
        if not shards.is_uneven or is_in_order(cuts):
            yield landing
            return
        packed = temporary(b, landing, iteration)
        yield packed
        b.emit(ir.Unpack(packed, landing, cuts))


def packed_source(b: Builder, src: str, cuts: Cuts, iteration: LoopIteration | None) -> str:
    """Contiguous memory with the blocks of the contiguous buffer `src`, one after another: `src` itself or a packed copy."""
    if is_in_order(cuts):
        return src
    packed = temporary(b, src, iteration)
    b.emit(ir.Pack(src, packed, cuts))
    return packed


def equal_blocks(b: Builder, full: str, shards: Shards, block: BufferType | None) -> str:
    """View of `full` with the rank as the outermost dim. Returns `full` itself if `block`, the type of a block, is given, and the blocks
    follow one another in memory."""
    dim, shape, blocks = shards.dim, b.types[full].shape, full
    assert dim is not None
    if block and b.is_contiguous(full) and all(size == Size() for size in shape[:dim]):
        return full
    if not block or len(shape) == len(block.shape):  # The dim of ranks is still merged with a dim of blocks.
        blocks = b.split(full, dim, Size(shards.size), f"{full}_blocks")
    return b.permute(blocks, (dim, *(i for i in range(len(b.types[blocks].shape)) if i != dim)), f"{full}_by_rank")


def contiguous_source(b: Builder, src: str, iteration: LoopIteration | None, alignment: int = 1) -> str:
    """`src` if it is contiguous and begins at a multiple of `alignment` elements, otherwise a copy."""
    return src if b.is_contiguous(src) and b.begins_at(src, alignment) else copied(b, src, iteration)


def copied(b: Builder, src: str, iteration: LoopIteration | None) -> str:
    packed = temporary(b, src, iteration)
    b.emit(ir.Copy(src, packed))
    return packed


@contextmanager
def packed_destination(b: Builder, dst: str, iteration: LoopIteration | None, alignment: int = 1) -> Iterator[str]:
    """Yields `dst` if it is contiguous and begins at a multiple of `alignment` elements, otherwise memory that is copied to it on exit."""
    if b.is_contiguous(dst) and b.begins_at(dst, alignment):
        yield dst
        return
    packed = temporary(b, dst, iteration)
    yield packed
    b.emit(ir.Copy(packed, dst))


def per_iteration(b: Builder, wanted: str, type: BufferType, iteration: LoopIteration | None, view: str = "") -> str:
    """Allocates contiguous memory. In a loop, each iteration has separate memory, with the name `view`."""
    if iteration is None:
        return b.allocate_here(wanted, type)
    slots = b.allocate(wanted, BufferType(type.dtype, (iteration.count, *type.shape)))
    return b.select(slots, 0, iteration.block, view or f"{wanted}_{iteration.index.name}")


def temporary(b: Builder, like: str, iteration: LoopIteration | None) -> str:
    """Allocates contiguous memory with the shape of `like`. In a loop, each iteration has separate memory."""
    whole = like.removesuffix(f"_{iteration.index.name}") if iteration else like
    return per_iteration(b, f"{whole}_packed", b.types[like], iteration, f"{like}_packed")


def split_terms(b: Builder, terms: str, name: str) -> list[str]:
    """Splits few stacked terms into separate operands. The sum of the operands can then fuse with the op that reads the sum."""
    count = int(b.types[terms].shape[0])
    return [b.select(terms, 0, Const(i), f"{name}_{i}") for i in range(count)] if count < MIN_STACKED_TERMS else [terms]


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
    if taken or not_taken:
        b.emit(ir.If(condition, tuple(taken), tuple(not_taken)))
