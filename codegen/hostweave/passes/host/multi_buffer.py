"""Host to host: multi-buffering: a buffer of which each iteration uses one chunk, and nothing else, becomes one slot per stream.

    %h = allocate bf16[M, K]                               %h = allocate bf16[4, M/16, K]
    for %j in 0..17 {                                      for %j in 0..17 {
      if %j < 16 {                                           if %j < 16 {
        stream ring[%j] {                                      stream ring[%j] {
          %h_j = chunk %h[0: %j of 16]                           %h_j = select %h[0: %j % 4]
          recv %h_j from 0 on x                 becomes          recv %h_j from 0 on x
        } }                                                    } }
      if %j > 0 {                                            if %j > 0 {
        %i = %j - 1                                            %i = %j - 1
        stream ring[%i] {                                      stream ring[%i] {
          %h_i = chunk %h[0: %i of 16]                           %h_i = select %h[0: %i % 4]
          matmul %h_i, %w -> %y_i                                matmul %h_i, %w -> %y_i
        } } }                                                  } } }

An iteration is on one stream, and the next iteration that uses its slot is later on the same stream.
"""

from __future__ import annotations

from dataclasses import replace

from hostweave.analysis.def_use import DefUse, def_use
from hostweave.host_ir import ir
from hostweave.options import Options
from hostweave.passes.host.privatize_per_stream import ChunkView
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


def multi_buffer(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, changed = def_use(program), dict[int, ir.Instruction]()
    pools = {pool.name: pool.count for pool in program.streams}
    for name, place in uses.allocates.items():
        for view, block in _chunks(uses, name, pools):
            streams, shape = pools[block.stream], uses.types[view.out].shape
            slots = BufferType(uses.types[name].dtype, (Size(streams), *shape))
            changed[id(place.instruction)] = ir.Allocate(name, slots, location=place.instruction.location)
            changed[id(view)] = ir.Select(view.out, name, 0, block.index % streams, location=view.location)
    return replace(program, body=ir.edited(program.body, changed)) if changed else program


def _chunks(uses: DefUse, name: str, pools: dict[str, int]) -> list[tuple[ChunkView, ir.OnStream]]:
    """The views of an allocation by which steps have a chunk of it each, in two blocks or more; none where that would save nothing."""
    touches, views = uses.touches.get(name, []), uses.viewed.get(name, [])
    blocks = {id(place.block): place.block for place in (*touches, *views)}
    loops = {id(place.loop): place.loop for place in touches}
    found: list[tuple[ChunkView, ir.OnStream]] = []
    for place in views:
        view, block = place.instruction, place.block
        if block is None or uses.roots.source(ir.names(view, "define")[0]) != name:
            continue
        if not isinstance(view, ChunkView) or view.index != block.index:
            return []
        found.append((view, block))
    if len(blocks) < 2 or None in blocks.values() or len({block.stream for _, block in found}) != 1 or len(loops) != 1:
        return []
    (loop,) = loops.values()
    if loop is None or any(loop is i for i in uses.allocates[name].around) or uses.allocates[name].block is not None:
        return []
    if any(name in ir.names(place.instruction, "read", "write") for place in touches):
        return []
    counts = {(type(view), view.dim, _count(view, uses)) for view, _ in found}
    return found if len(counts) == 1 and _is_more(counts.pop()[-1], pools[found[0][1].stream]) else []


def _count(view: ChunkView, uses: DefUse) -> Size:
    return view.count if isinstance(view, ir.Chunk) else uses.types[view.src].shape[view.dim]


def _is_more(count: Size, streams: int) -> bool:
    return not count.is_int or int(count) > streams
