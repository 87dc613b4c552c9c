"""Threads access contiguous elements as vectors of at most `Machine.access_bytes` bytes.

    %x: bf16[M, 4096] at i * 4096 + j

gets

    vectors of 8 along j

The width divides all sizes of `Loops.divided` that are ints. The kernel checks symbolic sizes and the alignment at run time.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import ONE, ZERO, Loops, stored
from hostweave.types.machine import Machine


def vectorise(loops: Loops, machine: Machine) -> Loops:
    scattered = any(loops.stride(access, loops.along) not in (ZERO, ONE) for access in loops.stores - {stored(loops.transposed)})
    helpful = loops.packed - loops.stores if loops.reduced else loops.packed  # A reduction reads more than it stores.
    if not helpful or scattered or loops.takes_fibers or loops.updates or loops.products:
        return loops
    width = machine.access_bytes // max(loops.memory[access].dtype.itemsize for access in loops.packed)
    while any(size.is_int and int(size) % width for size in loops.divided()):
        width //= 2
    return replace(loops, width=width)
