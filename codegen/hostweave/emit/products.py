"""Kernels for matmuls with few rows (hw::few_rows), strided copies and fills."""

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.analysis.kernel_indices import iteration
from hostweave.emit.cpp import CppExprPrinter, compute_type
from hostweave.emit.kernel_loops import ONE, Dim, Loops, merged
from hostweave.emit.kernels import Kernel, KernelEmitter
from hostweave.emit.names import Names
from hostweave.emit.sections import Section
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, strides_of


def multiplies(kernel: ir.Kernel) -> bool:
    return kernel.ops[0].kind == "matmul"


def emit_products(kernel: ir.Kernel, buffers: Sequence[BufferType], integers: CppExprPrinter, names: Names, number: int) -> Kernel:
    """Emits a kernel that begins with matmuls of few rows, for the types of its inputs, then its results."""
    products = [op for op in kernel.ops if op.kind == "matmul"]
    made = [ir.Parameter(op.result.name, op.result.type) for op in products]
    operands = {name for op in products for name in op.tensors}
    lies = dict(zip((p.name for p in kernel.inputs), buffers, strict=False))
    others = [p for p in kernel.inputs if p.name not in operands or any(p.name in op.tensors for op in kernel.ops if op not in products)]
    end = ir.Kernel(kernel.name, (*made, *others), tuple(op for op in kernel.ops if op not in products), kernel.returned)
    types = [BufferType(p.type.dtype, p.type.shape) for p in made] + [lies[p.name] for p in others]
    own = names.of(kernel.name, f"kernel {number}")
    emitter = _Emitter(own, end, iteration(end), [*types, *buffers[len(kernel.inputs) :]], integers)
    return emitter.multiplying(kernel, lies)


class _EachElement(Loops):
    """Loop over the elements that hw::few_rows passes to its epilogue, one at a time."""

    head = ""  # of the call of hw::few_rows
    launched_with = ""
    closing = ");"

    def taken_together(self) -> int:
        return 1

    def name_outermost(self) -> dict[object, Size]:  # type: ignore[override]
        return {}

    def type_of_number(self) -> str:
        return "int64_t"

    @property
    def loop(self) -> str:
        return self.head

    @property
    def grid(self) -> str:
        return self.launched_with

    @property
    def bounds(self) -> str:
        return "hw::kProductThreads, 2"


class _Emitter(KernelEmitter):
    """Emits the epilogue of matmuls, whose results are local variables."""

    loops_type = _EachElement
    loops: _EachElement

    def multiplying(self, kernel: ir.Kernel, lies: dict[str, BufferType]) -> Kernel:
        products = [op for op in kernel.ops if op.kind == "matmul"]
        row, column, sums = (self.names.of(word, "few rows") for word in ("row", "column", "sums"))
        section = Section(self)
        for number, op in enumerate(products):
            name = section.texts[op.result.name] = self.pointers.pop(op.result.name)
            section.lines.append(f"const {compute_type(op.result.type.dtype)} {name} = {sums}[{number}];")
        section.store(self.results)
        self.inputs = [p.name for p in kernel.inputs]
        self.types |= {p.name: p.type for p in kernel.inputs}
        self.lies = lies | {name: self.lies[name] for name in self.results}
        self.pointers = {name: self.pointers.get(name) or self.names.of(name) for name in self.inputs}

        x, w = (lies[name] for name in products[0].tensors)
        rows, (depth, columns), (step, pitch) = product(x.shape[:-1]), w.shape, strides_of(w)
        transposed = pitch != Size()
        pitch = pitch if transposed else step
        self.own_sizes = (rows, depth, columns, pitch)
        size = self.loops.integers.size
        pointer, *weights = (self.pointers[name] for name in (products[0].tensors[0], *(op.tensors[1] for op in products)))
        fields = f"{size(rows)}, {size(depth)}, {size(columns)}, {pointer}, {size(depth)}, {{{', '.join(weights)}}}, {size(pitch)}"
        operands = f"hw::FewRows<{x.dtype.cpp}, {len(products)}>{{{fields}}}"
        end = f"[&](int64_t {row}, int64_t {column}, const float (&{sums})[{len(products)}])"
        self.loops.head = f"hw::few_rows<{str(transposed).lower()}>({operands}, {end}"
        self.loops.launched_with = f"hw::grid_of_products({size(columns)}, {size(depth)})"
        element = f"const int64_t {self.loops.element} = {row} * {self.loops.integers.factor(columns)} + {column};"
        emitted = Kernel(self, section.taken(), before=(element,))
        emitted.comments = tuple(map(str, kernel.ops))
        return emitted


# --- copies -----------------------------------------------------------------------------------------------------------
# Copies and fills that no op of the fusion made: row by row if possible, else by a kernel.


@dataclass(frozen=True)
class Rows:
    """Copy of rows of contiguous elements. The starts of adjacent rows are `pitch` elements apart."""

    rows: Size
    elements: Size
    src_pitch: Size
    dst_pitch: Size


def copied(src: BufferType, dst: BufferType) -> Rows | None:
    """Row-wise form of a copy, or None if the strides do not allow one."""
    strides = zip(strides_of(src), strides_of(dst), strict=True)
    dims = merged([Dim(size, pair) for size, pair in zip(src.shape, strides, strict=True)])
    if not dims or dims[-1].strides != (ONE, ONE):
        dims.append(Dim(ONE, (ONE, ONE)))
    if len(dims) == 1:
        dims.insert(0, Dim(ONE, (dims[0].size, dims[0].size)))
    return Rows(dims[0].size, dims[1].size, *dims[0].strides) if len(dims) == 2 else None


def copy_kernel(name: str, buffer: BufferType) -> ir.Kernel:
    """Kernel that copies between strided views of this shape."""
    type = unsharded(buffer)
    return ir.Kernel(name, (ir.Parameter("src", type),), (Op("copy", ("src",), Value("dst", type)),))


def fill_kernel(name: str, buffer: BufferType, value: int | float) -> ir.Kernel:
    """Kernel that sets every element of a view to a value."""
    return ir.Kernel(name, (), (Op("fill", (), Value("dst", unsharded(buffer)), (("value", value),)),))
