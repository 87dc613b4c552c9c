"""A fusion without its mesh: the reference that an exported project computes."""

from __future__ import annotations

from dataclasses import replace

from hostweave.fusion_ir.calls import map_functions
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim


def needs_ranks(fusion: Fusion) -> str:
    """What of the fusion is stated for one rank, so that a device that has all of each tensor cannot compute it; "" where nothing is."""
    if fusion.user_kernels:
        return f"@{fusion.user_kernels[0].name}, a kernel of the user, is written for the blocks of one rank"
    return next((f"every rank has a term of its own of {value.name}" for value in fusion.inputs if value.type.partial), "")


def on_one_device(fusion: Fusion) -> Fusion:
    """The same math on global tensors: no dim is sharded, a reshard is a copy, no loop is over chunks."""

    def unsharded(value: Value) -> Value:
        dims = tuple(Dim(dim.size) for dim in value.type.dims)
        return Value(value.name, replace(value.type, dims=dims, partial=None, mesh=None))

    def alone(op: Op) -> Op:
        return replace(op, kind="copy" if op.kind == "reshard" else op.kind, result=unsharded(op.result))

    def body(given: Fusion) -> Fusion:
        return replace(given, mesh=Mesh(), inputs=tuple(map(unsharded, given.inputs)), ops=tuple(map(alone, given.ops)))

    return map_functions(replace(fusion, name=f"{fusion.name}_reference"), body)
