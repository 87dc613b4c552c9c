"""Replaces an outermost size such as `4*B` by a parameter. Kernels over `4*B` and over `8*B` rows then become equal.

    keep i in 4*B, j in N
    %x: f32 at i * N + j

becomes

    keep i in outermost, j in N
    outermost = 4*B
    %x: f32 at i * N + j

An inner size must not share a symbol with the outermost size. Otherwise a stride could be written with `outermost` or with the symbol.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import OUTERMOST, Loops
from hostweave.types.machine import Machine
from hostweave.types.size import Factor, Size


def name_outermost(loops: Loops, machine: Machine) -> Loops:
    outer, *inner = (dim.size for dim in loops.dims)
    if loops.products or len(loops.kept) < 2 or outer.coefficient == 1 or outer.divisor > 1 or outer.is_int:
        return loops
    if {atom for other in inner for atom in other.atoms} & set(outer.atoms):
        return loops
    named = replace(loops, outer=outer)
    kept = (replace(dim, size=named.own(dim.size), strides=tuple(map(named.own, dim.strides))) for dim in loops.kept)
    reduced = (replace(dim, strides=tuple(map(named.own, dim.strides))) for dim in loops.reduced)
    return replace(named, kept=tuple(kept), reduced=tuple(reduced))


def named_sizes(loops: Loops) -> dict[Factor, Size]:
    return {OUTERMOST: loops.outer} if loops.outer else {}
