"""Requirements on the sizes of a call: slices lie inside their dims, sizes are integers, and chosen loops divide them, or others run."""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm

from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXES, AXIS, FIRST
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import dedupe_functions, launched
from hostweave.host_ir.expr import Binary, Const, Expr, Symbol
from hostweave.types.size import Factor, Share, Size, Sum
from hostweave.types.tensor import BufferType, TensorType
from hostweave.types.zigzag import Zigzag, pieces

MOST = 2**48  # elements: of no memory


def multiples(program: ir.HostProgram) -> dict[Factor, int]:
    """What must divide each symbolic size for every dim and trip count of the program to be whole."""
    result: dict[Factor, int] = {}
    for size in dims_and_trips(program):
        if len(size.factors) == 1:
            result[size.factors[0]] = lcm(result.get(size.factors[0], 1), size.divisor)
    return result


def dims_and_trips(program: ir.HostProgram) -> Iterator[Size]:
    for _, type in ir.defined_types(program):
        yield from type.shape
    yield from trip_counts(program)
    for parameter in (*program.inputs, *program.outputs):
        on = parameter.type.mesh_in(program.mesh)
        yield from (dim.size // pieces(dim.axes, on) for dim in parameter.type.dims if isinstance(dim.axes, Zigzag))


def trip_counts(program: ir.HostProgram) -> Iterator[Size]:
    return (i.trips for i in tree.walk(program.body) if i.trips is not None)


def not_negative(program: ir.HostProgram) -> tuple[Size, ...]:
    """Differences of sizes, such as `(M - 2)`, that a call must not make negative."""
    types = ir.buffer_types(program)
    found = [size for i in tree.walk(program.body) if i.span for src in tree.names(i, "alias") for size in slack(i, types[src])]
    factors = (factor for type in types.values() for size in type.shape for factor in size.factors)
    found += [Size(1, (factor,)) for factor in factors if isinstance(factor, Sum)]
    for op, types_in_kernel in _ops(program):
        if op.kind == "start":  # a slice can begin at one place at least
            found.append(types_in_kernel[op.tensors[1]].shape[0] - 1)
        if FIRST in OPS[op.kind].attributes and op[FIRST]:  # of as many elements at least
            found.append(types_in_kernel[op.tensors[0]].shape[op[AXIS]] - op[FIRST])
    terms = {size: [term for factor in size.factors if isinstance(factor, Sum) for term in factor.terms] for size in found}
    return tuple(size for size, parts in terms.items() if any(term.coefficient < 0 for term in (size, *parts)))


def _ops(program: ir.HostProgram) -> Iterator[tuple[Op, dict[str, TensorType]]]:
    """Those of the kernels that are launched, with the types of what their kernels have."""
    for kernel in launched(program.kernels, program.body):
        types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        yield from ((op, types) for op in kernel.ops)


def not_empty(program: ir.HostProgram) -> Iterator[tuple[str, Size]]:
    """Sizes that a call must not make 0, each with the reduction that has no value of no elements. A rank may have none of them."""
    found: dict[tuple[str, Size], None] = {}
    for op, types in _ops(program):
        combine = OPS[op.kind].combine
        if combine and not combine.identity:
            factors = (factor for axis in op[AXES] for factor in types[op.tensors[0]].shape[axis].factors)
            wholes = (factor.size if isinstance(factor, Share) else Size(1, (factor,)) for factor in factors)
            found |= {(op.kind, size): None for size in wholes}
    yield from found


def slack(view: tree.Instruction, source: BufferType) -> tuple[Size, ...]:
    """How much room a view of some indices leaves before and after them, where that follows from sizes alone."""
    if view.span is None:
        return ()
    dim, start, spread = view.span
    before, dim_size = _size_of(start), source.shape[dim]
    if before is None or any(isinstance(factor, Share) for size in (dim_size, spread) for factor in size.factors):
        return ()  # it depends on the rank: right as it is made
    return (before, dim_size - before - spread)


def _size_of(expr: Expr) -> Size | None:
    """An expression of sizes as a size."""
    match expr:
        case Const(value):
            return Size(value)
        case Symbol(size):
            return None if isinstance(size, Share) else Size(1, (size,))
        case Binary(op, left, right) if op in "+-*":
            a, b = _size_of(left), _size_of(right)
            if a is None or b is None:
                return None
            return a + b if op == "+" else a - b if op == "-" else a * b
        case Binary("/", left, Const(divisor)):
            a = _size_of(left)
            return None if a is None else a // divisor
    return None


# --- chosen loops -----------------------------------------------------------------------------------------------------
# Which calls the chunk loops that the compiler has chosen can take: the others are made by the same program in sequence.


class LoopsDoNotDivide(ArgumentError):
    """A call of sizes that chosen loops do not divide. Nothing was done."""


def expect_divided(program: ir.HostProgram, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises LoopsDoNotDivide for global inputs of these shapes, `()` for those that are not known, where loops were chosen."""
    if wanted := _multiples(program):
        held = [(p.type.shape, shape) for p, shape in zip(program.inputs, shapes, strict=True) if shape]
        sizes = {dim.name: size for dims, shape in held for dim, size in zip(dims, shape, strict=True) if dim.name}
        if size := _first_undivided(wanted, sizes):
            raise LoopsDoNotDivide(f"{program.name}: {size} = {size.bind(sizes)}: no multiple of {wanted[size]}, as chosen loops want it")


def undivided(program: ir.HostProgram, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that the program must divide, such as among ranks, and cannot: those of a sum, such as (M + 1), if it is one."""
    found: dict[str, int] = {}
    for size, multiple in _of_symbols(program).items():
        if sizes.keys() >= set(size.symbols) and size.bind(sizes) % multiple:
            found |= {name: sizes[name] for name in size.symbols}
    return found


@ir.analysis
def _of_symbols(program: ir.HostProgram) -> dict[Size, int]:
    """Multiples of names, and of sums of names."""
    found = {Size(1, (factor,)): multiple for factor, multiple in multiples(dedupe_functions(program)).items() if multiple > 1}
    return {size: multiple for size, multiple in found.items() if size.symbols == size.atoms}


def are_divided(program: ir.HostProgram, sizes: Mapping[str, int]) -> bool:
    """Whether no size that is given, or that follows from these, is one that chosen loops do not divide."""
    return _first_undivided(_multiples(program), sizes) is None


def _first_undivided(multiples: Mapping[Size, int], sizes: Mapping[str, int]) -> Size | None:
    known = (size for size in multiples if sizes.keys() >= set(size.symbols))
    return next((size for size in known if size.bind(sizes) % multiples[size]), None)


@ir.analysis
def _multiples(program: ir.HostProgram) -> dict[Size, int]:
    """What must divide the sizes of a call; nothing where no loop was chosen, so that all is as the user has stated it."""
    if not any(choice.taken.chunks for choice in program.choices):
        return {}
    found = {Size(1, (factor,)): multiple for factor, multiple in multiples(dedupe_functions(program)).items()}
    return {size: multiple for size, multiple in found.items() if multiple > 1 and size.symbols == size.atoms}
