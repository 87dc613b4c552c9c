"""Kernels: which thread computes which elements, and the C++ of one element."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hostweave.analysis.kernel_indices import Iteration, NotOneKernel, iteration, reduced_indices
from hostweave.base.errors import ProgramError
from hostweave.emit.cpp import CppExprPrinter, accumulator_type, compute_type, number
from hostweave.emit.kernel_loops import BY_LANE_PARTS, OF_BLOCKS, ONE, Dim, Loops, merged, stored
from hostweave.emit.names import Names
from hostweave.emit.sections import COUNTED, Section, shifted
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import COUNT, DESCENDING, MESH_AXES
from hostweave.host_ir import ir
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, bool_

LATE_BYTES = 16 << 10  # of rows, at most, that a block loads before it needs them: they take registers from other blocks

# Of the op table: what kernels call by a name without a qualifier.
C_FUNCTIONS = frozenset(name + end for op in OPS.values() for name in re.findall(r"\bstd::(\w+)", op.cpp) for end in ("", "f"))


Lines = tuple[str, ...]


@dataclass(frozen=True)
class Walk:
    """One walk over what is reduced, which some reductions need."""

    before: Lines
    starts: Lines
    body: Lines
    after: Lines


class Kernel:
    """For the template: threads walk what is kept, and inside of that, where there are reductions, what is reduced.

    Neighbouring threads read side by side: those of elements, or those that share the innermost loop. `stores` are of results that have
    the kept dims alone, and the `last` walk is for results of every element. `before` stands before its indices.
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
        self.sizes = tuple(of.sizes.values())  # what a launch gives it after the buffers
        packed = [pointer for name, pointer in of.pointers.items() if name in of.loops.packed]
        packed += [pointer for name, pointer in of.results.items() if stored(name) in of.loops.packed]
        self.variants = tuple(of.loops.variants(packed))
        held = sorted(of.held, key=lambda name: name in of.terms)  # what others send comes last
        rows = ((of.elements(name), shifted(of.pointers[name], of.loops.row_of(name))) for name in held)
        kept_rows = (f"const auto {elements} = {of.loops.row}.load({first});" for elements, first in rows)
        # Declarations of the indices that its own stands for, and of what threads hold.
        self.indices = (*before, *of.loops.declarations(), *kept_rows)
        self.body, self.walks, self.stores, self.last = body, tuple(walks), stores, last
        # The parameter that kernels of several ranks add up.
        self.terms = next((of.pointers[name] for name in of.inputs if name in of.terms), "")
        self.form = of.form(self)  # the same for kernels that differ in names alone


