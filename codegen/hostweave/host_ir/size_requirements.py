"""Requirements on the sizes of a call: slices fit, reductions without an identity are not empty, quotients are integers, and chunk loops
divide dims evenly."""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm

from hostweave.base.errors import ArgumentError
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXES, AXIS, FIRST
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import dedupe_functions, launched
from hostweave.host_ir.expr import Binary, Const, Expr, Symbol, divisions
from hostweave.types.size import Factor, Share, Size, Sum
from hostweave.types.tensor import BufferType, TensorType
from hostweave.types.zigzag import Zigzag, pieces

MAX_SIZE = 2**48  # elements; no memory is so large


def multiples(program: ir.HostProgram) -> dict[Factor, int]:
    """Factor of a size -> number that must divide the factor. Dims and trip counts with this factor alone, such as M/8, are then
    integers."""
    result: dict[Factor, int] = {}
    for size in dims_and_trips(program):
        if len(size.factors) == 1:
            result[size.factors[0]] = lcm(result.get(size.factors[0], 1), size.divisor)
    return result


def dims_and_trips(program: ir.HostProgram) -> Iterator[Size]:
    for _, type in ir.defined_types(program):
        yield from type.shape
    yield from trip_counts(program)
    divisors = (divisor for i in tree.walk(program.body) for expr in tree.expressions(i) for _, divisor in divisions(expr))
    yield from (size for size in map(size_of, divisors) if size is not None)  # no quotient M/8 of a divisor is rounded to 0
    for parameter in (*program.inputs, *program.outputs):
        on = parameter.type.mesh_in(program.mesh)
        yield from (dim.size // pieces(dim.axes, on) for dim in parameter.type.dims if isinstance(dim.axes, Zigzag))


def trip_counts(program: ir.HostProgram) -> Iterator[Size]:
    return (i.trips for i in tree.walk(program.body) if i.trips is not None)


def not_negative(program: ir.HostProgram) -> tuple[Size, ...]:
    """Sizes that must not be negative in a call, such as `(M - 2)`, the number of indices after a slice. Omits sizes without a negative
    coefficient, because these sizes cannot be negative."""
    types = ir.buffer_types(program)
    found = [size for i in tree.walk(program.body) if i.span for src in tree.names(i, "alias") for size in slack(i, types[src])]
    factors = (factor for type in types.values() for size in type.shape for factor in size.factors)
    found += [*trip_counts(program), *(Size(1, (factor,)) for factor in factors if isinstance(factor, Sum))]
    for op, types_in_kernel in _ops(program):
        if op.kind == "start":  # A dynamic slice needs at least one valid start.
            found.append(types_in_kernel[op.tensors[1]].shape[0] - 1)
        if FIRST in OPS[op.kind].attributes and op[FIRST]:  # The source must have at least as many elements as the op keeps.
            found.append(types_in_kernel[op.tensors[0]].shape[op[AXIS]] - op[FIRST])
    terms = {size: [term for factor in size.factors if isinstance(factor, Sum) for term in factor.terms] for size in found}
    return tuple(size for size, of_sums in terms.items() if any(term.coefficient < 0 for term in (size, *of_sums)))


def _ops(program: ir.HostProgram) -> Iterator[tuple[Op, Mapping[str, TensorType]]]:
    """Ops of all launched kernels, each with the types of the kernel's values."""
    for kernel in launched(program.kernels, program.body):
        yield from ((op, kernel.types) for op in kernel.ops)


def not_empty(program: ir.HostProgram) -> Iterator[tuple[str, Size]]:
    """Global sizes that reductions without an identity reduce, each with the kind of the reduction. Calls must not set a size to 0."""
    found: dict[tuple[str, Size], None] = {}
    for op, types in _ops(program):
        combine = OPS[op.kind].combine
        if combine and not combine.identity:
            factors = (factor for axis in op[AXES] for factor in types[op.tensors[0]].shape[axis].factors)
            global_sizes = (factor.size if isinstance(factor, Share) else Size(1, (factor,)) for factor in factors)
            found |= {(op.kind, size): None for size in global_sizes}
    yield from found


def slack(view: tree.Instruction, source: BufferType) -> tuple[Size, ...]:
    """Number of indices of the source before and after a partial view. Empty for all other instructions, and if the numbers are not known
    as sizes."""
    if view.span is None:
        return ()
    dim, start, extent = view.span
    before, dim_size = size_of(start), source.shape[dim]
    if before is None or any(isinstance(factor, Share) for size in (dim_size, extent) for factor in size.factors):
        return ()  # The compiler emits such a view only if the view fits.
    return (before, dim_size - before - extent)


def size_of(expr: Expr) -> Size | None:
    """The size that an expression computes. None if the value depends on the rank or a loop index, or is not a size."""
    match expr:
        case Const(value):
            return Size(value)
        case Symbol(size):
            return None if isinstance(size, Share) else Size(1, (size,))
        case Binary(op, left, right) if op in "+-*":
            a, b = size_of(left), size_of(right)
            if a is None or b is None:
                return None
            return a + b if op == "+" else a - b if op == "-" else a * b
        case Binary("/", left, Const(divisor)):
            a = size_of(left)
            return None if a is None else a // divisor
    return None


# Chunk loops that the compiler chose support only some sizes. For other sizes, a variant without these loops runs.


class LoopsDoNotDivide(ArgumentError):
    """A program with chunk loops that the compiler chose does not support the sizes of the call. Nothing was executed."""


def expect_divided(program: ir.HostProgram, shapes: Sequence[tuple[int, ...]]) -> None:
    """If the compiler chose chunk loops, raises LoopsDoNotDivide if a loop, reshape or sharding does not divide a symbol or a sum of
    symbols. Does not check products and unknown sizes. Shapes are global. `()` stands for an unknown shape."""
    if required := _multiples(program):
        dims_and_shapes = [(p.type.shape, shape) for p, shape in zip(program.arguments, shapes, strict=True) if shape]
        sizes = {dim.name: size for dims, shape in dims_and_shapes for dim, size in zip(dims, shape, strict=True) if dim.name}
        if size := next(_undivided(required, sizes), None):
            raise LoopsDoNotDivide(f"{program.name}: {size} = {size.bind(sizes)}: chunk loops need a multiple of {required[size]}")


def undivided(program: ir.HostProgram, sizes: Mapping[str, int]) -> dict[str, int]:
    """Symbols that break a requirement of divisibility, with their sizes. All symbols of a sum or product are included."""
    return {name: sizes[name] for size in _undivided(_of_symbols(program), sizes) for name in size.symbols}


@ir.analysis
def _of_symbols(program: ir.HostProgram) -> dict[Size, int]:
    """Symbol, sum of symbols, or product of symbols and sums -> number that must divide the value."""
    program = dedupe_functions(program)
    found = {Size(1, (factor,)): multiple for factor, multiple in multiples(program).items() if multiple > 1}
    for size in dims_and_trips(program):
        if len(size.factors) > 1 and size.divisor > 1:
            product = size * size.divisor
            found[product] = lcm(found.get(product, 1), size.divisor)
    return {size: multiple for size, multiple in found.items() if size.symbols == size.atoms}


def are_divided(program: ir.HostProgram, sizes: Mapping[str, int]) -> bool:
    """False if `expect_divided` would raise an error for these sizes."""
    return next(_undivided(_multiples(program), sizes), None) is None


def _undivided(multiples: Mapping[Size, int], sizes: Mapping[str, int]) -> Iterator[Size]:
    return (size for size, multiple in multiples.items() if sizes.keys() >= set(size.symbols) and size.bind(sizes) % multiple)


@ir.analysis
def _multiples(program: ir.HostProgram) -> dict[Size, int]:
    """Symbol or sum of symbols -> number that must divide the value. Empty if the compiler chose no chunk loops."""
    is_chosen = any(choice.chosen.chunks for choice in program.choices)
    return {size: multiple for size, multiple in _of_symbols(program).items() if is_chosen and len(size.factors) == 1}
