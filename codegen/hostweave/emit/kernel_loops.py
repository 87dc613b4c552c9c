"""The loops of a kernel: which thread iterates over which elements, how many consecutive ones at once, and their offsets."""

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
SMALL = 32  # terms that one thread adds up alone although they lie side by side
ACCESS = 16  # bytes that a thread reads or writes at once
WARP = 32  # threads
ROW_THREADS = 512  # at most, that share a row of known length
LANES = (1, 2, 4, 8, 16, 32)  # threads that share a shorter one: a warp has several
LINE = 8  # threads that read 128 bytes together: preferably no fewer
EACH = (4, 3, 5, 2, 6, 7, 8, 1)  # accesses of a thread to such a row: the first that comes out even
HELD = 20  # accesses, at most, whose elements a thread holds: 80 registers
HELD_ROWS = 5  # of unknown length, at most, that a thread holds its part of: hw::kRowAccesses accesses each
TILE = 32  # columns of which a block takes rows together: hw::kTile
TILE_THREADS, MOST_THREADS = 512, 1024
FEW_COLUMNS = 132 * TILE  # at most one tile for each multiprocessor: these take all the threads that a block may have
OUTERMOST = "outermost"  # the size that a size becomes
SHORT = 1 << 30  # elements, at most, whose indices hw::fits_int32


@dataclass(frozen=True)
class ThreadSchedule:
    """How threads share what a kernel walks, as C++ with places for what they walk."""

    loop: str  # the loop over what is kept
    grid: str  # of the launch
    inner: str = ""  # the innermost loop over what is reduced, of which they take parts
    reduce: str = ""  # how their totals are reduced
    reduce_last: str = ""  # and where only the threads that store need them, if that takes less
    leader_if: str = ""  # the condition under which a thread stores what they come to


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
    """The elements of a dim that no loop walks."""

    size: Size
    stride: Size


@dataclass(frozen=True)
class Dim:
    """One dim of the loops: its size, and how far apart its elements lie in each place: inputs, results, indices."""

    size: Size
    strides: tuple[Size, ...]
    position: int = 0  # among the dims of the operands: indices are named in this order
    indices: tuple[str, ...] = ()  # of the iteration, that it stands for


def merged(dims: Sequence[Dim]) -> list[Dim]:
    """Neighbours that one stride covers in every operand become one dim; dims of one element go."""
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
    """The place that a result has in memory, beside those of other values."""
    return f"{result} stored"


def reversed_at(op: Op, dim: int) -> str:
    """The place that is an index of a dim of what an op reverses."""
    return f"{op.result.name} {dim}"


