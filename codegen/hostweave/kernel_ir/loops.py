"""Loop IR of a kernel, between its ops and its C++. Passes fill in the lines one by one:

loops @normed {
  keep i in M over x.0
  reduce j in 4096 over x.1
  %x: bf16[M, 4096] at i * 4096 + j
  %y stored: bf16[M, 4096] at i * 4096 + j
  walk 0: reduce %mean_square
  walk 1: store %y
  distribute: a block shares a row, 128 threads
  vectors of 8 along j
  outside: %mean_square, %scale
  hold %x
}
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hostweave.analysis.kernel_indices import Iteration
from hostweave.fusion_ir.index_map import Labels
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXIS, HALVES
from hostweave.host_ir import ir
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, DType, row_major, strides_of

ZERO, ONE = Size(0), Size()
OUTERMOST = "outermost"  # symbol for the outermost size


class Distribution(StrEnum):
    """Distribution of the iterations over threads. An element is one element of the result. A fiber is all elements along one dim."""

    THREAD = "each thread computes elements"
    BLOCK = "a block reduces an element"
    ROW = "a block shares a row"
    ANY_ROW = "a block shares a row of unknown length"
    SHORT_ROW = "a part of a warp shares a row"
    TILE = "a block transposes a tile"
    COLUMNS = "a block reduces a tile of columns"
    FIBERS = "a thread processes a fiber"
    FIBER_PARTS = "threads share the elements of a fiber"
    BLOCK_FIBERS = "a block processes a fiber"
    CLUSTER_FIBERS = "a cluster processes a fiber"
    PRODUCTS = "a cluster multiplies a tile of columns"


OF_BLOCKS = (Distribution.BLOCK_FIBERS, Distribution.CLUSTER_FIBERS)
ROWS = (Distribution.ROW, Distribution.ANY_ROW, Distribution.SHORT_ROW)


@dataclass(frozen=True)
class Fiber:
    """Size and stride of a dim without a loop. An op accesses the dim at data-dependent indices, or needs the whole dim at once."""

    size: Size
    stride: Size


@dataclass(frozen=True)
class LoopDim:
    """A loop over a dim. `strides` has the stride of the loop index in each access of `Loops`."""

    size: Size
    strides: tuple[Size, ...]
    letter: str = ""  # name of the loop index; empty if the dim is not a loop of a kernel
    indices: tuple[str, ...] = ()  # indices of the index space that this loop merges

    def __str__(self) -> str:
        return f"{self.letter} in {self.size}{' over ' if self.indices else ''}{' and '.join(self.indices)}"


@dataclass(frozen=True)
class Walk:
    """One loop nest over the reduced dims."""

    reductions: tuple[Op, ...] = ()
    stores: tuple[str, ...] = ()


@dataclass(frozen=True)
class FewRows:
    """Matmuls of few rows at the start of a kernel: one matrix [..., rows, depth] by each matrix of weights [depth, columns].

    `Loops.kernel` has the other ops of `kernel`, and the products as its first inputs. Threads hold the products in registers.
    """

    kernel: ir.Kernel
    memory: Mapping[str, BufferType]  # types of the operands of the matmuls

    @property
    def rows(self) -> Size:
        return product(self.memory[self.kernel.products[0].tensors[0]].shape[:-1])

    @property
    def weights(self) -> BufferType:
        """Type of each matrix of weights."""
        return self.memory[self.kernel.products[0].tensors[1]]

    @property
    def is_transposed(self) -> bool:
        """True if the columns of the weights are contiguous, not the rows."""
        return strides_of(self.weights)[1] != ONE

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Rows, depth, columns, and the number of elements between the contiguous rows or columns of the weights."""
        return self.rows, *self.weights.shape, strides_of(self.weights)[self.is_transposed]

    def lines(self) -> Iterator[str]:
        for op in self.kernel.products:
            yield f"%{op.result.name} = multiply {' by '.join(f'%{name}: {_stated(self.memory[name])}' for name in op.tensors)}"


