"""Small sizes for the check, at which every derived size is an integer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import gcd, lcm, prod

from hostweave.check.run import compiled
from hostweave.fusion_ir.ops.attributes import COUNT
from hostweave.fusion_ir.resharding import DEFAULT_SIZE
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.expr import Binary, Const, Expr, Symbol, leaves
from hostweave.host_ir.size_requirements import dims_and_trips, not_negative, trip_counts
from hostweave.types.mesh import RankSizes
from hostweave.types.size import LocalSize, Size, Sum
from hostweave.types.zigzag import pieces

POWERS_OF_TWO = tuple(2**power for power in range(24))
MAX_FACTOR = POWERS_OF_TWO[-1]  # largest factor, relative to the minimal sizes, that is tried

SizeRanges = dict[str, tuple[int, int]]  # symbol -> (increment between possible values, smallest value); increment 0: one value


@ir.analysis
def minimal_sizes(program: ir.HostProgram) -> dict[str, int]:
    """Small sizes at which every derived size of `program` is an integer, such as {'M': 12, 'K': 2, 'N': 2}. A loop over all indices of a
    dim uses each stream at least twice. Dims are sharded evenly if possible."""
    program = dedupe_functions(program)
    ranges = _size_ranges(program, evenly=True)
    smallest = {name: size for name, (_, size) in ranges.items()}  # If no sizes fit, the check raises an error at the smallest sizes.
    return _fitting_sizes(program, ranges) or _fitting_sizes(program, _size_ranges(program, evenly=False)) or smallest


MAX_CALLS = 4  # maximum number of calls of a repeat that the check runs, unless a constant index needs more


def default_sizes(program: ir.HostProgram, given: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a program. A size that is not given is DEFAULT_SIZE, rounded up to a multiple of its minimal size. Repeats have their stated
    numbers of calls."""
    smallest, depths = minimal_sizes(program), program.depths()
    return {name: depths.get(name) or given.get(name, -(-DEFAULT_SIZE // smallest[name]) * smallest[name]) for name in program.symbols()}


def _size_ranges(program: ir.HostProgram, evenly: bool) -> SizeRanges:
    trip_symbols = {name for count in trip_counts(program) for name in count.factors}
    twice_the_streams = 2 * max((pool.count for pool in program.streams), default=1) + 1
    sizes = dict.fromkeys(program.symbols(), 1)
    integer_sizes = set(all_sizes(program))
    for parameter in (*program.inputs, *program.outputs) if evenly else ():
        mesh = parameter.type.mesh_in(program.mesh)
        integer_sizes.update(dim.size // pieces(dim.axes, mesh) for dim in parameter.type.dims)
    for kernel in program.kernels:
        integer_sizes.update(dim_size for op in kernel.ops for dim_size in op.result.type.shape)
    for dim_size in sorted(integer_sizes, key=lambda e: (len(e.factors), tuple(map(str, e.factors)), e.divisor)):
        if not set(dim_size.factors) <= sizes.keys():
            continue  # ceil(...) and local(...) are integers at any size. `_search` tests sums.
        if dim_size.factors and (dim_size * dim_size.divisor).bind(sizes) % dim_size.divisor:
            # In a product of several symbols, only the first symbol changes.
            sizes[dim_size.symbols[0]] = lcm(sizes[dim_size.symbols[0]], dim_size.divisor // gcd(dim_size.divisor, dim_size.coefficient))
    smallest = {name: twice_the_streams if name in trip_symbols else 2 for name in sizes}
    ranges = {name: (size, size * -(-smallest[name] // size)) for name, size in sizes.items()}
    return ranges | {name: (0, _calls(program, name, count)) for name, count in program.depths().items()}


def _calls(program: ir.HostProgram, name: str, count: int) -> int:
    """Number of calls of a repeat to check: odd if `count` is odd, and greater than each constant index into a parameter group."""
    types, constant_indices = ir.buffer_types(program), list[Expr]()
    for i in tree.walk(program.body):
        chunk = next((i.chunk_of(types[src]) for src in tree.names(i, "alias")), None)
        if chunk and chunk[2].name == name and all(isinstance(leaf, Const) or leaf == Symbol(name) for leaf in leaves(chunk[1])):
            constant_indices.append(chunk[1])

    def fits(depth: int) -> bool:
        return all(0 <= compiled(index, RankSizes({name: depth}, program.mesh))({}) < depth for index in constant_indices)

    return next(filter(fits, range(min(count, MAX_CALLS - (count - MAX_CALLS) % 2), count, 2)), count)


VALUES_TO_TRY = (16, 256, 4096)  # number of values of each size in the first, second and third search
MAX_TRIES = 2**14  # maximum number of tries of one search


def _fitting_sizes(program: ir.HostProgram, sizes: SizeRanges) -> dict[str, int] | None:
    """Sizes at which all slices fit, and all sums and divisors of means are positive. None if the search finds no sizes."""
    # The search omits bounds with local sizes, because local sizes depend on the rank.
    lower_bounds = [(size, smallest) for size, smallest in _lower_bounds(program) if set(size.atoms) <= sizes.keys()]
    return next(filter(None, (_search(sizes, lower_bounds, values) for values in VALUES_TO_TRY)), None)


@ir.analysis
def _lower_bounds(program: ir.HostProgram) -> tuple[tuple[Size, int], ...]:
    """Sizes, each with the smallest value at which slices fit, and sums and divisors of means are positive."""
    lower_bounds = [(size, 0) for size in not_negative(program)]
    lower_bounds += [(op[COUNT], 1) for kernel in program.kernels for op in kernel.ops if COUNT.name in dict(op.attributes)]
    lower_bounds += [(size, 1) for size in all_sizes(program) if any(isinstance(factor, Sum) for factor in size.factors)]
    return tuple(dict.fromkeys(lower_bounds))


def _search(sizes: SizeRanges, lower_bounds: list[tuple[Size, int]], values: int) -> dict[str, int] | None:
    """Chooses one size after another by backtracking. None if no sizes fit, or after MAX_TRIES tries."""
    names, chosen, tries = list(sizes), dict[str, int](), count(1)
    # symbol -> bounds to test after this symbol has a size, because all other symbols of the bounds come earlier in `names`
    bounds_of: dict[str, list[tuple[Size, int]]] = {name: [] for name in names}
    for size, smallest in lower_bounds:
        if size.symbols:
            bounds_of[max(size.symbols, key=names.index)].append((size, smallest))

    def fits(name: str) -> bool:
        try:
            return all(size.bind(chosen) >= smallest for size, smallest in bounds_of[name])
        except ValueError:  # A sum does not divide evenly.
            return False

    def fit_from(at: int) -> bool:
        if at == len(names):
            return True
        increment, smallest = sizes[names[at]]
        for size in range(smallest, smallest + values * increment, increment) if increment else (smallest,):
            chosen[names[at]] = size
            if next(tries) <= MAX_TRIES and fits(names[at]) and fit_from(at + 1):
                return True
        return False

    return chosen if fit_from(0) else None


MIN_DIM, MIN_SHARD = 3, 2  # minimum number of elements of an enlarged dim, and of each of its shards
MAX_ENLARGED_ELEMENTS = 2**14  # up to this number of elements, dims are enlarged freely
NEAR_FACTOR = 64  # largest factor, relative to the minimal sizes, at which results are compared by default
_MAX_ITERATIONS = 2**13  # maximum number of iterations of all loops at enlarged sizes, because the check keeps all operations in memory
MAX_GROWTH = 1.5  # largest factor by which an enlarged dim may increase the number of elements beyond MAX_ENLARGED_ELEMENTS


@ir.analysis
def sizes_to_check(program: ir.HostProgram, max_factor: int = MAX_FACTOR) -> tuple[dict[str, int], ...]:
    """Small sizes to check: sizes that divide evenly, uneven sizes if the program allows them, and larger sizes at which conditions on
    sizes change. Ignores changes above `max_factor` times the minimal sizes, and at sizes at which loops have more than _MAX_ITERATIONS
    iterations."""
    program = dedupe_functions(program)
    conditions = [condition for i in program.instructions() if (condition := i.condition_of_body)]
    small = _small_sizes(program, frozenset(name for condition in conditions for name in _deciding_symbols(condition)))
    smallest = small[0]
    changes = [_changes(program, condition, smallest, max_factor) for condition in conditions]
    factors: dict[str, int] = {}  # symbol -> factor relative to the minimal size of the symbol
    for larger in sorted(filter(None, changes), key=len):
        # Enlarges one symbol per condition. Prefers a symbol that is enlarged already, then a symbol that changes several conditions.
        name = min(larger, key=lambda name: (name not in factors, -sum(name in other for other in changes), larger[name]))
        factors[name] = max(factors.get(name, 1), larger[name])
    if not factors:
        return small
    other = {name: (size, size * factors[name]) if name in factors else (0, size) for name, size in smallest.items()}
    return (*small, *filter(None, [_fitting_sizes(program, other)]))


def with_far_branches(program: ir.HostProgram, max_factor: int = NEAR_FACTOR) -> ir.HostProgram | None:
    """Inverts conditions that change at larger sizes, but not at the sizes of `sizes_to_check`. Branches for large sizes then run at small
    sizes. None if there are no conditions to invert."""
    smallest = sizes_to_check(program, max_factor)[0]

    def other(i: tree.Instruction) -> tree.Outcome:
        condition = i.condition_of_body
        is_far = condition and _factors(program, condition, smallest) and not _changes(program, condition, smallest, max_factor)
        return tree.with_expressions(i, lambda expr: Binary("==", expr, Const(0))) if is_far else None

    functions = tuple(replace(function, body=tree.rewrite(function.body, other)) for function in program.functions)
    changed = replace(program, body=tree.rewrite(program.body, other), functions=functions)
    return changed if changed != program else None


def _changes(program: ir.HostProgram, condition: Expr, smallest: Mapping[str, int], max_factor: int) -> dict[str, int]:
    """Maps symbols to factors, relative to the minimal sizes, at which a condition changes and can be checked."""
    factors = {name: factor for name, factor in _factors(program, condition, smallest).items() if factor <= max_factor}
    return {n: factor for n, factor in factors.items() if _iterations(program, {**smallest, n: smallest[n] * factor}) <= _MAX_ITERATIONS}


def _factors(program: ir.HostProgram, condition: Expr, smallest: Mapping[str, int]) -> dict[str, int]:
    """Maps symbols to the smallest power of two by which the symbol must grow for the condition to change. Omits symbols for which no
    tested power changes the condition."""

    def holds(name: str, factor: int) -> int:
        return compiled(condition, RankSizes({**smallest, name: smallest[name] * factor}, program.mesh))({})

    symbols = _deciding_symbols(condition)
    found = {name: next((factor for factor in POWERS_OF_TWO if holds(name, factor) != holds(name, 1)), None) for name in symbols}
    return {name: factor for name, factor in found.items() if factor}


@ir.analysis
def _small_sizes(program: ir.HostProgram, kept: frozenset[str]) -> tuple[dict[str, int], ...]:
    """Minimal sizes, and uneven sizes. Enlarges sizes, except `kept` and sizes in trip counts, because a wrong order of few elements may
    not show."""
    smallest = minimal_sizes(program)
    trip_symbols = {name for count in trip_counts(program) for name in count.factors}
    ranges: SizeRanges = {name: (0, size) for name, size in smallest.items()}
    elements = _elements(program, smallest)
    for name, size in smallest.items():
        if name in trip_symbols or name in kept:
            continue
        larger = ranges | {name: (size, size * max(MIN_SHARD if size > 2 else 1, -(-MIN_DIM // size)))}
        more = _elements(program, {name: at for name, (_, at) in larger.items()})
        if more <= max(MAX_ENLARGED_ELEMENTS, MAX_GROWTH * elements):
            ranges, elements = larger, more
    smallest = _fitting_sizes(program, ranges) or smallest
    return (smallest, *_uneven(program, smallest))


def _iterations(program: ir.HostProgram, sizes: Mapping[str, int]) -> float:
    """Sum of the numbers of iterations of all loops. Counts an inner loop once."""
    known = RankSizes(sizes, program.mesh)
    trips = (i.trips for i in program.instructions() if i.trips is not None)
    return sum((count * count.divisor).bind(known) / count.divisor for count in trips)


def _elements(program: ir.HostProgram, sizes: Mapping[str, int]) -> float:
    """Number of elements of all buffers and views of a rank. Approximate if sizes do not divide evenly."""
    known = RankSizes(sizes, program.mesh)
    shapes = Counter(type.shape for type in ir.buffer_types(program).values())
    return sum(number * prod((size * size.divisor).bind(known) / size.divisor for size in shape) for shape, number in shapes.items())


def _deciding_symbols(condition: Expr) -> list[str]:
    """Symbols of a condition that depends only on sizes. Empty for other conditions."""
    found = leaves(condition)
    sizes = [leaf.size for leaf in found if isinstance(leaf, Symbol)]
    is_of_sizes = len(sizes) + sum(isinstance(leaf, Const) for leaf in found) == len(found)
    return [name for size in sizes for name in Size(1, (size,)).symbols] if is_of_sizes else []


def _uneven(program: ir.HostProgram, smallest: Mapping[str, int]) -> tuple[dict[str, int], ...]:
    """Larger sizes for symbols that need not divide evenly. The larger sizes differ, because a swap of equal dims would not show. For each
    larger size, some rank has at least two elements of the dim, because a sum and a maximum of one element are equal."""
    if not program.uneven:
        return ()
    increments = dict.fromkeys(program.uneven, 1)
    ranks = dict.fromkeys(program.uneven, 1)  # maximum number of ranks that split the size
    for dim_size in all_sizes(program):
        for atom in dim_size.atoms:
            if isinstance(atom, LocalSize) and (shared := atom.size.name) and shared in ranks:
                ranks[shared] = max(ranks[shared], atom.ranks_in(program.mesh))
        if len(dim_size.atoms) == 1 and (name := dim_size.atoms[0]) in increments and isinstance(name, str):
            increments[name] = lcm(increments[name], dim_size.divisor)
    uneven: SizeRanges = {}
    for name, size in smallest.items():
        increment = increments.get(name, 0)
        used, shared_by = {other for _, other in uneven.values()}, ranks.get(name, 1)
        larger = size
        while increment and (larger == size or larger <= shared_by or larger in used):
            larger += increment
        uneven[name] = (increment, larger)
    return (_fitting_sizes(program, uneven) or dict(smallest),)


@ir.analysis
def all_sizes(program: ir.HostProgram) -> tuple[Size, ...]:
    found = dict.fromkeys(size for parameter in (*program.inputs, *program.outputs) for size in parameter.type.shape)
    found |= dict.fromkeys(size for _, type in ir.defined_types(program) for size in type.strides or ())
    return tuple(found | dict.fromkeys(dims_and_trips(program)))
