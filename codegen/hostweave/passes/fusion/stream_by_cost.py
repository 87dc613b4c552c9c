"""Streams matmuls next to reshards, and gathers of keys and values of attention, if the cost model predicts a gain at the stated sizes.

    %x_gathered: bf16[M, K] = all_gather(%x, dim=0, axes=(x))
    %y: bf16[M, N] = matmul(%x_gathered, %w)

becomes, with M = 8192 and all other sizes known,

    %x_gathered: bf16[M, K] = all_gather(%x, dim=0, axes=(x))
    %y: bf16[M, N] stream(M, 8, put) = matmul(%x_gathered, %w)
    choice %x_gathered of @ag_matmul predicted: put(8) 1239.1 us, none 1516.0 us, p2p(8) 1612.4 us

The program is then the same as if the user had written `.stream()`. Streams stated by the user do not change.
"""

from dataclasses import replace

from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.ir import Fusion, Stream
from hostweave.fusion_ir.rewriting import views_of_inputs_first
from hostweave.options import Options
from hostweave.tune.overlaps import alternatives, candidates, choice_of


def stream_by_cost(fusion: Fusion, options: Options) -> Fusion:
    """Streams the ops of the chosen loops, and records the choices. Skips a candidate if one of its ops is already in a chosen loop, or if
    the fusion already has the choice."""
    if options.overlap == "off":
        return fusion
    streams: dict[str, Stream] = {}  # streams of the ops on which a user would call `.stream()`
    in_loops: set[str] = set()
    choices: list[Choice] = []
    ordered = views_of_inputs_first(fusion)
    made = {choice.value for choice in fusion.choices}
    found = [one for one in candidates(ordered, options.sizes) if not one.unknown and one.reshard.result.name not in made]
    if not found:
        return fusion
    fusion = ordered
    for candidate in found:
        involved = {op.result.name for op in (*candidate.reshards, *candidate.matmuls)}
        if not involved.isdisjoint(in_loops):
            continue
        possible = alternatives(candidate, fusion, options)
        choices.append(choice_of(candidate.reshard, fusion, possible, options.choices))
        chosen = choices[-1].chosen
        if chosen.chunks > 1:
            in_loops |= involved
            stream = Stream(candidate.dim, chosen.chunks, None, chosen.algorithm)
            streams |= {op.result.name: stream for op in candidate.streamed}
    ops = (replace(op, result=replace(op.result, stream=streams.get(op.result.name, op.result.stream))) for op in fusion.ops)
    return replace(fusion, body=tuple(ops), choices=(*fusion.choices, *choices))
