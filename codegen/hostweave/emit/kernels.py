"""Kernels: which thread computes which elements, and the C++ of one element."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hostweave.analysis.kernel_indices import Iteration, NotOneKernel, iteration, reduced_indices
from hostweave.base.errors import ProgramError
from hostweave.emit.cpp import CppExprPrinter, accumulator_type, compute_type, number
from hostweave.emit.kernel_loops import BY_LANE_PARTS, OF_BLOCKS, ONE, Loops, stored
from hostweave.emit.names import Names
from hostweave.fusion_ir.ir import Op, Scalar
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.ops.attributes import COUNT, DESCENDING, ORDER, VALUE
from hostweave.fusion_ir.ops.definition import Combine
from hostweave.fusion_ir.text import print_op
from hostweave.host_ir import ir
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, DType, bool_, f32, f64, i64, u64

LATE_BYTES = 16 << 10  # of rows, at most, that a block loads before it needs them: they take registers from other blocks

COUNTED = ("index", "start")  # ops that take of their second operand how many elements it has

# Of the op table: what kernels call by a name without a qualifier.
C_FUNCTIONS = frozenset(name + end for op in OPS.values() for name in re.findall(r"\bstd::(\w+)", op.cpp) for end in ("", "f"))


@dataclass(frozen=True)
class Walk:
    """One walk over what is reduced, which some reductions need."""

    before: tuple[str, ...]
    starts: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """For the template: threads walk what is kept, and inside of that, where there are reductions, what is reduced.

    Neighbouring threads read side by side: those of elements, or those that share the innermost loop.
    """

    name: str
    by: str  # the function of all its variants
    comments: tuple[str, ...]
    params: tuple[str, ...]
    arguments: tuple[str, ...]  # the names of the parameters
    sizes: tuple[str, ...]  # what a launch gives it after the buffers
    form: str  # the same for kernels that differ in names alone
    variants: tuple[tuple[str, str], ...]  # a condition, and what it takes: how threads share rows, or arguments of a template
    indices: tuple[str, ...]  # declarations of the indices that its own stands for, and of what threads hold
    loops: Loops
    body: tuple[str, ...]
    walks: tuple[Walk, ...] = ()
    stores: tuple[str, ...] = ()  # of results that have the kept dims alone
    last: tuple[str, ...] = ()  # a last walk, for results of every element


def emit_kernel(kernel: ir.Kernel, buffers: Sequence[BufferType], integers: CppExprPrinter, names: Names, number: int) -> Kernel:
    """The kernel of this number for these buffers: its inputs, then its results. Raises ProgramError for ops that are not one kernel."""
    name = names.of(kernel.name, f"kernel {number}", C_FUNCTIONS)
    functions = name, names.of(f"{name}_by", f"kernel {number}")
    try:
        walked = iteration(kernel)
    except NotOneKernel as reason:
        raise ProgramError(f"kernel @{kernel.name}: {reason}; split it") from None
    emitter = KernelEmitter(functions, kernel, walked, buffers, integers)
    emitted = emitter.emit()
    again = [name for name, times in emitter.loaded.items() if times > 1]
    late: list[str] = []
    for one in emitter.late if emitter.loops.row_threads else []:
        rows = int(emitter.loops.along.size) * sum(emitter.types[name].dtype.itemsize for name in (*late, one))
        late += [one] if rows <= LATE_BYTES else []
    for held in filter(None, ([*again, *late], again)):
        holding = KernelEmitter(functions, kernel, walked, buffers, integers, held)
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
        functions: tuple[str, str],  # the kernel, and what all its variants are
        kernel: ir.Kernel,
        walked: Iteration,
        buffers: Sequence[BufferType],
        integers: CppExprPrinter,
        held: Collection[str] = (),
    ):
        self.ops, self.walked, self.integers = kernel.ops, walked, integers
        self.name, self.by = functions
        self.types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        self.inputs = [p.name for p in kernel.inputs]
        self.made = {op.result.name: op for op in kernel.ops}
        self.is_small = all(buffer.dtype.itemsize <= 2 for buffer in buffers if buffer.dtype.kind == "float")
        self.names = Names((*integers.sizes.values(), *functions, *self.functions()))
        self.pointers = {name: self.names.of(name) for name in self.inputs}
        self.results = {p.name: self.names.of(p.name, "result") for p in kernel.results}
        self.loops = self.loops_type(kernel, walked, buffers, integers, self.names, len(held))
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

    def kernel(self, body: tuple[str, ...], walks: Iterable[Walk] = (), stores: tuple[str, ...] = (), last: tuple[str, ...] = ()) -> Kernel:
        params = [f"const {self.types[name].dtype.cpp}* {self.pointers[name]}" for name in self.inputs]
        params += [f"{self.types[name].dtype.cpp}* {pointer}" for name, pointer in self.results.items()]
        params += [f"int64_t {size}" for size in self.sizes]
        packed = [pointer for name, pointer in self.pointers.items() if name in self.loops.packed]
        packed += [pointer for name, pointer in self.results.items() if stored(name) in self.loops.packed]
        rows = ((self.elements(name), _moved(self.pointers[name], self.loops.row_of(name))) for name in self.held)
        kept_rows = [f"const auto {elements} = {self.loops.row}.load({first});" for elements, first in rows]
        kernel = Kernel(
            name=self.name,
            by=self.by,
            comments=tuple(print_op(op) for op in self.ops),
            params=tuple(params),
            arguments=(*self.pointers.values(), *self.results.values(), *self.sizes),
            sizes=tuple(self.sizes.values()),
            form="",
            variants=tuple(self.loops.variants(packed)),
            indices=(*self.loops.declarations(), *kept_rows),
            loops=self.loops,
            body=body,
            walks=tuple(walks),
            stores=stores,
            last=last,
        )
        return replace(kernel, form=self.form(kernel))

    def form(self, kernel: Kernel) -> str:
        """Its text with numbers in place of the names that it gives."""
        loops, walks = self.loops, [part for walk in kernel.walks for part in (walk.before, walk.starts, walk.body, walk.after)]
        head = ((loops.bounds, loops.loop, loops.leader_if), kernel.params, *kernel.variants, loops.varied, kernel.indices, loops.inner)
        parts = (*head, *walks, kernel.body, kernel.stores, kernel.last)
        text, numbers = "\n\n".join(map("\n".join, parts)), dict[str, str]()
        own = {*self.names.given, *self.loops.integers.sizes.values()}

        def number(match: re.Match[str]) -> str:
            return numbers.setdefault(match[0], f"${len(numbers)}") if match[0] in own else match[0]

        return re.sub(r"(?<![\w.:])[A-Za-z_]\w*", number, text)

    def elements(self, name: str) -> str:
        """The local of an input's elements that a thread takes together."""
        return self.names.of(self.indexed(name, name), "elements")

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
        return self.kernel((*self.row.taken(), *lines))

    def lanes(self) -> Kernel:
        """A call for each lane, which one thread or all of a block make together."""
        (op,) = self.ops
        by_block = dict.fromkeys(OF_BLOCKS, "hw::BlockLanes()")
        group = {**by_block, BY_LANE_PARTS: self.loops.element}.get(self.loops.schedule, "hw::Lanes()")
        total = accumulator_type(self.types[op.tensors[0]].dtype)
        total = f"hw::Sum<{total}>" if op.result.type.dtype.kind == "float" else total
        facts = {"descending": "true" if op[DESCENDING] else "false", "total": total}
        lanes = [self.lane(self.pointers[name], name) for name in op.tensors]
        lanes.append(self.lane(self.results[op.result.name], stored(op.result.name)))
        return self.kernel((f"{OPS[op.kind].lane.format(**facts)}({', '.join([group, *lanes])});",))

    def lane(self, pointer: str, place: str) -> str:
        lane, size = self.loops.lanes[place], self.loops.integers.size
        return f"hw::lane({_moved(pointer, self.loops.offset(place))}, {size(lane.size)}, {size(lane.stride)})"

    def reduction(self) -> Kernel:
        """Walks what is reduced once for all reductions that can be made then, and a last time for results of every element."""
        walks = []
        left = [op for op in self.ops if self.reduces(op)]
        totals = {op.result.name for op in left}
        whole = [name for name in self.results if self.walked.is_whole(name)]
        kept = [name for name in self.results if name not in whole]
        while left:
            waiting = {op.result.name for op in left}
            ready = [op for op in left if not waiting & self.leads_to(op)]
            is_only = len(ready) == len(totals) and not any(totals & self.leads_to(self.made[name]) for name in whole)
            left = [op for op in left if op not in ready]
            walks.append(self.walk(ready, whole if is_only else (), is_last=not left and (is_only or not whole)))
            whole = [] if is_only else whole
        inside = self.section()
        inside.store(whole)
        last = inside.taken()
        outside = self.section() if self.loops.has_wide_totals else self.row
        outside.store(kept)
        stores = outside.taken_stores() if outside is self.row else outside.taken()
        return self.kernel(self.row.taken(), walks, stores, last)

    def section(self) -> Section:
        """The innermost loop, in which nothing is hoisted where each of its elements has totals of its own."""
        return Section(self, None if self.loops.has_wide_totals else self.row, self.loops.width)

    def reduces(self, op: Op) -> bool:
        return bool(reduced_indices(op, self.walked.indices))

    def count(self, op: Op) -> str:
        """By what a mean is divided, where that is not how many elements it reduces here."""
        count = op[COUNT] if COUNT in OPS[op.kind].attributes else Size(0)
        return self.loops.integers.size(count) if count != Size(0) else ""

    def leads_to(self, op: Op) -> set[str]:
        """Every value that an op is computed from."""
        made = [self.made[name] for name in op.tensors if name in self.made]
        return {*op.tensors, *(name for source in made for name in self.leads_to(source))}

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
            section.join(self.totals[op.result.name], combine, element)
            if reduce := self.loops.reduce(is_last):
                after.append(f"{total} = {reduce}({total}, {combine.functor}());")
        section.store(results)
        self.walks += 1
        body = section.taken()
        return Walk(before=self.row.taken(), starts=tuple(starts), body=body, after=tuple(after))


