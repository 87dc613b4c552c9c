"""Kernels with matmuls of few rows (hw::few_rows), and kernels that copy or fill strided buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hostweave.emit.cpp import CppExprPrinter, Word, compute_type
from hostweave.emit.kernel_loops import LoopPrinter
from hostweave.emit.kernels import EmittedKernel, KernelEmitter
from hostweave.emit.sections import Section
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir
from hostweave.kernel_ir.index_space import index_space
from hostweave.kernel_ir.loops import BY_THREAD, ONE, LoopDim, merged
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, strides_of


def multiplies(kernel: ir.Kernel) -> bool:
    return OPS[kernel.ops[0].kind].is_product


class _EachElement(LoopPrinter):
    """Loop of an epilogue. hw::few_rows calls the epilogue once per element."""

    bounds = "hw::kProductThreads, 2"
    multiplies = True


class ProductEmitter(KernelEmitter):
    """Emits a kernel that begins with matmuls of few rows. The rest is an epilogue, with the products as local variables."""

    printer = _EachElement
    loops: _EachElement

    def __init__(self, kernel: ir.Kernel, buffers: Sequence[BufferType], integers: CppExprPrinter, name: str):
        self.products = [op for op in kernel.ops if OPS[op.kind].is_product]
        end = tuple(op for op in kernel.ops if op not in self.products)
        made = [ir.Parameter(op.result.name, op.result.type) for op in self.products]
        operands = {name for op in self.products for name in op.tensors}
        self.given = dict(zip((p.name for p in kernel.inputs), buffers, strict=False))
        others = [p for p in kernel.inputs if p.name not in operands or any(p.name in op.tensors for op in end)]
        types = [BufferType(p.type.dtype, p.type.shape) for p in made] + [self.given[p.name] for p in others]
        epilogue = ir.Kernel(kernel.name, (*made, *others), end, kernel.returned)
        loops = index_space(epilogue, [*types, *buffers[len(kernel.inputs) :]])
        super().__init__(replace(loops, distribution=BY_THREAD), integers, name)
        self.locals = {op.result.name: self.pointers.pop(op.result.name) for op in self.products}
        self.kernel, self.made, self.inputs = kernel, kernel.made, [p.name for p in kernel.inputs]
        self.types = {**self.types, **{p.name: p.type for p in kernel.inputs}}
        self.lies = self.given | {name: self.lies[name] for name in self.results}
        x, w = (self.given[name] for name in self.products[0].tensors)
        rows, (depth, columns), (step, pitch) = product(x.shape[:-1]), w.shape, strides_of(w)
        self.loops.closing = ");"
        self.is_transposed = pitch != Size()
        self.own_sizes = (rows, depth, columns, pitch if self.is_transposed else step)
        size = self.loops.integers.size
        self.loops.grid = f"hw::grid_of_products({size(columns)}, {size(depth)})"

    @cached_property
    def key(self) -> tuple[object, ...]:
        operands = tuple(self.inputs.index(name) for op in self.products for name in op.tensors)
        return (*super().key, self.is_transposed, operands, tuple(self.types[name].dtype for name in self.inputs))

    def emit(self) -> EmittedKernel:
        row, column, sums = (self.names.of(word, "few rows") for word in ("row", "column", "sums"))
        section = Section(self)
        for number, op in enumerate(self.products):
            name = section.texts[op.result.name] = Word(self.locals[op.result.name])
            section.lines.append(f"const {compute_type(op.result.type.dtype)} {name} = {sums}[{number}];")
        section.store(self.results)
        self.pointers = {name: self.pointers.get(name) or self.names.of(name) for name in self.inputs}
        rows, depth, columns, pitch = self.own_sizes
        size, dtype = self.loops.integers.size, self.given[self.products[0].tensors[0]].dtype
        pointer, *weights = (self.pointers[name] for name in (self.products[0].tensors[0], *(op.tensors[1] for op in self.products)))
        fields = f"{size(rows)}, {size(depth)}, {size(columns)}, {pointer}, {size(depth)}, {{{', '.join(weights)}}}, {size(pitch)}"
        operands = f"hw::FewRows<{dtype.cpp}, {len(self.products)}>{{{fields}}}"
        end = f"[&](int64_t {row}, int64_t {column}, const float (&{sums})[{len(self.products)}])"
        self.loops.loop = f"hw::few_rows<{str(self.is_transposed).lower()}>({operands}, {end}"
        element = f"const int64_t {self.loops.element} = {row} * {self.loops.integers.factor(columns)} + {column};"
        return EmittedKernel(self, section.taken(), before=(element,))


@dataclass(frozen=True)
class Rows:
    """A copy of contiguous rows, which begin `src_pitch` and `dst_pitch` elements apart."""

    rows: Size
    elements: Size
    src_pitch: Size
    dst_pitch: Size


def copied(src: BufferType, dst: BufferType) -> Rows | None:
    """Describes a copy as a copy of rows. None if the strides do not allow this description."""
    strides = zip(strides_of(src), strides_of(dst), strict=True)
    dims = merged([LoopDim(size, pair) for size, pair in zip(src.shape, strides, strict=True)])
    if not dims or dims[-1].strides != (ONE, ONE):
        dims.append(LoopDim(ONE, (ONE, ONE)))
    if len(dims) == 1:
        dims.insert(0, LoopDim(ONE, (dims[0].size, dims[0].size)))
    return Rows(dims[0].size, dims[1].size, *dims[0].strides) if len(dims) == 2 else None


def copy_kernel(name: str, buffer: BufferType) -> ir.Kernel:
    type = unsharded(buffer)
    return ir.Kernel(name, (ir.Parameter("src", type),), (Op("copy", ("src",), Value("dst", type)),))


def fill_kernel(filled: str, buffer: BufferType, value: int | float) -> ir.Kernel:
    return ir.Kernel(f"fill_{filled}", (), (Op("fill", (), Value(filled, unsharded(buffer)), (("value", value),)),))
