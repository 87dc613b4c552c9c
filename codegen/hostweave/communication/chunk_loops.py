"""Parts of a chunk loop, and the number of shards of the dim that it streams.

    loop 3 chunks across_shards { ... }

over 8 rows of a shard has 2 steps of 3 rows, and one of 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.communication.steps import Dataflow
from hostweave.fusion_ir.ir import ChunkLoop, Op
from hostweave.fusion_ir.ops import RESHARD_STEPS, TO_OTHER_MESHES
from hostweave.types.size import Size


@dataclass(frozen=True)
class LoopPart:
    """Steps of a loop: `count` steps with `rows` rows of a shard each, from row `start` on. If `rows` is None, steps cover equal chunks of
    all rows."""

    count: Size
    rows: Size | None = None
    start: int = 0


def parts(flow: Dataflow, loop: ChunkLoop) -> tuple[LoopPart, ...]:
    """Parts of a loop: one over chunks of equal size and, if these do not divide the rows, one over the remaining rows.

    A shard of 8 rows in 3 chunks becomes 2 steps of 3 rows and one of 2. By shard, each step covers rows of one rank.
    """
    value, split = loop.ops[0].result, shards(flow, loop.ops)
    size, steps = value.type.dims[value.walked.dim].size // split, loop.steps // split if loop.by_block else loop.steps
    if loop.drops_dim or not size.is_int or int(size) % int(steps) == 0:
        return (LoopPart(loop.steps),)
    rows = -(-int(size) // int(steps))
    whole, rest = divmod(int(size), rows)
    each = split if loop.by_block else 1
    found = LoopPart(Size(each * whole), Size(rows)), LoopPart(Size(each), Size(rest), whole * rows)
    return found if rest else found[:1]


def shards(flow: Dataflow, ops: Sequence[Op]) -> int:
    """Number of shards of the streamed dim, before or after the communication of these ops."""
    split = [1]
    for op in ops:
        dims = [op.result.type.dims[op.result.walked.dim]]
        if op.kind in RESHARD_STEPS and op.kind not in TO_OTHER_MESHES:
            dims.append(flow.types[op.tensors[0]].dims[op.result.walked.dim])
        split.extend(flow.mesh_of(op).size_of(dim.axes) for dim in dims)
    return max(split)
