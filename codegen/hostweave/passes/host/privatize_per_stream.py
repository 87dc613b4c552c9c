"""Host to host: a buffer of which each iteration of a stream loop uses one chunk, and nothing else, becomes one buffer per stream.

    %h = allocate bf16[M, N]
    for %i in 0..8 { stream ring[%i] { %h_i = chunk %h[0: %i of 8]; matmul %x_i, %w -> %h_i; ... } }

becomes

    for %i in 0..8 { stream ring[%i] { %h = allocate bf16[M/8, N]; matmul %x_i, %w -> %h; ... } }
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Expr, Var, binary, evaluate, leaves
from hostweave.options import Options
from hostweave.types.tensor import BufferType

ChunkView = ir.Select | ir.Chunk


def privatize_per_stream(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses = def_use(program)
    dropped: set[int] = set()  # ids of instructions
    renamed: dict[str, str] = {}
    made: dict[int, list[ir.Instruction]] = {}  # the id of an instruction of a stream block -> what goes before it
    for name, place in uses.allocates.items():
        chunks = _chunks(uses, name)
        if not chunks:
            continue
        view = chunks[0].instruction
        shape = uses.types[_chunk(view).out].shape
        allocate = ir.Allocate(name, BufferType(uses.types[name].dtype, shape), location=place.instruction.location)
        made.setdefault(id(_child_of_block(chunks[0])), []).append(allocate)
        dropped |= {id(place.instruction), *(id(other.instruction) for other in uses.viewed[name] if other.block is None)}
        dropped |= {id(chunk.instruction) for chunk in chunks}
        renamed |= {_chunk(chunk.instruction).out: name for chunk in chunks}
    return replace(program, body=_rewritten(program.body, dropped, renamed, made)) if made else program


def _chunk(view: ir.Instruction) -> ChunkView:
    assert isinstance(view, ChunkView)
    return view


def _chunks(uses: DefUse, name: str) -> list[Place]:
    """The views that are all that a stream block touches of an allocation, one chunk a step; none where it has other uses."""
    touches, views = uses.touches.get(name, []), uses.viewed.get(name, [])
    blocks = {id(place.block): place.block for place in touches}
    (block,) = blocks.values() if len(blocks) == 1 else (None,)
    if block is None or uses.allocates[name].block is not None:
        return []
    outside = {name, *(_out(view) for view in views if view.block is None)}
    chunks = [view for view in views if view.block is not None and uses.roots.source(_out(view)) in outside]
    if any(outside & set(ir.names(place.instruction, "read", "write")) for place in touches):
        return []
    alike = {replace(view.instruction, out="", location=None) if isinstance(view.instruction, ChunkView) else None for view in chunks}
    loop = touches[0].loop
    if len(alike) != 1 or None in alike or loop is None or any(loop is i for i in uses.allocates[name].around):
        return []
    return chunks if _is_distinct(_chunk(chunks[0].instruction).index, loop, uses) else []


def _out(view: Place) -> str:
    (out,) = ir.names(view.instruction, "define")
    return out


def _child_of_block(place: Place) -> ir.Instruction:
    """The instruction of the stream block, or of an `on` body in it, that holds this one, or is it."""
    around = (*place.around, place.statement)
    inside = around[next(k for k, i in enumerate(around) if isinstance(i, ir.OnStream)) + 1 :]
    return inside[1] if isinstance(inside[0], ir.OnMesh) else inside[0]


def _is_distinct(index: Expr, loop: ir.For, uses: DefUse) -> bool:
    """Whether every step of a loop has another value of an index, on any rank."""
    index = _resolved(index, uses)
    if index == Var(loop.out):
        return True
    if not loop.count.is_int:
        return False
    axes = dict(uses.program.mesh.axes)
    try:
        for place in product(*map(range, axes.values())):
            coordinates = dict(zip(axes, place, strict=True))
            values = {evaluate(index, {loop.out: step}, coordinates, {}) for step in range(int(loop.count))}
            if len(values) < int(loop.count):
                return False
    except KeyError:  # another loop's index, or a size
        return False
    return True


def _resolved(expr: Expr, uses: DefUse) -> Expr:
    """An expression without the names that lets give to others."""
    if isinstance(expr, Var) and isinstance(let := uses.indices[expr.name].instruction, ir.Let):
        return _resolved(let.value, uses)
    if leaves(expr) == [expr]:
        return expr
    return binary(expr.op, _resolved(expr.left, uses), _resolved(expr.right, uses))  # type: ignore[attr-defined]


def _rewritten(body: ir.Body, dropped: set[int], renamed: dict[str, str], made: dict[int, list[ir.Instruction]]) -> ir.Body:
    result: list[ir.Instruction] = []
    for i in body:
        result.extend(made.get(id(i), ()))
        if id(i) in dropped:
            continue
        changes: dict[str, Any] = {}
        for name, role in ir.roles(type(i)).items():
            if role in ("read", "write", "update", "alias"):
                value = getattr(i, name)
                changes[name] = tuple(renamed.get(v, v) for v in value) if isinstance(value, tuple) else renamed.get(value, value)
        for f in fields(i):
            if f.name in ("body", "orelse"):
                changes[f.name] = _rewritten(getattr(i, f.name), dropped, renamed, made)
        result.append(replace(i, **changes) if any(getattr(i, f) != value for f, value in changes.items()) else i)
    return tuple(result)
