"""Groups ops into stream loops: consecutive streamed ops with the same iterations, each reading what its own iteration produced.

    %h: f32[M, K] stream(M, 4, by_shard) = negative(%x)
    %v: f32[K, M] = permute_dims(%x, axes=(1, 0))
    %y: f32[M, N] stream(M, 4, by_shard) = matmul(%h, %w)

becomes %v alone, a view without cost, and then a loop of %h and %y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.communication.steps import Dataflow
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import RESHARD_STEPS, TO_OTHER_MESHES
from hostweave.types.size import Size


@dataclass(frozen=True)
class Loop:
    """Consecutive ops of one loop, or a single op outside of loops."""

    ops: tuple[Op, ...]

    @property
    def is_streamed(self) -> bool:
        return self.ops[0].result.stream is not None

    @property
    def communication(self) -> Op | None:
        """The op whose communication determines the block of a step, or None."""
        return next((op for op in self.ops if op.result.stream and op.result.stream.algorithm), None)

    @property
    def by_block(self) -> bool:
        """True if the steps visit the blocks of a communication. A loop without communication takes its steps in order."""
        stream = self.ops[0].result.stream
        return stream is not None and stream.chunking == "by_shard" and self.communication is not None

    def makes(self, name: str) -> bool:
        return any(op.result.name == name for op in self.ops)


def gathered_beside(flow: Dataflow, op: Op) -> Op | None:
    """The gather outside of loops whose shards a matmul takes one per step (`multiply_shards`). None for other ops."""
    stream, last = op.result.stream, len(op.result.type.dims) - 1
    if op.kind != "matmul" or stream is None or (stream.dim, stream.chunking, stream.rotation) != (last, "by_shard", "local_first"):
        return None
    made = flow.producer.get(flow.viewed(op.tensors[1]))
    return made if made and made.kind == "all_gather" and made.result.is_async and not made.result.stream else None


def loops_of(flow: Dataflow) -> tuple[Loop, ...]:
    """Loops and single ops, in order. A view between two ops of a loop moves before the loop."""
    result: list[Loop] = []
    for op in flow.fusion.ops:
        last = result[-1] if result else None
        if last and _joins(flow, op, last):
            result[-1] = Loop((*last.ops, op))
        elif last and last.is_streamed and op.result.stream is None and flow.is_view(op) and not last.makes(op.tensors[0]):
            result.insert(-1, Loop((op,)))
        else:
            result.append(Loop((op,)))
    return tuple(result)


def iterations(flow: Dataflow, op: Op) -> tuple[Size, bool]:
    """Number of steps of a streamed op, and whether a step drops the dim."""
    stream = op.result.walked
    if stream.chunks is not None:
        return Size(stream.chunks), False
    size = op.result.type.dims[stream.dim].size
    return (size if stream.chunking == "by_shard" else size // shards(flow, (op,))), True


@dataclass(frozen=True)
class Part:
    """Steps of a loop: `count` steps with `rows` rows of a shard each, from row `start` on. If `rows` is None, steps cover equal chunks of
    all rows."""

    count: Size
    rows: Size | None = None
    start: int = 0


def parts(flow: Dataflow, loop: Loop) -> tuple[Part, ...]:
    """Parts of a loop: one over chunks of equal size and, if these do not divide the rows, one over the remaining rows.

    A shard of 8 rows in 3 chunks becomes 2 steps of 3 rows and one of 2. By shard, each step covers rows of one rank.
    """
    op, split = loop.ops[0], shards(flow, loop.ops)
    count, drops_dim = iterations(flow, op)
    size, steps = op.result.type.dims[op.result.walked.dim].size // split, count // split if loop.by_block else count
    if drops_dim or not size.is_int or int(size) % int(steps) == 0:
        return (Part(count),)
    rows = -(-int(size) // int(steps))
    whole, rest = divmod(int(size), rows)
    each = split if loop.by_block else 1
    found = Part(Size(each * whole), Size(rows)), Part(Size(each), Size(rest), whole * rows)
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


def _walks_alike(flow: Dataflow, op: Op, loop: Loop) -> bool:
    """True if an op's chunks have the rows of the loop's chunks, or both have chunks of equal size."""
    sizes = {each.result.type.dims[each.result.walked.dim].size for each in (op, *loop.ops)}
    return len(sizes) == 1 or all(part.rows is None for each in (Loop((op,)), loop, Loop((*loop.ops, op))) for part in parts(flow, each))


def _joins(flow: Dataflow, op: Op, loop: Loop) -> bool:
    """True if an op can join a loop."""
    stream, other = op.result.stream, loop.ops[0].result.stream
    if stream is None or other is None or gathered_beside(flow, op) or iterations(flow, op) != iterations(flow, loop.ops[0]):
        return False
    if (stream.chunking, stream.rotation) != (other.chunking, other.rotation) or not _walks_alike(flow, op, loop):
        return False
    fed = (user.result.stream for user in flow.consumers[op.result.name])
    if loop.by_block and (stream.algorithm or any(other and other.algorithm for other in fed)):
        return False  # a step can follow only one communication's rotation
    for number, operand in enumerate(op.operands):
        if not isinstance(operand, str) or not loop.makes(operand):
            continue
        produced = flow.values[operand].stream
        if produced is None or flow.map(op).operand_dim(number, stream.dim) != produced.dim:
            return False  # reads more than the chunk of its own step
        is_communicated = loop.communication is not None and loop.communication.result.name == operand
        if loop.by_block and is_communicated and flow.types[operand].dims[produced.dim].axes:
            return False  # the shard is complete only after the last step
    return True
