"""Kernels: which thread computes which elements, and the C++ of one element."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hostweave.emit import views
from hostweave.emit.cpp import Integers, accumulator_type, compute_type, number
from hostweave.emit.names import Names
from hostweave.errors import ProgramError
from hostweave.fusion.extent import Extent, product
from hostweave.fusion.ir import Op, Scalar, Value
from hostweave.fusion.ops import OPS, operand_types
from hostweave.fusion.text import print_op
from hostweave.fusion.types import BufferType, Dim, DType, TensorType, bool_, f32, f64, i64
from hostweave.host import ir
from hostweave.host.iteration import Iteration, NotOneKernel, iteration, reduced_indices

ZERO, ONE = Extent(0), Extent()
SMALL = 32  # terms that one thread adds up alone although they lie side by side

u64 = DType("u64", 8, "uint", "uint64_t")  # what unsigned sums add up in

_SAME = ("copy", "broadcast_to", "expand_dims", "reshape", "transpose")  # the element of the operand
_SHORT = (*_SAME, "cast", "iota")  # texts that read well inside others
_SIGNS = {"add": "+", "mul": "*"}
# How a reduction joins two values: the name of its total, the functor, and where it starts for floats, ints and uints.
_JOINS = {
    "add": ("sum", "hw::Add", ("0", "0", "0")),
    "mul": ("product", "hw::Multiply", ("1", "1", "1")),
    "maximum": ("largest", "hw::Maximum", ("-INFINITY", "INT64_MIN", "0")),
    "minimum": ("smallest", "hw::Minimum", ("INFINITY", "INT64_MAX", "UINT64_MAX")),
    "first_maximum": ("best", "hw::FirstMaximum", ("-INFINITY", "INT64_MIN", "0")),
}


@dataclass(frozen=True)
class _Sharing:
    """Who reduces to one element: the loop over the elements, which threads share the innermost loop, and how their totals meet."""

    each: str
    grid: str
    inner: str = ""
    meet: str = ""
    once: str = ""  # the condition under which the element is stored


_BY_THREAD = _Sharing("for (int64_t {} : hw::over_grid({}))", "grid_for")
_BY_BLOCK = _Sharing("for (int64_t {} : hw::over_blocks({}))", "grid_of", "over_threads", "reduce_block", "hw::first_thread()")
_BY_WARPS = _Sharing("for (const hw::Lane {} : hw::over_lanes({}))", "grid_of_lanes", "over_warps", "reduce_warps", "{}.stores()")


@dataclass(frozen=True)
class EmittedKernel:
    view: views.Kernel
    grid: str
    sizes: tuple[str, ...]  # C++ names of the sizes that it takes after the buffers


def emit_kernel(name: str, kernel: ir.Kernel, buffers: Sequence[BufferType], integers: Integers) -> EmittedKernel:
    """The kernel for these buffers: its inputs, then its results. Raises ProgramError for ops that are not one kernel."""
    try:
        walked = iteration(kernel)
    except NotOneKernel as reason:
        raise ProgramError(f"kernel @{kernel.name}: {reason}; split it") from None
    return _Emitter(name, kernel, walked, buffers, integers).emit()


@dataclass(frozen=True)
class _Dim:
    """One dim of the loops: its extent, and how far apart its elements lie in each place: inputs, results, indices."""

    extent: Extent
    strides: tuple[Extent, ...]
    position: int = 0  # among the dims of the operands: indices are named in this order


class _Emitter:
    """Writes one kernel. A value is a C++ text: a number, an element in memory, or a local of its name.

    What a reduction needs is computed where the reduction walks it, and again where something walks it later: its
    inputs are then in the cache, and no value of a whole row has to be kept.
    """

    def __init__(self, name: str, kernel: ir.Kernel, walked: Iteration, buffers: Sequence[BufferType], integers: Integers):
        self.name, self.ops, self.walked, self.integers = name, kernel.ops, walked, integers
        self.types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        self.inputs = [p.name for p in kernel.inputs]
        self.made = {op.result.name: op for op in kernel.ops}
        self.names = Names((*integers.sizes.values(), *self.functions()))
        self.pointers = {name: self.names.of(name) for name in self.inputs}
        self.results = {p.name: self.names.of(p.name, "result") for p in kernel.results}
        self.places = self.lie(buffers)
        self.dims()
        self.name_indices()
        self.uses = Counter(name for op in self.ops for name in _uses(op))
        self.uses.update(name for name in self.results if name in self.uses)
        self.sharing = self.shared()
        self.loops = self.loop_heads()
        self.row = _Section(self)  # around the loops over what is reduced; all there is where nothing is

    def emit(self) -> EmittedKernel:
        view = self.reduction() if self.reduced else self.pointwise()
        used = {name for dim in (*self.kept, *self.reduced) for extent in (dim.extent, *dim.strides) for name in extent.symbols}
        sizes = tuple(text for name, text in self.integers.sizes.items() if name in used)
        inputs = (f"const {self.types[name].dtype.cpp}* {self.pointers[name]}" for name in self.inputs)
        results = (f"{self.types[name].dtype.cpp}* {pointer}" for name, pointer in self.results.items())
        params = (*inputs, *results, *(f"int64_t {size}" for size in sizes))
        return EmittedKernel(replace(view, params=params), f"hw::{self.sharing.grid}({self.count})", sizes)

    def functions(self) -> set[str]:
        """The C functions that the kernel calls, whose names no local may take."""
        bodies = [_in_type(OPS[op.kind].expression, self.types[op.tensors[-1]].dtype) for op in self.ops if op.tensors]
        return {name for body in bodies for name in re.findall(r"(\w+)\(", body)}

    # --- loops ---

    @property
    def count(self) -> str:
        """How many elements are kept."""
        return self.integers.extent(product(tuple(dim.extent for dim in self.kept)))

    def lie(self, buffers: Sequence[BufferType]) -> dict[str, dict[str, Extent]]:
        """How far apart neighbours along each index are: in every input and result, and in the values that are indices."""
        places: dict[str, dict[str, Extent]] = {}
        for name, place, buffer in zip((*self.inputs, *self.results), (*self.inputs, *map(_stored, self.results)), buffers, strict=True):
            own = zip(self.walked.indices[name], ir.strides_of(buffer), strict=True)
            places[place] = {index: stride for index, stride in own if index is not None}
        for op in self.ops:
            if op.kind == "iota":
                counted: Iterable[str | None] = self.walked.indices[op.result.name]
            elif op.kind == "argmax":
                counted = reduced_indices(op, self.walked.indices)
            else:
                continue
            places[op.result.name] = {index: ONE for index in counted if index is not None}
        return places

    def dims(self) -> None:
        """The dims that the kernel keeps and those that it reduces, from the outermost in."""
        order = list(self.walked.extents)

        def dim(index: str) -> _Dim:
            return _Dim(self.walked.extents[index], tuple(own.get(index, ZERO) for own in self.places.values()), order.index(index))

        stored = set(map(_stored, self.results))
        scalar = _Dim(ONE, tuple(ONE if place in stored else ZERO for place in self.places))
        self.kept = _merged([dim(index) for index in self.walked.kept]) or [scalar]
        self.reduced = _merged([dim(index) for index in self.walked.reduced])

    def name_indices(self) -> None:
        """Names the index of every dim, in the order of the operands' dims, and of the element of the result."""
        order = sorted([*self.kept, *self.reduced], key=lambda dim: dim.position)
        names = {dim: self.names.of(letter, "index") for letter, dim in zip("ijklpqrstuvw", order, strict=False)}
        self.kept_indices = [names[dim] for dim in self.kept]
        self.reduced_indices = [names[dim] for dim in self.reduced]
        self.element = self.kept_indices[0] if len(self.kept) == 1 else self.names.of("element", "index")

    def terms(self, place: str) -> list[tuple[str, Extent]]:
        """The indices that lead to an element, with their strides."""
        number = list(self.places).index(place)
        if self.is_linear(number):
            terms = [(self.element, ONE)]
        else:
            terms = [(index, dim.strides[number]) for index, dim in zip(self.kept_indices, self.kept, strict=True)]
        terms += [(index, dim.strides[number]) for index, dim in zip(self.reduced_indices, self.reduced, strict=True)]
        return [(index, stride) for index, stride in terms if stride != ZERO]

    def offset(self, place: str) -> str:
        """Where an element lies, as `i * N + j`."""
        terms = self.terms(place)
        wide = [f"{index} * {self.integers.factor(stride)}" for index, stride in terms if stride != ONE]
        return " + ".join([*wide, *(index for index, stride in terms if stride == ONE)]) or "0"

    def element_of(self, name: str) -> str:
        """An input's element, as it lies in memory."""
        return f"{self.pointers[name]}[{self.offset(name)}]"

    def is_linear(self, number: int) -> bool:
        """Whether the number of an element of the result is also its offset in this place."""
        return tuple(dim.strides[number] for dim in self.kept) == ir.row_major(tuple(dim.extent for dim in self.kept))

    def index_declarations(self) -> tuple[str, ...]:
        """The indices of the result's dims, from the number of its element, where some offset needs them."""
        if len(self.kept) == 1:
            return ()
        scattered = [number for number in range(len(self.places)) if not self.is_linear(number)]
        needed = [i for i, dim in enumerate(self.kept) if any(dim.strides[number] != ZERO for number in scattered)]
        return tuple(f"const int64_t {self.kept_indices[i]} = {self.part_of_element(i)};" for i in needed)

    def part_of_element(self, i: int) -> str:
        """`element / (m * N) % 4`"""
        inner = product(tuple(dim.extent for dim in self.kept[i + 1 :]))
        text = self.element if inner == ONE else f"{self.element} / {self.integers.factor(inner)}"
        return text if i == 0 else f"{text} % {self.integers.factor(self.kept[i].extent)}"

    # --- bodies ---

    def pointwise(self) -> views.Kernel:
        stores = self.stores(self.row, self.results)
        return self.kernel(self.row.taken(), stores)

    def stores(self, section: _Section, results: Iterable[str]) -> tuple[str, ...]:
        """What the section ends with. Nothing is read after the first store: a result may lie where an input did."""
        values = [(name, section.stored(self.made[name])) for name in results]
        if len(values) > 1:
            values = [(name, section.read(name, text) if "[" in text else text) for name, text in values]
        return tuple(f"{self.results[name]}[{self.offset(_stored(name))}] = {value};" for name, value in values)

    def kernel(self, loads: tuple[str, ...], stores: tuple[str, ...]) -> views.Kernel:
        return views.Kernel(
            name=self.name,
            comments=tuple(print_op(op) for op in self.ops),
            params=(),
            each=self.sharing.each.format(self.element, self.count),
            indices=self.index_declarations(),
            loads=loads,
            stores=stores,
        )

    def reduction(self) -> views.Reduction:
        """Walks what is reduced once for all reductions that can be made then, and a last time for results of every element."""
        passes = []
        left = [op for op in self.ops if self.reduces(op)]
        totals = {op.result.name for op in left}
        whole = [name for name in self.results if self.walked.is_whole(name)]
        while left:
            waiting = {op.result.name for op in left}
            ready = [op for op in left if not waiting & self.leads_to(op)]
            is_only = len(ready) == len(totals) and not any(totals & self.leads_to(self.made[name]) for name in whole)
            passes.append(self.walk(ready, whole if is_only else ()))
            left = [op for op in left if op not in ready]
            whole = [] if is_only else whole
        section = _Section(self, self.row)
        last = self.stores(section, whole)
        stores = self.stores(self.row, [name for name in self.results if not self.walked.is_whole(name)])
        return views.Reduction(
            **vars(self.kernel(self.row.taken(), stores)),
            loops=self.loops,
            passes=tuple(passes),
            once=(f"if ({self.sharing.once.format(self.element)})",) if self.sharing.once else (),
            final=(*section.taken(), *last),
        )

    def loop_heads(self) -> tuple[str, ...]:
        """The loops over what is reduced, of which threads may share the innermost one."""
        counts = [self.integers.extent(dim.extent) for dim in self.reduced]
        heads = [f"for (int64_t {i} = 0; {i} < {count}; ++{i})" for i, count in zip(self.reduced_indices, counts, strict=True)]
        if self.sharing.inner:
            heads[-1] = f"for (int64_t {self.reduced_indices[-1]} : hw::{self.sharing.inner}({counts[-1]}))"
        return tuple(heads)

    def shared(self) -> _Sharing:
        """A block where what is reduced to one element lies side by side, else warps; a thread alone where it is little."""
        if not self.reduced or (self.reduced[-1].extent.is_int and int(self.reduced[-1].extent) < SMALL):
            return _BY_THREAD
        if any(self.reduced[-1].strides[number] == ONE for number in range(len(self.inputs))):
            return _BY_BLOCK
        return _BY_THREAD if any(map(self.walked.is_whole, self.results)) else _BY_WARPS

    def reduces(self, op: Op) -> bool:
        return bool(reduced_indices(op, self.walked.indices))

    def leads_to(self, op: Op) -> set[str]:
        """Every value that an op is computed from."""
        made = [self.made[name] for name in op.tensors if name in self.made]
        return {*op.tensors, *(name for source in made for name in self.leads_to(source))}

    def walk(self, ops: Sequence[Op], results: Sequence[str]) -> views.Pass:
        """One loop over what is reduced, in which these reductions add up, and these results are stored."""
        section = _Section(self, self.row)
        starts, adding, after = [], [], []
        for op in ops:
            word, join, start = _JOINS[OPS[op.kind].combine]
            kind = self.types[op.tensors[0]].dtype
            accumulator = accumulator_type(kind)
            is_value = op.kind not in ("mean", "argmax") and accumulator == compute_type(op.result.type.dtype)
            total = self.names.of(op.result.name if is_value and op.result.name not in self.results else word, f"total of {op.result.name}")
            first = start[("float", "int", "uint").index("uint" if kind == bool_ else kind.kind)]
            first = first.replace("64", str(8 * kind.itemsize))  # of no elements: a value of the dtype, wide as the total may be
            element = section.value(op.tensors[0])
            if op.kind == "argmax":
                accumulator, first = f"hw::Indexed<{accumulator}>", f"{{{first}, INT64_MAX}}"
                element = f"{accumulator}{{{element}, {self.offset(op.result.name)}}}"
            elif compute_type(kind) != accumulator:
                element = f"{accumulator}({element})"
            starts.append(f"{accumulator} {total} = {first};")
            sign = _SIGNS.get(OPS[op.kind].combine)
            adding.append(f"{total} {sign}= {element};" if sign else f"{total} = {join}()({total}, {element});")
            if self.sharing.meet:
                after.append(f"{total} = hw::{self.sharing.meet}({total}, {join}());")
            self.row.totals[op.result.name] = total
        stores = self.stores(section, results)
        return views.Pass(before=self.row.taken(), starts=tuple(starts), body=(*section.taken(), *adding, *stores), after=tuple(after))


