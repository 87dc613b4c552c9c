"""How long an op of the fusion IR takes on one rank, by the roofline of a machine (Williams, Waterman and Patterson, "Roofline", 2009)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.resharding import local_dims
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType


@dataclass(frozen=True)
class Machine:
    """What one GPU does in a second, at most 0.9 of its data sheet, and what a launch costs."""

    flops: float  # of matmuls of 16-bit floats
    memory: float  # bytes read and written
    network: float  # bytes that a collective receives from the other GPUs of the host
    latency: float  # seconds of a collective of a few bytes
    launch: float  # seconds of a kernel that does nothing


H200 = Machine(flops=700e12, memory=4.0e12, network=250e9, latency=15e-6, launch=3e-6)


def seconds(op: Op, fusion: Fusion, sizes: Mapping[str, int], machine: Machine = H200) -> float:
    """The time of an op at these sizes (4096 for dims that have none), alone on the machine. A view takes none, a call that of its ops."""
    if op.callee:
        return 0.0 if op.kind == "output" else sum(seconds(inner, op.callee, sizes, machine) for inner in op.callee.ops)
    if OPS[op.kind].is_view:
        return 0.0
    types = fusion.values()
    moved = [_bytes(types[name].type, fusion.mesh, sizes) for name in (*op.tensors, op.result.name)]
    if OPS[op.kind].is_reshard_step:
        return machine.latency + max(moved) / machine.network
    work = 0.0
    if op.kind == "matmul":
        terms = local_dims(types[op.tensors[0]].type, fusion.mesh, sizes)[-1]
        work = float(2 * terms * prod(local_dims(op.result.type, fusion.mesh, sizes))) / machine.flops
    return machine.launch + max(work, sum(moved) / machine.memory)


def _bytes(type: TensorType, mesh: Mesh, sizes: Mapping[str, int]) -> float:
    return float(prod(local_dims(type, mesh, sizes)) * type.dtype.itemsize)
