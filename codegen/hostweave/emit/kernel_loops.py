"""C++ of a kernel's loops: loop heads, launch grid, element offsets, and variants by alignment and size."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from hostweave.analysis.kernel_indices import OperandRange
from hostweave.emit.cpp import CppExprPrinter, Word
from hostweave.emit.names import CppNames
from hostweave.fusion_ir.ir import Op
from hostweave.kernel_ir import loops as ir
from hostweave.kernel_ir.loops import ONE, OUTERMOST, LoopDim, Loops
from hostweave.kernel_ir.name_outermost import named_sizes
from hostweave.types.size import Factor, Size, product


@dataclass(frozen=True)
class Templates:
    """C++ templates of a distribution of iterations over threads. `LoopPrinter.text` fills in the placeholders."""

    loop: str  # head of the loop over the kept dims
    grid: str
    inner: str = ""  # head of the innermost reduction loop, which divides its iterations among threads
    reduce: str = ""  # function that combines the accumulators of threads that share an element
    reduce_last: str = ""  # cheaper function whose result only the storing threads get
    leader_if: str = ""  # condition that is true on the storing threads
    bounds: str = ""  # arguments of `__launch_bounds__`
    closing: str = ""  # text after the body of `loop`


_OF_ROW = Templates(
    loop="for (int64_t {element} : {row}.of({count}))",
    grid="hw::Grid{{{clusters}, {threads}{cluster}}}",
    inner="#pragma unroll Row::kEach\nfor (const hw::Chunk {index} : {row})",
    reduce="{row}.reduce",
    leader_if="{row}.first_thread()",
    bounds="{threads}",
)
_OF_BLOCK_FIBERS = Templates(
    "for (int64_t {element} : hw::BlockFibers::of({count}))", "hw::grid_of_rows({count}, {length})", bounds="hw::kRowThreads"
)
TEMPLATES = {
    ir.Distribution.THREAD: Templates("for ({number} {element} : hw::over_grid{walk}({count}))", "hw::grid_of_elements{width}({count})"),
    ir.Distribution.BLOCK: Templates(
        loop="for (int64_t {element} : hw::over_blocks({count}))",
        grid="hw::grid_of_rows{width}({count}, {length})",
        inner="for (int64_t {index} : hw::over_threads{width}({length}))",
        reduce="hw::reduce_block",
        leader_if="hw::first_thread()",
        bounds="hw::kRowThreads",
    ),
    ir.Distribution.ROW: _OF_ROW,
    ir.Distribution.ANY_ROW: replace(_OF_ROW, grid="hw::grid_of_rows{width}({count}, {length})", bounds="hw::kRowThreads"),
    ir.Distribution.SHORT_ROW: replace(_OF_ROW, grid="hw::grid_of_elements({together})", bounds=""),
    ir.Distribution.TILE: Templates(
        loop="hw::transpose{width}({rows}, {columns}, {result}, {pitch}, [&](int64_t {first}, int64_t {last})",
        grid="hw::grid_of_tiles<{bytes}>({rows}, {columns})",
        bounds="hw::kThreads, hw::kTransposing",
        closing=");",
    ),
    ir.Distribution.COLUMNS: Templates(
        loop="for (const hw::Column {element} : hw::over_columns{width}({count}))",
        grid="hw::grid_of_columns({count}, {threads})",
        inner="#pragma unroll 8\nfor (int64_t {index} : hw::over_rows<{threads}{more}>({length}))",
        reduce="hw::reduce_rows<{threads}>",
        reduce_last="hw::reduce_rows_to_first<{threads}>",
        leader_if="{element}.stores()",
        bounds="{threads}",
    ),
    ir.Distribution.FIBERS: Templates("for (int64_t {element} : hw::Fibers::of({count}))", "hw::grid_of_elements({count})"),
    ir.Distribution.FIBER_PARTS: Templates(
        "for (const hw::FiberPart {element} : hw::FiberParts{{{count}}})", "hw::grid_of_elements({fibers} * hw::kFiberParts)"
    ),
    ir.Distribution.BLOCK_FIBERS: _OF_BLOCK_FIBERS,
    ir.Distribution.PRODUCTS: Templates("", "hw::grid_of_products({columns}, {depth})", bounds="hw::kProductThreads", closing=");"),
    ir.Distribution.CLUSTER_FIBERS: replace(_OF_BLOCK_FIBERS, grid="hw::grid_of_orders({count}, {length}, {ordered})"),
}


class LoopPrinter:
    """Prints the loops of a kernel as C++, and names the indices."""

    def __init__(self, loops: Loops, integers: CppExprPrinter, names: CppNames):
        assert loops.distribution
        self.ir, self.templates = loops, TEMPLATES[loops.distribution]
        self.integers = _with_outermost(loops, integers, names)
        self.names = {dim: Word(names.of(dim.letter, "index")) for dim in loops.dims}
        self.element = self.names[loops.kept[0]] if len(loops.kept) == 1 else Word(names.of("element", "index"))
        self.vector_index = names.of("e", "element of a thread") if loops.width > 1 else ""
        self.row = names.of("row", "shared") if loops.has_rows else ""
        self.closing = self.templates.closing
        self.starts: dict[str, Size] = {}  # dim of an operand of a concat or pad -> first index of this operand in the result
        self.transposed = names.of(loops.transposed, "result") if loops.transposed else ""
        self.loop = self.text(self.templates.loop)
        self.grid = self.text(self.templates.grid, str(loops.width), named_sizes(loops))
        self.bounds = self.text(self.templates.bounds) + (f", {loops.resident}" if loops.resident else "")

    def text(self, pattern: str, width: str = "kWidth", named: Mapping[Factor, Size] = MappingProxyType({})) -> str:
        """Fills in the placeholders of a template. `width` is the C++ of the vector width. `named` maps sizes to replacements."""
        loops = self.ir
        width, number = width if loops.width > 1 else "", loops.index

        def size(*sizes: Size) -> str:
            return self.integers.size(product(sizes).replaced(named))

        walk = width if number == "int64_t" else f"{width or 1}, {number}"
        return pattern.format(
            element=self.element,
            count=size(loops.count),
            clusters=size(loops.count, Size(loops.blocks)),
            cluster=f", {loops.blocks}" if loops.blocks > 1 else "",
            fibers=self.integers.first_factor(loops.count.replaced(named)),
            number=number,
            walk=walk and f"<{walk}>",
            together=size(loops.count, Size(loops.threads)),
            index=self.names[loops.reduced[-1]] if loops.reduced else "",
            length=size(loops.length) if loops.length else "",
            ordered=size(loops.fibers[ir.stored(loops.results[0])].size) if loops.takes_fibers else "",
            row=self.row,
            threads=loops.threads,
            width=width and f"<{width}>",
            more=width and f", {width}",
            rows=size(loops.kept[0].size),
            columns=size(loops.products.weights.shape[1] if loops.products else loops.kept[-1].size),
            depth=size(loops.products.weights.shape[0]) if loops.products else "",
            first=self.names[loops.kept[0]],
            last=self.names[loops.kept[-1]],
            result=self.transposed,
            bytes=loops.dtype(loops.transposed).itemsize if loops.transposed else "",
            pitch=size(loops.stride(ir.stored(loops.transposed), loops.along)) if loops.transposed else "",
        )

    def nest(self, body: tuple[str, ...]) -> tuple[str, ...]:
        """Loop nest over the reduced dims. Empty if the body is empty."""
        walked = [(self.names[dim], self.integers.size(dim.size)) for dim in self.ir.reduced]
        heads = [f"for (int64_t {i} = 0; {i} < {count}; ++{i})" for i, count in walked]
        heads[-1] = self.text(self.templates.inner) or heads[-1]
        return (*(f"{head} {{" for head in heads), *body, *("}" for _ in heads)) if body else ()

    def reduce(self, is_last: bool) -> str:
        """Function that combines the accumulators of several threads. After the last loop, only the storing threads need the result."""
        return self.text((is_last and self.templates.reduce_last) or self.templates.reduce)

    @property
    def reduced_count(self) -> str:
        return self.integers.size(product(tuple(dim.size for dim in self.ir.reduced)))

    @property
    def varied(self) -> dict[str, str]:
        """Template parameters of the lambda `compute`, each with the function parameter from which C++ deduces the template parameter. Each
        variant of the kernel is a call of `compute`."""
        if self.row:
            return {"class Row": f"const Row& {self.row}"}
        width = {"int kWidth": "hw::Width<kWidth>"} if self.ir.width > 1 else {}
        return width | ({"class Index": "Index"} if self.ir.index == "Index" else {})

    def variants(self, pointers: Iterable[str]) -> list[tuple[str, str]]:
        """Condition of each variant, and its arguments for `varied`. The last variant has no condition. Empty if nothing varies."""
        if not self.varied:
            return []
        loops = self.ir
        (is_wide, is_narrow), length = self.alignment(pointers), self.integers.size(loops.along.size)
        if loops.index == "Index":
            by_index = [(self.text("hw::fits_int32({count})"), "uint32_t()"), ("", "int64_t()")]
            if loops.width == 1:
                return by_index
            wide = [(condition, f"hw::Width<{loops.width}>(), {index}") for condition, index in by_index]
            return [(is_narrow, "hw::Width<1>(), int64_t()"), *wide]
        if self.row and loops.threads:
            blocks = f", {loops.blocks}" if loops.blocks > 1 else ""
            rows = [f"hw::Row<{length}, {loops.threads}, {width}{blocks}>()" for width in (loops.width, 1)]
            return [(is_wide, rows[0]), ("", rows[1])]
        if self.row:
            held = f"hw::RowUpTo<{loops.width}>"
            wide = [(f"{held}::fits({length})", f"{held}({length})"), ("", f"hw::LongRow<{loops.width}>({length})")]
            return [(is_narrow, f"hw::LongRow<1>({length})"), *wide]
        return [(is_wide, f"hw::Width<{loops.width}>()"), ("", "hw::Width<1>()")]

    def alignment(self, pointers: Iterable[str]) -> tuple[str, str]:
        """C++ condition for vectorised access, and its negation. Pointers must be aligned, and sizes multiples of the vector width."""
        width, aligned = self.ir.width, f"hw::aligned({', '.join(pointers)})"
        unsure = [size for size in self.ir.divided() if size.divisor > 1 or size.coefficient % width]
        rests = [f"{self.integers.first_factor(size)} % {width}" for size in unsure]
        return " && ".join([*(f"{rest} == 0" for rest in rests), aligned]), " || ".join(
            [*(f"{rest} != 0" for rest in rests), f"!{aligned}"]
        )

    @contextmanager
    def inside(self, op: Op, spans: Sequence[OperandRange]) -> Iterator[list[tuple[str, str]]]:
        """In the `with` block, offsets are relative to an operand of a concat or pad. Yields two conditions per dim: that the index is not
        before the operand, or "", and that the index is not after the operand."""
        outer, self.starts, bounds = self.starts, dict(self.starts), list[tuple[str, str]]()
        for span in spans:
            before = self.starts.get(span.whole, ir.ZERO)
            self.starts[span.part] = before + span.start
            index = self.sum_of(self.terms(ir.index_at(op, span.dim)))
            first, end = (self.integers.size(before + bound) for bound in (span.start, span.end))
            bounds.append((f"{index} >= {first}" if span.start != ir.ZERO else "", f"{index} < {end}"))
        yield bounds
        self.starts = outer

    def indices(self, access: str) -> list[tuple[str, Size, LoopDim, Size]]:
        """Terms of the offset of an element: (index, stride, dim, start of a concat's or pad's operand). A linear access may have one index
        for all kept dims."""
        loops, parts = self.ir, self.ir.space.parts.get(access, {})
        first = {dim: self.starts[part] for index, part in parts.items() for dim in loops.dims if index in dim.indices}
        terms = [(self.names[dim], loops.stride(access, dim), dim, first.get(dim, ir.ZERO)) for dim in loops.dims]
        if loops.is_linear(access) and not loops.transposed:
            moved = sum((start * stride for _, stride, dim, start in terms if dim in loops.kept), ir.ZERO)
            terms = [(self.element, ONE, loops.kept[-1], moved), *terms[len(loops.kept) :]]
        return [term for term in terms if term[1] != ir.ZERO]

    def terms(self, access: str, vector_index: str = "") -> list[tuple[str, Size]]:
        """Terms (index, stride) of the offset of an element. A vector has the offset of its first element, or of element `vector_index`."""

        def index(name: str, stride: Size, dim: LoopDim, start: Size) -> str:
            text = f"{name} + {vector_index}" if vector_index and dim == self.ir.along else name
            text = text if start == ir.ZERO else f"{text} - {self.integers.factor(start)}"
            return f"({text})" if start != ir.ZERO or (text is not name and stride != ONE) else text

        return [(index(*term), term[1]) for term in self.indices(access)]

    def row_terms(self, access: str) -> list[tuple[str, Size]]:
        return [term for term in self.terms(access) if term[0] != self.names[self.ir.along]]

    def shifted(self, pointer: str, terms: Sequence[tuple[str, Size]]) -> str:
        return f"{pointer} + {self.sum_of(terms)}" if terms else pointer

    def offset(self, access: str) -> str:
        """C++ for the offset of an element, such as `i * N + j`, or `i * N + j + e` for element `e` of a vector."""
        return self.sum_of(self.terms(access, self.vector_index))

    def sum_of(self, terms: Sequence[tuple[str, Size]]) -> str:
        if len(terms) == 1 and terms[0][1] == ONE:
            return terms[0][0]
        wide = [f"{index} * {self.integers.factor(stride)}" for index, stride in terms if stride != ONE]
        return " + ".join([*wide, *(index for index, stride in terms if stride == ONE)]) or Word("0")

    def declarations(self) -> tuple[str, ...]:
        """Declarations that decompose a linear index into the indices of the result's dims, such as `element / (m * N) % 4`."""
        declared, kept = [], self.ir.kept
        for i in self.ir.taken_apart():
            inner = product(tuple(dim.size for dim in kept[i + 1 :]))
            quotient = self.element if inner == ONE else f"{self.element} / {self.divisor(inner)}"
            rest = f" % {self.divisor(kept[i].size)}" if i else ""
            declared.append(f"const int64_t {self.names[kept[i]]} = {quotient}{rest};")
        return tuple(declared)

    def divisor(self, size: Size) -> str:
        """C++ of a divisor in the type of the linear index."""
        text = self.integers.size(size)
        return text if size.is_int else f"Index({text})" if self.ir.index == "Index" else f"({text})" if " " in text else text


def _with_outermost(loops: Loops, integers: CppExprPrinter, names: CppNames) -> CppExprPrinter:
    """Printer of sizes. One parameter of the kernel, `rows` or `elements`, replaces the outermost size and its multiples."""
    if not loops.outer:
        return integers
    sizes = list(integers.sizes.items())
    at = next((i for i, (atom, _) in enumerate(sizes) if atom in loops.outer.atoms), len(sizes))
    name = names.of("rows" if len(loops.dims) > 1 else "elements", OUTERMOST)
    return replace(integers, sizes=dict([*sizes[:at], (OUTERMOST, name), *sizes[at:]]))
