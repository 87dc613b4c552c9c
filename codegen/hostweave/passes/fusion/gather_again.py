"""What the rows of a matmul take as it is gathered, and other products later, is gathered once more for these, where that hides the first.

    %g: bf16[M, K] = all_gather(%dy, dim=0, axes=(x))
    %dx: bf16[M, N] = matmul(%g, %w)
    %t: bf16[K, M] = permute_dims(%g, axes=(1, 0))
    %dw: bf16[K, N] = matmul(%t, %x)

becomes, at sizes at which a chunk loop of puts gains more for %dx than a gather beside it costs, and where no gradient of weights that
is computed before could hide the gather,

    %g: bf16[M, K] = all_gather(%dy, dim=0, axes=(x))
    %dx: bf16[M, N] = matmul(%g, %w)
    %g_2: bf16[M, K] = all_gather(%dy, dim=0, axes=(x))
    %t: bf16[K, M] = permute_dims(%g_2, axes=(1, 0))
    %dw: bf16[K, N] = matmul(%t, %x)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from hostweave.base.names import unique_name
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.rewriting import views_of_inputs_first
from hostweave.options import Options
from hostweave.tune.cost import cost_beside
from hostweave.tune.overlaps import LEAST, Finder, needed_soon, ways, ways_outside_loops


def gather_again(fusion: Fusion, options: Options) -> Fusion:
    """After it each gather whose loop of puts is worth a second one has matmuls alone that are in that loop."""
    if options.overlap == "off" or options.transport != "auto" or options.figures.no_puts:
        return fusion
    ordered = twice = views_of_inputs_first(fusion)
    for op in ordered.ops:
        if op.kind == "all_gather" and not op.result.stream:
            twice = _gathered_twice(twice, op, options)
    return fusion if twice is ordered else twice


def _gathered_twice(fusion: Fusion, op: Op, options: Options) -> Fusion:
    name, finder = op.result.name, Finder(fusion, options.sizes)
    users = [user for user in finder.uses[name] if user is not None]
    others = [user for user in users if not finder.has_rows_of(op, user)]
    if len(users) < len(finder.uses[name]) or not others or len(others) == len(users) or _is_hidden(op, finder):
        return fusion
    second = replace(op, result=replace(op.result, name=unique_name(name, finder.types)))
    ops: list[Op] = []
    for other in fusion.ops:
        if other in others:
            ops += [second] if second not in ops else []
            other = replace(other, operands=tuple(second.result.name if operand == name else operand for operand in other.operands))
        ops.append(other)
    twice = replace(fusion, ops=tuple(ops))
    candidate = Finder(twice, options.sizes).candidate(op)
    if candidate is None or candidate.unknown:
        return fusion
    possible = ways(candidate, twice, options.sizes, options.figures, options.transport, options.tf32)
    in_sequence = next(way for way in possible if not way.chunks)
    beside, *_ = ways_outside_loops(second, twice, options.sizes, options.figures, cost_beside)
    return twice if possible[0].micros + beside.micros <= in_sequence.micros - LEAST else fusion


def _is_hidden(op: Op, finder: Finder) -> bool:
    """Whether `overlap_communication` has products to move beside it: those before it, behind the last call, that nothing needs soon."""
    needed = needed_soon(finder.fusion.ops)
    behind_call = takewhile(lambda before: not before.callee, reversed(finder.fusion.ops[: finder.place[op.result.name]]))
    return any(before.kind == "matmul" and before.result.name not in needed for before in behind_call)
