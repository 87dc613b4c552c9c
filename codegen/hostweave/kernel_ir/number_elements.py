"""Chooses the integer type in which elements are numbered: 32 bits if all numbers fit, since their division is faster.

    keep i in M, j in 63

gets

    number elements by Index

which is 32 or 64 bits at run time. The type matters only if a kernel decomposes the number of an element into indices.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import BY_THREAD, Loops
from hostweave.types.machine import Machine

SHORT = 1 << 30  # maximum number of elements for which hw::fits_int32


def number_elements(loops: Loops, machine: Machine) -> Loops:
    """Chooses the type of an element's number."""
    if loops.distribution != BY_THREAD or not loops.taken_apart():
        return loops
    count = loops.count
    return replace(loops, index="Index" if not count.is_int else "uint32_t" if int(count) <= SHORT else "int64_t")
