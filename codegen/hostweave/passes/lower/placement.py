"""Finds ops that can write directly into the memory of another value. In

    %h: f32[M, 2] = matmul(%x, %w)
    %y: f32[(M + 1), 2] = concat(%h, %row, axis=0)

the matmul computes %h in its part of %y. In

    %h: f32[M, N] = matmul(%x, %w)
    %t: f32[N, M] = permute_dims(%h, axes=(1, 0))
    return %t

the matmul computes %h through a view of the memory of %t, without a copy.
"""

from dataclasses import dataclass

from hostweave.communication.dataflow import Dataflow
from hostweave.fusion_ir.index_map import ONE, groups
from hostweave.fusion_ir.ir import ChunkLoop, Op
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS, TO_OTHER_MESHES, operand_types
from hostweave.fusion_ir.ops.attention import COUNTS
from hostweave.fusion_ir.ops.attributes import ORDER
from hostweave.host_ir import ir
from hostweave.types.tensor import BufferType, strided, strides_of

MAX_JOINED = 16  # maximum number of operands that one kernel concatenates

STRIDED_OPERANDS = 5  # a gradient of attention accepts any strides of its first 5 operands

PlacedOperand = tuple[Op, int]  # a concat or pad, and the index of an operand


@dataclass(frozen=True)
class Placement:
    parts: dict[str, PlacedOperand]  # value -> concat or pad in whose result the value is computed
    by_kernel: frozenset[str]  # results of concat and pad that one kernel computes; the kernel can fuse with other kernels
    inverse_view: dict[str, Op]  # value -> its view; the view gets memory, and the value's op writes to this memory
    within_loops: frozenset[str]  # values that only one loop uses, so that their layout is free
    by_shards: frozenset[str]  # gathered values that a loop reads shard by shard; each shard is contiguous


def placement_of(flow: Dataflow) -> Placement:
    by_kernel = frozenset(op.result.name for op in flow.fusion.ops if _is_by_kernel(flow, op))
    parts, loops = _parts(flow, by_kernel), [item for item in flow.fusion.body if isinstance(item, ChunkLoop)]
    within_loops = frozenset(op.result.name for loop in loops for op in loop.ops if _ends_in(flow, op.result.name, loop))
    by_shards = frozenset(loop.gathered for loop in loops if loop.gathered)
    return Placement(parts, by_kernel, _inverse_views(flow, parts), within_loops, by_shards)


def reversed_view(flow: Dataflow, op: Op, src: str) -> ir.Reshape | ir.Permute:
    if op.kind == "permute_dims":
        axes = op[ORDER]
        return ir.Permute("", src, tuple(axes.index(i) for i in range(len(axes))))
    return ir.Reshape("", src, flow.local(flow.values[op.tensors[0]]).shape)


def _ends_in(flow: Dataflow, name: str, loop: ChunkLoop) -> bool:
    """True if only this loop uses a value. Local slices (`shard`) and transposes count as other uses, because they view the whole value,
    not a chunk."""
    return name not in flow.fusion.outputs and all(
        loop.makes(op.result.name)
        and op.kind not in ("permute_dims", "shard")
        and (not flow.is_view(op) or _ends_in(flow, op.result.name, loop))
        for op in flow.consumers[name]
    )


def _is_by_kernel(flow: Dataflow, op: Op) -> bool:
    """True if one kernel should compute a concat or pad. False if an operand's op, such as a matmul, could write into the result."""
    begin = OPS[op.kind].parts
    if begin is None or op.result.stream or len(op.tensors) > MAX_JOINED:
        return False
    dims = {dim for starts in begin(operand_types(op, flow.types), op) for dim in starts}
    is_placed = any(_is_placed(flow, name) or _chain_to(flow, name, op) for name in op.tensors)
    return bool(dims) and all(op.result.type.shape[dim] != ONE for dim in dims) and not is_placed


def _is_placed(flow: Dataflow, name: str) -> bool:
    """True if the op of a value is not pointwise, and can write into the result of a concat or pad."""
    made = flow.made.get(name)
    if made is None:
        return False
    if _adds_dims(flow, made):
        return _is_placed(flow, made.tensors[0])
    return not _is_pointwise(made) and _writes_strided(flow, made)


def _is_pointwise(op: Op) -> bool:
    entry = OPS[op.kind]
    return entry.parts is not None or (bool(entry.cpp) and entry.combine is None)