@dataclass(frozen=True)
class Loops:
    """Loops over the kept dims of a kernel and, inside of them, loop nests over the reduced dims.

    An access is an input, a result in memory (see `stored`), or an index (see `index_at`). The access of an iota or argmax has the name of
    the op's result. The offset of an access is the sum of all loop indices times their strides. OUTERMOST stands for the size `outer`.
    """

    kernel: ir.Kernel
    space: Iteration
    memory: Mapping[str, BufferType]
    accesses: tuple[str, ...]
    fibers: Mapping[str, Fiber]
    kept: tuple[LoopDim, ...]
    reduced: tuple[LoopDim, ...]
    products: FewRows | None = None  # matmuls before the loops
    outer: Size | None = None
    walks: tuple[Walk, ...] = ()
    distribution: Distribution | None = None
    threads: int = 0  # threads of a block, or in Distribution.SHORT_ROW of a row; 0 if no pass has chosen a number
    blocks: int = 1  # blocks of a cluster that share a row of known length
    resident: int = 0  # number of blocks whose registers must fit into a multiprocessor; 0 if no pass has chosen a number
    width: int = 1  # consecutive elements per access
    outside: tuple[str, ...] = ()  # inputs that are loaded, and values that are computed, outside of the innermost loop
    prepared: tuple[str, ...] = ()  # inputs and values of `outside` by which the innermost loop divides
    held: tuple[str, ...] = ()  # inputs and values whose rows threads hold in registers
    index: str = "int64_t"  # C++ type of linear element indices; `Index` has 32 bits if all indices of the launch fit

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.kernel.inputs)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.kernel.results)

    @property
    def stores(self) -> set[str]:
        return set(map(stored, self.results))

    @property
    def takes_fibers(self) -> bool:
        return any(OPS[op.kind].fiber for op in self.kernel.ops)

    @property
    def updates(self) -> bool:
        return any(OPS[op.kind].updates for op in self.kernel.ops)

    @property
    def calls_fibers(self) -> bool:
        return not self.space.fibers.keys().isdisjoint(name for op in self.kernel.ops if not gathers_in_order(op) for name in op.tensors)

    def dtype(self, name: str) -> DType:
        return self.kernel.types[name].dtype

    def is_f32(self, name: str) -> bool:
        """True if the kernel computes with this input or value in f32."""
        return self.dtype(name).kind == "float" and self.dtype(name).itemsize <= 4

    def is_rounded(self, value: str) -> bool:
        """True if the value is a cast to a float of at most 16 bits. Results of other ops stay in f32 until the store."""
        return OPS[self.kernel.made[value].kind].is_cast and self.is_f32(value) and self.dtype(value).itemsize < 4

    def held_bytes(self, name: str) -> int:
        return 4 if self.is_f32(name) and name not in self.memory else self.dtype(name).itemsize

    @property
    def dims(self) -> tuple[LoopDim, ...]:
        return (*self.kept, *self.reduced)

    @property
    def along(self) -> LoopDim:
        return (self.reduced if self.distribution in (Distribution.BLOCK, *ROWS) else self.kept)[-1]

    @property
    def transposed(self) -> str:
        """The result that is contiguous along the first dim, if blocks transpose tiles. Otherwise ""."""
        return next(y for y in self.results if self.stride(stored(y), self.along) != ONE) if self.distribution == Distribution.TILE else ""

    @property
    def packed(self) -> set[str]:
        return {access for access in self.memory if self.stride(access, self.along) == ONE}

    @property
    def has_rows(self) -> bool:
        return self.distribution in ROWS

    @property
    def has_wide_totals(self) -> bool:
        """True if the reduction keeps the vectorised dim. Each element of a vector then has its own accumulator."""
        return self.width > 1 and bool(self.reduced) and self.along == self.kept[-1]

    @property
    def count(self) -> Size:
        return product(tuple(dim.size for dim in self.kept))

    @property
    def length(self) -> Size | None:
        """Size of the innermost reduced dim, or None. For fibers, the size of an input's fiber, or of the result's fiber if the op has
        `splits_fibers`."""
        if self.takes_fibers:
            of_result = any(OPS[op.kind].splits_fibers for op in self.kernel.ops)
            return self.fibers[next(access for access in self.memory if (access in self.stores) == of_result)].size
        return self.reduced[-1].size if self.reduced else None

    def stride(self, access: str, dim: LoopDim) -> Size:
        return dim.strides[self.accesses.index(access)]

    def own(self, size: Size) -> Size:
        """Writes a multiple of the outermost size as a multiple of OUTERMOST. Returns other sizes unchanged."""
        quotient = size.divided_by(self.outer) if self.outer else None
        return size if quotient is None or quotient.divisor > 1 else quotient * Size(1, (OUTERMOST,))

    def is_linear(self, access: str) -> bool:
        """True if the offset of an access equals the linear index of the kept dims."""
        return tuple(self.stride(access, dim) for dim in self.kept) == row_major(tuple(dim.size for dim in self.kept))

    def divided(self) -> list[Size]:
        """Sizes that the vector width must divide: the vectorised dim, bounds of operands of concats and pads along this dim, and the other
        strides of accesses that are contiguous along this dim."""
        packed = [access for access in self.memory if access in self.packed]
        rows = [self.stride(access, dim) for dim in self.dims if dim != self.along for access in packed]
        jumps = [fiber.stride for access, fiber in self.fibers.items() if access in self.packed]
        spans = [span for operands in self.space.joined.values() for operand in operands for span in operand]
        ends = [end for span in spans if span.index in self.along.indices for end in (span.start, span.end) if end != ZERO]
        return list(dict.fromkeys([self.along.size, *rows, *jumps, *ends]))

    def taken_apart(self) -> list[int]:
        """Positions of the kept dims whose indices are computed from the linear index."""
        if len(self.kept) == 1 or self.distribution == Distribution.TILE:
            return []
        scattered = [access for access in self.accesses if not self.is_linear(access)]
        return [i for i, dim in enumerate(self.kept) if any(self.stride(access, dim) != ZERO for access in scattered)]

    def moves_inside(self, op: Op) -> bool:
        """True if an op gathers from different positions in different iterations of the innermost loop, or under a condition."""
        labels = self.space.indices[op.result.name]
        # An operand of a concat or pad is read only under a condition.
        if any(name in self.space.parts for name in (op.result.name, *op.tensors[1:])):
            return True
        return self.are_inside((labels[op[AXIS]], labels[op[HALVES]]) if gathers_in_order(op) else self.space.indices[op.tensors[1]])

    def are_inside(self, indices: Labels) -> bool:
        """True if a value with these indices differs between iterations of the innermost loop."""
        if self.reduced and not self.has_wide_totals:
            return any(index in self.space.reduced for index in indices)
        return self.width == 1 or any(index in self.along.indices for index in indices)

    @property
    def outside_nests(self) -> tuple[str, ...]:
        """Inputs and values of `outside` that do not change in the loops over the reduced dims."""
        return tuple(name for name in self.outside if not self.space.is_whole(name))

    def __str__(self) -> str:
        return "\n".join([f"loops @{self.kernel.name} {{", *(f"  {line}" for line in self.lines()), "}\n"])

    def lines(self) -> Iterator[str]:
        if self.products:
            yield from self.products.lines()
        for verb, dims in (("keep", self.kept), ("reduce", self.reduced)):
            if dims:
                yield f"{verb} {', '.join(map(str, dims))}"
        if self.outer:
            yield f"{OUTERMOST} = {self.outer}"
        for access in self.accesses:
            terms = [(dim.letter, self.stride(access, dim)) for dim in self.dims if self.stride(access, dim) != ZERO]
            offset = " + ".join(index if stride == ONE else f"{index} * {stride}" for index, stride in terms) or "0"
            fiber = f", fiber of {self.fibers[access].size} every {self.fibers[access].stride}" if access in self.fibers else ""
            yield f"%{access}{f': {_stated(self.memory[access])}' if access in self.memory else ''} at {offset}{fiber}"
        for number, walk in enumerate(self.walks):
            reduced = [f"reduce {_listed(op.result.name for op in walk.reductions)}"] if walk.reductions else []
            yield f"walk {number}: {'; '.join([*reduced, *([f'store {_listed(walk.stores)}'] if walk.stores else [])])}"
        if self.distribution:
            blocks = f" of each of {self.blocks} blocks" if self.blocks > 1 else ""
            threads = f", {self.threads} threads{blocks}" if self.threads else ""
            resident = f", {self.resident} block{'s' if self.resident > 1 else ''} per multiprocessor" if self.resident else ""
            yield f"distribute: {self.distribution}{threads}{resident}"
        if self.width > 1:
            yield f"vectors of {self.width} along {self.along.letter}"
        if self.outside:
            yield f"outside {_listed(self.outside)}"
        if self.prepared:
            yield f"prepare {_listed(self.prepared)}"
        if self.held:
            yield f"hold {_listed(self.held)}"
        if self.index != "int64_t":
            yield f"number elements by {self.index}"


def _stated(buffer: BufferType) -> str:
    return f"{buffer} strides [{', '.join(map(str, buffer.strides))}]" if buffer.strides is not None else str(buffer)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"%{name}" for name in names)


def merged(dims: Sequence[LoopDim]) -> list[LoopDim]:
    """Merges adjacent dims that one loop with one stride per access can cover. Removes dims of size 1."""
    result: list[LoopDim] = []
    for dim in dims:
        if dim.size == ONE:
            continue
        if result and all(wide == dim.size * narrow for wide, narrow in zip(result[-1].strides, dim.strides, strict=True)):
            outer = result.pop()
            dim = LoopDim(outer.size * dim.size, dim.strides, indices=outer.indices + dim.indices)
        result.append(dim)
    return result


def stored(result: str) -> str:
    """Name of the access of a result in memory. The result's own name is the value before the store."""
    return f"{result} stored"


def gathers_in_order(op: Op) -> bool:
    return OPS[op.kind].gathers and len(op.tensors) == 1


def index_at(op: Op, dim: int) -> str:
    """Name of the access that stands for the index of the op's result in a dim."""
    return f"{op.result.name} {dim}"
