"""Infers missing shardings: first from the operands of each op, then from the consumers of the result if all consumers agree.

    %h: bf16[M, N] = matmul(%x, %w)                     # x: [M, K@x], w: [K@x, N]
    %z: bf16[M, N] = relu(%h)
    %y: bf16[M@x, N] pinned = reshard(%z)

becomes

    %h: bf16[M@x, N] = matmul(%x, %w)
    %z: bf16[M@x, N] = relu(%h)
    %y: bf16[M@x, N] pinned = reshard(%z)
"""

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import RESHARD_STEPS, RESHARDS, operand_types
from hostweave.fusion_ir.sharding import Layout, ShardingRule, divides, flow, layout, with_layout
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, TensorType


def with_shardings(fusion: Fusion) -> Fusion:
    """The fusion with the inferred shardings. Functions that it calls are as given."""
    types, groups = {value.name: value.type for value in fusion.inputs}, {value.name for value in fusion.inputs if value.group}
    flows: dict[str, ShardingRule] = {}
    for op in fusion.ops:
        if op.kind not in RESHARDS:
            flows[op.result.name] = flow(op, operand_types(op, types), fusion.mesh)
        types[op.result.name] = _forward(op, flows.get(op.result.name))
    use_shardings: dict[str, list[Layout]] = {name: [layout(types[name])] for name in fusion.outputs}
    for op in reversed(fusion.ops):
        name = op.result.name
        if op.kind not in RESHARDS and not (op.kind == "select" and op.tensors[0] in groups):  # A repeat reads the whole group.
            types[name] = _backward(op.result, types[name], flows[name], use_shardings.get(name, []), fusion.mesh)
        # A consumer that is a reshard step, or is on another mesh, does not constrain its operand.
        if op.kind not in RESHARD_STEPS and all(types[operand].mesh == types[name].mesh for operand in op.tensors):
            passed, wanted = flows.get(name), layout(types[name])
            needed = passed.operands(passed.computed(wanted)) if passed else (wanted,)
            for operand, wish in zip(op.operands, needed, strict=True):
                if isinstance(operand, str):
                    use_shardings.setdefault(operand, []).append(wish)
    ops = [replaced(op, result=replaced(op.result, type=types[op.result.name])) for op in fusion.ops]
    return replaced(fusion, body=tuple(ops))


def _forward(op: Op, passed: ShardingRule | None) -> TensorType:
    """Type of a result after forward propagation. A reshard keeps its stated type. The dim of a chunk loop is unsharded."""
    if passed is None:
        return op.result.type
    stream = op.result.stream
    axes = tuple(() if stream and i == stream.dim else a for i, a in enumerate(passed.result))
    return with_layout(op.result.type, axes)


def _backward(value: Value, type: TensorType, passed: ShardingRule, use_shardings: list[Layout], mesh: Mesh) -> TensorType:
    """Type after backward propagation. An unsharded dim gets the axes that all consumers need and the rule allows."""
    mesh = type.mesh_in(mesh)
    axes = list(layout(type))
    for i, dim in enumerate(type.dims):
        wanted = {wish[i] for wish in use_shardings}
        is_open = not dim.axes and not (value.stream and value.stream.dim == i)
        if is_open and len(wanted) == 1:
            (found,) = wanted
            is_free = set(found).isdisjoint(axis for other in axes for axis in other)
            if divides(found, dim, mesh) and passed.takes(i, Dim(dim.size, found), mesh) and is_free:
                axes[i] = found
    return with_layout(type, tuple(axes))
