"""Emission of kernels: loops, statements of one element, and the parameters of a launch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hostweave.analysis.kernel_indices import Iteration, NotOneKernel, iteration, reduced_indices
from hostweave.base.errors import ProgramError
from hostweave.emit.cpp import CFunction, CppExprPrinter, Literal, accumulator_type, compute_type
from hostweave.emit.kernel_loops import BY_LANE_PARTS, OF_BLOCKS, ONE, Dim, Loops, merged, stored
from hostweave.emit.names import Names
from hostweave.emit.sections import COUNTED, Section, shifted
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import COUNT, DESCENDING, MESH_AXES, OFFSET
from hostweave.fusion_ir.ops.definition import OpDef
from hostweave.host_ir import ir
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, bool_

LATE_BYTES = 16 << 10  # maximum bytes of rows that a block prefetches; they occupy registers

# C functions of the op table, which kernels call without a qualifier.
C_FUNCTIONS = frozenset(name + end for op in OPS.values() for field, name in op.fields(op.cpp) if field == "std" for end in ("", "f"))


Lines = tuple[str, ...]


@dataclass(frozen=True)
class Walk:
    """One loop nest over the reduced dims. A kernel has several if one reduction needs the result of another."""

    before: Lines
    starts: Lines
    body: Lines
    after: Lines


class Kernel:
    """A kernel as its template sees it: loops over the kept dims, and inside them loops over the reduced dims.

    Accesses of neighbouring threads are coalesced. `stores` write results that have only the kept dims. `last` is the body of a
    final loop that writes results with all dims. `before` precedes the declarations of indices.
    """

    def __init__(
        self, of: KernelEmitter, body: Lines, walks: Iterable[Walk] = (), stores: Lines = (), last: Lines = (), before: Lines = ()
    ):
        self.name, self.loops, self.comments = of.name, of.loops, tuple(map(str, of.ops))
        pointers = (
            *(f"{of.array_of(name)} {of.pointers[name]}" for name in of.inputs),
            *(f"{of.types[y].dtype.cpp}* {at}" for y, at in of.results.items()),
        )
        self.params = (*pointers, *(f"int64_t {size}" for size in of.sizes))
        self.touches = tuple(of.touches())
        self.sizes = tuple(of.sizes.values())  # arguments of a launch after the buffers
        packed = [pointer for name, pointer in of.pointers.items() if name in of.loops.packed]
        packed += [pointer for name, pointer in of.results.items() if stored(name) in of.loops.packed]
        self.variants = tuple(of.loops.variants(packed))
        held = sorted(of.held, key=lambda name: name in of.terms)  # terms that other ranks send come last
        rows = ((of.elements(name), shifted(of.pointers[name], of.loops.row_of(name))) for name in held)
        kept_rows = (f"const auto {elements} = {of.loops.row}.load({first});" for elements, first in rows)
        # Declarations of decomposed indices and of held rows.
        self.indices = (*before, *of.loops.declarations(), *kept_rows)
        self.body, self.walks, self.stores, self.last = body, tuple(walks), stores, last
        # The parameter whose terms the kernels of several ranks reduce.
        self.terms = next((of.pointers[name] for name in of.inputs if name in of.terms), "")
        self.form = of.form(self)  # equal for kernels that differ only in names


def emit_kernel(kernel: ir.Kernel, buffers: Sequence[BufferType], integers: CppExprPrinter, names: Names, number: int) -> Kernel:
    """Emits a kernel for the types of its inputs, then its results.

    `number` tells kernels of one name apart. Raises ProgramError if the ops do not fit in one kernel.
    """
    name = names.of(kernel.name, f"kernel {number}", C_FUNCTIONS)
    try:
        walked = iteration(kernel)
    except NotOneKernel as reason:
        raise ProgramError(f"kernel @{kernel.name}: {reason}; split it") from None
    emitter = KernelEmitter(name, kernel, walked, buffers, integers)
    emitted = emitter.emit()
    again = [name for name, times in emitter.loaded.items() if times > 1]
    late: list[str] = []
    for one in (name for name in emitter.late if emitter.loops.row_threads and name not in again):
        rows = int(emitter.loops.along.size) * sum(emitter.types[name].dtype.itemsize for name in (*late, one))
        late += [one] if rows <= LATE_BYTES else []
    for held in filter(None, ([*again, *late], again)):
        holding = KernelEmitter(name, kernel, walked, buffers, integers, held)
        if holding.loops.row:
            return holding.emit()
    return emitted


class KernelEmitter:
    """Writes one kernel. A value is C++ text: a literal, an element in memory, or a local variable.

    Operands of a reduction are computed in its loop, and again in any later loop that needs them; by then the inputs are in
    cache. Threads keep the rows of the inputs named by `held` in registers. Those rows are loaded before the first loop, so that
    no load follows a reduction.
    """

    loops_type = Loops
    own_sizes: tuple[Size, ...] = ()  # sizes that its text names besides those of the loops

    def __init__(
        self,
        name: str,
        kernel: ir.Kernel,
        walked: Iteration,
        buffers: Sequence[BufferType],
        integers: CppExprPrinter,
        held: Collection[str] = (),
    ):
        self.kernel, self.ops, self.walked, self.integers = kernel, kernel.ops, walked, integers
        self.name = name
        self.types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        self.inputs = [p.name for p in kernel.inputs]
        self.made = {op.result.name: op for op in kernel.ops}
        exchange = kernel.exchanges
        self.terms = (
            {exchange.tensors[0]: integers.program.size_of(exchange[MESH_AXES].names)} if exchange else {}
        )  # input -> number of ranks that send terms
        self.is_small = all(buffer.dtype.itemsize <= 2 for buffer in buffers if buffer.dtype.kind == "float")
        self.names = Names((*integers.sizes.values(), name, *self.functions()))
        self.pointers = {name: self.names.of(name) for name in self.inputs}
        self.results = {p.name: self.names.of(p.name, "result") for p in kernel.results}
        self.loops = self.loops_type(kernel, walked, buffers, integers, self.names, len(held))
        self.lies = {**dict(zip(self.inputs, buffers, strict=False)), **{name: self.loops.memory[stored(name)] for name in self.results}}
        self.held = held
        self.walks = 0  # loop nests over the reduced dims so far
        self.loaded = Counter[str]()  # number of loads by input
        self.late: list[str] = []  # inputs that are first loaded after a reduction
        self.uses = Counter(name for op in self.ops for name in self.used(op))
        self.uses.update(name for name in self.results if name in self.uses)
        self.totals: dict[str, str] = {}  # accumulators by reduction
        self.row = Section(self)  # statements outside the innermost loops

    def emit(self) -> Kernel:
        if self.loops.takes_lanes:
            return self.lanes()
        return self.reduction() if self.loops.reduced else self.pointwise()

    @property
    def sizes(self) -> dict[str, str]:
        """Parameters that are sizes, each with the argument that a launch passes."""
        dims, integers, lanes = (*self.loops.kept, *self.loops.reduced), self.loops.integers, self.loops.lanes.values()
        sizes = (
            *self.own_sizes,
            *(size for buffer in self.lies.values() for sizes in self.extent(buffer) for size in sizes),
            *self.kernel.sizes,
            *(size for dim in dims for size in (dim.size, *dim.strides)),
            *(size for lane in lanes for size in (lane.size, lane.stride)),
            *(self.types[op.tensors[1]].shape[0] for op in self.ops if op.kind in COUNTED),
        )
        used = {name for size in sizes for name in size.atoms}
        given = {name: integers.size(Size(1, (name,)).replaced(self.loops.named)) for name in integers.sizes if name in used}
        return {integers.sizes[name]: text for name, text in given.items()}

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
        dtype = self.types[op.tensors[-1]].dtype
        return self.template(op).format(*operands, T=Literal(dtype), std=CFunction(dtype))

    def size_of_lane(self, name: str) -> str:
        """Size of the dim of a value that no loop iterates over."""
        size = self.types[name].shape[self.walked.lanes[name]]
        return self.loops.integers.factor(size)

    def first_row(self, rows: str) -> str:
        """First of the rows that this rank holds; empty if it holds all of them."""
        if rows in self.pointers:
            return f"hw::first({self.pointers[rows]}, {self.size_of_lane(rows)})"
        return "" if (offset := self.made[rows][OFFSET]) == Size(0) else self.loops.integers.factor(offset)

    def jump(self, place: str, name: str) -> str:
        """Offset of index `place` along an input's dim that no loop iterates over."""
        stride = self.loops.lanes[name].stride
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
            return (self.loops.own(product(buffer.shape)),), ()
        dims = merged([Dim(size, (stride,)) for size, stride in zip(buffer.shape, buffer.strides, strict=True)]) or [Dim(ONE, (ONE,))]
        return tuple(self.loops.own(dim.size) for dim in dims), tuple(self.loops.own(dim.strides[0]) for dim in dims)

    def form(self, kernel: Kernel) -> str:
        """Canonical text of the kernel, in which numbers replace the names that it chose."""
        loops, walks = self.loops, [part for walk in kernel.walks for part in (walk.before, walk.starts, walk.body, walk.after)]
        head = (
            (loops.bounds, loops.loop, loops.leader_if),
            kernel.params,
            *kernel.variants,
            tuple(loops.varied),
            kernel.indices,
            loops.inner,
        )
        parts = (*head, *walks, kernel.body, kernel.stores, kernel.last, kernel.touches)
        text, numbers = "\n\n".join(map("\n".join, parts)), dict[str, str]()
        own = {*self.names.given, *self.loops.integers.sizes.values()}

        def number(match: re.Match[str]) -> str:
            return numbers.setdefault(match[0], f"${len(numbers)}") if match[0] in own else match[0]

        return re.sub(r"(?<![\w.:])[A-Za-z_]\w*", number, text)

    def elements(self, name: str) -> str:
        """Local variable for a vector of an input's elements."""
        return self.names.of(self.indexed(name, name), f"elements of {name}")

    def indexed(self, name: str, place: str) -> str:
        """Name of an element with its indices: `x_ij`."""
        return "_".join([name, "".join(sorted(index for index, _ in self.loops.terms(place)))]).rstrip("_")

    def pointwise(self) -> Kernel:
        section = Section(self, self.row, self.loops.width)
        if self.loops.moved:
            section.store_update(self.ops[-1])
        else:
            section.store(self.results)
        lines = section.taken()  # first, because it may hoist statements into self.row
        return Kernel(self, (*self.row.taken(), *lines))

    def lanes(self) -> Kernel:
        """One call per lane, made by one thread or by all threads of a block together."""
        (op,) = self.ops
        by_block = dict.fromkeys(OF_BLOCKS, "hw::BlockLanes()")
        group = {**by_block, BY_LANE_PARTS: self.loops.element}.get(self.loops.schedule, "hw::Lanes()")
        kind = self.types[op.tensors[0]].dtype
        total = f"hw::Sum<{accumulator_type(kind)}>" if kind.kind == "float" else "uint64_t"  # unsigned, so that integers wrap around
        facts = {"descending": "true" if op[DESCENDING] else "false", "total": total}
        lanes = [self.lane(self.pointers[name], name) for name in op.tensors]
        lanes.append(self.lane(self.results[op.result.name], stored(op.result.name)))
        return Kernel(self, (f"{OPS[op.kind].lane.format(**facts)}({', '.join([group, *lanes])});",))

    def lane(self, pointer: str, place: str) -> str:
        lane, size = self.loops.lanes[place], self.loops.integers.size
        return f"hw::lane({shifted(pointer, self.loops.offset(place))}, {size(lane.size)}, {size(lane.stride)})"

    def reduction(self) -> Kernel:
        """One loop nest for all reductions that are ready together, and a last one for results with all dims."""
        walks = []
        left = [op for op in self.ops if self.reduces(op)]
        totals = {op.result.name for op in left}
        whole = [name for name in self.results if self.walked.is_whole(name)]
        kept = [name for name in self.results if name not in whole]
        while left:
            waiting = {op.result.name for op in left}
            ready = [op for op in left if not waiting & self.leads_to[op.result.name]]
            is_only = len(ready) == len(totals) and not any(totals & self.leads_to[name] for name in whole)
            left = [op for op in left if op not in ready]
            walks.append(self.walk(ready, whole if is_only else (), is_last=not left and (is_only or not whole)))
            whole = [] if is_only else whole
        inside = self.section()
        inside.store(whole)
        last = inside.taken()
        outside = self.section() if self.loops.has_wide_totals else self.row
        outside.store(kept)
        stores = outside.taken_stores() if outside is self.row else outside.taken()
        return Kernel(self, self.row.taken(), walks, stores, last)

    def section(self) -> Section:
        """Statements of the innermost loop. Nothing is hoisted if each vector element has its own accumulator."""
        return Section(self, None if self.loops.has_wide_totals else self.row, self.loops.width)

    def reduces(self, op: Op) -> bool:
        return bool(reduced_indices(op, self.walked.indices))

    def count(self, op: Op) -> str:
        """Divisor of a mean, if it differs from the number of elements that the kernel reduces."""
        count = op[COUNT] if COUNT in OPS[op.kind].attributes else Size(0)
        return self.loops.integers.size(count) if count != Size(0) else ""

    @cached_property
    def leads_to(self) -> dict[str, set[str]]:
        """All values that an op's result depends on, by result."""
        found: dict[str, set[str]] = {}
        for op in self.ops:
            found[op.result.name] = set(op.tensors).union(*(found.get(name, ()) for name in op.tensors))
        return found

    def walk(self, ops: Sequence[Op], results: Sequence[str], is_last: bool) -> Walk:
        """Loop nest that accumulates these reductions and stores these results."""
        section = self.section()
        starts, after = [], []
        for op in ops:
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
            self.totals[op.result.name] = f"{total}[{self.loops.lane}]" if self.loops.has_wide_totals else total
            if self.loops.has_wide_totals:
                starts.append(f"auto {total} = hw::filled<kWidth, {accumulator}>({first});")
            else:
                starts.append(f"{accumulator} {total} = {first};")
            section.join(self.totals[op.result.name], combine, element, wraps=kind.kind == "int" and combine.sign in ("+", "*"))
            if reduce := self.loops.reduce(is_last):
                after.append(f"{total} = {reduce}({total}, {combine.functor}());")
        section.store(results)
        self.walks += 1
        body = section.taken()
        return Walk(before=self.row.taken(), starts=tuple(starts), body=body, after=tuple(after))
