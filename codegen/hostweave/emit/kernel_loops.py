"""Loops of a kernel: the mapping of elements to threads, vector widths, and element offsets."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hostweave.analysis.kernel_indices import Iteration, reduced_indices
from hostweave.base.names import claim_unique
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.names import Names
from hostweave.fusion_ir.index_map import Labels
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXIS, HALVES, ORDER
from hostweave.host_ir import ir
from hostweave.types.size import Factor, Size, product
from hostweave.types.tensor import BufferType, row_major, strides_of

ZERO, ONE = Size(0), Size()
SMALL = 32  # a shorter contiguous reduction is done by one thread
ACCESS = 16  # bytes per vectorised access
WARP = 32  # threads
ROW_THREADS = 512  # maximum number of threads that share a row of known length
LANES = (1, 2, 4, 8, 16, 32)  # threads that share a short row, so that a warp has several rows
LINE = 8  # threads that read 128 bytes together: the preferred minimum
EACH = (4, 3, 5, 2, 6, 7, 8, 1)  # accesses per thread to such a row: the first that divides it
HELD = 20  # maximum number of accesses whose elements a thread holds: 80 registers
HELD_ROWS = 5  # maximum number of held rows of unknown length: hw::kRowAccesses accesses each
TILE = 32  # columns per block tile: hw::kTile
TILE_THREADS, MOST_THREADS = 512, 1024
FEW_COLUMNS = 132 * TILE  # at most one tile per multiprocessor, so blocks use MOST_THREADS
OUTERMOST = "outermost"  # atom that replaces the outermost size
SHORT = 1 << 30  # maximum number of elements for which hw::fits_int32


@dataclass(frozen=True)
class ThreadSchedule:
    """Distribution of a kernel's iteration space over threads, as C++ templates with placeholders for the loops."""

    loop: str  # head of the loop over the kept dims
    grid: str  # launch grid
    inner: str = ""  # head of the innermost reduction loop, which threads share
    reduce: str = ""  # call that reduces the threads' accumulators
    reduce_last: str = ""  # cheaper call if only the storing threads need the result
    leader_if: str = ""  # condition under which a thread stores the result


BY_THREAD = ThreadSchedule("for ({number} {element} : hw::over_grid{walk}({count}))", "hw::grid_of_elements{width}({count})")
BY_BLOCK = ThreadSchedule(
    loop="for (int64_t {element} : hw::over_blocks({count}))",
    grid="hw::grid_of_rows{width}({count}, {length})",
    inner="for (int64_t {index} : hw::over_threads{width}({length}))",
    reduce="hw::reduce_block",
    leader_if="hw::first_thread()",
)
BY_ROW = ThreadSchedule(
    loop="for (int64_t {element} : {row}.of({count}))",
    grid="hw::Grid{{{count}, {threads}}}",
    inner="#pragma unroll Row::kEach\nfor (const hw::Chunk {index} : {row})",
    reduce="{row}.reduce",
    leader_if="{row}.first_thread()",
)
BY_ANY_ROW = replace(BY_ROW, grid="hw::grid_of_rows{width}({count}, {length})")
BY_SHORT_ROW = replace(BY_ROW, grid="hw::grid_of_elements({together})")
BY_COLUMNS = ThreadSchedule(
    loop="for (const hw::Column {element} : hw::over_columns{width}({count}))",
    grid="hw::grid_of_columns({count}, {threads})",
    inner="#pragma unroll 8\nfor (int64_t {index} : hw::over_rows<{threads}{more}>({length}))",
    reduce="hw::reduce_rows<{threads}>",
    reduce_last="hw::reduce_rows_to_first<{threads}>",
    leader_if="{element}.stores()",
)


BY_LANES = ThreadSchedule("for (int64_t {element} : hw::Lanes::of({count}))", "hw::grid_of_elements({count})")
BY_LANE_PARTS = ThreadSchedule(
    "for (const hw::LanePart {element} : hw::LaneParts{{{count}}})", "hw::grid_of_elements({lanes} * hw::kLaneParts)"
)
BY_BLOCK_LANES = ThreadSchedule("for (int64_t {element} : hw::BlockLanes::of({count}))", "hw::grid_of_rows({count}, {length})")
BY_CLUSTER_LANES = replace(BY_BLOCK_LANES, grid="hw::grid_of_orders({count}, {length}, {ordered})")
OF_BLOCKS = (BY_BLOCK_LANES, BY_CLUSTER_LANES)