def _parts(flow: Dataflow, by_kernel: frozenset[str]) -> dict[str, PlacedOperand]:
    """Operands of concat and pad that are computed in the result. All other consumers must be able to read strided memory."""
    made = {op.result.name for op in flow.fusion.ops if op.result.stream is None and (_writes_strided(flow, op) or _adds_dims(flow, op))}
    return {
        name: (op, number)
        for op in flow.fusion.ops
        if OPS[op.kind].parts and op.result.stream is None and op.result.name not in by_kernel
        for number, name in enumerate(op.tensors)
        if (name in made and _can_lie_in(flow, name, op)) or _chain_to(flow, name, op)
    }


def _can_lie_in(flow: Dataflow, name: str, op: Op) -> bool:
    """True if a value can be stored in the memory of `op`'s result. All consumers except `op` must be attention ops, which read strided
    operands."""
    users = flow.consumers[name]
    others = [user for user in users if user != op]
    are_read = all(user.kind in COUNTS and name in user.tensors[:STRIDED_OPERANDS] for user in others)
    return len(others) == len(users) - 1 and name not in flow.fusion.outputs and are_read


def _adds_dims(flow: Dataflow, op: Op) -> bool:
    """True if the view `op` only adds or removes dims of one element. The op of the viewed value must also be able to write into the
    memory of the view."""
    if op.kind not in ("reshape", "expand_dims"):
        return False
    source = flow.values[op.tensors[0]]
    made = flow.made.get(source.name)
    have, want = ([size for size in flow.local(value).shape if size != ONE] for value in (source, op.result))
    is_free = made is not None and made.result.stream is None and made.kind not in RESHARD_STEPS and _writes_strided(flow, made)
    return have == want and is_free and _can_lie_in(flow, source.name, op)


def _writes_strided(flow: Dataflow, op: Op) -> bool:
    """True if the lowering of an op can write strided memory, directly or by a copy."""
    return not (flow.is_view(op) or op.kind in TO_OTHER_MESHES or op.callee or op.user_kernel or op.kind == "output")


def _inverse_views(flow: Dataflow, parts: dict[str, PlacedOperand]) -> dict[str, Op]:
    """Maps a value to the view of the value that gets the memory. The value's op writes through the inverse view."""
    found = dict[str, Op]()
    for name, (whole, _) in parts.items():
        view = flow.made[name]
        found |= _chain_to(flow, name, whole) or ({view.tensors[0]: view} if flow.is_view(view) else {})
    for op in flow.fusion.ops:
        users = flow.consumers[op.result.name]
        is_returned = op.result.name in flow.fusion.outputs and not users
        is_merged = op.kind == "permute_dims" and bool(users) and all(user.kind == "reshape" and _merges(flow, user) for user in users)
        if _is_reversible(op) and (is_returned or is_merged):
            found |= _chain(flow, op, flow.local(op.result), parts)
    return found


def _chain_to(flow: Dataflow, name: str, op: Op) -> dict[str, Op]:
    """The chain of views that ends in `name`, an operand of a concat or pad, as `_chain` returns it. Empty if the operand must be copied,
    or if a pointwise op computes the first value of the chain."""
    view, types = flow.made.get(name), [flow.local(op.result), flow.local(flow.values[name])]
    if view is None or not _is_reversible(view) or not _can_lie_in(flow, name, op):
        return {}
    chain = _chain(flow, view, strided(types[1], types[1].shape, strides_of(types[0])), {})
    return {} if chain and _is_pointwise(flow.made[[*chain][-1]]) else chain


def _is_reversible(op: Op) -> bool:
    return OPS[op.kind].is_view and not OPS[op.kind].cuts


def _merges(flow: Dataflow, op: Op) -> bool:
    return any(len(source) > 1 for source, _ in groups(flow.types[op.tensors[0]].shape, op.result.type.shape))


def _chain(flow: Dataflow, op: Op, memory: BufferType, parts: dict[str, PlacedOperand]) -> dict[str, Op]:
    """Maps each value in the chain of views up to `op` to its view. Empty if this is impossible, for example if a value has other uses."""
    (name,) = op.tensors
    made = flow.made.get(name)
    if made is None or op.result.stream or made.result.stream or flow.consumers[name] != [op] or name in flow.fusion.outputs:
        return {}
    try:
        memory = reversed_view(flow, op, "").type_of(memory)
    except ValueError:
        return {}
    if _is_reversible(made):
        rest = _chain(flow, made, memory, parts)
        return {name: op, **rest} if rest else {}
    return {name: op} if made.kind not in RESHARD_STEPS and _writes_strided(flow, made) and name not in parts else {}
