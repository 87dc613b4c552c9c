"""What must hold of the sizes of a call so that every slice stays inside its dim and every sum of sizes is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hostweave.fusion_ir.ops import WITHOUT_IDENTITY, axes_of
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Binary, Const, Expr, Size
from hostweave.types.size import Extent, block_of, is_sum, part_of, terms_of
from hostweave.types.tensor import BufferType

Walk = Callable[[ir.Body], Iterator[ir.Instruction]]  # ir.walk or ir.walk_at_any_size


def types_in(program: ir.HostProgram, walk: Walk) -> Iterator[BufferType]:
    """The local types of the parameters and of all that is defined on the way."""
    types = {p.name: program.local_type(p) for p in (*program.inputs, *program.outputs)}
    yield from types.values()
    for instruction in walk(program.body):
        if isinstance(instruction, ir.Allocate):
            types[instruction.out] = instruction.type
        elif isinstance(instruction, ir.View):
            types[instruction.out] = instruction.type_of(types[instruction.src])
        yield from (types[name] for name in ir.names(instruction, "define"))


def trip_counts(program: ir.HostProgram, walk: Walk) -> Iterator[Extent]:
    return (i.count for i in walk(program.body) if isinstance(i, ir.For))


def not_negative(program: ir.HostProgram) -> tuple[Extent, ...]:
    """Differences of sizes, such as `(M - 2)`, that a call must not make negative."""
    types = ir.buffer_types(program)
    found = [extent for i in ir.walk(program.body) if isinstance(i, ir.View) for extent in slack(i, types[i.src])]
    found += [Extent(1, (name,)) for extent in sums(program) for name in extent.names if is_sum(name)]
    return tuple(dict.fromkeys(extent for extent in found if _can_be_negative(extent)))


def not_empty(program: ir.HostProgram) -> Iterator[tuple[str, Extent]]:
    """Sizes that a call must not make 0, each with the reduction that has no value of no elements. A rank may have none of them."""
    launched = {i.kernel for i in ir.walk(program.body) if isinstance(i, ir.Launch)}
    found: dict[tuple[str, Extent], None] = {}
    for kernel in program.kernels:
        types = {p.name: p.type for p in kernel.inputs} | {op.result.name: op.result.type for op in kernel.ops}
        for op in kernel.ops if kernel.name in launched else ():
            if op.kind in WITHOUT_IDENTITY:
                names = (name for axis in axes_of(op) for name in types[op.tensors[0]].shape[axis].names)
                found |= {(op.kind, _global_size(name)): None for name in names}
    yield from found


def _global_size(name: str) -> Extent:
    """What ranks share, where a size is a rank's part or block of it."""
    found = part_of(name) or block_of(name)
    return found[0] if found else Extent(1, (name,))


def sums(program: ir.HostProgram) -> Iterator[Extent]:
    """The extents of buffers that hold a sum of sizes."""
    for type in ir.buffer_types(program).values():
        yield from (extent for extent in type.shape if any(map(is_sum, extent.names)))


def slack(view: ir.Instruction, source: BufferType) -> tuple[Extent, ...]:
    """How much room a view of some indices leaves before and after them, where that follows from sizes alone."""
    match view:
        case ir.Slice(dim=dim, extent=extent, start=start):
            before, after = _extent_of(start), extent
        case ir.Strided(dim=dim, extent=extent, start=start, step=step):
            before, after = _extent_of(start), (extent - 1) * step + 1
        case ir.Select(dim=dim, index=index):
            before, after = _extent_of(index), Extent()
        case _:
            return ()
    if before is None or any(block_of(name) or part_of(name) for e in (source.shape[dim], after) for name in e.names):
        return ()  # it goes by this rank's place: right as it is made
    return (before, source.shape[dim] - before - after)


def _extent_of(expr: Expr) -> Extent | None:
    """An expression of sizes as an extent."""
    match expr:
        case Const(value):
            return Extent(value)
        case Size(name):
            return None if block_of(name) or part_of(name) else Extent(1, (name,))
        case Binary(op, left, right) if op in "+-*":
            a, b = _extent_of(left), _extent_of(right)
            if a is None or b is None:
                return None
            return a + b if op == "+" else a - b if op == "-" else a * b
        case Binary("/", left, Const(divisor)):
            a = _extent_of(left)
            return None if a is None else a // divisor
    return None


def _can_be_negative(extent: Extent) -> bool:
    if extent.coefficient < 0:
        return True
    return any(sign < 0 for name in extent.names if is_sum(name) for sign, _ in terms_of(name))
