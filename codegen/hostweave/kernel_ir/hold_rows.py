"""Splits rows evenly over threads, which hold a row in registers if several walks read it or if a late walk would wait for it.

    walk 0: reduce %mean_square of %x
    walk 1: store %y of %x and %weight
    distribute: a block reduces an element
    vectors of 8 along j

becomes

    distribute: a block shares a row, 512 threads
    hold %x, %weight
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.kernel_ir.loops import BY_ANY_ROW, BY_BLOCK, BY_ROW, BY_SHORT_ROW, COUNTED, Loops, Walk
from hostweave.types.machine import Machine

WARP = 32  # threads
ROW_THREADS = 512  # maximum number of threads that share a row of known length
LANES = (1, 2, 4, 8, 16, 32)  # threads that share a short row, so that a warp has several rows
LINE = 8  # threads that read 128 bytes together: the preferred minimum
EACH = (4, 3, 5, 2, 6, 7, 8, 1)  # accesses per thread to such a row: the first that divides it
HELD = 20  # maximum number of accesses whose elements a thread holds: 80 registers
HELD_ROWS = 5  # maximum number of held rows of unknown length: hw::kRowAccesses accesses each
LATE_BYTES = 16 << 10  # maximum bytes of rows that a block prefetches; they occupy registers


def hold_rows(loops: Loops, machine: Machine) -> Loops:
    """Chooses the threads of a row and the rows that they hold."""
    if loops.distribution != BY_BLOCK or loops.width == 1 or len(loops.reduced) > 1:
        return loops
    reads = [list(dict.fromkeys(_reads(loops, walk))) for walk in loops.walks]
    times = Counter(name for names in reads for name in names)
    again = [name for name, count in times.items() if count > 1]
    shared, late = _shared(loops, ()), list[str]()
    for one in (name for names in reads[1:] for name in names if times[name] == 1 and shared.threads):
        of_rows = int(loops.along.size) * sum(loops.memory[name].dtype.itemsize for name in (*late, one))
        late += [one] if of_rows <= LATE_BYTES else []
    held = (_shared(loops, names) for names in ((*again, *late), tuple(again)) if names)
    return next((candidate for candidate in held if candidate.has_rows), shared)


def _reads(loops: Loops, walk: Walk) -> Iterator[str]:
    """Inputs of which a walk reads vectors, in order."""
    made = {op.result.name: op for op in loops.kernel.ops}

    def operands(op: Op) -> tuple[str, ...]:
        return op.tensors[:1] if op.kind in COUNTED else op.tensors[1:2] if OPS[op.kind].gathers else op.tensors

    waiting = [*walk.stores[::-1], *(op.tensors[0] for op in reversed(walk.reductions))]
    while waiting:
        name = waiting.pop()
        if name in made and name not in loops.outside:
            waiting.extend(reversed(operands(made[name])))
        elif name in loops.packed and name not in loops.outside:
            yield name


def _shared(loops: Loops, held: tuple[str, ...]) -> Loops:
    """The loops with rows that are split over threads that hold these ones. Rows of unknown length are held if they may fit."""
    threads = _threads_of_row(int(loops.along.size) // loops.width, len(held)) if loops.along.size.is_int else 0
    if threads:
        return replace(loops, distribution=BY_ROW if threads > WARP else BY_SHORT_ROW, threads=threads, held=held)
    return replace(loops, distribution=BY_ANY_ROW, held=held) if 0 < len(held) <= HELD_ROWS else loops


def _threads_of_row(accesses: int, held: int) -> int:
    """Number of threads that share a row of known length, or 0 if none divides it evenly."""
    for least, each in itertools.product((LINE, 1), EACH):
        threads = accesses // each
        fits = (threads % WARP == 0 and threads <= ROW_THREADS) or (threads in LANES and threads >= min(least, accesses))
        if fits and accesses % each == 0 and each * held <= HELD:
            return threads
    return 0