def emit_kernel(kernel: ir.Kernel, buffers: Sequence[BufferType], integers: CppExprPrinter, names: Names, number: int) -> Kernel:
    """The kernel of this number for these buffers: its inputs, then its results. Raises ProgramError for ops that are not one kernel."""
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
    """Writes one kernel. A value is a C++ text: a number, an element in memory, or a local of its name.

    What a reduction needs is computed where the reduction walks it, and again where something walks it later. Its inputs are then
    in the cache. Rows of those named by `held` threads keep in registers, and the compiler what it computed from them; they are loaded
    before the first walk, so that none is waited for after a reduction.
    """

    loops_type = Loops
    own_sizes: tuple[Size, ...] = ()  # that its text names beside those of its loops

    def __init__(
        self,
        name: str,
        kernel: ir.Kernel,
        walked: Iteration,
        buffers: Sequence[BufferType],
        integers: CppExprPrinter,
        held: Collection[str] = (),
    ):
        self.ops, self.walked, self.integers = kernel.ops, walked, integers
        self.name = name
        self.types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        self.inputs = [p.name for p in kernel.inputs]
        self.made = {op.result.name: op for op in kernel.ops}
        exchange = kernel.exchanges
        self.terms = {exchange.tensors[0]: integers.program.size_of(exchange[MESH_AXES].names)} if exchange else {}  # and of how many ranks
        self.is_small = all(buffer.dtype.itemsize <= 2 for buffer in buffers if buffer.dtype.kind == "float")
        self.names = Names((*integers.sizes.values(), name, *self.functions()))
        self.pointers = {name: self.names.of(name) for name in self.inputs}
        self.results = {p.name: self.names.of(p.name, "result") for p in kernel.results}
        self.loops = self.loops_type(kernel, walked, buffers, integers, self.names, len(held))
        self.lies = {**dict(zip(self.inputs, buffers, strict=False)), **{name: self.loops.memory[stored(name)] for name in self.results}}
        self.held = held
        self.walks = 0  # over what is reduced
        self.loaded = Counter[str]()  # how often
        self.late: list[str] = []  # what is loaded only when a walk is over
        self.uses = Counter(name for op in self.ops for name in self.used(op))
        self.uses.update(name for name in self.results if name in self.uses)
        self.totals: dict[str, str] = {}  # what reductions have added up
        self.row = Section(self)  # around the innermost loops

    def emit(self) -> Kernel:
        if self.loops.takes_lanes:
            return self.lanes()
        return self.reduction() if self.loops.reduced else self.pointwise()

    @property
    def sizes(self) -> dict[str, str]:
        """The parameters that are sizes, each with what a launch gives for it."""
        dims, integers, lanes = (*self.loops.kept, *self.loops.reduced), self.loops.integers, self.loops.lanes.values()
        sizes = (
            *self.own_sizes,
            *(size for buffer in self.lies.values() for sizes in self.extent(buffer) for size in sizes),
            *(op[COUNT] for op in self.ops if COUNT in OPS[op.kind].attributes),
            *(size for dim in dims for size in (dim.size, *dim.strides)),
            *(size for lane in lanes for size in (lane.size, lane.stride)),
            *(self.types[op.tensors[1]].shape[0] for op in self.ops if op.kind in COUNTED),
        )
        used = {name for size in sizes for name in size.atoms}
        given = {name: integers.size(Size(1, (name,)).replaced(self.loops.named)) for name in integers.sizes if name in used}
        return {integers.sizes[name]: text for name, text in given.items()}

    def functions(self) -> set[str]:
        """The C functions that the kernel calls, whose names no local may take."""
        return {name for op in self.ops if op.tensors for name in re.findall(r"(\w+)\(", self.cpp(op))}

    def cpp(self, op: Op) -> str:
        """The C++ of an op of tensors, with T(1) as a literal and std::exp as the C function, both of the compute type."""
        dtype = self.types[op.tensors[-1]].dtype
        text = re.sub(r"\bT\((-?[\d.]+)\)", lambda match: number(float(match[1]), dtype), OPS[op.kind].cpp_for(dtype, self.is_small))
        return re.sub(r"\bstd::(\w+)", lambda match: match[1] + ("f" if compute_type(dtype) == "float" else ""), text)

    def size_of_lane(self, name: str) -> str:
        """How many elements a value has along the dim that no loop walks."""
        size = self.types[name].shape[self.walked.lanes[name]]
        return self.loops.integers.factor(size)

    def jump(self, place: str, name: str) -> str:
        """How far from its first element an input has the one of this place."""
        stride = self.loops.lanes[name].stride
        return place if stride == ONE else f"{place} * {self.loops.integers.factor(stride)}"

    def used(self, op: Op) -> Iterator[str]:
        """The operands of an op, as often as its C++ names each."""
        for i, operand in enumerate(op.operands):
            if isinstance(operand, str):
                yield from [operand] * max(1, self.cpp(op).count(f"{{{i}}}"))

    # --- bodies ---

    def array_of(self, name: str) -> str:
        """The type of the parameter that is an input."""
        cpp = self.types[name].dtype.cpp
        return f"hw::Terms<{cpp}, {self.terms[name]}>" if name in self.terms else f"const {cpp}*"

    def touches(self) -> Iterator[str]:
        """The elements that it reads and writes, for the CPU device."""
        integers = self.loops.integers
        for verb, pointers in (("reads", self.pointers), ("writes", self.results)):
            for name, pointer in pointers.items():
                shape, strides = self.extent(self.lies[name])
                extent = f"{integers.shape(shape)}, {integers.shape(strides)}" if strides else integers.size(*shape)
                yield pointer if name in self.terms else f"hw::{verb}({pointer}, {extent})"

    def extent(self, buffer: BufferType) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
        """How many elements a buffer has, or the dims of a view and how far apart their elements lie."""
        if buffer.strides is None:
            return (self.loops.own(product(buffer.shape)),), ()
        dims = merged([Dim(size, (stride,)) for size, stride in zip(buffer.shape, buffer.strides, strict=True)]) or [Dim(ONE, (ONE,))]
        return tuple(self.loops.own(dim.size) for dim in dims), tuple(self.loops.own(dim.strides[0]) for dim in dims)

    def form(self, kernel: Kernel) -> str:
        """Its text with numbers in place of the names that it gives."""
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
        """The local of an input's elements that a thread takes together."""
        return self.names.of(self.indexed(name, name), f"elements of {name}")

    def indexed(self, name: str, place: str) -> str:
        """`x_ij`"""
        return "_".join([name, "".join(sorted(index for index, _ in self.loops.terms(place)))]).rstrip("_")

    def pointwise(self) -> Kernel:
        section = Section(self, self.row, self.loops.width)
        if self.loops.moved:
            section.store_update(self.ops[-1])
        else:
            section.store(self.results)
        lines = section.taken()  # before those that it hoists
        return Kernel(self, (*self.row.taken(), *lines))

    def lanes(self) -> Kernel:
        """A call for each lane, which one thread or all of a block make together."""
        (op,) = self.ops
        by_block = dict.fromkeys(OF_BLOCKS, "hw::BlockLanes()")
        group = {**by_block, BY_LANE_PARTS: self.loops.element}.get(self.loops.schedule, "hw::Lanes()")
        kind = self.types[op.tensors[0]].dtype
        total = f"hw::Sum<{accumulator_type(kind)}>" if kind.kind == "float" else "uint64_t"  # wraps around
        facts = {"descending": "true" if op[DESCENDING] else "false", "total": total}
        lanes = [self.lane(self.pointers[name], name) for name in op.tensors]
        lanes.append(self.lane(self.results[op.result.name], stored(op.result.name)))
        return Kernel(self, (f"{OPS[op.kind].lane.format(**facts)}({', '.join([group, *lanes])});",))

    def lane(self, pointer: str, place: str) -> str:
        lane, size = self.loops.lanes[place], self.loops.integers.size
        return f"hw::lane({shifted(pointer, self.loops.offset(place))}, {size(lane.size)}, {size(lane.stride)})"

    def reduction(self) -> Kernel:
        """Walks what is reduced once for all reductions that can be made then, and a last time for results of every element."""
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
        """The innermost loop, in which nothing is hoisted where each of its elements has totals of its own."""
        return Section(self, None if self.loops.has_wide_totals else self.row, self.loops.width)

    def reduces(self, op: Op) -> bool:
        return bool(reduced_indices(op, self.walked.indices))

    def count(self, op: Op) -> str:
        """By what a mean is divided, where that is not how many elements it reduces here."""
        count = op[COUNT] if COUNT in OPS[op.kind].attributes else Size(0)
        return self.loops.integers.size(count) if count != Size(0) else ""

    @cached_property
    def leads_to(self) -> dict[str, set[str]]:
        """Every value that an op's result is computed from."""
        found: dict[str, set[str]] = {}
        for op in self.ops:
            found[op.result.name] = set(op.tensors).union(*(found.get(name, ()) for name in op.tensors))
        return found

    def walk(self, ops: Sequence[Op], results: Sequence[str], is_last: bool) -> Walk:
        """One loop over what is reduced, in which these reductions add up, and these results are stored."""
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
            first = first.replace("64", str(8 * kind.itemsize))  # of no elements: a value of the dtype, wide as the total may be
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
