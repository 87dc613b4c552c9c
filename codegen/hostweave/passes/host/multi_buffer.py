"""Multi-buffering: a buffer shrinks to one slot per stream if each of its chunks is used on only one stream.

    %h = allocate bf16[M, K]                     becomes    %h = allocate bf16[4, M/16, K]
    for %i in 0..15 {                                       for %i in 0..15 {
      stream loop[%i + 1] {                                   stream loop[%i + 1] {
        %h_next = chunk %h[0: %i + 1 of 16]                     %h_next = select %h[0: (%i + 1) % 4]
        recv %h_next from 0 on x                                recv %h_next from 0 on x
      }                                                       }
      stream loop[%i] {                                       stream loop[%i] {
        %h_i = chunk %h[0: %i of 16]                            %h_i = select %h[0: %i % 4]
        matmul %h_i, %w -> %y_i                                 matmul %h_i, %w -> %y_i

Chunk i is used on stream i % 4, in slot i % 4. One stream therefore orders all uses of a slot.
"""

from dataclasses import replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const
from hostweave.options import Options
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


def multi_buffer(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, edits = def_use(program), dict[int, tree.Instruction]()
    pools = {pool.name: pool.count for pool in program.streams}
    for name, place in uses.allocates.items():
        for view, (pool, index) in _chunks(uses, name, pools):
            (out,), streams = tree.names(view.instruction, "view"), pools[pool]
            slots = BufferType(uses.types[name].dtype, (Size(streams), *uses.types[out].shape))
            edits[place.number] = ir.Allocate(name, slots, location=place.instruction.location)
            edits[view.number] = ir.Select(out, name, 0, index % streams, location=view.instruction.location)
    return replace(program, body=tree.edited(program.body, edits)) if edits else program


def _chunks(uses: DefUse, name: str, pools: dict[str, int]) -> list[tuple[Place, tree.Slot]]:
    """Views of an allocation's chunks, and the stream of each view. Empty if slots cannot replace the allocation, or save nothing."""
    touches, views = uses.touches.get(name, []), uses.viewed.get(name, [])
    blocks = {place.block for place in (*touches, *views)}
    loops = {place.loop for place in touches if place.loop}
    found: list[tuple[Place, tree.Slot]] = []
    counts: set[tuple[int, Size, BufferType]] = set()  # dim, number and type of the chunks
    for place in views:
        if place.stream is None or name not in tree.names(place.instruction, "alias"):
            continue
        chunk = uses.chunk(place)
        if chunk is None or chunk[1] != place.stream[1]:
            return []
        found.append((place, place.stream))
        counts.add((chunk[0], chunk[2], uses.types[tree.names(place.instruction, "view")[0]]))
    if len(blocks) < 2 or None in blocks or len({pool for _, (pool, _) in found}) != 1 or len(loops) != 1 or len(counts) != 1:
        return []
    (loop,), ((_, count, _),) = loops, counts
    if loop in uses.allocates[name].around or uses.allocates[name].block is not None:
        return []
    streams = pools[found[0][1][0]]
    before = [place.stream[1] for place in touches if place.loop is None and place.stream and place.number < loop.number]
    if len(before) < sum(place.loop is None for place in touches) or not {*before} <= {*map(Const, range(streams))}:
        return []  # Outside of the loop, only the first chunks may be used, and only before the loop.
    is_long = not count.is_int or int(count) > streams
    return found if is_long and not any(name in tree.names(place.instruction, "read", "write") for place in touches) else []