class _Section:
    """Statements of one scope. A value is computed where it is first asked for: outside of the loops where it can be."""

    def __init__(self, kernel: _Emitter, outer: _Section | None = None):
        self.kernel, self.outer = kernel, outer
        self.texts: dict[str, str] = {}
        self.totals: dict[str, str] = {}  # what reductions have added up
        self.lines: list[str] = []

    def taken(self) -> tuple[str, ...]:
        """The statements since the last time."""
        lines, self.lines = tuple(self.lines), []
        return lines

    def value(self, name: str, is_hoisted: bool = False) -> str:
        """A value in the type that computes it: a local, or the text itself where it is needed once."""
        if self.outer and not self.kernel.walked.is_whole(name):
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

    def local(self, name: str) -> str:
        """`h`, or `x_ij` of an input or a result."""
        if name in self.kernel.pointers or name in self.kernel.results:
            place = name if name in self.kernel.pointers else _stored(name)
            return self.kernel.names.of("_".join([name, "".join(i for i, _ in self.kernel.terms(place))]).rstrip("_"), "element")
        return self.kernel.names.of(name, "local")

    def computed(self, name: str) -> tuple[str, bool]:
        """A value's text, and whether it reads well inside another."""
        dtype = self.kernel.types[name].dtype
        if name in self.kernel.pointers:
            element = self.kernel.element_of(name)
            return (f"float({element})" if _is_small_float(dtype) else element), True
        op = self.kernel.made[name]
        text, computed = self.expression(op)
        if _is_small_float(dtype):  # in registers floats are rounded only by a cast
            return (f"float({_converted(text, computed, dtype)})" if op.kind == "cast" else text), op.kind in _SHORT
        return _converted(text, computed, dtype), op.kind in _SHORT and dtype != bool_

    def stored(self, op: Op) -> str:
        """The value of one element of a result, as memory holds it."""
        if self.kernel.uses[op.result.name]:
            return _converted(self.value(op.result.name), op.result.type.dtype, op.result.type.dtype)
        if (op.kind in _SAME and op.tensors and op.tensors[0] in self.kernel.pointers) or (self.is_trivial(op) and op.kind != "argmax"):
            (source,) = op.tensors
            if source in self.kernel.pointers:
                return self.kernel.element_of(source)
        text, computed = self.expression(op)
        return _converted(text, computed, op.result.type.dtype)

    def is_trivial(self, op: Op) -> bool:
        """A reduction of one element."""
        return op.kind in OPS and bool(OPS[op.kind].combine) and not self.kernel.reduces(op)

    def expression(self, op: Op) -> tuple[str, DType]:
        """What an op computes, and the dtype that this is in before it is converted to the result's."""
        dtype = op.result.type.dtype
        if op.kind == "fill":
            value = op.attribute("value")
            assert isinstance(value, int | float)
            return number(value, dtype), dtype
        if op.kind == "iota":
            return self.kernel.offset(op.result.name), i64
        if op.kind == "argmax":
            return ("int64_t(0)" if self.is_trivial(op) else f"{self.totals[op.result.name]}.index"), dtype
        if op.result.name in self.totals:
            return self.total(op)
        if op.kind in _SAME or self.is_trivial(op):
            return self.value(op.tensors[0]), dtype
        types = operand_types(op, self.kernel.types)
        expression = OPS[op.kind].expression
        if not expression:
            raise ProgramError(f"{op.kind}: no kernel computes this op", op.location)
        texts = [self.value(o) if isinstance(o, str) else _literal(o, type.dtype) for o, type in zip(op.operands, types, strict=True)]
        return _in_type(expression, types[-1].dtype).format(*texts), types[-1].dtype if op.kind == "cast" else dtype

    def total(self, op: Op) -> tuple[str, DType]:
        """What a reduction comes to, in the dtype that it adds up in."""
        total, source = self.totals[op.result.name], self.kernel.types[op.tensors[0]].dtype
        wide = {"float": f64 if source == f64 else f32, "int": i64}.get(source.kind, u64)
        if op.kind != "mean":
            return total, wide
        count = self.kernel.integers.extent(product(tuple(dim.extent for dim in self.kernel.reduced)))
        return f"{total} / {wide.cpp}({count})", wide


