"""Removes mesh axes of size 1 from all shardings. Later passes then recognise equal process groups, and reshards that do nothing."""

from dataclasses import replace

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import RESHARD_STEPS
from hostweave.fusion_ir.ops.attributes import MESH_AXES
from hostweave.fusion_ir.sharding import Axes, layout, partial_axes, with_layout
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.options import Options
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, TensorType
from hostweave.types.zigzag import some_of


def drop_unit_axes(fusion: Fusion, options: Options) -> Fusion:
    if all(size > 1 for mesh in {type.mesh_in(fusion.mesh) for type in fusion.types.values()} for _, size in mesh.axes):
        return fusion

    def without(axes: Axes, mesh: Mesh) -> Axes:
        return some_of(axes, lambda axis: mesh.axis_size(axis) > 1, ranks_stay=True)

    def stripped(type: TensorType, mesh: Mesh) -> TensorType:
        partial = type.partial
        if partial is not None:
            left = without(partial.axes, mesh)
            partial = replace(partial, axes=left) if left else None
        return with_layout(type, tuple(without(axes, mesh) for axes in layout(type)), partial)

    def in_value(value: Value) -> Value:
        return replaced(value, type=stripped(value.type, value.type.mesh_in(fusion.mesh)))

    def in_kernel(kernel: UserKernel) -> UserKernel:
        mesh = kernel.inputs[0].mesh_in(fusion.mesh)  # A kernel runs on the mesh of its operands.

        def in_dim(dim: Dim) -> Dim:
            return replace(dim, axes=without(dim.axes, mesh))

        arguments = (replace(a, type=a.type and stripped(a.type, mesh), dim=a.dim and in_dim(a.dim)) for a in kernel.arguments)
        return replace(kernel, arguments=tuple(arguments), grid=tuple(map(in_dim, kernel.grid)))

    def in_op(op: Op) -> Op:
        result = in_value(op.result)
        if op.kind in RESHARD_STEPS and _names(op, fusion.types[op.tensors[0]], fusion.mesh):
            return Op("reshard", op.operands, result, location=op.location)  # decompose_reshards decomposes the reshard again.
        return replaced(op, result=result, user_kernel=op.user_kernel and in_kernel(op.user_kernel))

    return replaced(fusion, inputs=tuple(map(in_value, fusion.inputs)), body=tuple(map(in_op, fusion.ops)))


def _names(op: Op, source: TensorType, program: Mesh) -> bool:
    """True if a reshard step, or the type of its operand, names an axis that is removed."""
    mesh = source.mesh_in(program)
    named = {*(op[MESH_AXES].names if MESH_AXES.name in dict(op.attributes) else ()), *source.axes, *partial_axes(source)}
    return any(mesh.axis_size(axis) == 1 for axis in named)
