"""Hoists values that are equal in all iterations of the innermost loop.

    %e: f32[M, N] = exp(%x - %m); %s: f32[M] = sum(%e, axis=(1)); %r: f32[M] = reciprocal(%s); %y: f32[M, N] = %e * %r

gets

    outside: %s, %r

A thread computes them once per row. In a pointwise kernel they are equal for all elements of a vector. Nothing is hoisted if each element
of a vector has a separate accumulator.
"""

from dataclasses import replace

from hostweave.kernel_ir.loops import Loops
from hostweave.types.machine import Machine


def hoist(loops: Loops, machine: Machine) -> Loops:
    """Lists the inputs and values outside the innermost loop."""
    if loops.takes_lanes or loops.has_wide_totals:
        return loops
    values = (*loops.inputs, *(op.result.name for op in loops.kernel.ops))
    return replace(loops, outside=tuple(name for name in values if not loops.are_inside(loops.space.indices[name])))
