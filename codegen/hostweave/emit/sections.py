"""C++ of the statements of a kernel: loads, computations and stores of one scope."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hostweave.base.errors import ProgramError
from hostweave.emit.cpp import Word, compute_type, number
from hostweave.emit.kernel_facts import KernelFacts
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.ops.attributes import AXIS, HALVES, OFFSET, ORDER, VALUE
from hostweave.fusion_ir.ops.definition import Combine
from hostweave.kernel_ir.loops import ONE, ZERO, gathers_in_order, index_at, stored
from hostweave.types.tensor import DType, bool_, f32, f64, i32, i64, u64


class VectorElement(str):
    def __new__(cls, vector: str, index: str) -> VectorElement:
        made = super().__new__(cls, f"{vector}[{index}]")
        made.vector = vector
        return made

    vector: str


class Section:
    """Statements of one scope. The first use of a value emits its computation. A value that does not change in a loop is computed outside
    of the loop.

    With vectorised access, the statements are in a loop over the elements of a vector, between vector loads and vector stores. `around` is
    the section outside of this loop. `is_around` is True if this section is the `around` of another section.
    """

    def __init__(
        self, kernel: KernelFacts, outer: Section | None = None, width: int = 1, around: Section | None = None, is_around: bool = False
    ):
        self.kernel, self.outer, self.around, self.is_wide, self.is_around = kernel, outer or around, around, width > 1, is_around
        self.hoisted = kernel.ir.outside_nests if is_around else kernel.ir.outside  # values that the outer section computes
        self.texts: dict[str, str] = {}
        self.loads: dict[str, str] = {}  # input or held value -> C++ of a vector of its elements
        self.own = ""  # value whose row this section computes for the registers, or ""
        # Vector loads, statements per element, updates, and vector stores are emitted in this order.
        self.begin: list[str] = []
        self.lines: list[str] = []
        self.adds: list[str] = []  # updates of accumulators and of local vectors
        self.stores: list[str] = []

    def taken(self) -> tuple[str, ...]:
        before = self.around.taken() if self.around else ()
        lines, self.lines = [*self.lines, *self.adds], []
        stores, self.adds = self.taken_stores(), []
        begin, self.begin = self.begin, []
        if self.is_wide and lines:
            index = self.kernel.loops.vector_index
            lines = ["#pragma unroll", f"for (int {index} = 0; {index} < kWidth; ++{index}) {{", *lines, "}"]
        return (*before, *begin, *lines, *stores)

    def taken_stores(self) -> tuple[str, ...]:
        stores, self.stores = tuple(self.stores), []
        return stores

    def join(self, total: str, combine: Combine, element: str, wraps: bool) -> None:
        """Combines an element with the accumulator `total`. Uses the functor for ints that wrap around, because C++ does not define the
        overflow of the operators of ints."""
        by_sign = combine.sign and not wraps
        self.adds.append(f"{total} {combine.sign}= {element};" if by_sign else f"{total} = {combine.functor}()({total}, {element});")

    def store(self, results: Iterable[str]) -> None:
        """Stores results at the end of the section. All loads are before the first store, because a result may alias an input."""
        # The transposed result is last, because the enclosing lambda returns it.
        ordered = sorted(results, key=lambda name: name == self.kernel.ir.transposed)
        values = [(name, self.stored(self.kernel.made[name])) for name in ordered]
        if len(values) > 1 and not self.is_wide:
            values = [(name, text if isinstance(text, Word) or self.is_local(name) else self.read(name, text)) for name, text in values]
        for name, value in values:
            pointer, access = self.kernel.results[name], stored(name)
            element = f32 if self.is_rounded_by_store(name) else self.kernel.types[name].dtype
            if self.is_wide and access in self.kernel.ir.packed:
                local = value.vector if isinstance(value, VectorElement) else ""
                if not local:
                    local = self.kernel.names.of(self.kernel.indexed(name, access), f"elements to store of {name}")
                    self.begin.append(f"hw::Values<{element.cpp}, kWidth> {local};")
                    self.adds.append(f"{local}[{self.kernel.loops.vector_index}] = {value};")
                self.stores.append(f"hw::store({self.kernel.loops.shifted(pointer, self.kernel.loops.terms(access))}, {local});")
            elif name == self.kernel.ir.transposed:
                self.give_back(name, element.cpp, value)
            else:
                self.stores.append(f"{pointer}[{self.kernel.loops.offset(access)}] = {value};")

    def row(self, name: str) -> str:
        """Local variable that holds a row of a computed value in registers. The first use emits the computation outside of the loops."""
        kernel, chunk = self.kernel, self.kernel.loops.names[self.kernel.ir.along]
        assert self.outer is not None
        if name not in kernel.rows:
            section = Section(kernel, self.outer, kernel.ir.width)
            section.own = name
            section.give_back(name, compute_type(kernel.types[name].dtype), section.value(name))
            lines = section.taken()
            kernel.rows[name] = Word(kernel.names.of(f"{name}_row", f"row of {name}"))
            head = f"const auto {kernel.rows[name]} = {kernel.loops.row}.hold([&](const hw::Chunk {chunk}) {{"
            self.outer.lines += [head, *lines, "});"]
        return kernel.rows[name]

    def give_back(self, name: str, element: str, value: str) -> None:
        """Makes the enclosing lambda return a vector of elements."""
        if not self.is_wide:
            self.stores.append(f"return hw::Values<{element}, 1>{{{value}}};")
            return
        local = self.chunk(name)
        self.begin.append(f"hw::Values<{element}, kWidth> {local};")
        self.adds.append(f"{local}[{self.kernel.loops.vector_index}] = {value};")
        self.stores.append(f"return {local};")

    def chunk(self, name: str) -> str:
        return self.kernel.names.of(f"{name}_{self.kernel.loops.names[self.kernel.ir.along]}", f"chunk of {name}")

    def is_held(self, name: str) -> bool:
        """True if this section reads a computed value from registers."""
        return name in self.kernel.ir.held and name not in self.kernel.pointers and name != self.own

    def store_update(self, op: Op) -> None:
        """Stores an element of an update if this rank has the row. The last operands are, for each axis, a start and this rank's rows."""
        _, update, *bounds = op.tensors
        kernel, loops, access = self.kernel, self.kernel.loops, stored(op.result.name)
        dtype = op.result.type.dtype
        value = self.element(update) if update in kernel.pointers else _converted(self.value(update), dtype, dtype)
        terms, held = [(loops.offset(access), ONE)] if loops.terms(access) else [], []
        axes = op[ORDER]
        for axis, start, rows in zip(axes, bounds[::2], bounds[1::2], strict=True):
            at = f"{access} {axis}"
            fiber, row = kernel.ir.fibers[at], loops.shifted(self.value(start), [(loops.offset(at), ONE)] if loops.terms(at) else [])
            if first := kernel.first_row(rows):
                local = Word(kernel.names.of(f"{op.result.name} {axis}", f"row_{axis}"))
                size = loops.integers.factor(fiber.size)
                self.lines.append(f"const int64_t {local} = {row} - {first};")
                held.append(f"{local} >= 0 && {local} < {size}")
                row = local
            terms.append((row if isinstance(row, Word) or fiber.stride == ONE else f"({row})", fiber.stride))
        condition = f"if ({' && '.join(held)}) " if held else ""
        self.stores.append(f"{condition}{kernel.results[op.result.name]}[{loops.sum_of(terms)}] = {value};")

    def value(self, name: str, is_hoisted: bool = False, is_assigned: bool = False) -> str:
        """C++ of a value in its compute type: an expression or a local variable. An expression with one use, in this section, stays an
        expression if it is short or is assigned to a variable. Otherwise, C++ of several tokens becomes a local variable."""
        if self.outer and name in self.hoisted:
            return self.outer.value(name, is_hoisted=True)
        if name not in self.texts:
            path = [(name, self.operands(name))]  # A loop avoids deep recursion: a chain of ops may exceed Python's recursion limit.
            while path:
                at, rest = path[-1]
                if below := next((operand for operand in rest if operand not in self.texts), None):
                    path.append((below, self.operands(below)))
                    continue
                path.pop()
                text, is_short = self.computed(at)
                is_needed = self.kernel.uses[at] > 1 or (is_hoisted and at == name)
                is_nested = is_short or (is_assigned and at == name)
                if (not is_nested or is_needed) and not isinstance(text, Word):
                    local = Word(self.local(at))
                    self.lines.append(f"const {compute_type(self.kernel.types[at].dtype)} {local} = {text};")
                    text = local
                self.texts[at] = text
        return self.texts[name]

    def rounded(self, name: str) -> str:
        text, dtype = self.value(name), self.kernel.types[name].dtype
        op = None if name in self.kernel.pointers else self.kernel.made[name]
        return f"hw::rounded<{dtype.cpp}>({text})" if op and not OPS[op.kind].is_cast and _is_small_float(dtype) else text

    def operands(self, name: str) -> Iterator[str]:
        """Operands that this scope must compute before the value."""
        op = None if name in self.kernel.pointers else self.kernel.made[name]
        if op and OPS[op.kind].cpp and not OPS[op.kind].counts and not self.is_held(name):
            tensors = op.tensors[1:2] if OPS[op.kind].gathers else op.tensors  # `index_of` and `moved_element` read the other operands.
            yield from (o for o in tensors if not self.outer or o not in self.hoisted)

    def is_local(self, result: str) -> bool:
        return bool(self.kernel.uses[result]) and isinstance(self.value(result), Word)

    def read(self, result: str, text: str) -> str:
        local = self.local(result)
        self.lines.append(f"const {self.kernel.types[result].dtype.cpp} {local} = {text};")
        return local

    def element(self, name: str, in_f32: bool = False) -> str:
        """C++ of an input's element, from memory or from a loaded vector. With `in_f32`, converts floats of at most 16 bits."""
        loops, pointer, dtype = self.kernel.loops, self.kernel.pointers[name], self.kernel.types[name].dtype
        in_f32 = in_f32 and _is_small_float(dtype)
        if not self.is_wide or name not in self.kernel.ir.packed:
            text = f"{pointer}[{loops.offset(name)}]"
            return f"hw::truth({text})" if dtype == bool_ else f"float({text})" if in_f32 else text
        if name not in self.loads:
            self.loads[name] = self.load(name)
        return f"{self.loads[name]}.f32({loops.vector_index})" if in_f32 else VectorElement(self.loads[name], loops.vector_index)

    def load(self, name: str) -> str:
        """C++ of a vector of an input. Emits a load, unless the thread holds the row in registers."""
        kernel, local = self.kernel, self.kernel.elements(name)
        if name in kernel.ir.held:
            return f"{local}[{kernel.loops.names[kernel.ir.along]}]"
        self.begin.append(
            f"const auto {local} = hw::load<kWidth>({kernel.loops.shifted(kernel.pointers[name], kernel.loops.terms(name))});"
        )
        return local

    def local(self, name: str) -> str:
        """Name of a local variable: `h` for a value, `x_ij` for an element of an input or result, `x_e` for an element of a vector."""
        kernel, index = self.kernel, self.kernel.loops.vector_index
        access = stored(name) if name in kernel.results else name
        if self.is_wide and (access in kernel.ir.packed or (name in kernel.totals and kernel.ir.has_wide_totals)):
            return kernel.names.of(f"{name}_{index}", f"element of {name}")
        if name not in kernel.pointers and name not in kernel.results:
            return kernel.names.of(name, "local")
        return kernel.names.of(kernel.indexed(name, access), f"element of {name}")

    def computed(self, name: str) -> tuple[str, bool]:
        """C++ of a value, and True if this C++ may be nested in another expression."""
        dtype = self.kernel.types[name].dtype
        if name in self.kernel.pointers:
            return self.element(name, in_f32=True), True
        if self.is_held(name):
            if name not in self.loads:
                self.loads[name] = self.chunk(name)
                self.begin.append(f"const auto {self.loads[name]} = {self.row(name)}[{self.kernel.loops.names[self.kernel.ir.along]}];")
            return f"{self.loads[name]}[{self.kernel.loops.vector_index}]", True
        op = self.kernel.made[name]
        text, computed = self.expression(op)
        is_short = not OPS[op.kind].cost or self.is_total(op) or (self.is_wide and bool(OPS[op.kind].parts))
        if _is_small_float(dtype):  # Small floats are f32 in registers. An explicit cast rounds them.
            text = text if compute_type(computed) == "float" else f"float({text})"
            return (f"hw::rounded<{dtype.cpp}>({text})" if OPS[op.kind].is_cast else text), is_short
        return _converted(text, computed, dtype), is_short and dtype != bool_

    def stored(self, op: Op) -> str:
        """C++ of one element of a result in the storage type, or in f32 if the store rounds."""
        dtype = op.result.type.dtype
        stored_as = f32 if self.is_rounded_by_store(op.result.name) else dtype
        if self.kernel.uses[op.result.name]:
            return _converted(self.value(op.result.name), dtype, stored_as)
        if self.is_moved(op) and OPS[op.kind].parts:
            return self.joined(op, is_moved=True)
        if self.is_moved(op):
            element, held = (self.element(op.tensors[0]), "") if self.is_same(op) else self.moved_element(op)
            return f"{held} ? {element} : {dtype.cpp}{{}}" if held else element
        text, computed = self.expression(op)
        return _converted(text, computed, stored_as)

    def is_moved(self, op: Op) -> bool:
        """True if an op moves elements of inputs and computes nothing."""
        is_same = self.is_same(op) or bool(OPS[op.kind].parts)
        return (is_same and all(name in self.kernel.pointers for name in op.tensors)) or OPS[op.kind].gathers

    def is_rounded_by_store(self, result: str) -> bool:
        """True for vectors of computed 8-bit floats. The store of such a vector rounds two floats in one instruction."""
        dtype, op = self.kernel.types[result].dtype, self.kernel.made[result]
        is_vector = self.is_wide and (stored(result) in self.kernel.ir.packed or result == self.kernel.ir.transposed)
        return is_vector and dtype.kind == "float" and dtype.itemsize == 1 and (self.kernel.uses[result] > 0 or not self.is_moved(op))

    def is_same(self, op: Op) -> bool:
        """True if the C++ of the result is the C++ of the operand, as in a reduction of a dim of size 1."""
        if not op.tensors or OPS[op.kind].is_cast:
            return False
        if op == self.kernel.kernel.exchanges:  # hw::Terms delivers the sum.
            return True
        if OPS[op.kind].combine:
            return not (self.kernel.reduces(op) or OPS[op.kind].locates or self.kernel.count(op))
        return self.kernel.template(op) == "{0}"

    def expression(self, op: Op) -> tuple[str, DType]:
        """C++ of an op, and the dtype in which this C++ computes."""
        dtype = op.result.type.dtype
        if op.kind == "fill":
            return number(op[VALUE], dtype), dtype
        if OPS[op.kind].is_range:
            index = self.kernel.loops.offset(op.result.name)
            if op[OFFSET] != ZERO:
                index = f"{self.kernel.loops.integers.first_factor(op[OFFSET])} + {index}"
            is_cast = dtype == i32 or isinstance(index, Word)  # A cast to 32 bits adds parentheses. A Word needs none.
            return index if is_cast else f"({index})", i64
        if OPS[op.kind].locates:
            return (f"{self.kernel.totals[op.result.name]}.index" if self.kernel.reduces(op) else "int64_t(0)"), dtype
        if op.result.name in self.kernel.totals or self.kernel.count(op):
            return self.total(op)
        if OPS[op.kind].counts:
            ids, rows = op.tensors
            return OPS[op.kind].cpp.format(self.value(ids), self.kernel.size_of_fiber(rows)), dtype
        if OPS[op.kind].gathers:
            return self.taken_at(op), dtype
        if OPS[op.kind].parts:
            return self.joined(op), dtype
        if self.is_same(op):
            return self.value(op.tensors[0]), dtype
        types = operand_types(op, self.kernel.types)
        if not OPS[op.kind].cpp:
            raise ProgramError(f"{op.kind}: no kernel computes this op", op.location)
        value = self.rounded if OPS[op.kind].rounds_operands else self.value
        texts = [value(o) if isinstance(o, str) else number(o, type.dtype) for o, type in zip(op.operands, types, strict=True)]
        if self.outer and OPS[op.kind].prepared and op.operands[-1] in {*self.kernel.ir.prepared} & {*self.hoisted}:
            texts[-1] = self.outer.prepared(op)
        return self.kernel.cpp(op, texts), types[-1].dtype if OPS[op.kind].is_cast else dtype

    def joined(self, op: Op, is_moved: bool = False) -> str:
        """C++ of an element of a concat or pad. The type of the C++ is the storage type if `is_moved`, otherwise the compute type.

        Each operand has a branch. A vector never spans two operands.
        """
        kernel, dtype = self.kernel, op.result.type.dtype
        width, is_pad = kernel.ir.width if self.is_wide else 1, VALUE in OPS[op.kind].attributes
        branches: list[tuple[str, Section, str]] = []  # condition, statements and value of each operand
        for name, spans in zip(op.tensors, kernel.walked.joined[op.result.name], strict=True):
            one = Section(kernel, self.outer, width)
            with kernel.loops.inside(op, spans) as bounds:
                # Each operand of a concat begins at the end of the operand before, so the upper bound suffices.
                condition = " && ".join(bound for pair in bounds for bound in (pair if is_pad else pair[1:]) if bound)
                branches.append((condition, one, one.element(name) if is_moved else one.value(name, is_assigned=True)))
        if is_pad:
            literal = number(op[VALUE], dtype)
            branches.append(("", Section(kernel, self.outer, width), _converted(literal, dtype, dtype) if is_moved else literal))
        else:
            branches[-1] = ("", *branches[-1][1:])
        is_read = all(name in kernel.pointers or not OPS[kernel.made[name].kind].cost for name in op.tensors)
        if is_read and not self.is_wide and not any(one.lines or one.begin for _, one, _ in branches):
            return "".join(f"{condition} ? {value} : " if condition else value for condition, _, value in branches)
        name = op.result.name
        if name in kernel.results:  # The store converts a vector of the compute type to another vector.
            name = kernel.indexed(name, stored(name)) if is_moved or not self.is_wide else f"{name}_values"
        local, type = Word(kernel.names.of(name, "joined")), dtype.cpp if is_moved else compute_type(dtype)
        into = self.begin if self.is_wide else self.lines
        into.append(f"hw::Values<{type}, kWidth> {local};" if self.is_wide else f"{type} {local};")
        for i, (condition, one, value) in enumerate(branches):
            one.adds.append(f"{local}[{kernel.loops.vector_index}] = {value};" if self.is_wide else f"{local} = {value};")
            into += [f"{'} else ' * (i > 0)}{f'if ({condition}) ' if condition else ''}{{", *one.taken()]
        into.append("}")
        return VectorElement(local, kernel.loops.vector_index) if self.is_wide else local

    def prepared(self, op: Op) -> str:
        """Declares a local variable with a prepared form of the last operand, such as a divisor and its reciprocal."""
        name = op.tensors[-1]
        if (key := f"{name} prepared") not in self.texts:
            self.texts[key] = Word(self.kernel.names.of(f"by_{name}", f"prepared {name}"))
            kind = OPS[op.kind].prepared + ("<hw::kNormal>" if self.kernel.has_normal_reciprocal(name) else "")
            self.lines.append(f"const {kind} {self.texts[key]}({self.value(name)});")
        return self.texts[key]

    def index_of(self, op: Op) -> tuple[str, str]:
        """Index at which a gathering op reads its operand, and the C++ condition that this rank has the index. The condition is "" if the
        rank has all rows."""
        if self.outer and not self.is_around and not self.kernel.ir.moves_inside(op):
            return self.outer.index_of(op)
        if (name := f"{op.result.name} index") not in self.texts:
            self.texts[name] = self.number_in_order(op) if gathers_in_order(op) else self.value(op.tensors[1])
            if op.tensors[1:] and (first := self.kernel.first_row(op.tensors[2])):
                local, held = (self.kernel.names.of(f"{op.result.name}_{word}", word) for word in ("row", "held"))
                size = self.kernel.size_of_fiber(op.tensors[2])
                self.lines.append(f"const int64_t {local} = {self.texts[name]} - {first};")
                self.lines.append(f"const bool {held} = {local} >= 0 && {local} < {size};")
                self.texts[name], self.texts[f"{op.result.name} held"] = local, held
        return self.texts[name], self.texts.get(f"{op.result.name} held", "")

    def number_in_order(self, op: Op) -> str:
        """Declares a local variable with the index along the axis. In zigzag order, the index decreases in the second half."""
        half, index = (self.kernel.loops.offset(index_at(op, dim)) for dim in (op[HALVES], op[AXIS]))
        local, size = self.kernel.names.of(f"{op.result.name}_from", "index"), self.kernel.fiber_size(op.tensors[0])
        last = int(size) - 1 if size.is_int else f"{self.kernel.loops.integers.factor(size)} - 1"
        self.lines.append(f"const int64_t {local} = {half} == 1 ? {last} - {index if isinstance(index, Word) else f'({index})'} : {index};")
        return local

    def taken_at(self, op: Op) -> str:
        """C++ of a gathered element in the compute type. The value is 0 if another rank has the element."""
        (element, held), dtype = self.moved_element(op), op.result.type.dtype
        element = f"float({element})" if _is_small_float(dtype) else element
        return f"{held} ? {element} : {compute_type(dtype)}(0)" if held else element

    def moved_element(self, op: Op) -> tuple[str, str]:
        """C++ of a gathered element, and the condition that this rank has the element. If all elements of a vector have one index, loads
        the vector under this condition, and returns the condition ""."""
        kernel, loops = self.kernel, self.kernel.loops
        x, dtype, (index, held) = op.tensors[0], op.result.type.dtype, self.index_of(op)
        moved = loops.sum_of([(index, kernel.ir.fibers[x].stride)])
        if self.is_wide and x in kernel.ir.packed and not kernel.ir.moves_inside(op):
            local = kernel.names.of(f"{op.result.name}_elements", "elements that an op reads")
            load = f"hw::load<kWidth>({loops.shifted(kernel.pointers[x], [(moved, ONE), *loops.terms(x)])})"
            nothing = f"hw::Values<{dtype.cpp}, kWidth>{{}}"
            self.begin.append(f"const auto {local} = {f'{held} ? {load} : {nothing}' if held else load};")
            return VectorElement(local, loops.vector_index), ""
        element = f"{kernel.pointers[x]}[{f'{moved} + {loops.offset(x)}' if loops.terms(x) else moved}]"
        return (f"hw::truth({element})" if dtype == bool_ else element), held

    def is_total(self, op: Op) -> bool:
        """True if the value of an op is an accumulator itself, not a mean or an index."""
        combine = OPS[op.kind].combine
        return combine is not None and op.result.name in self.kernel.totals and not (combine.is_mean or OPS[op.kind].locates)

    def total(self, op: Op) -> tuple[str, DType]:
        """C++ of a reduction's result, and the dtype of the reduction's accumulator."""
        source = self.kernel.types[op.tensors[0]].dtype
        total = self.kernel.totals.get(op.result.name) or self.value(op.tensors[0])  # A reduction of one element has no accumulator.
        wide = {"float": f64 if source == f64 else f32, "int": i64}.get(source.kind, u64)
        combine = OPS[op.kind].combine
        if not combine or not combine.is_mean:
            return total, wide
        return f"{total} / {wide.cpp}({self.kernel.count(op) or self.kernel.loops.reduced_count})", wide


def _converted(value: str, computed: DType, dtype: DType) -> str:
    """Converts C++ from the compute type of `computed` to the storage type of `dtype`."""
    if _is_small_float(dtype):
        return f"{dtype.cpp}({value})" if compute_type(computed) == "float" else f"{dtype.cpp}(float({value}))"
    if dtype == bool_:
        return value if computed == bool_ else f"({value}) != 0"
    if compute_type(computed) == dtype.cpp and dtype.itemsize >= 4:
        return value
    if (computed, dtype) == (f64, f32):
        return f"hw::to_f32({value})"
    if computed.kind == "float" and dtype.kind in ("int", "uint"):
        return f"hw::to_int<{dtype.cpp}>({value})"
    return f"{dtype.cpp}({value})"  # C++ promotes narrow integers to int.


def _is_small_float(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize < 4
