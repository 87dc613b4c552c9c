"""Index space of a kernel: the dims of its loops, and the offset of each element that the kernel reads or writes.

    kernel @sum_y(%x: f32[M, N]) { %y: f32[M] = sum(%x, axis=(1,)) }

becomes

    keep i in M over x.0
    reduce j in N over x.1
    %x: f32[M, N] at i * N + j
    %y stored: f32[M] at i
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hostweave.analysis.kernel_indices import Iteration, epilogue, iteration, reduced_indices
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXIS, HALVES, ORDER
from hostweave.host_ir import ir
from hostweave.kernel_ir.loops import ONE, ZERO, FewRows, Fiber, LoopDim, Loops, gathers_in_order, index_at, merged, stored
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, strides_of

Moved = Mapping[str, tuple[int, ...]]  # access -> partly written dims


def index_space(kernel: ir.Kernel, buffers: Sequence[BufferType]) -> Loops:
    """Builds the index space. `buffers` are the types of the inputs, then of the results. Raises NotOneKernel if one kernel cannot compute
    the ops."""
    if kernel.products:
        return _after_products(kernel, buffers)
    space = iteration(kernel)
    inputs, results = [p.name for p in kernel.inputs], [p.name for p in kernel.results]
    memory = dict(zip((*inputs, *map(stored, results)), buffers, strict=True))
    moved = {stored(op.result.name): op[ORDER] for op in kernel.ops if OPS[op.kind].updates}
    accesses = _accesses(kernel, space, memory, moved)

    def dim(index: str) -> LoopDim:
        return LoopDim(space.sizes[index], tuple(own.get(index, ZERO) for own in accesses.values()), indices=(index,))

    kept = merged([dim(index) for index in space.kept]) or [_one_row(space, inputs, results, accesses)]
    reduced = merged([dim(index) for index in space.reduced])
    letters = _letters((*kept, *reduced), list(space.sizes))
    kept, reduced = ([replace(dim, letter=letters[dim]) for dim in dims] for dims in (kept, reduced))
    fibers = _fibers(space, memory, moved, (*inputs, *results))
    return Loops(kernel, space, memory, tuple(accesses), fibers, tuple(kept), tuple(reduced))


def _letters(dims: Sequence[LoopDim], order: Sequence[str]) -> dict[LoopDim, str]:
    """Names of the loop indices, in the order of the index space."""
    letters = (f"{letter}{number or ''}" for number in itertools.count() for letter in "ijklpqrstuvw")
    return dict(zip(sorted(dims, key=lambda dim: order.index(dim.indices[0]) if dim.indices else 0), letters, strict=False))


def _after_products(kernel: ir.Kernel, buffers: Sequence[BufferType]) -> Loops:
    """Loops of the ops after matmuls of few rows."""
    end, memory = epilogue(kernel), dict(zip((p.name for p in kernel.inputs), buffers, strict=False))
    operands = {name: memory[name] for op in kernel.products for name in op.tensors}
    made = (BufferType(op.result.type.dtype, op.result.type.shape) for op in kernel.products)
    others = (memory[p.name] for p in end.inputs[len(kernel.products) :])
    loops = index_space(end, (*made, *others, *buffers[len(kernel.inputs) :]))
    return replace(loops, products=FewRows(kernel, operands))


def _one_row(space: Iteration, inputs: Sequence[str], results: Sequence[str], accesses: Iterable[str]) -> LoopDim:
    """Loop dim of size 1 for a kernel without kept indices. Contiguous rows determine the strides."""
    row = product(tuple(space.sizes[index] for index in space.reduced))
    strides = {name: row for name in inputs if space.is_whole(name)}
    strides |= {stored(name): row if space.is_whole(name) else ONE for name in results}
    return LoopDim(ONE, tuple(strides.get(access, ZERO) for access in accesses))


def _accesses(kernel: ir.Kernel, space: Iteration, memory: Mapping[str, BufferType], moved: Moved) -> dict[str, dict[str, Size]]:
    """Stride of each loop index in the offset of each access (see `Loops`)."""
    accesses: dict[str, dict[str, Size]] = {}
    named = (*(p.name for p in kernel.inputs), *(p.name for p in kernel.results))
    for name, (access, buffer) in zip(named, memory.items(), strict=True):
        own = enumerate(zip(space.indices[name], strides_of(buffer), strict=True))
        accesses[access] = {index: stride for i, (index, stride) in own if index is not None and i not in moved.get(access, ())}
    for access, axes in moved.items():
        indices = space.indices[kernel.results[0].name]
        accesses |= {f"{access} {i}": {index: ONE} if (index := indices[i]) else {} for i in axes}
    for op in kernel.ops:
        indices = space.indices[op.result.name]
        joined = {span.dim for spans in space.joined.get(op.result.name, ()) for span in spans}
        needed = (op[AXIS], op[HALVES]) if gathers_in_order(op) else sorted(joined)
        accesses |= {index_at(op, dim): {index: ONE} if (index := indices[dim]) else {} for dim in needed}
        if OPS[op.kind].is_range or OPS[op.kind].locates:
            counted = indices if OPS[op.kind].is_range else reduced_indices(op, space.indices)
            accesses[op.result.name] = {index: ONE for index in counted if index is not None}
    return accesses


def _fibers(space: Iteration, memory: Mapping[str, BufferType], moved: Moved, named: Sequence[str]) -> dict[str, Fiber]:
    """Size and stride of each dim without a loop, by access."""
    dims = {f"{access} {i}": (memory[access], i) for access, axes in moved.items() for i in axes}
    dims |= {access: (type, space.fibers[name]) for name, (access, type) in zip(named, memory.items(), strict=True) if name in space.fibers}
    return {access: Fiber(type.shape[dim], strides_of(type)[dim]) for access, (type, dim) in dims.items()}
