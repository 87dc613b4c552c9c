"""Small sizes for a program to be looked at with, such that every extent of it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, lcm

from hostweave.host_ir import ir
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.size_requirements import Walk, not_negative, trip_counts, types_in
from hostweave.types.size import Size, Sum


def minimal_sizes(program: ir.HostProgram) -> dict[str, int]:
    """Small sizes at which every extent of `program` is whole: {'M': 12, 'K': 2, 'N': 2}.

    A size that counts the steps of a loop is large enough for the streams to be walked twice. Dims are shared evenly, also
    where that need not be, if the rest allows it.
    """
    program = dedupe_functions(program)
    steps = _steps(program, evenly=True)
    least = {name: size for name, (_, size) in steps.items()}  # where nothing will do, what is wrong shows at these
    return _with_room(program, steps) or _with_room(program, _steps(program, evenly=False)) or least


USUAL = 4096  # the least of a size that nobody gives


def usual_sizes(program: ir.HostProgram, given: Mapping[str, int]) -> dict[str, int]:
    """The sizes that are given, and for others 4096, or the next size that every extent can be cut from."""
    least = minimal_sizes(program)
    return {name: given.get(name, -(-USUAL // least[name]) * least[name]) for name in program.symbols()}


def _steps(program: ir.HostProgram, evenly: bool) -> dict[str, tuple[int, int]]:
    """For every size: what it is a multiple of, and the least that it may be."""
    loops = [i for i in ir.walk(program.body) if isinstance(i, ir.For)]
    walked = {name for loop in loops for name in loop.count.factors}
    twice = 2 * max((pool.count for pool in program.streams), default=1) + 1
    sizes = dict.fromkeys(program.symbols(), 1)
    needed = set(extents(program, ir.walk if evenly else ir.walk_at_any_size))
    for parameter in (*program.inputs, *program.outputs) if evenly else ():
        mesh = parameter.type.mesh_in(program.mesh)
        needed.update(dim.extent // mesh.size_of(dim.axes) for dim in parameter.type.dims)
    for kernel in program.kernels:
        needed.update(extent for op in kernel.ops for extent in op.result.type.shape)
    for extent in sorted(needed, key=lambda e: (len(e.factors), tuple(map(str, e.factors)), e.divisor)):
        if not set(extent.factors) <= sizes.keys():
            continue  # parts and blocks are whole at any size
        if extent.factors and (extent * extent.divisor).bind(sizes) % extent.divisor:
            # A multiple of the divisor always serves, and for a name that stands alone nothing less does.
            sizes[extent.symbols[0]] = lcm(sizes[extent.symbols[0]], extent.divisor // gcd(extent.divisor, extent.coefficient))
    least = {name: twice if name in walked else 2 for name in sizes}
    return {name: (size, size * -(-least[name] // size)) for name, size in sizes.items()}


MOST_STEPS = 4096


def _with_room(program: ir.HostProgram, sizes: dict[str, tuple[int, int]]) -> dict[str, int] | None:
    """The first sizes that slices and sums of sizes allow, from the least on by steps; None where none of them do."""
    room, summed = not_negative(program), [extent for extent in extents(program) if any(isinstance(f, Sum) for f in extent.factors)]

    def taken(steps: int) -> dict[str, int]:
        return {name: least + steps * step for name, (step, least) in sizes.items()}

    def fits(steps: int) -> bool:
        some = taken(steps)
        try:
            return all(extent.bind(some) >= 0 for extent in room) and all(extent.bind(some) > 0 for extent in summed)
        except ValueError:  # a sum that does not divide
            return False
        except KeyError:  # a part of a size
            return True

    steps = next(filter(fits, range(MOST_STEPS)), None) if room or summed else 0
    return None if steps is None else taken(steps)


def sizes_to_check(program: ir.HostProgram) -> Iterator[dict[str, int]]:
    """Small sizes for both sides of every branch on sizes."""
    program = dedupe_functions(program)
    least = minimal_sizes(program)
    yield least
    if program.uneven:
        steps = dict.fromkeys(program.uneven, 1)
        for extent in extents(program, ir.walk_at_any_size):
            if len(extent.atoms) == 1 and (name := extent.atoms[0]) in steps and isinstance(name, str):
                steps[name] = lcm(steps[name], extent.divisor)
        uneven = {name: (steps.get(name, 0), size + steps.get(name, 0)) for name, size in least.items()}
        yield _with_room(program, uneven) or least


def extents(program: ir.HostProgram, walk: Walk = ir.walk) -> Iterator[Size]:
    """Everything about the program's memory and loops that must be whole."""
    for parameter in (*program.inputs, *program.outputs):
        yield from parameter.type.shape
    for type in types_in(program, walk):
        yield from (*type.shape, *(type.strides or ()))
    yield from trip_counts(program, walk)
