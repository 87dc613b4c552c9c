"""Data of a kernel for its C++: names, sizes, buffer types, accumulators, and templates of ops."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from hostweave.analysis.kernel_indices import reduced_indices
from hostweave.emit.cpp import CFunction, CppExprPrinter, Literal
from hostweave.emit.kernel_loops import LoopPrinter
from hostweave.emit.names import CppNames
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import COUNT, MESH_AXES, OFFSET
from hostweave.fusion_ir.ops.definition import OpDef
from hostweave.kernel_ir.loops import ONE, LoopDim, Loops, merged, stored
from hostweave.types.size import Atom, Size, product
from hostweave.types.tensor import BufferType

ARRIVING = {"all_reduce": "Terms", "reduce_scatter": "ScatteredSums", "all_gather": "GatheredBlocks"}  # collective -> C++ type of its input


class KernelFacts:
    """C++ names, sizes and types of one kernel. Kernels with equal keys share one definition."""

    def __init__(self, loops: Loops, integers: CppExprPrinter, name: str):
        kernel, buffers = loops.kernel, tuple(loops.memory.values())
        self.ir, self.kernel, self.ops, self.walked, self.name = loops, kernel, kernel.ops, loops.space, name
        self.types = kernel.types
        self.inputs = [p.name for p in kernel.inputs]
        self.made = kernel.made
        # input -> number of ranks that send terms or blocks
        self.terms = {op.tensors[0]: integers.program.size_of(op[MESH_AXES].names) for op in self.ops if op == kernel.exchanges}
        self.is_small = all(buffer.dtype.itemsize <= 2 for buffer in buffers if buffer.dtype.kind == "float")
        self.names = CppNames((*integers.sizes.values(), name, *self.functions()))
        self.pointers = {name: self.names.of(name) for name in self.inputs}
        self.results = {p.name: self.names.of(p.name, "result") for p in kernel.results}
        self.loops = LoopPrinter(loops, integers, self.names)
        self.lies = {**dict(zip(self.inputs, buffers, strict=False)), **{name: loops.memory[stored(name)] for name in self.results}}
        self.uses = Counter(name for op in self.ops for name in self.used(op))
        self.uses.update(name for name in self.results if name in self.uses)
        self.totals: dict[str, str] = {}  # reduction -> its accumulator
        self.rows: dict[str, str] = {}  # value -> local variable with a row in registers

    @cached_property
    def used_sizes(self) -> tuple[Size, ...]:
        return (
            *(self.ir.products.sizes if self.ir.products else ()),
            *(size for buffer in self.lies.values() for sizes in self.extent(buffer) for size in sizes),
            *self.kernel.sizes,
            *(size for dim in self.ir.dims for size in (dim.size, *dim.strides)),
            *(size for fiber in self.ir.fibers.values() for size in (fiber.size, fiber.stride)),
            *(self.types[op.tensors[1]].shape[0] for op in self.ops if OPS[op.kind].counts),
            *(end for operands in self.walked.joined.values() for spans in operands for span in spans for end in (span.start, span.end)),
        )

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """Atoms of `used_sizes` that are parameters of the kernel, in the printer's order of sizes."""
        used = {atom for size in self.used_sizes for atom in size.atoms}
        return tuple(atom for atom in self.loops.integers.sizes if atom in used)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for kernels that differ only in names."""
        values = {name: number for number, name in enumerate((*self.types, *self.ir.accesses))}
        integers = self.loops.integers

        def of(value: object) -> object:
            return integers.key(value, self.atoms) if isinstance(value, Size) else value

        def of_op(op: Op) -> tuple[object, ...]:
            inside = (op.result.name in self.ir.outside, OPS[op.kind].gathers and self.ir.moves_inside(op))
            operands = tuple(values[operand] if isinstance(operand, str) else (operand,) for operand in op.operands)
            attributes = tuple((name, of(value)) for name, value in op.attributes)
            return (op.kind, operands, attributes, op.result.type.dtype, *inside, self.reduces(op))

        dims = tuple(dim.letter for dim in self.ir.dims)
        walks = tuple(tuple(values[op.result.name] for op in walk.reductions) for walk in self.ir.walks)
        chosen = self.ir.distribution, self.ir.threads, self.ir.blocks, self.ir.width, self.ir.index
        held = tuple(values[name] for name in self.ir.held)
        fibers = tuple((values[name], fiber, of(self.types[name].shape[fiber])) for name, fiber in self.walked.fibers.items())
        return (
            tuple(map(of_op, self.ir.kernel.ops)),
            tuple((self.types[name].dtype, name in self.ir.outside) for name in self.ir.inputs),
            tuple(values[name] for name in self.results),
            *(dims, len(self.ir.kept), walks, chosen, held, fibers, self.kernel.receivers),
            tuple(map(of, self.used_sizes)),
        )

    def functions(self) -> set[str]:
        """C functions that the kernel calls. Local variables must not have these names."""
        specs = {(spec, self.types[op.tensors[-1]].dtype) for op in self.ops for field, spec in self.fields(op) if field == "std"}
        return {f"{CFunction(dtype):{spec}}" for spec, dtype in specs}

    def template(self, op: Op) -> str:
        """C++ template of an op for the dtype of its last tensor operand. Empty if the op has no tensor operands."""
        if not op.tensors:
            return ""
        dtype = op.result.type.dtype
        is_fast = self.is_small or (dtype.kind == "float" and dtype.itemsize <= 2)
        return OPS[op.kind].cpp_for(self.types[op.tensors[-1]].dtype, is_fast)

    def fields(self, op: Op) -> tuple[tuple[str, str], ...]:
        return OpDef.fields(self.template(op))

    def cpp(self, op: Op, operands: Iterable[str]) -> str:
        dtype, template, operands = self.types[op.tensors[-1]].dtype, self.template(op), tuple(operands)
        return operands[0] if template == "{0}" else template.format(*operands, T=Literal(dtype), std=CFunction(dtype))

    def fiber_size(self, name: str) -> Size:
        """Size of a value's fiber, the dim without a loop."""
        return self.types[name].shape[self.walked.fibers[name]]

    def size_of_fiber(self, name: str) -> str:
        return self.loops.integers.factor(self.fiber_size(name))

    def first_row(self, rows: str) -> str:
        """C++ for the first of the indices `rows` that this rank holds. Empty if this index is 0."""
        if rows in self.pointers:
            return f"hw::first({self.pointers[rows]}, {self.size_of_fiber(rows)})"
        return "" if (offset := self.made[rows][OFFSET]) == Size(0) else self.loops.integers.factor(offset)

    def used(self, op: Op) -> Iterator[str]:
        """Operands of an op, each as often as the C++ of the op uses it, and at least once."""
        for i, operand in enumerate(op.operands):
            if isinstance(operand, str):
                yield from [operand] * max(1, self.fields(op).count((str(i), "")))

    def array_of(self, name: str) -> str:
        """C++ type of the kernel's parameter for an input or result."""
        cpp = self.types[name].dtype.cpp
        if name in self.results:
            return f"hw::SentBlocks<{cpp}, {self.kernel.receivers}>" if self.kernel.receivers else f"{cpp}*"
        return f"hw::{ARRIVING[self.ops[0].kind]}<{cpp}, {self.terms[name]}>" if name in self.terms else f"const {cpp}*"

    def touches(self) -> Iterator[str]:
        """Arguments of HW_TOUCHES: the elements that the kernel reads and writes. With these arguments, the CPU device checks accesses."""
        integers = self.loops.integers
        for verb, pointers in (("reads", self.pointers), ("writes", self.results)):
            for name, pointer in pointers.items():
                shape, strides = self.extent(self.lies[name])
                extent = f"{integers.shape(shape)}, {integers.shape(strides)}" if strides else integers.size(*shape)
                yield pointer if name in self.terms or (self.kernel.receivers and verb == "writes") else f"hw::{verb}({pointer}, {extent})"

    def extent(self, buffer: BufferType) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
        """Dims and strides of a view. For a contiguous buffer, the number of elements and no strides."""
        if buffer.strides is None:
            return (self.ir.own(product(buffer.shape)),), ()
        dims = merged([LoopDim(size, (stride,)) for size, stride in zip(buffer.shape, buffer.strides, strict=True)])
        dims = dims or [LoopDim(ONE, (ONE,))]
        return tuple(self.ir.own(dim.size) for dim in dims), tuple(self.ir.own(dim.strides[0]) for dim in dims)

    def elements(self, name: str) -> str:
        """Local variable that holds a vector of elements of an input, or a thread's elements of a held row."""
        return self.names.of(self.indexed(name, name), f"elements of {name}")

    def indexed(self, name: str, access: str) -> str:
        """Name of an element, with the indices of the element, such as `x_ij`."""
        return "_".join([name, "".join(sorted(index for index, _, _, _ in self.loops.indices(access)))]).rstrip("_")

    def reduces(self, op: Op) -> bool:
        return bool(reduced_indices(op, self.walked.indices))

    def has_normal_reciprocal(self, name: str) -> bool:
        """True for a scale of quantised values, max(x, least) / by, whose reciprocal is a normal number for every finite x."""
        scale = self.made.get(name)
        if not scale or scale.kind != "divide" or scale.operands[0] not in self.made:
            return False
        top, by = self.made[scale.tensors[0]], scale.operands[1]
        least = top.operands[-1] if top.kind == "maximum" else ""
        return not isinstance(by, str) and not isinstance(least, str) and 4 <= by <= 2**20 and least >= 2**-80

    def count(self, op: Op) -> str:
        """C++ of a mean's explicit divisor. Empty if the divisor is the number of reduced elements."""
        count = op[COUNT] if COUNT in OPS[op.kind].attributes else Size(0)
        return self.loops.integers.size(count) if count != Size(0) else ""
