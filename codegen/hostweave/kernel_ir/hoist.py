"""Hoists values that do not change in the innermost loop.

    %e: f32[M, N] = exp(%x - %m); %s: f32[M, 1] = sum(%e, axis=(1,), keepdims=true)
    %r: f32[M, 1] = reciprocal(%s); %y: f32[M, N] = %e * %r

gets

    outside %m, %s, %r

A thread computes these values once per row. It also computes the reciprocal of a hoisted f32 divisor once. In a pointwise kernel, the
innermost loop is the loop over a vector. The innermost loop is also this loop if each element of a vector has a separate accumulator. An
operand of a concat or pad is not hoisted, because a condition guards the operand.
"""

from dataclasses import replace

from hostweave.fusion_ir.ops import OPS
from hostweave.kernel_ir.loops import Loops
from hostweave.types.machine import Machine


def hoist(loops: Loops, machine: Machine) -> Loops:
    if loops.takes_fibers:
        return loops
    values = (*loops.inputs, *(op.result.name for op in loops.kernel.ops))
    outside = tuple(name for name in values if name not in loops.space.parts and not loops.are_inside(loops.space.indices[name]))
    last = (op.operands[-1] for op in loops.kernel.ops if OPS[op.kind].prepared and op.result.name not in outside)
    prepared = tuple(dict.fromkeys(name for name in last if isinstance(name, str) and name in outside and loops.is_f32(name)))
    return replace(loops, outside=outside, prepared=prepared)