ROWS = (BY_ROW, BY_ANY_ROW, BY_SHORT_ROW)


@dataclass(frozen=True)
class Lane:
    """A dim that no loop iterates over: its size and the stride of its elements."""

    size: Size
    stride: Size


@dataclass(frozen=True)
class Dim:
    """A dim of the loops: its size, and the stride of its elements in each place (inputs, results, index values)."""

    size: Size
    strides: tuple[Size, ...]
    position: int = 0  # position among the operands' dims; indices are named in this order
    indices: tuple[str, ...] = ()  # indices of the iteration that it merges


def merged(dims: Sequence[Dim]) -> list[Dim]:
    """Merges adjacent dims that one stride covers in every operand, and drops dims of size 1."""
    result: list[Dim] = []
    for dim in dims:
        if dim.size == ONE:
            continue
        if result and all(wide == dim.size * narrow for wide, narrow in zip(result[-1].strides, dim.strides, strict=True)):
            outer = result.pop()
            dim = Dim(outer.size * dim.size, dim.strides, outer.position, outer.indices + dim.indices)
        result.append(dim)
    return result


def stored(result: str) -> str:
    """Key of a result in memory, in contrast to the value of that name."""
    return f"{result} stored"


def reversed_at(op: Op, dim: int) -> str:
    """Key of the index of a dim that an op reverses."""
    return f"{op.result.name} {dim}"


