"""Splits the loops over reduced dims into walks. A walk is a loop nest for reductions that depend only on reductions of earlier walks.

    %m: f32[M, 1] = max(%x, axis=(1,), keepdims=true); %e: f32[M, N] = exp(%x - %m)
    %s: f32[M, 1] = sum(%e, axis=(1,), keepdims=true); %y: f32[M, N] = %e / %s

becomes

    walk 0: reduce %m
    walk 1: reduce %s
    walk 2: store %y

An additional last walk stores results that vary along a reduced dim. If these results do not depend on reductions of the last walk that
reduces, this walk stores the results. Each walk computes the values that it needs, unless `hold_rows` holds the values.
"""

from collections.abc import Sequence
from dataclasses import replace

from hostweave.analysis.kernel_indices import reduced_indices
from hostweave.fusion_ir.ir import Op
from hostweave.kernel_ir.loops import Loops, Walk
from hostweave.types.machine import Machine


def split_walks(loops: Loops, machine: Machine) -> Loops:
    if not loops.reduced:
        return loops
    space, ops = loops.space, loops.kernel.ops
    leads_to = _leads_to(ops)
    left = [op for op in ops if reduced_indices(op, space.indices)]
    whole = tuple(name for name in loops.results if space.is_whole(name))
    walks = []
    while left:
        waiting = {op.result.name for op in left}
        ready = tuple(op for op in left if not waiting & leads_to[op.result.name])
        stores = len(ready) == len(left) and not any(waiting & leads_to[name] for name in whole)
        left = [op for op in left if op not in ready]
        walks.append(Walk(ready, whole if stores else ()))
        whole = () if stores else whole
    return replace(loops, walks=(*walks, *((Walk((), whole),) if whole else ())))


def _leads_to(ops: Sequence[Op]) -> dict[str, set[str]]:
    """Maps the result of each op to all values on which it depends."""
    found: dict[str, set[str]] = {}
    for op in ops:
        found[op.result.name] = set(op.tensors).union(*(found.get(name, ()) for name in op.tensors))
    return found
