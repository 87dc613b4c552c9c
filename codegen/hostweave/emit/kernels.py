"""Emits kernels: loops, statements for one element, and parameters of the kernel."""

from __future__ import annotations

from collections.abc import Iterator

from hostweave.emit.cpp import CppExprPrinter, Word, accumulator_type, compute_type
from hostweave.emit.kernel_facts import KernelFacts
from hostweave.emit.sections import Section
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import DESCENDING, GROUPS
from hostweave.kernel_ir.loops import OF_BLOCKS, Distribution, Loops, Walk, stored
from hostweave.types.tensor import bool_

# C functions of the op table, which kernels call without `std::`.
C_FUNCTIONS = frozenset(name + end for op in OPS.values() for field, name in op.fields(op.cpp) if field == "std" for end in ("", "f"))

Lines = tuple[str, ...]


class EmittedKernel:
    """A kernel in the form that the template needs. `lines` is the body of the loop over the kept dims."""

    def __init__(self, of: KernelEmitter, body: Lines, before: Lines = ()):
        """`before` precedes the declarations of indices."""
        self.name, self.loops, self.ops = of.name, of.loops, of.kernel.ops
        self.others: dict[str, None] = {}  # names of other kernels of program.hw that share this definition
        pointers = (
            *(f"{of.array_of(name)} {of.pointers[name]}" for name in of.inputs),
            *(f"{of.array_of(y)} {at}" for y, at in of.results.items()),
        )
        self.params = (*pointers, *(f"int64_t {of.loops.integers.sizes[atom]}" for atom in of.atoms))
        self.touches = tuple(of.touches())
        packed = [pointer for name, pointer in of.pointers.items() if name in of.ir.packed]
        packed += [pointer for name, pointer in of.results.items() if stored(name) in of.ir.packed]
        self.variants = tuple(of.loops.variants(packed))
        held = sorted(filter(of.pointers.get, of.ir.held), key=lambda name: name in of.terms)  # Terms of other ranks are loaded last.
        rows = ((name, of.loops.shifted(of.pointers[name], of.loops.row_terms(name))) for name in held)
        loads = (f"const auto {of.elements(name)} = {of.loops.row}.load({first});" for name, first in rows)
        self.lines = (*before, *of.loops.declarations(), *loads, *body)
        # The parameter by which the kernel exchanges data with other ranks, or "".
        self.terms = next((of.pointers[name] for name in of.inputs if name in of.terms), "")
        if of.kernel.receivers:
            (self.terms,) = of.results.values()

    @property
    def comments(self) -> Iterator[str]:
        yield from map(str, self.ops)
        if self.others:
            yield f"Also for kernel{'s' * (len(self.others) > 1)} {', '.join(f'@{name}' for name in self.others)} of program.hw."


