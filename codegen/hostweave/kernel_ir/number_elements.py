"""Chooses the integer type of linear element indices: 32 bits if all indices fit, because division is then faster.

    keep i in M over x.0, j in 63 over x.1

gets

    number elements by Index

`Index` has 32 or 64 bits, as the sizes of a launch require. The type matters only if a kernel computes indices of dims from the linear
index.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import Distribution, Loops
from hostweave.types.machine import Machine

SHORT = 1 << 30  # most elements for which hw::fits_int32 is true


def number_elements(loops: Loops, machine: Machine) -> Loops:
    if loops.distribution != Distribution.THREAD or not loops.taken_apart():
        return loops
    count = loops.count
    return replace(loops, index="Index" if not count.is_int else "uint32_t" if int(count) <= SHORT else "int64_t")
