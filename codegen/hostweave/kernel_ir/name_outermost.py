"""Replaces an outermost size such as `4*B` by a parameter. Kernels over `4*B` and over `8*B` rows then become equal.

    keep i in 4*B over x.0, j in N over x.1
    %x: f32[4*B, N] at i * N + j

becomes

    keep i in outermost over x.0, j in N over x.1
    outermost = 4*B
    %x: f32[4*B, N] at i * N + j

An inner size must not share a symbol with the outermost size. Otherwise a stride could be written with `outermost` or with the symbol.

If a kernel computes contiguous elements in one loop, the number of elements becomes the parameter. Kernels over `4*B` elements and over
4096 elements then become equal.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import ONE, OUTERMOST, ZERO, Loops
from hostweave.types.machine import Machine
from hostweave.types.size import Factor, Size


def name_outermost(loops: Loops, machine: Machine) -> Loops:
    outer = loops.kept[0].size
    if loops.products or not (_counts_elements(loops, machine) if len(loops.dims) == 1 else _counts_rows(loops)):
        return loops
    named = replace(loops, outer=outer)
    kept = (replace(dim, size=named.own(dim.size), strides=tuple(map(named.own, dim.strides))) for dim in loops.kept)
    reduced = (replace(dim, strides=tuple(map(named.own, dim.strides))) for dim in loops.reduced)
    return replace(named, kept=tuple(kept), reduced=tuple(reduced))


def _counts_rows(loops: Loops) -> bool:
    outer, *inner = (dim.size for dim in loops.dims)
    if len(loops.kept) < 2 or outer.coefficient == 1 or outer.divisor > 1 or outer.is_int:
        return False
    return {atom for other in inner for atom in other.atoms}.isdisjoint(outer.atoms)


def _counts_elements(loops: Loops, machine: Machine) -> bool:
    """True for a loop over contiguous elements. A constant number of elements must be a multiple of the longest vector, because vectors of
    an unknown number of elements have the greatest width."""
    size, strides = loops.kept[0].size, loops.kept[0].strides
    is_pointwise = not (loops.fibers or loops.space.joined or loops.kernel.exchanges or loops.kernel.receivers)
    return is_pointwise and {ZERO, ONE}.issuperset(strides) and not (size.is_int and int(size) % machine.access_bytes)


def named_sizes(loops: Loops) -> dict[Factor, Size]:
    return {OUTERMOST: loops.outer} if loops.outer else {}