class KernelEmitter(KernelFacts):
    """Emits one kernel. Rows of inputs in registers are loaded before all reductions, so that no load waits for a reduction."""

    def __init__(self, loops: Loops, integers: CppExprPrinter, name: str):
        super().__init__(loops, integers, name)
        self.row = Section(self)  # statements outside of the innermost loops

    def emit(self) -> EmittedKernel:
        if self.ir.takes_fibers:
            return self.fibers()
        return self.reduction() if self.ir.reduced else self.pointwise()

    def pointwise(self) -> EmittedKernel:
        section = Section(self, self.row, self.ir.width)
        if self.ir.updates:
            section.store_update(self.ops[-1])
        else:
            section.store(self.results)
        lines = section.taken()  # This call must precede self.row.taken(), because it may add statements to self.row.
        return EmittedKernel(self, (*self.row.taken(), *lines))

    def fibers(self) -> EmittedKernel:
        """Emits the call that computes one fiber."""
        op = self.ops[-1]
        group = "hw::BlockFibers()" if self.ir.distribution in OF_BLOCKS else "hw::Fibers()"
        group = self.loops.element if self.ir.distribution == Distribution.FIBER_PARTS else group
        kind = self.types[op.tensors[0]].dtype
        total = f"hw::Sum<{accumulator_type(kind)}>" if kind.kind == "float" else "uint64_t"  # Unsigned integers wrap around.
        facts = {"descending": "true" if op[DESCENDING] else "false", "total": total, "groups": op[GROUPS]}
        *others, last = op.tensors
        rows = f"hw::Rows{{{self.first_row(last) or 0}, {self.size_of_fiber(last)}}}"
        fibers = [self.fiber(self.pointers[name], name) for name in others]
        fibers.append(rows if OPS[op.kind].splits_fibers else self.fiber(self.pointers[last], last))
        fibers.append(self.fiber(self.results[op.result.name], stored(op.result.name)))
        return EmittedKernel(self, (f"{OPS[op.kind].fiber.format(**facts)}({', '.join([group, *fibers])});",))

    def fiber(self, pointer: str, access: str) -> str:
        fiber, size = self.ir.fibers[access], self.loops.integers.size
        return f"hw::fiber({self.loops.shifted(pointer, self.loops.terms(access))}, {size(fiber.size)}, {size(fiber.stride)})"

    def reduction(self) -> EmittedKernel:
        """Emits the loop nests over the reduced dims, the stores of results that have only kept dims, and a final loop for results with all
        dims."""
        walks = self.ir.walks
        nests = [line for walk in walks if walk.reductions for line in self.nest(walk, is_last=walk is walks[-1])]
        inside = self.section()
        inside.store(() if walks[-1].reductions else walks[-1].stores)
        last = self.loops.nest(inside.taken())
        outside = self.section() if self.ir.has_wide_totals else self.row
        outside.store([name for name in self.results if not self.walked.is_whole(name)])
        stores = outside.taken_stores() if outside is self.row else outside.taken()
        if stores and (is_leader := self.loops.text(self.loops.templates.leader_if)):
            stores = (f"if ({is_leader}) {{", *stores, "}")
        return EmittedKernel(self, (*nests, *self.row.taken(), *stores, *last))

    def section(self) -> Section:
        """Section for the innermost loop. If each element of a vector has its own accumulator, this loop is the loop over the vector."""
        if not self.ir.has_wide_totals:
            return Section(self, self.row, self.ir.width)
        return Section(self, width=self.ir.width, around=Section(self, self.row, is_around=True))

    def nest(self, walk: Walk, is_last: bool) -> Lines:
        """Accumulators, the loop nest, and statements after the nest."""
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
            first = first.replace("64", str(8 * kind.itemsize))  # A minimum of i32 starts at INT32_MAX, not at INT64_MAX.
            element = section.value(op.tensors[0])
            if OPS[op.kind].locates:
                accumulator, first = f"hw::Indexed<{accumulator}>", f"{{{first}, INT64_MAX}}"
                element = f"{accumulator}{{{element}, {self.loops.offset(op.result.name)}}}"
            elif compute_type(kind) != accumulator:
                element = f"{accumulator}({element})"
            if combine.sign == "+" and kind.kind == "float":
                accumulator, first = f"hw::Sum<{accumulator}>", "{}"
            self.totals[op.result.name] = f"{total}[{self.loops.vector_index}]" if self.ir.has_wide_totals else Word(total)
            if self.ir.has_wide_totals:
                starts.append(f"auto {total} = hw::filled<kWidth, {accumulator}>({first});")
            else:
                starts.append(f"{accumulator} {total} = {first};")
            section.join(self.totals[op.result.name], combine, element, wraps=kind.kind == "int" and combine.sign in ("+", "*"))
            if reduce := self.loops.reduce(is_last):
                after.append(f"{total} = {reduce}({total}, {combine.functor}());")
        section.store(walk.stores)
        nest = self.loops.nest(section.taken())
        return (*self.row.taken(), *starts, *nest, *after)
