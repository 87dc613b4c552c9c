"""Orders what the stages of a pipeline do such that none waits for what another one could have done before: 1F1B of plain micro-batches.

    %f0: f32[M, N] on stage 0 = matmul(%x0, %w0)              %f0: f32[M, N] on stage 0 = matmul(%x0, %w0)
    %g0: f32[M, N] on stage 1 = transfer(%f0)                 %g0: f32[M, N] on stage 1 = transfer(%f0)
    %h0: f32[M, N] on stage 0 = transfer(matmul(%g0, ...))    %f1: f32[M, N] on stage 0 = matmul(%x1, %w0)
    %f1: f32[M, N] on stage 0 = matmul(%x1, %w0)              %h0: f32[M, N] on stage 0 = transfer(matmul(%g0, ...))

Ranks that take part in a move wait for each other, and each rank does what it does in the order of the ops. They are in one order for all
ranks, so that no two can wait for one another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, TO_OTHER_MESHES
from hostweave.options import Options
from hostweave.tune.cost import seconds
from hostweave.types.mesh import Mesh

ENOUGH = 0.97  # of the time in the order of the text that another one may take, by the cost model, to be taken


def order_stages(fusion: Fusion, options: Options) -> Fusion:
    """After it the ops stand in the order in which ranks that are never idle without need would begin them, where that is faster by the
    cost model at the typical sizes. What the user has streamed keeps its order, and so does all with `overlap="off"`."""
    streamed = any(op.result.stream for op in fusion.ops)
    if options.overlap == "off" or streamed or not any(op.kind in TO_OTHER_MESHES for op in fusion.ops):
        return fusion
    times = seconds(fusion, options.sizes, options.figures, options.tf32)
    in_ns = {name: round(time * 1e9) for name, time in times.items()}  # whole, so that equal sums are equal
    moves = {op.result.name: 0 for op in fusion.ops if op.kind in TO_OTHER_MESHES}
    ordered = _Ranks(fusion, in_ns | moves).scheduled()  # what a move delays would let ranks begin something long just before it
    ranks = _Ranks(fusion, in_ns)
    return replace(fusion, ops=ordered) if ranks.time_of(ordered) < ENOUGH * ranks.time_of(fusion.ops) else fusion


class _Ranks:
    """The ranks of a fusion, each of which does one op at a time."""

    def __init__(self, fusion: Fusion, times: Mapping[str, int]):
        self.fusion, self.times = fusion, times
        self.types = {name: value.type for name, value in fusion.values().items()}
        self.on = {op.result.name: self._on(op) for op in fusion.ops}

    def _on(self, op: Op) -> frozenset[int]:
        """The ranks that take part in an op; a view costs none anything."""
        meshes: Iterable[Mesh | None] = (self.types[name].mesh for name in (*op.tensors, op.result.name))
        is_free = OPS[op.kind].is_view and op.kind not in TO_OTHER_MESHES
        return frozenset() if is_free else frozenset(rank for mesh in meshes for rank in (mesh or self.fusion.mesh).all_ranks)

    def time_of(self, ops: Iterable[Op]) -> int:
        """Until the last one has ended, in this order."""
        state = _State(self)
        for op in ops:
            state.do(op)
        return max(state.done.values(), default=0)

    def scheduled(self) -> tuple[Op, ...]:
        """List scheduling: the op that can begin first comes first. Of several that is a move, for which two sides come together, then the
        one with the least behind it, so that the backward pass of a micro-batch goes before the forward pass of a later one."""
        behind, state, order = self.behind(), _State(self), list[Op]()
        made = {op.result.name for op in self.fusion.ops}
        missing = {op.result.name: len({name for name in op.tensors if name in made}) for op in self.fusion.ops}
        users: dict[str, list[Op]] = {name: [] for name in made}
        for op in self.fusion.ops:
            for name in {name for name in op.tensors if name in made}:
                users[name].append(op)
        ready = [op for op in self.fusion.ops if not missing[op.result.name]]  # in the order of the text
        while ready:
            op = min(ready, key=lambda op: (state.start(op), op.kind not in TO_OTHER_MESHES, behind[op.result.name]))
            ready.remove(op)
            state.do(op)
            order.append(op)
            for user in users[op.result.name]:
                missing[user.result.name] -= 1
                if not missing[user.result.name]:
                    ready.append(user)
        return tuple(order)

    def behind(self) -> dict[str, int]:
        """How long at least what needs an op takes, that included."""
        result: dict[str, int] = {}
        for op in reversed(self.fusion.ops):
            result[op.result.name] = result.get(op.result.name, 0) + self.times[op.result.name]
            for name in op.tensors:
                result[name] = max(result.get(name, 0), result[op.result.name])
        return result


class _State:
    """Until when ranks are busy, and when values are there."""

    def __init__(self, ranks: _Ranks):
        self.ranks = ranks
        self.busy: dict[int, int] = {}
        self.done: dict[str, int] = {}

    def start(self, op: Op) -> int:
        """When an op can begin."""
        made = (self.done.get(name, 0) for name in op.tensors)
        return max((*made, *(self.busy.get(rank, 0) for rank in self.ranks.on[op.result.name])), default=0)

    def do(self, op: Op) -> None:
        end = self.start(op) + self.ranks.times[op.result.name]
        self.done[op.result.name] = end
        self.busy.update(dict.fromkeys(self.ranks.on[op.result.name], end))
