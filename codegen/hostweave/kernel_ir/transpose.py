"""Blocks transpose tiles in shared memory if a result and an operand are contiguous along different dims.

    keep i in M over x.0, j in 4096 over x.1
    %x: bf16[M, 4096] at i * 4096 + j
    %y stored: bf16[M, 4096] strides [1, M] at i + j * M

gets

    distribute: a block transposes a tile

With tiles, reads and writes of global memory are contiguous. The pass orders the dims of `keep` so that one result is contiguous along the
first dim. All other accesses must then be contiguous or constant along the last dim.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import ONE, ZERO, Distribution, Loops
from hostweave.types.machine import Machine

MIN_TILED_ELEMENTS = 16  # a tile of a shorter dim would be mostly empty
MAX_ELEMENT_BYTES = 4  # largest element of the transposed result


def transpose(loops: Loops, machine: Machine) -> Loops:
    others = loops.reduced or loops.fibers or loops.updates or loops.space.joined or loops.kernel.exchanges
    is_plain = loops.distribution == Distribution.THREAD and not others
    if not is_plain or len(loops.kept) != 2 or any(dim.size.is_int and int(dim.size) < MIN_TILED_ELEMENTS for dim in loops.kept):
        return loops
    orders = (replace(loops, kept=kept, distribution=Distribution.TILE) for kept in (loops.kept, loops.kept[::-1]))
    return next(filter(_writes_across, orders), loops)


def _writes_across(loops: Loops) -> bool:
    """True if one result is contiguous along the first dim, and all other accesses are contiguous or constant along the last dim."""
    strides = {access: tuple(loops.stride(access, dim) for dim in loops.kept) for access in loops.memory}
    across = [access for access, (first, last) in strides.items() if first == ONE and last not in (ZERO, ONE)]
    others = [both for access, both in strides.items() if access not in across]
    is_one = len(across) == 1 and across[0] in loops.stores and loops.memory[across[0]].dtype.itemsize <= MAX_ELEMENT_BYTES
    is_read = any(last == ONE and first != ZERO for first, last in others)
    return is_one and is_read and all(last in (ZERO, ONE) for _, last in others)
