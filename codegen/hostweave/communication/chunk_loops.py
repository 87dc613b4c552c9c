"""Splits a chunk loop into loops, each with chunks of one size.

    loop 3 chunks across_shards { ... }

If each shard has 8 rows, this loop has 2 iterations of 3 rows, and 1 iteration of 2 rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.communication.dataflow import Dataflow
from hostweave.fusion_ir.ir import ChunkLoop, Op
from hostweave.fusion_ir.ops import RESHARD_STEPS, TO_OTHER_MESHES
from hostweave.types.size import Size


@dataclass(frozen=True)
class EvenLoop:
    """`count` iterations of a chunk loop. A chunk has `rows` rows of a shard. The first chunk begins at row `start`. If `rows` is None, the
    iterations split all rows of a shard evenly."""

    count: Size
    rows: Size | None = None
    start: int = 0


def even_loops(flow: Dataflow, loop: ChunkLoop) -> tuple[EvenLoop, ...]:
    """One loop and, if equal chunks do not cover all rows, a second loop for the remaining rows. In a loop by shard, both loops have
    iterations for the shards of all ranks."""
    value, split = loop.ops[0].result, shards(flow, loop.ops)
    size, trips = value.type.dims[value.walked.dim].size // split, loop.trips // split if loop.by_block else loop.trips
    if loop.drops_dim or not size.is_int or int(size) % int(trips) == 0:
        return (EvenLoop(loop.trips),)
    rows = -(-int(size) // int(trips))
    whole, rest = divmod(int(size), rows)
    each = split if loop.by_block else 1
    found = EvenLoop(Size(each * whole), Size(rows)), EvenLoop(Size(each), Size(rest), whole * rows)
    return found if rest else found[:1]


def shards(flow: Dataflow, ops: Sequence[Op]) -> int:
    """Largest number of shards of the chunked dim in the results of `ops`, and in the operands of reshards within one mesh."""
    split = [1]
    for op in ops:
        dims = [op.result.type.dims[op.result.walked.dim]]
        if op.kind in RESHARD_STEPS and op.kind not in TO_OTHER_MESHES:
            dims.append(flow.types[op.tensors[0]].dims[op.result.walked.dim])
        split.extend(flow.mesh_of(op).size_of(dim.axes) for dim in dims)
    return max(split)