def _stored(result: str) -> str:
    """The place that a result has in memory, beside those of other values."""
    return f"{result} stored"


def _in_type(expression: str, dtype: DType) -> str:
    """The expression with T(1) as a literal and std::exp as the C function, both of the compute type."""
    text = re.sub(r"\bT\(([\d.]+)\)", lambda match: number(float(match[1]), dtype), expression)
    return re.sub(r"\bstd::(\w+)", lambda match: match[1] + ("f" if compute_type(dtype) == "float" else ""), text)


def _uses(op: Op) -> Iterator[str]:
    """The operands of an op, as often as its expression names each."""
    expression = OPS[op.kind].expression if op.kind in OPS else ""
    for i, operand in enumerate(op.operands):
        if isinstance(operand, str):
            yield from [operand] * max(1, expression.count(f"{{{i}}}"))


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
    return f"{dtype.cpp}({value})"  # narrower ints are computed as int


def _is_small_float(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize < 4


def _merged(dims: Sequence[_Dim]) -> list[_Dim]:
    """Neighbours that one stride covers in every operand become one dim; dims of one element go."""
    result: list[_Dim] = []
    for dim in dims:
        if dim.extent == ONE:
            continue
        if result and all(wide == dim.extent * narrow for wide, narrow in zip(result[-1].strides, dim.strides, strict=True)):
            outer = result.pop()
            dim = _Dim(outer.extent * dim.extent, dim.strides, outer.position)
        result.append(dim)
    return result


# --- kernels that no fusion names -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """A copy of rows of contiguous elements, whose beginnings lie `pitch` elements apart."""

    rows: Extent
    elements: Extent
    src_pitch: Extent
    dst_pitch: Extent


def copied(src: BufferType, dst: BufferType) -> Rows | None:
    """How a copy goes row by row, or None where its elements are scattered more than that."""
    strides = zip(ir.strides_of(src), ir.strides_of(dst), strict=True)
    dims = _merged([_Dim(extent, pair) for extent, pair in zip(src.shape, strides, strict=True)])
    if not dims or dims[-1].strides != (ONE, ONE):
        dims.append(_Dim(ONE, (ONE, ONE)))
    if len(dims) == 1:
        dims.insert(0, _Dim(ONE, (dims[0].extent, dims[0].extent)))
    return Rows(dims[0].extent, dims[1].extent, *dims[0].strides) if len(dims) == 2 else None


def copy_kernel(name: str, buffer: BufferType) -> ir.Kernel:
    """A kernel that copies between strided views of this shape."""
    type = _tensor(buffer)
    return ir.Kernel(name, (ir.Parameter("src", type),), (Op("copy", ("src",), Value("dst", type)),))


def fill_kernel(name: str, buffer: BufferType, value: float) -> ir.Kernel:
    """A kernel that sets every element of a view."""
    return ir.Kernel(name, (), (Op("fill", (), Value("dst", _tensor(buffer)), (("value", value),)),))


def _tensor(buffer: BufferType) -> TensorType:
    return TensorType(buffer.dtype, tuple(Dim(extent) for extent in buffer.shape))
