"""Which ops share a stream loop: consecutive streamed ops with the same iterations, each reading what its own iteration produced.

    %h: f32[M, K] stream(M, 4, by_shard) = negative(%x)
    %v: f32[K, M] = permute_dims(%x, axes=(1, 0))
    %y: f32[M, N] stream(M, 4, by_shard) = matmul(%h, %w)

is %v by itself, a view that costs nothing where it stands, and then a loop of %h and %y.
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
    """Neighbouring ops of one loop; an op outside of every loop stands alone."""

    ops: tuple[Op, ...]

    @property
    def is_streamed(self) -> bool:
        return self.ops[0].result.stream is not None

    @property
    def communication(self) -> Op | None:
        """The op whose communication decides which block a step takes."""
        return next((op for op in self.ops if op.result.stream and op.result.stream.algorithm), None)

    @property
    def by_block(self) -> bool:
        """True if the blocks of a communication are walked; a loop that has none takes its steps in order."""
        stream = self.ops[0].result.stream
        return stream is not None and stream.chunking == "by_shard" and self.communication is not None

    def makes(self, name: str) -> bool:
        return any(op.result.name == name for op in self.ops)


def gathered_beside(flow: Dataflow, op: Op) -> Op | None:
    """The gather outside of loops of whose shards a product takes one a step, if it is one that does (`multiply_shards`)."""
    stream, last = op.result.stream, len(op.result.type.dims) - 1
    if op.kind != "matmul" or stream is None or (stream.dim, stream.chunking, stream.rotation) != (last, "by_shard", "local_first"):
        return None
    made = flow.producer.get(flow.viewed(op.tensors[1]))
    return made if made and made.kind == "all_gather" and made.result.is_async and not made.result.stream else None


def loops_of(flow: Dataflow) -> tuple[Loop, ...]:
    """Ops in order, neighbours with the same loop together. Views cost nothing, so they go before a loop that they would cut."""
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
    """How many steps a streamed op takes, and whether each drops the dim."""
    stream = op.result.walked
    if stream.chunks is not None:
        return Size(stream.chunks), False
    size = op.result.type.dims[stream.dim].size
    return (size if stream.chunking == "by_shard" else size // shards(flow, (op,))), True


@dataclass(frozen=True)
class Part:
    """So many steps of a loop, each over so many rows of a shard, from `start` on; over equal chunks of all rows if `rows` is None."""

    count: Size
    rows: Size | None = None
    start: int = 0


def parts(flow: Dataflow, loop: Loop) -> tuple[Part, ...]:
    """A loop as one over chunks of equal size, and one over the rest of the rows, which are fewer, if the chunks do not divide them.

    Each rank's shard of 8 rows in 3 chunks is 2 steps over 3 rows and one over 2. By block a step of each part takes those of one rank.
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
    """Into how many shards the streamed dim is split, before or after the communication of these ops."""
    split = [1]
    for op in ops:
        dims = [op.result.type.dims[op.result.walked.dim]]
        if op.kind in RESHARD_STEPS and op.kind not in TO_OTHER_MESHES:
            dims.append(flow.types[op.tensors[0]].dims[op.result.walked.dim])
        split.extend(flow.mesh_of(op).size_of(dim.axes) for dim in dims)
    return max(split)


def _walks_alike(flow: Dataflow, op: Op, loop: Loop) -> bool:
    """True if chunks of an op have the rows of those of the loop, or both loops have chunks of equal size."""
    sizes = {each.result.type.dims[each.result.walked.dim].size for each in (op, *loop.ops)}
    return len(sizes) == 1 or all(part.rows is None for each in (Loop((op,)), loop, Loop((*loop.ops, op))) for part in parts(flow, each))


def _joins(flow: Dataflow, op: Op, loop: Loop) -> bool:
    """True if an op can take its steps in this loop."""
    stream, other = op.result.stream, loop.ops[0].result.stream
    if stream is None or other is None or gathered_beside(flow, op) or iterations(flow, op) != iterations(flow, loop.ops[0]):
        return False
    if (stream.chunking, stream.rotation) != (other.chunking, other.rotation) or not _walks_alike(flow, op, loop):
        return False
    fed = (user.result.stream for user in flow.consumers[op.result.name])
    if loop.by_block and (stream.algorithm or any(other and other.algorithm for other in fed)):
        return False  # a step can follow the rotation of one communication
    for number, operand in enumerate(op.operands):
        if not isinstance(operand, str) or not loop.makes(operand):
            continue
        produced = flow.values[operand].stream
        if produced is None or flow.map(op).operand_dim(number, stream.dim) != produced.dim:
            return False  # it reads more than the chunk of its own step
        is_communicated = loop.communication is not None and loop.communication.result.name == operand
        if loop.by_block and is_communicated and flow.types[operand].dims[produced.dim].axes:
            return False  # the shard is complete only after the last step
    return True