class Loops:
    """Loops over the dims that a kernel keeps, and inside them over the dims that it reduces.

    Threads hold rows of `held` inputs in registers, if they fit.
    """

    closing = ""  # text after the body of the loop over the kept dims

    def __init__(
        self, kernel: ir.Kernel, walked: Iteration, buffers: Sequence[BufferType], integers: CppExprPrinter, names: Names, held: int = 0
    ):
        self.kernel, self.walked, self.integers = kernel, walked, integers
        inputs, results = [p.name for p in kernel.inputs], [p.name for p in kernel.results]
        self.memory = dict(zip((*inputs, *map(stored, results)), buffers, strict=True))
        self.stores = set(map(stored, results))
        self.takes_lanes = any(OPS[op.kind].lane for op in kernel.ops)
        self.moved = {stored(op.result.name): op[ORDER] for op in kernel.ops if OPS[op.kind].updates}  # dims that an update writes in part
        self.lanes = self.lie_unwalked((*inputs, *results))
        self.places = self.lie((*inputs, *results))
        self.dims()
        self.name_indices(names)
        self.schedule = self.shared(inputs, results)
        self.along = (self.reduced if self.schedule == BY_BLOCK else self.kept)[-1]  # the vectorised dim
        self.packed = {place for place in self.memory if self.stride(place, self.along) == ONE}  # places with vectorised access
        self.width = self.taken_together()
        self.lane = names.of("e", "element of a thread") if self.width > 1 else ""
        self.row_threads = 0  # number of threads that share a row of known length
        if self.schedule == BY_BLOCK and self.width > 1 and len(self.reduced) == 1:
            self.share_row(held)
        self.row = names.of("row", "shared") if self.schedule in ROWS else ""
        self.parts = self.taken_apart()
        self.number = self.type_of_number()

    # --- dims ---

    def lie(self, named: Sequence[str]) -> dict[str, dict[str, Size]]:
        """Stride of each index in every input, result and index value."""
        places: dict[str, dict[str, Size]] = {}
        for name, (place, buffer) in zip(named, self.memory.items(), strict=True):
            own = enumerate(zip(self.walked.indices[name], strides_of(buffer), strict=True))
            moved = self.moved.get(place, ())
            places[place] = {index: stride for i, (index, stride) in own if index is not None and i not in moved}
        for place, axes in self.moved.items():
            own_indices = self.walked.indices[self.kernel.results[0].name]
            places |= {f"{place} {i}": {index: ONE} if (index := own_indices[i]) else {} for i in axes}
        for op in self.kernel.ops:
            if op.kind == "reverse_second":
                of_result = self.walked.indices[op.result.name]
                places |= {reversed_at(op, dim): {index: ONE} if (index := of_result[dim]) else {} for dim in (op[AXIS], op[HALVES])}
            if op.kind == "iota":
                counted: Iterable[str | None] = self.walked.indices[op.result.name]
            elif OPS[op.kind].locates:
                counted = reduced_indices(op, self.walked.indices)
            else:
                continue
            places[op.result.name] = {index: ONE for index in counted if index is not None}
        return places

    def lie_unwalked(self, named: Sequence[str]) -> dict[str, Lane]:
        """Size and stride of each dim that no loop iterates over, by place. Includes the dims that an update writes in part."""
        moved = {
            f"{place} {i}": Lane(self.memory[place].shape[i], strides_of(self.memory[place])[i])
            for place, axes in self.moved.items()
            for i in axes
        }
        return moved | {
            place: Lane(buffer.shape[dim], strides_of(buffer)[dim])
            for name, (place, buffer) in zip(named, self.memory.items(), strict=True)
            if (dim := self.walked.lanes.get(name)) is not None
        }

    def dims(self) -> None:
        """Computes the dims that the kernel keeps and those that it reduces, outermost first."""
        order = list(self.walked.sizes)

        def dim(index: str) -> Dim:
            strides = tuple(own.get(index, ZERO) for own in self.places.values())
            return Dim(self.walked.sizes[index], strides, order.index(index), (index,))

        scalar = Dim(ONE, tuple(ONE if place in self.stores else ZERO for place in self.places))
        self.kept = merged([dim(index) for index in self.walked.kept]) or [scalar]
        self.reduced = merged([dim(index) for index in self.walked.reduced])
        self.outer: Size | None = None
        self.named = self.name_outermost()

    def name_outermost(self) -> dict[Factor, Size]:
        """Replaces an outermost size such as `4*B` by a parameter, so that launches with other multiples share the kernel.

        Does nothing if an inner dim contains one of its sizes, because strides would then have two spellings. Returns the size
        that the new parameter stands for.
        """
        dim_size, *inner = (dim.size for dim in (*self.kept, *self.reduced))
        if len(self.kept) < 2 or dim_size.coefficient == 1 or dim_size.divisor > 1 or dim_size.is_int:
            return {}
        if {atom for other in inner for atom in other.atoms} & set(dim_size.atoms):
            return {}
        sizes = self.integers.sizes
        at = next(i for i, atom in enumerate(sizes) if atom in dim_size.atoms)
        known, free = list(sizes.items()), claim_unique(OUTERMOST, set(sizes.values()))
        self.integers = replace(self.integers, sizes=dict([*known[:at], (OUTERMOST, free), *known[at:]]))
        self.outer = dim_size
        self.kept = [replace(dim, size=self.own(dim.size), strides=tuple(map(self.own, dim.strides))) for dim in self.kept]
        self.reduced = [replace(dim, strides=tuple(map(self.own, dim.strides))) for dim in self.reduced]
        return {OUTERMOST: dim_size}

    def own(self, size: Size) -> Size:
        """Rewrites a size in terms of the parameter for the outermost dim."""
        quotient = size.divided_by(self.outer) if self.outer else None
        return size if quotient is None or quotient.divisor > 1 else quotient * Size(1, (OUTERMOST,))

    def name_indices(self, names: Names) -> None:
        """Names the index of every dim, in the order of the operands' dims, and the index of the result's element."""
        order = sorted([*self.kept, *self.reduced], key=lambda dim: dim.position)
        letters = (f"{letter}{number or ''}" for number in itertools.count() for letter in "ijklpqrstuvw")
        self.names = {dim: names.of(letter, "index") for letter, dim in zip(letters, order, strict=False)}
        self.element = self.names[self.kept[0]] if len(self.kept) == 1 else names.of("element", "index")

    def stride(self, place: str, dim: Dim) -> Size:
        return dim.strides[list(self.places).index(place)]

    # --- schedules ---

    def shared(self, inputs: Sequence[str], results: Sequence[str]) -> ThreadSchedule:
        """Chooses the schedule.

        A block reduces one element if the reduced dim is contiguous, and otherwise a tile of columns. A thread reduces alone if
        the reduced dim is short.
        """
        if self.takes_lanes:
            if self.lanes[stored(results[0])].stride == ONE:
                return BY_CLUSTER_LANES if any(OPS[op.kind].in_clusters for op in self.kernel.ops) else BY_BLOCK_LANES
            return BY_LANE_PARTS if any(OPS[op.kind].parts_lanes for op in self.kernel.ops) else BY_LANES
        if not self.reduced or (self.reduced[-1].size.is_int and int(self.reduced[-1].size) < SMALL):
            return BY_THREAD
        whole = [name for name in inputs if all(any(self.stride(name, dim) != ZERO for dim in of) for of in (self.kept, self.reduced))]
        if any(self.stride(name, self.reduced[-1]) == ONE for name in whole or inputs):  # contiguous along the reduced dim
            return BY_BLOCK
        columns = product(tuple(dim.size for dim in self.kept))
        in_tiles = columns.is_int and int(columns) % TILE == 0  # whole tiles: no thread reads a column that another thread stores
        return BY_COLUMNS if in_tiles or not any(map(self.walked.is_whole, results)) else BY_THREAD

    def taken_together(self) -> int:
        """Vector width: number of consecutive elements per access, at most 16 bytes, in every place where they are contiguous."""
        scattered = any(self.stride(place, self.along) not in (ZERO, ONE) for place in self.stores)
        helpful = self.packed - self.stores if self.reduced else self.packed  # a reduction reads more than it stores
        if not helpful or scattered or self.takes_lanes or self.moved:
            return 1
        width = ACCESS // max(self.memory[place].dtype.itemsize for place in self.packed)
        while any(size.is_int and int(size) % width for size in self.divided()):
            width //= 2
        return width

    def divided(self) -> list[Size]:
        """Sizes that the vector width must divide: the vectorised dim, and the strides of its rows."""
        others = [dim for dim in (*self.kept, *self.reduced) if dim != self.along]
        rows = [self.stride(place, dim) for dim in others for place in self.memory if place in self.packed]
        jumps = [lane.stride for place, lane in self.lanes.items() if place in self.packed]
        return list(dict.fromkeys([self.along.size, *rows, *jumps]))

    def share_row(self, held: int) -> None:
        """Splits a row evenly over the threads of a block, or of part of a warp. Rows of unknown length are held if they may fit."""
        if self.along.size.is_int:
            self.row_threads = self.threads_of_row(int(self.along.size) // self.width, held)
        if self.row_threads:
            self.schedule = BY_ROW if self.row_threads > WARP else BY_SHORT_ROW
        elif 0 < held <= HELD_ROWS:
            self.schedule = BY_ANY_ROW

    def threads_of_row(self, accesses: int, held: int) -> int:
        """Number of threads that share a row of known length, or 0 if none divides it evenly."""
        for least, each in itertools.product((LINE, 1), EACH):
            threads = accesses // each
            fits = (threads % WARP == 0 and threads <= ROW_THREADS) or (threads in LANES and threads >= min(least, accesses))
            if fits and accesses % each == 0 and each * held <= HELD:
                return threads
        return 0

    def is_wide(self, pointers: Iterable[str]) -> str:
        """C++ condition for vectorised access: sizes are multiples of the width, and pointers are aligned."""
        unsure = [size for size in self.divided() if size.divisor > 1 or size.coefficient % self.width]
        texts = [f"{self.integers.first_factor(size)} % {self.width} == 0" for size in unsure]
        return " && ".join([*texts, f"hw::aligned({', '.join(pointers)})"])

    @property
    def has_wide_totals(self) -> bool:
        """True if the reduction keeps the vectorised dim, so that each vector element has an accumulator of its own."""
        return self.width > 1 and bool(self.reduced) and self.along == self.kept[-1]

    @property
    def calls_lanes(self) -> bool:
        """True if the kernel gathers or scatters by indices that are data."""
        return not self.walked.lanes.keys().isdisjoint(name for op in self.kernel.ops if op.kind != "reverse_second" for name in op.tensors)

    def is_inside(self, value: str) -> bool:
        """Returns True if a value differs between iterations of the innermost loop."""
        return self.are_inside(self.walked.indices[value])

    def moves_inside(self, op: Op) -> bool:
        """Returns True if the index at which an op reads its operand differs between iterations of the innermost loop."""
        labels = self.walked.indices[op.result.name]
        return self.are_inside((labels[op[AXIS]], labels[op[HALVES]])) if op.kind == "reverse_second" else self.is_inside(op.tensors[1])

    def are_inside(self, indices: Labels) -> bool:
        if self.reduced:
            return any(index in self.walked.reduced for index in indices)
        return self.width == 1 or any(index in self.along.indices for index in indices)

    # --- text ---

    def text(self, pattern: str, width: str = "kWidth", named: Mapping[Factor, Size] = MappingProxyType({})) -> str:
        """Fills in a template of the schedule. `width` is the C++ name of the vector width, and `named` replaces sizes."""
        width, number = width if self.width > 1 else "", self.number

        def size(*sizes: Size) -> str:
            return self.integers.size(product(sizes).replaced(named))

        walk = width if number == "int64_t" else f"{width or 1}, {number}"
        return pattern.format(
            element=self.element,
            count=size(*(dim.size for dim in self.kept)),
            lanes=self.integers.first_factor(product(tuple(dim.size for dim in self.kept)).replaced(named)),
            number=number,
            walk=walk and f"<{walk}>",
            together=size(*(dim.size for dim in self.kept), Size(self.row_threads)),
            index=self.names[self.reduced[-1]] if self.reduced else "",
            length=size(self.length) if self.length else "",
            ordered=size(self.lanes[stored(self.kernel.results[0].name)].size) if self.takes_lanes else "",
            row=self.row,
            threads=self.threads,
            width=width and f"<{width}>",
            more=width and f", {width}",
        )

    @property
    def length(self) -> Size | None:
        """Size of the dim that a block processes together, or None. With lanes, it is that of the result or of the operand."""
        if self.takes_lanes:
            of_result = any(OPS[op.kind].parts_lanes for op in self.kernel.ops)
            return self.lanes[next(place for place in self.memory if (place in self.stores) == of_result)].size
        return self.reduced[-1].size if self.reduced else None

    @property
    def loop(self) -> str:
        """Head of the loop over the kept dims."""
        return self.text(self.schedule.loop)

    @property
    def grid(self) -> str:
        """Launch grid of the kernel."""
        return self.text(self.schedule.grid, str(self.width), self.named)

    @property
    def inner(self) -> tuple[str, ...]:
        """Heads of the loops over the reduced dims. Threads may share the innermost loop."""
        walked = [(self.names[dim], self.integers.size(dim.size)) for dim in self.reduced]
        heads = [f"for (int64_t {i} = 0; {i} < {count}; ++{i})" for i, count in walked]
        return (*heads[:-1], self.text(self.schedule.inner)) if self.schedule.inner else tuple(heads)

    def type_of_number(self) -> str:
        """Index type: 32 bits if the index fits and is decomposed."""
        if self.schedule != BY_THREAD or not self.parts:
            return "int64_t"
        count = product(tuple(dim.size for dim in self.kept))
        return "Index" if not count.is_int else "uint32_t" if int(count) <= SHORT else "int64_t"

    @property
    def varied(self) -> dict[str, str]:
        """Template parameters of the kernel, each with the function parameter from which it is deduced."""
        if self.row:
            return {"class Row": f"const Row& {self.row}"}
        width = {"int kWidth": "hw::Width<kWidth>"} if self.width > 1 else {}
        return width | ({"class Index": "Index"} if self.number == "Index" else {})

    def variants(self, pointers: Iterable[str]) -> list[tuple[str, str]]:
        """Arguments for the template parameters, each with its condition. The last variant is unconditional."""
        if not self.varied:
            return []
        is_wide, length = self.is_wide(pointers), self.integers.size(self.along.size)
        if self.number == "Index":
            fits_int32 = self.text("hw::fits_int32({count})")
            if self.width == 1:
                return [(fits_int32, "uint32_t()"), ("", "int64_t()")]
            wide = f"hw::Width<{self.width}>()"
            return [
                (f"{is_wide} && {fits_int32}", f"{wide}, uint32_t()"),
                (is_wide, f"{wide}, int64_t()"),
                ("", "hw::Width<1>(), int64_t()"),
            ]
        if self.row_threads:
            rows = [f"hw::Row<{length}, {self.row_threads}, {width}>()" for width in (self.width, 1)]
            return [(is_wide, rows[0]), ("", rows[1])]
        if self.row:
            held = f"hw::RowUpTo<{self.width}>"
            longer = [(is_wide, f"hw::LongRow<{self.width}>({length})"), ("", f"hw::LongRow<1>({length})")]
            return [(f"{is_wide} && {held}::fits({length})", f"{held}({length})"), *longer]
        return [(is_wide, f"hw::Width<{self.width}>()"), ("", "hw::Width<1>()")]

    @property
    def threads(self) -> str:
        """Maximum number of threads per block."""
        if self.schedule == BY_COLUMNS:
            columns = product(tuple(dim.size for dim in self.kept))
            return str(MOST_THREADS if columns.is_int and int(columns) <= FEW_COLUMNS else TILE_THREADS)
        by_row = dict.fromkeys((BY_BLOCK, BY_ANY_ROW, *OF_BLOCKS), "hw::kRowThreads")
        return {BY_ROW: str(self.row_threads), **by_row}.get(self.schedule, "")

    @property
    def bounds(self) -> str:
        """Arguments of `__launch_bounds__`. With 1 block per multiprocessor the compiler may use all registers."""
        return f"{self.threads}, 1" if self.threads == str(MOST_THREADS) else self.threads

    def reduce(self, is_last: bool) -> str:
        """Call that reduces the accumulators of several threads. After the last loop, only the storing threads need the result."""
        return self.text((is_last and self.schedule.reduce_last) or self.schedule.reduce)

    @property
    def leader_if(self) -> str:
        """Condition under which a thread stores a reduced result."""
        return self.text(self.schedule.leader_if)

    @property
    def reduced_count(self) -> str:
        return self.integers.size(product(tuple(dim.size for dim in self.reduced)))

    def terms(self, place: str) -> list[tuple[str, Size]]:
        """Indices that address an element, each with its stride."""
        number = list(self.places).index(place)
        kept = [(self.element, ONE)] if self.is_linear(number) else [(self.names[dim], dim.strides[number]) for dim in self.kept]
        terms = [*kept, *((self.names[dim], dim.strides[number]) for dim in self.reduced)]
        return [(index, stride) for index, stride in terms if stride != ZERO]

    def first(self, place: str) -> str:
        """Offset of the first element of a vector, such as `i * N + j`."""
        return self.sum_of(self.terms(place))

    def row_of(self, place: str) -> str:
        """Offset of the first element of a row."""
        return self.sum_of([term for term in self.terms(place) if term[0] != self.names[self.along]])

    def offset(self, place: str) -> str:
        """Offset of an element, such as `i * N + j`, or `i * N + j + e` for element `e` of a vector."""
        terms = self.terms(place)
        if self.width == 1:
            return self.sum_of(terms)
        along = {self.names[self.along], self.element} if self.along == self.kept[-1] else {self.names[self.along]}
        moved = [(f"({index} + {self.lane})" if stride != ONE else f"{index} + {self.lane}", stride) for index, stride in terms]
        return self.sum_of([new if old[0] in along else old for old, new in zip(terms, moved, strict=True)])

    def sum_of(self, terms: Sequence[tuple[str, Size]]) -> str:
        wide = [f"{index} * {self.integers.factor(stride)}" for index, stride in terms if stride != ONE]
        return " + ".join([*wide, *(index for index, stride in terms if stride == ONE)]) or "0"

    def is_linear(self, number: int) -> bool:
        """Returns True if the linear index of a result's element is also its offset in this place."""
        return tuple(dim.strides[number] for dim in self.kept) == row_major(tuple(dim.size for dim in self.kept))

    def declarations(self) -> tuple[str, ...]:
        """Declarations of the indices of the result's dims, such as `element / (m * N) % 4`."""
        declared = []
        for i in self.parts:
            inner = product(tuple(dim.size for dim in self.kept[i + 1 :]))
            quotient = self.element if inner == ONE else f"{self.element} / {self.divisor(inner)}"
            rest = f" % {self.divisor(self.kept[i].size)}" if i else ""
            declared.append(f"const int64_t {self.names[self.kept[i]]} = {quotient}{rest};")
        return tuple(declared)

    def taken_apart(self) -> list[int]:
        """Dims of the result whose indices are computed from the linear index, because an offset needs them."""
        if len(self.kept) == 1:
            return []
        scattered = [number for number in range(len(self.places)) if not self.is_linear(number)]
        return [i for i, dim in enumerate(self.kept) if any(dim.strides[number] != ZERO for number in scattered)]

    def divisor(self, size: Size) -> str:
        """Divisor of a linear index, in the type of that index."""
        return self.integers.factor(size) if size.is_int or self.number != "Index" else f"Index({self.integers.size(size)})"
