"""Results that need no memory of their own, because they are computed into that of another value.

    %h: f32[M, 2] = matmul(%x, %w)
    %y: f32[(M + 1), 2] = concat(%h, %row, axis=0)

%h is made where it belongs in %y, and

    %h: f32[M, N] = matmul(%x, %w)
    %t: f32[N, M] = permute_dims(%h, axes=(1, 0))
    return %t

makes %h through a view of the memory of %t, so that nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.communication.steps import Dataflow
from hostweave.fusion_ir.index_map import ONE, groups
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import RESHARD_STEPS, TO_OTHER_MESHES
from hostweave.fusion_ir.ops.attention import COUNTS
from hostweave.fusion_ir.ops.attributes import ORDER
from hostweave.host_ir import ir
from hostweave.passes.lower.loops import Loop, gathered_beside
from hostweave.types.tensor import BufferType

REVERSIBLE = ("reshape", "expand_dims", "permute_dims", "renumber")  # views of all elements

HEADS = 5  # operands of an attention, at most, that it reads as they lie

Part = tuple[Op, int]  # a concat or pad, and which operand of it


@dataclass(frozen=True)
class Placement:
    parts: dict[str, Part]  # a value that is made where it belongs in another's memory
    inverse_view: dict[str, Op]  # a value -> the view of it whose result has the memory, through which its op writes
    within_loops: frozenset[str]  # values that live and die in one loop, so that they may lie as it likes
    by_shards: frozenset[str]  # values that were gathered for a loop over their shards, which lie one after another


def placement_of(flow: Dataflow, loops: Sequence[Loop]) -> Placement:
    parts = _parts(flow)
    within_loops = frozenset(
        op.result.name for loop in loops if loop.is_streamed for op in loop.ops if _ends_in(flow, op.result.name, loop)
    )
    gathers = (gathered_beside(flow, loop.ops[0]) for loop in loops)
    by_shards = frozenset(gather.result.name for gather in gathers if gather)
    return Placement(parts, _inverse_views(flow, parts), within_loops, by_shards)


def reversed_view(flow: Dataflow, op: Op, src: str) -> ir.Reshape | ir.Permute:
    """The view that leads from the result of a view back to what it is of."""
    if op.kind == "permute_dims":
        axes = op[ORDER]
        return ir.Permute("", src, tuple(axes.index(i) for i in range(len(axes))))
    return ir.Reshape("", src, flow.local(flow.values[op.tensors[0]]).shape)


def _ends_in(flow: Dataflow, name: str, loop: Loop) -> bool:
    """Whether a value lives and dies in this loop. One of which a shard or a transpose is taken does not: that is a view of all of it."""
    return name not in flow.fusion.outputs and all(
        loop.makes(op.result.name)
        and op.kind not in ("permute_dims", "shard")
        and (not flow.is_view(op) or _ends_in(flow, op.result.name, loop))
        for op in flow.consumers[name]
    )


# --- operands of concat and pad ---------------------------------------------------------------------------------------


def _parts(flow: Dataflow) -> dict[str, Part]:
    """Operands of concat and pad that their own op can write where they belong in the result, as what else uses them can read them there;
    also through a view that gives them dims of one element."""
    made = {op.result.name for op in flow.fusion.ops if op.result.stream is None and (_writes_strided(flow, op) or _adds_dims(flow, op))}
    return {
        name: (op, number)
        for op in flow.fusion.ops
        if op.kind in ("concat", "pad") and op.result.stream is None
        for number, name in enumerate(op.tensors)
        if name in made and _can_lie_in(flow, name, op)
    }


def _can_lie_in(flow: Dataflow, name: str, op: Op) -> bool:
    """Whether a value can lie in the memory of what an op makes of it, as strided as it is there, where attention alone reads it."""
    users = flow.consumers[name]
    others = [user for user in users if user != op]
    are_read = all(user.kind in COUNTS and name in user.tensors[:HEADS] for user in others)
    return len(others) == len(users) - 1 and name not in flow.fusion.outputs and are_read


def _adds_dims(flow: Dataflow, op: Op) -> bool:
    """Whether a view adds dims of one element to what nothing else uses, and whose op can write it anywhere."""
    if op.kind not in ("reshape", "expand_dims"):
        return False
    source = flow.values[op.tensors[0]]
    made = flow.producer.get(source.name)
    have, want = ([size for size in flow.local(value).shape if size != ONE] for value in (source, op.result))
    is_free = made is not None and made.result.stream is None and made.kind not in RESHARD_STEPS and _writes_strided(flow, made)
    return have == want and is_free and _can_lie_in(flow, source.name, op)


def _writes_strided(flow: Dataflow, op: Op) -> bool:
    """Whether an op can write memory that is not contiguous. A reshard on one mesh can, by a copy."""
    return not (flow.is_view(op) or op.kind in TO_OTHER_MESHES or op.callee or op.user_kernel or op.kind == "output")


# --- values that one view alone uses ----------------------------------------------------------------------------------


def _inverse_views(flow: Dataflow, parts: dict[str, Part]) -> dict[str, Op]:
    """Values that are used through one view alone, and lie in memory as that view has them: as it is returned, or as what
    merges its dims needs it. The view is then how their own op sees the memory, and nothing is copied."""
    found = {flow.producer[name].tensors[0]: flow.producer[name] for name in parts if flow.is_view(flow.producer[name])}
    for op in flow.fusion.ops:
        users = flow.consumers[op.result.name]
        is_returned = op.result.name in flow.fusion.outputs and not users
        is_merged = op.kind == "permute_dims" and bool(users) and all(user.kind == "reshape" and _merges(flow, user) for user in users)
        if op.kind in REVERSIBLE and (is_returned or is_merged):
            found |= _chain(flow, op, flow.local(op.result), parts)
    return found


def _merges(flow: Dataflow, op: Op) -> bool:
    return any(len(source) > 1 for source, _ in groups(flow.types[op.tensors[0]].shape, op.result.type.shape))


def _chain(flow: Dataflow, op: Op, memory: BufferType, parts: dict[str, Part]) -> dict[str, Op]:
    """The views from `op` down to what makes the elements; none where some cannot be seen through, or has other uses."""
    (name,) = op.tensors
    made = flow.producer.get(name)
    if made is None or op.result.stream or made.result.stream or flow.consumers[name] != [op] or name in flow.fusion.outputs:
        return {}
    try:
        memory = reversed_view(flow, op, "").type_of(memory)
    except ValueError:
        return {}
    if made.kind in REVERSIBLE:
        rest = _chain(flow, made, memory, parts)
        return {name: op, **rest} if rest else {}
    return {name: op} if made.kind not in RESHARD_STEPS and _writes_strided(flow, made) and name not in parts else {}
