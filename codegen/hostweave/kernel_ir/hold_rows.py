"""Splits rows over threads, which hold rows in registers. A row is held if the row fits, and several loop nests (walks) use the row. A row
may also be held so that threads load the row before an earlier reduction.

    walk 0: reduce %mean_square of %x
    walk 1: store %y of %x and %weight
    distribute: a block reduces an element
    vectors of 8 along j

becomes

    distribute: a block shares a row, 128 threads
    hold %x, %weight

If threads hold few elements, the kernel may state a minimum number of blocks per multiprocessor. The C++ compiler then leaves registers for
these blocks. One block loads rows while another block waits for a reduction.

In a kernel with a collective, latency dominates. Each thread then makes one access if possible, and the blocks of a cluster share a long
row.

A value that several walks use is computed once and held if it is expensive or rounded.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.kernel_ir.loops import Distribution, Loops, Walk
from hostweave.types.machine import Machine

BLOCKS, TERM_THREADS = (1, 2, 4, 8), 256  # in a kernel with a collective: blocks that can share a row, and maximum threads per block
EACH = (4, 3, 5, 2, 6, 7, 8, 1)  # vectors of a row per thread, in order of preference
ROW_ACCESSES = 4  # maximum accesses per thread to a held row of unknown length: hw::kRowAccesses
ROW_REGISTERS = 128  # registers per thread of the largest block that shares a row, unless threads hold computed values
HELD_BYTES = 320  # maximum number of bytes that a thread holds: 80 registers
FEW_BYTES, FEW_INPUT_BYTES = 256, 192  # maximum number of held bytes that count as few: with computed values, and with inputs only
RESIDENT_REGISTERS = 64  # registers per thread, if a thread holds few bytes
LARGE_BLOCK = 256  # threads; a few more registers per thread already reduce the number of such blocks per multiprocessor
LATE_BYTES = 16 << 10  # maximum number of bytes of rows that are held only for an early load, in a kernel without a collective
EXPENSIVE = 16  # lowest cost per element of an expensive value, in additions


def hold_rows(loops: Loops, machine: Machine) -> Loops:
    if loops.distribution != Distribution.BLOCK or loops.width == 1 or len(loops.reduced) > 1:
        return loops
    shared = _shared(loops, (), machine)
    held = (rows for values in (_expensive(loops), ()) for rows in _held(loops, values, prefetches=bool(shared.threads)) if rows)
    return next((candidate for rows in held if (candidate := _shared(loops, rows, machine)).has_rows), shared)


def _held(loops: Loops, values: tuple[str, ...], prefetches: bool) -> Iterator[tuple[str, ...]]:
    """Yields sets of rows to hold together with `values`, in order of preference."""
    reads, computed = [], set[str]()
    for walk in loops.walks:
        needed = _needed(loops, _roots(walk), computed)
        reads.append([name for name in needed if name in loops.packed and name not in loops.space.parts])
        computed |= {name for name in needed if name in values}
    times = Counter(name for names in reads for name in names)
    again, late = [name for name, count in times.items() if count > 1], list[str]()
    for one in (name for names in reads[1:] for name in names if times[name] == 1 and prefetches):
        of_rows = int(loops.along.size) * sum(loops.memory[name].dtype.itemsize for name in (*late, one))
        late += [one] if of_rows <= LATE_BYTES or loops.kernel.exchanges else []
    yield from ((*again, *late, *values), (*again, *values))


def _expensive(loops: Loops) -> tuple[str, ...]:
    """Expensive or rounded values that several walks compute. The operand of a cast replaces the cast value unless the cast rounds, because
    each walk can repeat the cast."""
    made = loops.kernel.made
    found, before = list[str](), set[str]()
    for walk in loops.walks:
        now = [name for name in _needed(loops, _roots(walk)) if name in made]
        used = (*_roots(walk), *(operand for name in now if name not in before for operand in _operands(made[name])))
        for name in dict.fromkeys(used):
            if name in before and name in now and name not in loops.space.parts:
                while OPS[made[name].kind].is_cast and not loops.is_rounded(name) and made[name].tensors[0] in made:
                    (name,) = made[name].tensors
                cost = sum(OPS[made[one].kind].cost for one in _needed(loops, (name,)) if one in made)
                found += [name] if cost >= EXPENSIVE or loops.is_rounded(name) else []
        before.update(now)
    return tuple(dict.fromkeys(found))


def _roots(walk: Walk) -> tuple[str, ...]:
    """Values that a walk reduces or stores."""
    return (*(op.tensors[0] for op in walk.reductions), *walk.stores)


def _needed(loops: Loops, roots: Sequence[str], computed: Collection[str] = ()) -> list[str]:
    """`roots`, and the values of the innermost loop on which `roots` depend, depth first. Omits values in `computed`, and values that only
    values in `computed` need."""
    made = loops.kernel.made
    found, waiting = dict[str, None](), [*reversed(roots)]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in loops.outside and name not in computed:
            found[name] = None
            waiting.extend(reversed(_operands(made[name]) if name in made else ()))
    return list(found)


def _operands(op: Op) -> tuple[str, ...]:
    """Operands that the op reads at the indices of the loop."""
    return op.tensors[:1] if OPS[op.kind].counts else op.tensors[1:2] if OPS[op.kind].gathers else op.tensors


def _shared(loops: Loops, held: tuple[str, ...], machine: Machine) -> Loops:
    """Splits each row over threads if possible. The threads hold the rows of `held`."""
    accesses = sum(-(-loops.width * loops.held_bytes(name) // machine.access_bytes) for name in held)
    count = int(loops.along.size) // loops.width if loops.along.size.is_int else 0
    computes = any(name not in loops.memory for name in held)
    most = machine.block_threads if computes else machine.registers // ROW_REGISTERS
    sharing = [n for n in BLOCKS if loops.kernel.exchanges and n <= machine.cluster_blocks and count % (n * machine.warp) == 0]
    if blocks := next((n for n in sharing if machine.warp < count // n <= TERM_THREADS), 0):
        return replace(loops, distribution=Distribution.ROW, threads=count // blocks, blocks=blocks, held=held)
    if count and (threads := _threads_of_row(count, accesses, most, machine)):
        inputs = FEW_INPUT_BYTES if threads >= LARGE_BLOCK and len(loops.results) == 1 else 0
        few = FEW_BYTES if computes and threads > machine.warp else inputs
        is_few = 0 < count // threads * accesses * machine.access_bytes <= few
        resident = machine.registers // RESIDENT_REGISTERS // threads if is_few else int(threads == machine.block_threads)
        by = Distribution.ROW if threads > machine.warp else Distribution.SHORT_ROW
        return replace(loops, distribution=by, threads=threads, resident=resident, held=held)
    is_held = 0 < accesses * ROW_ACCESSES * machine.access_bytes <= HELD_BYTES
    return replace(loops, distribution=Distribution.ANY_ROW, held=held) if is_held else loops


def _threads_of_row(vectors: int, held: int, most: int, machine: Machine) -> int:
    """Number of threads that share a row of `vectors` vectors evenly, or 0. The threads are parts of a warp, or whole warps. For each
    vector, a thread holds `held` accesses in registers. If possible, the threads read a cache line at once."""
    for least, each in itertools.product((machine.line_bytes // machine.access_bytes, 1), EACH):
        threads = vectors // each
        divides_warp = threads > 0 and machine.warp % threads == 0 and threads >= min(least, vectors)
        fits = (threads % machine.warp == 0 and threads <= most) or divides_warp
        if fits and vectors % each == 0 and each * held * machine.access_bytes <= HELD_BYTES:
            return threads
    return 0
