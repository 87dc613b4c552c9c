"""Emission of kernels: loops, statements of one element, and the parameters of a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hostweave.analysis.kernel_indices import reduced_indices
from hostweave.emit.cpp import CFunction, CppExprPrinter, Literal, Word, accumulator_type, compute_type
from hostweave.emit.kernel_loops import LoopPrinter
from hostweave.emit.names import CppNames
from hostweave.emit.sections import Section
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import COUNT, DESCENDING, MESH_AXES, OFFSET
from hostweave.fusion_ir.ops.definition import OpDef
from hostweave.kernel_ir.loops import BY_LANE_PARTS, COUNTED, OF_BLOCKS, ONE, LoopDim, Loops, Walk, merged, stored
from hostweave.types.size import Atom, Size, product
from hostweave.types.tensor import BufferType, bool_

# C functions of the op table, which kernels call without a qualifier.
C_FUNCTIONS = frozenset(name + end for op in OPS.values() for field, name in op.fields(op.cpp) if field == "std" for end in ("", "f"))


Lines = tuple[str, ...]


@dataclass(frozen=True)
class Nest:
    """C++ of one loop nest over the reduced dims."""

    before: Lines
    starts: Lines
    body: Lines
    after: Lines


class EmittedKernel:
    """A kernel as its template sees it: loops over the kept dims, and inside them loops over the reduced dims.

    Accesses of neighbouring threads are coalesced. `stores` write results that have only the kept dims. `last` is the body of a
    final loop that writes results with all dims. `before` precedes the declarations of indices.
    """

    def __init__(
        self, of: KernelEmitter, body: Lines, walks: Iterable[Nest] = (), stores: Lines = (), last: Lines = (), before: Lines = ()
    ):
        self.name, self.loops, self.comments = of.name, of.loops, tuple(map(str, of.kernel.ops))
        pointers = (
            *(f"{of.array_of(name)} {of.pointers[name]}" for name in of.inputs),
            *(f"{of.types[y].dtype.cpp}* {at}" for y, at in of.results.items()),
        )
        self.params = (*pointers, *(f"int64_t {of.loops.integers.sizes[atom]}" for atom in of.atoms))
        self.touches = tuple(of.touches())
        packed = [pointer for name, pointer in of.pointers.items() if name in of.ir.packed]
        packed += [pointer for name, pointer in of.results.items() if stored(name) in of.ir.packed]
        self.variants = tuple(of.loops.variants(packed))
        held = sorted(of.ir.held, key=lambda name: name in of.terms)  # terms that other ranks send come last
        rows = ((of.elements(name), of.loops.shifted(of.pointers[name], of.loops.row_terms(name))) for name in held)
        kept_rows = (f"const auto {elements} = {of.loops.row}.load({first});" for elements, first in rows)
        # Declarations of decomposed indices and of held rows.
        self.indices = (*before, *of.loops.declarations(), *kept_rows)
        self.body, self.walks, self.stores, self.last = body, tuple(walks), stores, last
        # The parameter whose terms the kernels of several ranks reduce.
        self.terms = next((of.pointers[name] for name in of.inputs if name in of.terms), "")


class KernelEmitter:
    """Writes one kernel. A value is C++ text: a literal, an element in memory, or a local variable.

    Rows that threads hold in registers are loaded before the first loop, so that no load follows a reduction.
    """

    printer = LoopPrinter
    own_sizes: tuple[Size, ...] = ()  # sizes that its text names besides those of the loops

    def __init__(self, loops: Loops, integers: CppExprPrinter, name: str):
        kernel, buffers = loops.kernel, tuple(loops.memory.values())
        self.ir, self.kernel, self.ops, self.walked, self.name = loops, kernel, kernel.ops, loops.space, name
        self.types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        self.inputs = [p.name for p in kernel.inputs]
        self.made = {op.result.name: op for op in kernel.ops}
        exchange = kernel.exchanges
        self.terms = (
            {exchange.tensors[0]: integers.program.size_of(exchange[MESH_AXES].names)} if exchange else {}
        )  # input -> number of ranks that send terms
        self.is_small = all(buffer.dtype.itemsize <= 2 for buffer in buffers if buffer.dtype.kind == "float")
        self.names = CppNames((*integers.sizes.values(), name, *self.functions()))
        self.pointers = {name: self.names.of(name) for name in self.inputs}
        self.results = {p.name: self.names.of(p.name, "result") for p in kernel.results}
        self.loops = self.printer(loops, integers, self.names)
        self.lies = {**dict(zip(self.inputs, buffers, strict=False)), **{name: loops.memory[stored(name)] for name in self.results}}
        self.uses = Counter(name for op in self.ops for name in self.used(op))
        self.uses.update(name for name in self.results if name in self.uses)
        self.totals: dict[str, str] = {}  # accumulators by reduction
        self.row = Section(self)  # statements outside the innermost loops

    def emit(self) -> EmittedKernel:
        if self.ir.takes_lanes:
            return self.lanes()
        return self.reduction() if self.ir.reduced else self.pointwise()

    @cached_property
    def used_sizes(self) -> tuple[Size, ...]:
        """Sizes that the text of the kernel names."""
        return (
            *self.own_sizes,
            *(size for buffer in self.lies.values() for sizes in self.extent(buffer) for size in sizes),
            *self.kernel.sizes,
            *(size for dim in self.ir.dims for size in (dim.size, *dim.strides)),
            *(size for lane in self.ir.lanes.values() for size in (lane.size, lane.stride)),
            *(self.types[op.tensors[1]].shape[0] for op in self.ops if op.kind in COUNTED),
        )

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """Sizes that are parameters of the kernel, in order."""
        used = {atom for size in self.used_sizes for atom in size.atoms}
        return tuple(atom for atom in self.loops.integers.sizes if atom in used)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Key of the kernel: equal for two that differ in nothing but names."""
        values = {name: number for number, name in enumerate((*self.types, *self.ir.places))}
        integers, letters = self.loops.integers, self.ir.letters()

        def of(value: object) -> object:
            return integers.key(value, self.atoms) if isinstance(value, Size) else value

        def of_op(op: Op) -> tuple[object, ...]:
            inside = (op.result.name in self.ir.outside, OPS[op.kind].gathers and self.ir.moves_inside(op))
            operands = tuple(values[operand] if isinstance(operand, str) else (operand,) for operand in op.operands)
            attributes = tuple((name, of(value)) for name, value in op.attributes)
            return (op.kind, operands, attributes, op.result.type.dtype, *inside, self.reduces(op))

        dims = tuple(letters[dim] for dim in self.ir.dims)
        walks = tuple(tuple(values[op.result.name] for op in walk.reductions) for walk in self.ir.walks)
        chosen = (self.ir.distribution, self.ir.threads, self.ir.width, self.ir.index, *(values[name] for name in self.ir.held))
        lanes = tuple((values[name], lane, of(self.types[name].shape[lane])) for name, lane in self.walked.lanes.items())
        return (
            tuple(map(of_op, self.ir.kernel.ops)),
            tuple((self.types[name].dtype, name in self.ir.outside) for name in self.ir.inputs),
            tuple(values[name] for name in self.results),
            *(dims, len(self.ir.kept), walks, chosen, lanes),
            tuple(map(of, self.used_sizes)),
        )

    def functions(self) -> set[str]:
        """C functions that the kernel calls; no local variable may have their names."""
        specs = {(spec, self.types[op.tensors[-1]].dtype) for op in self.ops for field, spec in self.fields(op) if field == "std"}
        return {f"{CFunction(dtype):{spec}}" for spec, dtype in specs}

    def template(self, op: Op) -> str:
        """C++ template of an op, for the dtype of its operands."""
        return OPS[op.kind].cpp_for(self.types[op.tensors[-1]].dtype, self.is_small) if op.tensors else ""

    def fields(self, op: Op) -> tuple[tuple[str, str], ...]:
        return OpDef.fields(self.template(op))

    def cpp(self, op: Op, operands: Iterable[str]) -> str:
        """C++ of an op, with literals and C functions in the compute type."""
        dtype, template, operands = self.types[op.tensors[-1]].dtype, self.template(op), tuple(operands)
        return operands[0] if template == "{0}" else template.format(*operands, T=Literal(dtype), std=CFunction(dtype))

    def lane_size(self, name: str) -> Size:
        """Size of the dim of a value that no loop iterates over."""
        return self.types[name].shape[self.walked.lanes[name]]

    def size_of_lane(self, name: str) -> str:
        return self.loops.integers.factor(self.lane_size(name))

    def first_row(self, rows: str) -> str:
        """First of the rows that this rank holds; empty if it holds all of them."""
        if rows in self.pointers:
            return f"hw::first({self.pointers[rows]}, {self.size_of_lane(rows)})"
        return "" if (offset := self.made[rows][OFFSET]) == Size(0) else self.loops.integers.factor(offset)

    def jump(self, place: str, name: str) -> str:
        """Offset of index `place` along an input's dim that no loop iterates over."""
        stride = self.ir.lanes[name].stride
        return place if stride == ONE else f"{place} * {self.loops.integers.factor(stride)}"

    def used(self, op: Op) -> Iterator[str]:
        """Operands of an op, each as often as the C++ of the op mentions it."""
        for i, operand in enumerate(op.operands):
            if isinstance(operand, str):
                yield from [operand] * max(1, self.fields(op).count((str(i), "")))

    # --- bodies ---

    def array_of(self, name: str) -> str:
        """C++ type of the parameter for an input."""
        cpp = self.types[name].dtype.cpp
        return f"hw::Terms<{cpp}, {self.terms[name]}>" if name in self.terms else f"const {cpp}*"

    def touches(self) -> Iterator[str]:
        """Elements that the kernel reads and writes, as arguments that the CPU device checks."""
        integers = self.loops.integers
        for verb, pointers in (("reads", self.pointers), ("writes", self.results)):
            for name, pointer in pointers.items():
                shape, strides = self.extent(self.lies[name])
                extent = f"{integers.shape(shape)}, {integers.shape(strides)}" if strides else integers.size(*shape)
                yield pointer if name in self.terms else f"hw::{verb}({pointer}, {extent})"

    def extent(self, buffer: BufferType) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
        """Number of elements of a buffer. For a strided view, its dims and strides."""
        if buffer.strides is None:
            return (self.ir.own(product(buffer.shape)),), ()
        dims = merged([LoopDim(size, (stride,)) for size, stride in zip(buffer.shape, buffer.strides, strict=True)])
        dims = dims or [LoopDim(ONE, (ONE,))]
        return tuple(self.ir.own(dim.size) for dim in dims), tuple(self.ir.own(dim.strides[0]) for dim in dims)

    def elements(self, name: str) -> str:
        """Local variable for a vector of an input's elements."""
        return self.names.of(self.indexed(name, name), f"elements of {name}")

    def indexed(self, name: str, place: str) -> str:
        """Name of an element with its indices: `x_ij`."""
        return "_".join([name, "".join(sorted(index for index, _ in self.loops.terms(place)))]).rstrip("_")

    def pointwise(self) -> EmittedKernel:
        section = Section(self, self.row, self.ir.width)
        if self.ir.updates:
            section.store_update(self.ops[-1])
        else:
            section.store(self.results)
        lines = section.taken()  # first, because it may hoist statements into self.row
        return EmittedKernel(self, (*self.row.taken(), *lines))

    def lanes(self) -> EmittedKernel:
        """One call per lane, made by one thread or by all threads of a block together."""
        (op,) = self.ops
        by_block = dict.fromkeys(OF_BLOCKS, "hw::BlockLanes()")
        group = {**by_block, BY_LANE_PARTS: self.loops.element}.get(self.ir.distribution, "hw::Lanes()")
        kind = self.types[op.tensors[0]].dtype
        total = f"hw::Sum<{accumulator_type(kind)}>" if kind.kind == "float" else "uint64_t"  # unsigned, so that integers wrap around
        facts = {"descending": "true" if op[DESCENDING] else "false", "total": total}
        lanes = [self.lane(self.pointers[name], name) for name in op.tensors]
        lanes.append(self.lane(self.results[op.result.name], stored(op.result.name)))
        return EmittedKernel(self, (f"{OPS[op.kind].lane.format(**facts)}({', '.join([group, *lanes])});",))

    def lane(self, pointer: str, place: str) -> str:
        lane, size = self.ir.lanes[place], self.loops.integers.size
        return f"hw::lane({self.loops.shifted(pointer, self.loops.terms(place))}, {size(lane.size)}, {size(lane.stride)})"

    def reduction(self) -> EmittedKernel:
        """The loop nests over the reduced dims, and the results that have only the kept dims."""
        walks = self.ir.walks
        nests = [self.nest(walk, is_last=walk is walks[-1]) for walk in walks if walk.reductions]
        inside = self.section()
        inside.store(() if walks[-1].reductions else walks[-1].stores)
        last = inside.taken()
        outside = self.section() if self.ir.has_wide_totals else self.row
        outside.store([name for name in self.results if not self.walked.is_whole(name)])
        stores = outside.taken_stores() if outside is self.row else outside.taken()
        return EmittedKernel(self, self.row.taken(), nests, stores, last)

    def section(self) -> Section:
        """Statements of the innermost loop. Nothing is hoisted if each vector element has its own accumulator."""
        return Section(self, None if self.ir.has_wide_totals else self.row, self.ir.width)

    def reduces(self, op: Op) -> bool:
        return bool(reduced_indices(op, self.walked.indices))

    def count(self, op: Op) -> str:
        """Divisor of a mean, if it differs from the number of elements that the kernel reduces."""
        count = op[COUNT] if COUNT in OPS[op.kind].attributes else Size(0)
        return self.loops.integers.size(count) if count != Size(0) else ""

    def nest(self, walk: Walk, is_last: bool) -> Nest:
        """C++ of a loop nest that accumulates reductions and stores results."""
        section = self.section()
        starts, after = [], []
        for op in walk.reductions:
            combine = OPS[op.kind].combine
            assert combine is not None
            kind = self.types[op.tensors[0]].dtype
            accumulator = accumulator_type(kind)
            is_value = not (combine.is_mean or OPS[op.kind].locates) and accumulator == compute_type(op.result.type.dtype)
            total = self.names.of(
                op.result.name if is_value and op.result.name not in self.results else combine.total, f"total of {op.result.name}"
            )
            first = combine.starts[("float", "int", "uint").index("uint" if kind == bool_ else kind.kind)]
            first = first.replace("64", str(8 * kind.itemsize))  # identity element of the dtype, even if the accumulator is wider
            element = section.value(op.tensors[0])
            if OPS[op.kind].locates:
                accumulator, first = f"hw::Indexed<{accumulator}>", f"{{{first}, INT64_MAX}}"
                element = f"{accumulator}{{{element}, {self.loops.offset(op.result.name)}}}"
            elif compute_type(kind) != accumulator:
                element = f"{accumulator}({element})"
            if combine.sign == "+" and kind.kind == "float":
                accumulator, first = f"hw::Sum<{accumulator}>", "{}"
            self.totals[op.result.name] = f"{total}[{self.loops.lane}]" if self.ir.has_wide_totals else Word(total)
            if self.ir.has_wide_totals:
                starts.append(f"auto {total} = hw::filled<kWidth, {accumulator}>({first});")
            else:
                starts.append(f"{accumulator} {total} = {first};")
            section.join(self.totals[op.result.name], combine, element, wraps=kind.kind == "int" and combine.sign in ("+", "*"))
            if reduce := self.loops.reduce(is_last):
                after.append(f"{total} = {reduce}({total}, {combine.functor}());")
        section.store(walk.stores)
        body = section.taken()
        return Nest(before=self.row.taken(), starts=tuple(starts), body=body, after=tuple(after))
