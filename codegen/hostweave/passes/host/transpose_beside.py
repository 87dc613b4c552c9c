"""A kernel also writes the transpose of its result, tile by tile. No copy then reads the result again.

    launch @astype_q %x -> %q
    matmul %q, %w -> %y                             %q_by_rows = allocate f8e4m3[K, M]
    %q_transposed = permute %q by [1, 0]            launch @astype_q_by_rows %x -> %q, %q_by_rows
    %q_by_rows = allocate f8e4m3[K, M]    becomes   matmul %q, %w -> %y
    copy %q_transposed -> %q_by_rows                matmul %q_by_rows, %v -> %z
    matmul %q_by_rows, %v -> %z

with `kernel @astype_q_by_rows(%x) { %q = astype(%x); %q_by_rows_wide = permute_dims(%x); %q_by_rows = astype(%q_by_rows_wide) }`.
Gradients of scaled matmuls need both layouts. Kernels with reductions do not change, because their thread blocks do not process tiles.
"""

from dataclasses import replace

from hostweave.analysis.def_use import DefUse, Place
from hostweave.fusion_ir.ir import Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir, tree
from hostweave.kernel_ir.loops import Distribution
from hostweave.kernel_ir.pipeline import stages
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import Links, finished, viewed


def transpose_beside(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    given = program
    while (changed := _changed(program, options)) is not None:
        program = changed
    return program if program is given else finished(Links(program))


def _changed(program: ir.HostProgram, options: Options) -> ir.HostProgram | None:
    links = Links(program)
    made = {dst: place for place, launch in links.launches.items() for dst in launch.dsts}
    for copy in links.uses.places:
        for source in tree.names(copy.instruction, "read") if copy.instruction.copies else ():
            result = links.root(source)
            path = links.path(source, result) if result in made else None
            may_move = path and len(path) == 1 and _may_move(links.uses, copy, made[result], result)
            if path and may_move and (changed := _with_copy(links.uses, copy, made[result], path, options)):
                return changed
    return None


def _may_move(uses: DefUse, copy: Place, first: Place, result: str) -> bool:
    """True if the copy can move to the launch at `first`. This launch computes the operand of the copy."""
    (dst,) = tree.names(copy.instruction, "write")
    is_whole = uses.root(dst) == dst and len(uses.types[result].shape) == 2
    if copy.body is not first.body or copy.number < first.number or not is_whole:
        return False
    is_new = dst in uses.allocates and uses.allocates[dst].body is copy.body
    is_returned = not copy.loop and any(parameter.name == dst and not parameter.memory for parameter in uses.program.outputs)
    if not (is_new or is_returned):
        return False
    is_first = all(touch.number >= copy.number for touch in uses.touches[dst])
    writers = [touch for touch in uses.touches[result] if result in map(uses.root, tree.names(touch.instruction, "write"))]
    return is_first and writers == [first]


def _with_copy(uses: DefUse, copy: Place, first: Place, path: list[tree.Instruction], options: Options) -> ir.HostProgram | None:
    """Program in which the launch at `first` also writes the copy. None if the kernels cannot fuse, or would not write tiles."""
    (dst,), program, location = tree.names(copy.instruction, "write"), uses.program, copy.instruction.location
    (result,) = tree.names(path[0], "alias")
    types = {**uses.types, tree.names(path[0], "view")[0]: uses.types[dst]}
    ops = tuple(viewed(path, result, dst, types, set()))
    kernel = ir.Kernel(f"copy {copy.number}", (ir.Parameter(result, unsharded(types[result])),), ops)
    launch = ir.Launch(kernel.name, (result,), (dst,), location=location)
    edits: dict[int, tree.Instruction | tree.Body] = {copy.number: (), first.number: (first.instruction, launch)}
    if allocated := uses.allocates.get(dst):
        edits |= {allocated.number: (), first.number: (allocated.instruction, first.instruction, launch)}
    links = Links(replace(program, body=tree.edited(program.body, edits), kernels=(*program.kernels, kernel)))
    producer = next(place for place in links.launches if place.instruction is first.instruction)
    found = links.union(producer)
    if isinstance(found, str) or len(found) > 1:
        return None
    (merged,) = found
    buffers = [links.types[name] for name in (*merged.launch.srcs, *merged.launch.dsts)]
    if stages(merged.kernel, buffers, options.figures)[-1][1].distribution != Distribution.TILE:
        return None
    links.fuse(lambda place: place is producer)
    links.kernels[merged.kernel.name] = _rounded_apart(merged.kernel)
    return links.fused()


def _rounded_apart(kernel: ir.Kernel) -> ir.Kernel:
    """Replaces the transpose of a cast by the cast of a transpose. The store of 8-bit floats then rounds two elements at once."""
    *ops, last = kernel.ops
    cast = next(op for op in ops if op.result.name == last.operands[0])
    if not OPS[cast.kind].is_cast:
        return kernel
    (wide,), name = cast.tensors, f"{last.result.name}_wide"
    turned = replace(last, operands=(wide,), result=Value(name, replace(last.result.type, dtype=kernel.types[wide].dtype)))
    return replace(kernel, ops=(*ops, turned, replace(cast, operands=(name,), result=last.result)))
