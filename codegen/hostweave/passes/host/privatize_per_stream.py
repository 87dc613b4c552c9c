"""Replaces a buffer by one buffer per stream if each iteration of a loop uses a separate chunk. The new buffers have the size of a chunk.

    %h = allocate bf16[M, N]
    for %i in 0..8 { stream loop[%i] { %h_i = chunk %h[0: %i of 8]; matmul %x_i, %w -> %h_i; ... } }

becomes

    for %i in 0..8 { stream loop[%i] { %h = allocate bf16[M/8, N]; matmul %x_i, %w -> %h; ... } }
"""

from dataclasses import replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.check.run import compiled
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import renamed
from hostweave.host_ir.expr import Expr, Var, with_leaves
from hostweave.options import Options
from hostweave.types.tensor import BufferType


def privatize_per_stream(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses = def_use(program)
    gone: set[int] = set()
    made: dict[int, tree.Body] = {}  # number of an instruction -> new instructions before it
    names: dict[str, str] = {}
    for name, place in uses.allocates.items():
        chunks = _chunks(uses, name)
        if not chunks:
            continue
        shape = uses.types[_out(chunks[0])].shape
        allocate = ir.Allocate(name, BufferType(uses.types[name].dtype, shape), location=place.instruction.location)
        gone.update((place.number, *(view.number for view in uses.viewed[name] if view.block is None or view in chunks)))
        first = _child_of_block(chunks[0], uses).number
        made[first] = (*made.get(first, ()), allocate)
        names |= {_out(chunk): name for chunk in chunks}
    return replace(program, body=renamed(uses.edited(gone, made), names)) if made else program


def _chunks(uses: DefUse, name: str) -> list[Place]:
    """Views of the chunks of an allocation, if each iteration of a loop uses a separate chunk in one stream block. Otherwise empty."""
    touches, views = uses.touches.get(name, []), uses.viewed.get(name, [])
    blocks = {place.block for place in touches}
    if len(blocks) != 1 or None in blocks or uses.allocates[name].block is not None:
        return []
    outside = {name, *(_out(view) for view in views if view.block is None)}
    chunks = [view for view in views if view.block is not None and uses.roots.source(_out(view)) in outside]
    if any(outside & set(tree.names(place.instruction, "read", "write")) for place in touches):
        return []
    alike = {(uses.roots.source(_out(view)), uses.types[_out(view)], uses.chunk(view)) for view in chunks}
    loop = touches[0].loop
    if len(alike) != 1 or loop is None or loop in uses.allocates[name].around:
        return []
    ((_, _, chunk),) = alike
    return chunks if chunk and _is_distinct(chunk[1], loop.instruction, uses) else []


def _out(view: Place) -> str:
    (out,) = tree.names(view.instruction, "view")
    return out


def _child_of_block(place: Place, uses: DefUse) -> Place:
    """The instruction at `place`, or the enclosing instruction that is directly in the stream block or in an `on` body of the block."""
    assert place.block
    inside = [*place.around, uses.places[place.statement]][len(place.block.around) + 1 :]
    return inside[1] if inside[0].instruction.ranks else inside[0]


def _is_distinct(index: Expr, loop: tree.Instruction, uses: DefUse) -> bool:
    """True if an index has a different value in every iteration of a loop, on every rank."""
    (loop_index,), index = tree.names(loop, "index"), with_leaves(index, lambda leaf: _resolved(leaf, uses))
    if index == Var(loop_index):
        return True
    if loop.trips is None or not loop.trips.is_int:
        return False
    iterations, mesh = range(int(loop.trips)), uses.program.mesh
    try:
        value = compiled(index, {})
        ranks = [{f"rank.{axis}": mesh.coordinate(rank, axis) for axis, _ in mesh.axes} for rank in mesh.all_ranks]
        return all(len({value({**rank, loop_index: iteration}) for iteration in iterations}) == len(iterations) for rank in ranks)
    except KeyError:  # The index depends on a value that is unknown here, such as a size.
        return False


def _resolved(leaf: Expr, uses: DefUse) -> Expr:
    """Value of a `let` integer, or any other leaf itself."""
    if isinstance(leaf, Var) and isinstance(let := uses.indices[leaf.name].instruction, ir.Let):
        return with_leaves(let.value, lambda inner: _resolved(inner, uses))
    return leaf