class Loops:
    """Of what a kernel keeps, and inside of what it reduces.

    Threads may hold rows of so many inputs in registers: `held`.
    """

    closing = ""  # what ends the loop over what is kept

    def __init__(
        self, kernel: ir.Kernel, walked: Iteration, buffers: Sequence[BufferType], integers: CppExprPrinter, names: Names, held: int = 0
    ):
        self.kernel, self.walked, self.integers = kernel, walked, integers
        inputs, results = [p.name for p in kernel.inputs], [p.name for p in kernel.results]
        self.memory = dict(zip((*inputs, *map(stored, results)), buffers, strict=True))
        self.stores = set(map(stored, results))
        self.takes_lanes = any(OPS[op.kind].lane for op in kernel.ops)
        self.moved = {stored(op.result.name): op[ORDER] for op in kernel.ops if OPS[op.kind].updates}  # dims of which a part is written
        self.lanes = self.lie_unwalked((*inputs, *results))
        self.places = self.lie((*inputs, *results))
        self.dims()
        self.name_indices(names)
        self.schedule = self.shared(inputs, results)
        self.along = (self.reduced if self.schedule == BY_BLOCK else self.kept)[-1]  # the dim of which a thread takes neighbours
        self.packed = {place for place in self.memory if self.stride(place, self.along) == ONE}  # read or written together
        self.width = self.taken_together()
        self.lane = names.of("e", "element of a thread") if self.width > 1 else ""
        self.row_threads = 0  # that share a row of known length
        if self.schedule == BY_BLOCK and self.width > 1 and len(self.reduced) == 1:
            self.share_row(held)
        self.row = names.of("row", "shared") if self.schedule in ROWS else ""
        self.parts = self.taken_apart()
        self.number = self.type_of_number()

    # --- dims ---

    def lie(self, named: Sequence[str]) -> dict[str, dict[str, Size]]:
        """How far apart neighbours along each index are: in every input and result, and in the values that are indices."""
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
        """The dims that no loop walks, by place: how many elements there are, and how far apart. Also those that are written in part."""
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
        """The dims that the kernel keeps and those that it reduces, from the outermost in."""
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
        """Makes an outermost dim_size such as `4*B` a size of its own, which may be another multiple in another launch.

        Not where an inner dim_size has one of its sizes: strides would be written in two ways. Gives what the new size stands for.
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
        """Writes a size with the one that the kernel has for its outermost dim."""
        quotient = size.divided_by(self.outer) if self.outer else None
        return size if quotient is None or quotient.divisor > 1 else quotient * Size(1, (OUTERMOST,))

    def name_indices(self, names: Names) -> None:
        """Names the index of every dim, in the order of the operands' dims, and of the element of the result."""
        order = sorted([*self.kept, *self.reduced], key=lambda dim: dim.position)
        letters = (f"{letter}{number or ''}" for number in itertools.count() for letter in "ijklpqrstuvw")
        self.names = {dim: names.of(letter, "index") for letter, dim in zip(letters, order, strict=False)}
        self.element = self.names[self.kept[0]] if len(self.kept) == 1 else names.of("element", "index")

    def stride(self, place: str, dim: Dim) -> Size:
        return dim.strides[list(self.places).index(place)]

    # --- who walks what ---

    def shared(self, inputs: Sequence[str], results: Sequence[str]) -> ThreadSchedule:
        """A block for an element where what is reduced to it lies side by side, else for a tile of them; a thread where that is little."""
        if self.takes_lanes:
            if self.lanes[stored(results[0])].stride == ONE:
                return BY_CLUSTER_LANES if any(OPS[op.kind].in_clusters for op in self.kernel.ops) else BY_BLOCK_LANES
            return BY_LANE_PARTS if any(OPS[op.kind].parts_lanes for op in self.kernel.ops) else BY_LANES
        if not self.reduced or (self.reduced[-1].size.is_int and int(self.reduced[-1].size) < SMALL):
            return BY_THREAD
        whole = [name for name in inputs if all(any(self.stride(name, dim) != ZERO for dim in of) for of in (self.kept, self.reduced))]
        if any(self.stride(name, self.reduced[-1]) == ONE for name in whole or inputs):  # vectors are read as they lie
            return BY_BLOCK
        columns = product(tuple(dim.size for dim in self.kept))
        in_tiles = columns.is_int and int(columns) % TILE == 0  # no thread walks a column that another one stores
        return BY_COLUMNS if in_tiles or not any(map(self.walked.is_whole, results)) else BY_THREAD

    def taken_together(self) -> int:
        """How many neighbours a thread takes: as many as one access reads or writes of each place that has them side by side."""
        scattered = any(self.stride(place, self.along) not in (ZERO, ONE) for place in self.stores)
        helpful = self.packed - self.stores if self.reduced else self.packed  # a reduction reads more than it stores
        if not helpful or scattered or self.takes_lanes or self.moved:
            return 1
        width = ACCESS // max(self.memory[place].dtype.itemsize for place in self.packed)
        while any(size.is_int and int(size) % width for size in self.divided()):
            width //= 2
        return width

    def divided(self) -> list[Size]:
        """What the number of neighbours that a thread takes has to divide: how many there are, and how far apart rows of them lie."""
        others = [dim for dim in (*self.kept, *self.reduced) if dim != self.along]
        rows = [self.stride(place, dim) for dim in others for place in self.memory if place in self.packed]
        jumps = [lane.stride for place, lane in self.lanes.items() if place in self.packed]
        return list(dict.fromkeys([self.along.size, *rows, *jumps]))

    def share_row(self, held: int) -> None:
        """By the threads of a block, or by fewer of a warp, where each takes the same number of times what it takes together."""
        if self.along.size.is_int:
            self.row_threads = self.threads_of_row(int(self.along.size) // self.width, held)
        if self.row_threads:
            self.schedule = BY_ROW if self.row_threads > WARP else BY_SHORT_ROW
        elif 0 < held <= HELD_ROWS:
            self.schedule = BY_ANY_ROW

    def threads_of_row(self, accesses: int, held: int) -> int:
        """The number of threads that share a row of known length; 0 if none divides it evenly."""
        for least, each in itertools.product((LINE, 1), EACH):
            threads = accesses // each
            fits = (threads % WARP == 0 and threads <= ROW_THREADS) or (threads in LANES and threads >= min(least, accesses))
            if fits and accesses % each == 0 and each * held <= HELD:
                return threads
        return 0

    def is_wide(self, pointers: Iterable[str]) -> str:
        """The condition under which a thread takes neighbours together."""
        unsure = [size for size in self.divided() if size.divisor > 1 or size.coefficient % self.width]
        texts = [f"{self.integers.first_factor(size)} % {self.width} == 0" for size in unsure]
        return " && ".join([*texts, f"hw::aligned({', '.join(pointers)})"])

    @property
    def has_wide_totals(self) -> bool:
        """Whether what is taken together is of what is kept, so that each of those elements has totals of its own."""
        return self.width > 1 and bool(self.reduced) and self.along == self.kept[-1]

    @property
    def calls_lanes(self) -> bool:
        """Whether it reads or writes where data say: other elements are at indices that its loops have."""
        return not self.walked.lanes.keys().isdisjoint(name for op in self.kernel.ops if op.kind != "reverse_second" for name in op.tensors)

    def is_inside(self, value: str) -> bool:
        """Whether a value differs among the elements of the innermost loop."""
        return self.are_inside(self.walked.indices[value])

    def moves_inside(self, op: Op) -> bool:
        """Whether the place differs among these at which an op reads its operand."""
        labels = self.walked.indices[op.result.name]
        return self.are_inside((labels[op[AXIS]], labels[op[HALVES]])) if op.kind == "reverse_second" else self.is_inside(op.tensors[1])

    def are_inside(self, indices: Labels) -> bool:
        if self.reduced:
            return any(index in self.walked.reduced for index in indices)
        return self.width == 1 or any(index in self.along.indices for index in indices)

    # --- text ---

    def text(self, pattern: str, width: str = "kWidth", named: Mapping[Factor, Size] = MappingProxyType({})) -> str:
        """What the schedule has for these loops, in which the number of neighbours that a thread takes has this name; `named` differ."""
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
        """Of what a block takes together: elements of the result, or where threads meet of the operand."""
        if self.takes_lanes:
            of_result = any(OPS[op.kind].parts_lanes for op in self.kernel.ops)
            return self.lanes[next(place for place in self.memory if (place in self.stores) == of_result)].size
        return self.reduced[-1].size if self.reduced else None

    @property
    def loop(self) -> str:
        """The head of the loop over what is kept."""
        return self.text(self.schedule.loop)

    @property
    def grid(self) -> str:
        """The grid that walks it, for the launch."""
        return self.text(self.schedule.grid, str(self.width), self.named)

    @property
    def inner(self) -> tuple[str, ...]:
        """The heads of the loops over what is reduced, of which threads may share the innermost one."""
        walked = [(self.names[dim], self.integers.size(dim.size)) for dim in self.reduced]
        heads = [f"for (int64_t {i} = 0; {i} < {count}; ++{i})" for i, count in walked]
        return (*heads[:-1], self.text(self.schedule.inner)) if self.schedule.inner else tuple(heads)

    def type_of_number(self) -> str:
        """Of an element: of 32 bits, where these hold it and it is taken apart."""
        if self.schedule != BY_THREAD or not self.parts:
            return "int64_t"
        count = product(tuple(dim.size for dim in self.kept))
        return "Index" if not count.is_int else "uint32_t" if int(count) <= SHORT else "int64_t"

    @property
    def varied(self) -> dict[str, str]:
        """What differs between numbers of neighbours and types of indices: parameters of a template, each with what it is deduced from."""
        if self.row:
            return {"class Row": f"const Row& {self.row}"}
        width = {"int kWidth": "hw::Width<kWidth>"} if self.width > 1 else {}
        return width | ({"class Index": "Index"} if self.number == "Index" else {})

    def variants(self, pointers: Iterable[str]) -> list[tuple[str, str]]:
        """Arguments for what is varied, each with the condition under which they are taken, the last ones without."""
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
        """Of a block, at most."""
        if self.schedule == BY_COLUMNS:
            columns = product(tuple(dim.size for dim in self.kept))
            return str(MOST_THREADS if columns.is_int and int(columns) <= FEW_COLUMNS else TILE_THREADS)
        by_row = dict.fromkeys((BY_BLOCK, BY_ANY_ROW, *OF_BLOCKS), "hw::kRowThreads")
        return {BY_ROW: str(self.row_threads), **by_row}.get(self.schedule, "")

    @property
    def bounds(self) -> str:
        """`__launch_bounds__`: with 1 thread block per multiprocessor the compiler may use all of its registers."""
        return f"{self.threads}, 1" if self.threads == str(MOST_THREADS) else self.threads

    def reduce(self, is_last: bool) -> str:
        """How the totals of several threads are reduced, which nothing but stores may need."""
        return self.text((is_last and self.schedule.reduce_last) or self.schedule.reduce)

    @property
    def leader_if(self) -> str:
        """The condition under which a thread stores what several have reduced."""
        return self.text(self.schedule.leader_if)

    @property
    def reduced_count(self) -> str:
        return self.integers.size(product(tuple(dim.size for dim in self.reduced)))

    def terms(self, place: str) -> list[tuple[str, Size]]:
        """The indices that lead to an element, with their strides."""
        number = list(self.places).index(place)
        kept = [(self.element, ONE)] if self.is_linear(number) else [(self.names[dim], dim.strides[number]) for dim in self.kept]
        terms = [*kept, *((self.names[dim], dim.strides[number]) for dim in self.reduced)]
        return [(index, stride) for index, stride in terms if stride != ZERO]

    def first(self, place: str) -> str:
        """Where an element lies, as `i * N + j`: the first of those that a thread takes together."""
        return self.sum_of(self.terms(place))

    def row_of(self, place: str) -> str:
        """Where a row begins."""
        return self.sum_of([term for term in self.terms(place) if term[0] != self.names[self.along]])

    def offset(self, place: str) -> str:
        """Where an element lies: each of those that a thread takes together, as `i * N + j + e`."""
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
        """Whether the number of an element of the result is also its offset in this place."""
        return tuple(dim.strides[number] for dim in self.kept) == row_major(tuple(dim.size for dim in self.kept))

    def declarations(self) -> tuple[str, ...]:
        """Of the indices of the result's dims that are needed: `element / (m * N) % 4`."""
        declared = []
        for i in self.parts:
            inner = product(tuple(dim.size for dim in self.kept[i + 1 :]))
            quotient = self.element if inner == ONE else f"{self.element} / {self.divisor(inner)}"
            rest = f" % {self.divisor(self.kept[i].size)}" if i else ""
            declared.append(f"const int64_t {self.names[self.kept[i]]} = {quotient}{rest};")
        return tuple(declared)

    def taken_apart(self) -> list[int]:
        """The dims of the result whose indices are taken from the number of its element, because some offset needs them."""
        if len(self.kept) == 1:
            return []
        scattered = [number for number in range(len(self.places)) if not self.is_linear(number)]
        return [i for i, dim in enumerate(self.kept) if any(dim.strides[number] != ZERO for number in scattered)]

    def divisor(self, size: Size) -> str:
        """Of an element's number, in its type."""
        return self.integers.factor(size) if size.is_int or self.number != "Index" else f"Index({self.integers.size(size)})"