class Section:
    """Statements of one scope. A value is computed where it is first asked for: outside of the loops where it can be.

    Where a thread takes several elements together, the statements are about each of them, between loads and stores of all.
    """

    def __init__(self, kernel: KernelEmitter, outer: Section | None = None, width: int = 1):
        self.kernel, self.outer, self.is_wide = kernel, outer, width > 1
        self.texts: dict[str, str] = {}  # of values
        self.loads: dict[str, str] = {}  # of inputs, the local that holds the elements
        # The statements in their order: of all elements, of each one, and of all again.
        self.begin: list[str] = []
        self.lines: list[str] = []
        self.adds: list[str] = []  # to totals, and to what is stored
        self.stores: list[str] = []

    def taken(self) -> tuple[str, ...]:
        """The statements since the last time."""
        lines, self.lines = [*self.lines, *self.adds], []
        stores, self.adds = self.taken_stores(), []
        begin, self.begin = self.begin, []
        if self.is_wide and lines:
            lane = self.kernel.loops.lane
            lines = ["#pragma unroll", f"for (int {lane} = 0; {lane} < kWidth; ++{lane}) {{", *lines, "}"]
        return (*begin, *lines, *stores)

    def taken_stores(self) -> tuple[str, ...]:
        stores, self.stores = tuple(self.stores), []
        return stores

    def join(self, total: str, combine: Combine, element: str) -> None:
        """Adds an element to a total."""
        self.adds.append(f"{total} {combine.sign}= {element};" if combine.sign else f"{total} = {combine.functor}()({total}, {element});")

    def store(self, results: Iterable[str]) -> None:
        """What the section ends with. Nothing is read after the first store: a result may lie where an input did."""
        values = [(name, self.stored(self.kernel.made[name])) for name in results]
        if len(values) > 1 and not self.is_wide:
            values = [(name, self.read(name, text) if "[" in text else text) for name, text in values]
        for name, value in values:
            pointer, place = self.kernel.results[name], stored(name)
            if self.is_wide and place in self.kernel.loops.packed:
                local = self.kernel.names.of(self.kernel.indexed(name, place), "elements to store")
                self.begin.append(f"hw::Values<{self.kernel.types[name].dtype.cpp}, kWidth> {local};")
                self.adds.append(f"{local}[{self.kernel.loops.lane}] = {value};")
                self.stores.append(f"hw::store({_moved(pointer, self.kernel.loops.first(place))}, {local});")
            else:
                self.stores.append(f"{pointer}[{self.kernel.loops.offset(place)}] = {value};")

    def store_update(self, op: Op) -> None:
        """Stores an element of what goes into the result where numbers say, if the rank has that place."""
        _, update, *places = op.tensors
        kernel, loops, place = self.kernel, self.kernel.loops, stored(op.result.name)
        dtype = op.result.type.dtype
        value = self.element(update) if update in kernel.pointers else _converted(self.value(update), dtype, dtype)
        terms, held = [(loops.offset(place), ONE)] if loops.offset(place) != "0" else [], []
        axes = op[ORDER]
        for axis, start, rows in zip(axes, places[::2], places[1::2], strict=True):
            lane, own = loops.lanes[f"{place} {axis}"], loops.offset(f"{place} {axis}")
            row = self.value(start) if own == "0" else f"{self.value(start)} + {own}"
            if first := kernel.pointers.get(rows):
                local = kernel.names.of(f"{op.result.name} {axis}", f"row_{axis}")
                size = loops.integers.factor(lane.size)
                self.lines.append(f"const int64_t {local} = {row} - hw::first({first}, {size});")
                held.append(f"{local} >= 0 && {local} < {size}")
                row = local
            terms.append((row if row.isidentifier() or lane.stride == ONE else f"({row})", lane.stride))
        condition = f"if ({' && '.join(held)}) " if held else ""
        self.stores.append(f"{condition}{kernel.results[op.result.name]}[{loops.sum_of(terms)}] = {value};")

    def value(self, name: str, is_hoisted: bool = False) -> str:
        """A value in the type that computes it: a local, or the text itself where it is needed once."""
        if self.outer and not self.kernel.loops.is_inside(name):
            return self.outer.value(name, is_hoisted=True)
        if name not in self.texts:
            text, is_short = self.computed(name)
            if (not is_short or is_hoisted or self.kernel.uses[name] > 1) and not text.isidentifier():
                local = self.local(name)
                self.lines.append(f"const {compute_type(self.kernel.types[name].dtype)} {local} = {text};")
                text = local
            self.texts[name] = text
        return self.texts[name]

    def read(self, result: str, text: str) -> str:
        """A local that holds what is to be stored."""
        local = self.local(result)
        self.lines.append(f"const {self.kernel.types[result].dtype.cpp} {local} = {text};")
        return local

    def element(self, name: str) -> str:
        """An input's element: as it lies in memory, or of those that are loaded together."""
        loops, pointer = self.kernel.loops, self.kernel.pointers[name]
        if not self.is_wide or name not in loops.packed:
            text = f"{pointer}[{loops.offset(name)}]"
            return f"hw::truth({text})" if self.kernel.types[name].dtype == bool_ else text
        if name not in self.loads:
            self.loads[name] = self.load(name)
        return f"{self.loads[name]}[{loops.lane}]"

    def load(self, name: str) -> str:
        """Loads what a thread takes together of an input, unless it holds it."""
        kernel, local = self.kernel, self.kernel.elements(name)
        if kernel.walks and name not in kernel.loaded:
            kernel.late.append(name)
        kernel.loaded[name] += 1
        if name in kernel.held:
            return f"{local}[{kernel.loops.names[kernel.loops.along]}]"
        self.begin.append(f"const auto {local} = hw::load<kWidth>({_moved(kernel.pointers[name], kernel.loops.first(name))});")
        return local

    def local(self, name: str) -> str:
        """`h`, or `x_ij` of an input or a result; `x_e` of one of several elements."""
        if name not in self.kernel.pointers and name not in self.kernel.results:
            return self.kernel.names.of(name, "local")
        place = name if name in self.kernel.pointers else stored(name)
        if self.is_wide and place in self.kernel.loops.packed:
            return self.kernel.names.of(f"{name}_{self.kernel.loops.lane}", "element")
        return self.kernel.names.of(self.kernel.indexed(name, place), "element")

    def computed(self, name: str) -> tuple[str, bool]:
        """A value's text, and whether it reads well inside another."""
        dtype = self.kernel.types[name].dtype
        if name in self.kernel.pointers:
            element = self.element(name)
            return (f"float({element})" if _is_small_float(dtype) else element), True
        op = self.kernel.made[name]
        text, computed = self.expression(op)
        is_short = not OPS[op.kind].cost or text in self.kernel.totals.values()
        if _is_small_float(dtype):  # in registers floats are rounded only by a cast
            return (f"float({_converted(text, computed, dtype)})" if op.kind == "astype" else text), is_short
        return _converted(text, computed, dtype), is_short and dtype != bool_

    def stored(self, op: Op) -> str:
        """The value of one element of a result, as memory holds it."""
        if self.kernel.uses[op.result.name]:
            return _converted(self.value(op.result.name), op.result.type.dtype, op.result.type.dtype)
        if self.is_same(op) and op.tensors[0] in self.kernel.pointers:
            return self.element(op.tensors[0])
        text, computed = self.expression(op)
        return _converted(text, computed, op.result.type.dtype)

    def is_same(self, op: Op) -> bool:
        """Whether an op gives the element of its operand: it moves elements, or reduces one alone."""
        if not op.tensors or OPS[op.kind].target == "dtype":
            return False
        if OPS[op.kind].combine:
            return not (self.kernel.reduces(op) or OPS[op.kind].locates or self.kernel.count(op))
        return self.kernel.cpp(op) == "{0}"

    def expression(self, op: Op) -> tuple[str, DType]:
        """What an op computes, and the dtype that this is in before it is converted to the result's."""
        dtype = op.result.type.dtype
        if op.kind == "fill":
            return number(op[VALUE], dtype), dtype
        if op.kind == "iota":
            return self.kernel.loops.offset(op.result.name), i64
        if OPS[op.kind].locates:
            return (f"{self.kernel.totals[op.result.name]}.index" if self.kernel.reduces(op) else "int64_t(0)"), dtype
        if op.result.name in self.kernel.totals or self.kernel.count(op):
            return self.total(op)
        if op.kind in COUNTED:
            ids, rows = op.tensors
            return OPS[op.kind].cpp.format(self.value(ids), self.kernel.size_of_lane(rows)), dtype
        if op.kind == "take":
            return self.taken_at(op), dtype
        if self.is_same(op):
            return self.value(op.tensors[0]), dtype
        types = operand_types(op, self.kernel.types)
        if not OPS[op.kind].cpp:
            raise ProgramError(f"{op.kind}: no kernel computes this op", op.location)
        texts = [self.value(o) if isinstance(o, str) else _literal(o, type.dtype) for o, type in zip(op.operands, types, strict=True)]
        return self.kernel.cpp(op).format(*texts), types[-1].dtype if op.kind == "astype" else dtype

    def place(self, op: Op) -> tuple[str, str]:
        """Where in its operand an element is that a take reads, and the condition under which it is there, of which none is needed
        where all rows are."""
        _, index, rows = op.tensors
        if self.outer and not self.kernel.loops.is_inside(index):
            return self.outer.place(op)
        if (name := f"{op.result.name} place") not in self.texts:
            self.texts[name] = self.value(index)
            if first := self.kernel.pointers.get(rows):
                local, held = (self.kernel.names.of(f"{op.result.name}_{word}", word) for word in ("row", "held"))
                size = self.kernel.size_of_lane(rows)
                self.lines.append(f"const int64_t {local} = {self.texts[name]} - hw::first({first}, {size});")
                self.lines.append(f"const bool {held} = {local} >= 0 && {local} < {size};")
                self.texts[name], self.texts[f"{op.result.name} held"] = local, held
        return self.texts[name], self.texts.get(f"{op.result.name} held", "")

    def taken_at(self, op: Op) -> str:
        """The element that a take reads; 0 where the rank does not hold it. Neighbours are loaded together where one index is of all."""
        kernel, loops = self.kernel, self.kernel.loops
        x, index, _ = op.tensors
        dtype, (place, held) = kernel.types[x].dtype, self.place(op)
        moved = kernel.jump(place, x)
        if self.is_wide and x in loops.packed and not loops.is_inside(index):
            local = kernel.names.of(f"{op.result.name}_elements", "elements")
            load = f"hw::load<kWidth>({_moved(kernel.pointers[x], loops.sum_of([(moved, ONE), *loops.terms(x)]))})"
            nothing = f"hw::Values<{dtype.cpp}, kWidth>{{}}"
            self.begin.append(f"const auto {local} = {f'{held} ? {load} : {nothing}' if held else load};")
            element, held = f"{local}[{loops.lane}]", ""
        else:
            offset = loops.offset(x)
            element = f"{kernel.pointers[x]}[{moved if offset == '0' else f'{moved} + {offset}'}]"
            element = f"hw::truth({element})" if dtype == bool_ else element
        element = f"float({element})" if _is_small_float(dtype) else element
        return f"{held} ? {element} : {compute_type(dtype)}(0)" if held else element

    def total(self, op: Op) -> tuple[str, DType]:
        """What a reduction comes to, in the dtype that it adds up in."""
        source = self.kernel.types[op.tensors[0]].dtype
        total = self.kernel.totals.get(op.result.name) or self.value(op.tensors[0])  # of one element
        wide = {"float": f64 if source == f64 else f32, "int": i64}.get(source.kind, u64)
        combine = OPS[op.kind].combine
        if not combine or not combine.is_mean:
            return total, wide
        return f"{total} / {wide.cpp}({self.kernel.count(op) or self.kernel.loops.reduced_count})", wide


def _moved(pointer: str, offset: str) -> str:
    return pointer if offset == "0" else f"{pointer} + {offset}"


def _literal(value: Scalar, dtype: DType) -> str:
    text = number(value, dtype)
    return f"({text})" if text.startswith("-") else text


def _converted(value: str, computed: DType, dtype: DType) -> str:
    """A value of the compute type of `computed` as an element of `dtype`."""
    if _is_small_float(dtype):
        return f"{dtype.cpp}({value})" if compute_type(computed) == "float" else f"{dtype.cpp}(float({value}))"
    if dtype == bool_:
        return value if computed == bool_ else f"({value}) != 0"
    if compute_type(computed) == dtype.cpp and dtype.itemsize >= 4:
        return value
    if (computed, dtype) == (f64, f32):
        return f"hw::to_f32({value})"
    return f"{dtype.cpp}({value})"  # narrower ints are computed as int


def _is_small_float(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize < 4
