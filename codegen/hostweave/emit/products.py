"""Kernels with matmuls of few rows (hw::few_rows), and kernels that copy or fill strided buffers."""

from dataclasses import dataclass
from functools import cached_property

from hostweave.emit.cpp import CppExprPrinter, Word, compute_type
from hostweave.emit.kernels import EmittedKernel, KernelEmitter
from hostweave.emit.sections import Section
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir
from hostweave.kernel_ir.loops import ONE, LoopDim, Loops, merged
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, strides_of


class ProductEmitter(KernelEmitter):
    """Emits a kernel that begins with matmuls of few rows. hw::few_rows calls the other ops once per element, with the products as local
    variables."""

    def __init__(self, loops: Loops, integers: CppExprPrinter, name: str):
        super().__init__(loops, integers, name)
        assert loops.products
        self.kernel, self.products = loops.products.kernel, loops.products
        self.locals = {op.result.name: self.pointers.pop(op.result.name) for op in self.kernel.products}
        self.made, self.inputs = self.kernel.made, [p.name for p in self.kernel.inputs]
        self.types = {**self.types, **self.kernel.types}
        self.lies = {**self.lies, **self.products.memory}

    @cached_property
    def key(self) -> tuple[object, ...]:
        operands = tuple(self.inputs.index(name) for op in self.kernel.products for name in op.tensors)
        return (*super().key, self.products.is_transposed, operands, tuple(self.types[name].dtype for name in self.inputs))

    def emit(self) -> EmittedKernel:
        row, column, sums = (self.names.of(word, "few rows") for word in ("row", "column", "sums"))
        section = Section(self)
        for number, op in enumerate(self.kernel.products):
            name = section.texts[op.result.name] = Word(self.locals[op.result.name])
            section.lines.append(f"const {compute_type(op.result.type.dtype)} {name} = {sums}[{number}];")
        section.store(self.results)
        self.pointers = {name: self.pointers.get(name) or self.names.of(name) for name in self.inputs}
        rows, depth, columns, pitch = self.products.sizes
        size, products = self.loops.integers.size, self.kernel.products
        x, weights = products[0].tensors[0], [self.pointers[op.tensors[1]] for op in products]
        fields = f"{size(rows)}, {size(depth)}, {size(columns)}, {self.pointers[x]}, {size(depth)}, {{{', '.join(weights)}}}, {size(pitch)}"
        operands = f"hw::FewRows<{self.types[x].dtype.cpp}, {len(weights)}>{{{fields}}}"
        end = f"[&](int64_t {row}, int64_t {column}, const float (&{sums})[{len(weights)}])"
        self.loops.loop = f"hw::few_rows<{str(self.products.is_transposed).lower()}>({operands}, {end}"
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
