"""Reorders the ops of pipeline stages so that ranks wait less. Micro-batches in plain order (left) become a 1F1B schedule (right).

    %f0: f32[M, N] on stage 0 = matmul(%x0, %w0)              %f0: f32[M, N] on stage 0 = matmul(%x0, %w0)
    %g0: f32[M, N] on stage 1 = transfer(%f0)                 %g0: f32[M, N] on stage 1 = transfer(%f0)
    %h0: f32[M, N] on stage 0 = transfer(matmul(%g0, ...))    %f1: f32[M, N] on stage 0 = matmul(%x1, %w0)
    %f1: f32[M, N] on stage 0 = matmul(%x1, %w0)              %h0: f32[M, N] on stage 0 = transfer(matmul(%g0, ...))

The ranks of a move wait for each other, and each rank executes its ops in order. All ranks use one order, so they cannot deadlock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, TO_OTHER_MESHES
from hostweave.options import Options
from hostweave.tune.cost import seconds
from hostweave.types.mesh import Mesh

MAX_TIME_RATIO = 0.97  # the new order is used if its predicted time is below this share of the old order's predicted time


def order_stages(fusion: Fusion, options: Options) -> Fusion:
    """Orders ops by list scheduling if there are moves between meshes and no chunk loops, the options allow it, and the cost model predicts
    a gain."""
    streamed = any(op.result.stream for op in fusion.ops)
    is_kept = options.overlap == "off" or options.stages == "as_written" or streamed
    if is_kept or not any(op.kind in TO_OTHER_MESHES for op in fusion.ops):
        return fusion
    times = seconds(fusion, options.sizes, options.figures, options.tf32)
    in_ns = {name: round(time * 1e9) for name, time in times.items()}  # With integers, equal sums compare equal.
    moves = {op.result.name: 0 for op in fusion.ops if op.kind in TO_OTHER_MESHES}
    # Scheduling assumes that moves take no time. With real times, the input of a move is often ready slightly after the rank is free. The
    # rank would then start a long op, and the move would wait for this op.
    ordered = _Ranks(fusion, in_ns | moves).scheduled()
    ranks = _Ranks(fusion, in_ns)
    return replace(fusion, body=ordered) if ranks.time_of(ordered) < MAX_TIME_RATIO * ranks.time_of(fusion.ops) else fusion


class _Ranks:
    """Execution model of a fusion: each rank executes one op at a time."""

    def __init__(self, fusion: Fusion, times: Mapping[str, int]):
        self.fusion, self.times, self.made = fusion, times, fusion.made
        self.on = {op.result.name: self._on(op) for op in fusion.ops}
        self.busy: dict[int, int] = {}  # rank -> nanoseconds until the rank is free
        self.done: dict[str, int] = {}  # value -> nanoseconds until the value is computed

    def _on(self, op: Op) -> frozenset[int]:
        """Ranks that execute an op. Empty for views, which cost nothing."""
        meshes: Iterable[Mesh | None] = (self.fusion.types[name].mesh for name in (*op.tensors, op.result.name))
        is_free = OPS[op.kind].is_view and op.kind not in TO_OTHER_MESHES
        return frozenset() if is_free else frozenset(rank for mesh in meshes for rank in (mesh or self.fusion.mesh).all_ranks)

    def start(self, op: Op) -> int:
        made = (self.done.get(name, 0) for name in op.tensors)
        return max((*made, *(self.busy.get(rank, 0) for rank in self.on[op.result.name])), default=0)

    def do(self, op: Op) -> None:
        end = self.start(op) + self.times[op.result.name]
        self.done[op.result.name] = end
        self.busy.update(dict.fromkeys(self.on[op.result.name], end))

    def time_of(self, ops: Iterable[Op]) -> int:
        """Nanoseconds until the last op ends, if the ops run in the given order."""
        self.busy, self.done = {}, {}
        for op in ops:
            self.do(op)
        return max(self.done.values(), default=0)

    def scheduled(self) -> tuple[Op, ...]:
        """List scheduling by earliest start. Among ops with the same start, a move comes first, and then the op with the shortest chain of
        dependent ops. So a backward pass precedes a later forward pass."""
        behind, order, made = self.behind(), list[Op](), self.made
        sorter = TopologicalSorter({name: [operand for operand in op.tensors if operand in made] for name, op in made.items()})
        sorter.prepare()
        ready = [made[name] for name in sorter.get_ready()]  # in program order
        while ready:
            op = min(ready, key=lambda op: (self.start(op), op.kind not in TO_OTHER_MESHES, behind[op.result.name]))
            ready.remove(op)
            self.do(op)
            order.append(op)
            sorter.done(op.result.name)
            ready += [made[name] for name in sorter.get_ready()]
        return tuple(order)

    def behind(self) -> dict[str, int]:
        """For each op, the longest time of a chain of dependent ops that begins with this op."""
        result: dict[str, int] = {}
        for op in reversed(self.fusion.ops):
            result[op.result.name] = result.get(op.result.name, 0) + self.times[op.result.name]
            for name in op.tensors:
                result[name] = max(result.get(name, 0), result[op.result.name])
        return result
