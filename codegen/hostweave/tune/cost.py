"""How long an op of the fusion IR takes on one rank, by the roofline of a machine (Williams, Waterman and Patterson, "Roofline", 2009)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.resharding import local_dims


@dataclass(frozen=True)
class Machine:
    """What one GPU does in a second, at most 0.9 of its data sheet, and what a launch costs."""

    flops: float  # of matmuls of 16-bit floats
    memory: float  # bytes read and written
    network: float  # bytes that a collective receives from the other GPUs of the host
    latency: float  # seconds of a collective of a few bytes
    launch: float  # seconds of a kernel that does nothing


H200 = Machine(flops=700e12, memory=4.0e12, network=250e9, latency=15e-6, launch=3e-6)


def seconds(fusion: Fusion, sizes: Mapping[str, int], machine: Machine = H200) -> dict[str, float]:
    """The time of each op, by its result's name, at these sizes (4096 for dims that have none), alone on the machine.

    A view takes none, a call what the ops of its function do.
    """
    functions: dict[str, float] = {}
    for body in fusion.functions:
        functions[body.name] = sum(_of_body(body, sizes, machine, functions).values())
    return _of_body(fusion, sizes, machine, functions)


def _of_body(fusion: Fusion, sizes: Mapping[str, int], machine: Machine, functions: Mapping[str, float]) -> dict[str, float]:
    dims = {name: local_dims(value.type, fusion.mesh, sizes) for name, value in fusion.values().items()}
    bytes_of = {name: float(prod(dims[name]) * value.type.dtype.itemsize) for name, value in fusion.values().items()}

    def of_op(op: Op) -> float:
        if op.callee:
            return 0.0 if op.kind == "output" else functions[op.callee.name]
        if OPS[op.kind].is_view:
            return 0.0
        moved = [bytes_of[name] for name in (*op.tensors, op.result.name)]
        if OPS[op.kind].is_reshard_step:
            return machine.latency + max(moved) / machine.network
        work = float(2 * dims[op.tensors[0]][-1] * prod(dims[op.result.name])) / machine.flops if op.kind == "matmul" else 0.0
        return machine.launch + max(work, sum(moved) / machine.memory)

    return {op.result.name: of_op(op) for op in fusion.ops}
