"""Forms chunk loops: chooses the ops of each loop, its chunks, and the algorithms of its reshards.

    %x_gathered: bf16[M, K] = all_gather(%x, dim=0, axes=(x))
    %y: bf16[M, N] stream(M, 8) = matmul(%x_gathered, %w)

becomes

    loop 8 chunks by_shard local_first {
      %x_gathered: bf16[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
      %y: bf16[M, N] stream(M) = matmul(%x_gathered, %w)
    }
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from hostweave.base.errors import Location, OverlapWarning, ProgramError, did_you_mean
from hostweave.base.unchanged import replaced
from hostweave.communication.algorithm import Algorithm
from hostweave.communication.algorithms import NAMES, algorithms_of
from hostweave.communication.chunk_loops import even_loops, shards
from hostweave.communication.dataflow import Dataflow
from hostweave.fusion_ir.ir import CHUNKINGS, ChunkLoop, Fusion, Op, Stream
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS, TO_OTHER_MESHES, index_map, needs_whole, operand_types
from hostweave.fusion_ir.ops.attributes import BLOCKS
from hostweave.fusion_ir.resharding import ReshardStep, step_of
from hostweave.fusion_ir.rewriting import consumers
from hostweave.options import Options
from hostweave.types.size import Size

_shown: dict[str | tuple[str, type[Warning], int], int] = {}  # Python shows a warning of a line once, by default.


def choose_overlap(fusion: Fusion, options: Options) -> Fusion:
    choice = _Choice(fusion, options)
    for op in fusion.ops:
        if op.result.stream and op.result.name not in choice.streams:
            choice.choose(op, op.result.stream)
    flow = Dataflow(replace(fusion, body=tuple(choice.ordered())))
    return replaced(fusion, body=tuple(_Loops(flow, choice.rotations).formed()))


@dataclass(frozen=True)
class _Member:
    """An op of a loop. The loop splits dim `dim` of the op's result. `change` is the step if the op is a reshard step."""

    op: Op
    dim: int
    change: ReshardStep | None = None

    @property
    def name(self) -> str:
        return self.op.result.name

    @property
    def communicates(self) -> bool:
        """True for reshards except local slices. Also true for reductions with a partial result, because a reshard follows."""
        if self.change:
            return not OPS[self.change.kind].is_view
        return bool(OPS[self.op.kind].combine) and self.op.result.type.partial is not None

    def changes_streamed_dim(self, *kinds: str) -> bool:
        return self.change is not None and self.change.dim == self.dim and self.change.kind in kinds


class _Choice:
    def __init__(self, fusion: Fusion, options: Options):
        self.mesh, self.options = fusion.mesh, options
        self.ops = fusion.ops
        self.types = fusion.types
        self.made = fusion.made
        self.number = {op.result.name: i for i, op in enumerate(fusion.ops)}
        self.uses = consumers(fusion)
        self.streams: dict[str, Stream] = {}
        self.rotations: dict[str, str | None] = {}  # streamed value -> rotation of its loop
        self.joined: dict[str, list[_Member]] = {}  # streamed value -> further ops of its loop

    def choose(self, root: Op, stream: Stream) -> None:
        if stream.algorithm and stream.algorithm not in NAMES:
            why = f"there is no algorithm={stream.algorithm!r}; {did_you_mean(stream.algorithm, NAMES)}"
            raise ProgramError(f"stream of %{root.result.name}: {why}", root.location)
        members = self.members(root, stream.dim, through_gathers=False)
        chunking, by = self.communicate(root, stream, members)
        if chunking == "across_shards":
            members = self.members(root, stream.dim, through_gathers=True)
            chunking, by = self.communicate(root, replace(stream, chunking=chunking), members)
        if why := next(filter(None, map(self.shared_unevenly, members)), ""):
            self.warn(root, f"{why}, so no loop is formed; pad the dim so that the split is even")
            return
        rotation = next((by[m.name].rotation for m in members if m.name in by), None)
        if not by:
            chunking, rotation = self.compute(root, stream)
            self.warn_of_gathers_before(members[0])
        for member in members:
            self.streams[member.name] = Stream(member.dim, stream.chunks, chunking, by[member.name].name if member.name in by else None)
            self.rotations[member.name] = rotation
        self.joined[root.result.name] = members[1:]

    def members(self, root: Op, dim: int, through_gathers: bool) -> list[_Member]:
        """The streamed op, the communications of its operands, the producers of communicated values, and consumers that must join the loop.

        In a loop by shard, an iteration reads the shard of one rank, so the search stops at a gather of the chunked dim. In a loop across
        shards (`through_gathers`), all members that shard the chunked dim must have the same number of shards.
        """
        found = [self.member(root, dim)]
        barriers = ("shard",) if through_gathers else ("shard", "all_gather")
        shards = self.shards(found[0])
        for member in found:  # `found` grows during the iteration.
            if (member is found[0] or member.communicates) and not member.changes_streamed_dim(*barriers):
                for producer, beside in self.producers(member):
                    if not through_gathers or len(shards | self.shards(producer)) < 2:
                        shards |= self.shards(producer)
                        known = {each.name for each in found}
                        found += [each for each in (producer, *beside) if each.name not in known]
        return found

    def shards(self, member: _Member) -> set[int]:
        """Numbers of shards of the chunked dim in a member's result, and in the operand of a reshard. Omits 1."""
        types = [member.op.result.type, *([self.types[member.op.tensors[0]]] if member.change else [])]
        return {type.mesh_in(self.mesh).size_of(type.dims[member.dim].axes) for type in types} - {1}

    def member(self, op: Op, dim: int) -> _Member:
        return _Member(op, dim, step_of(op) if op.kind in RESHARD_STEPS else None)

    def producers(self, member: _Member) -> Iterator[tuple[_Member, list[_Member]]]:
        """Yields producers of operands that can run in the loop. Each producer comes with the consumers that must join the loop too."""
        indices = index_map(member.op, operand_types(member.op, self.types))
        rows = member.op.result.type.dims[member.dim].size
        for i, name in enumerate(member.op.operands):
            op = self.made.get(name) if isinstance(name, str) else None
            dim = indices.operand_dim(i, member.dim)
            if op is None or op.callee or dim is None or op.result.stream or needs_whole(op, operand_types(op, self.types), dim):
                continue
            if OPS[member.op.kind].is_product and i > 1 and (op.kind != "all_gather" or op.result.type.dims[dim].size != rows):
                continue  # Scales are communicated before the loop, unless they are gathered along the chunked rows.
            producer = self.member(op, dim)
            if (beside := self.beside(producer, member)) is None:
                continue
            if producer.change and self.moves_streamed_dim(producer, producer.change):
                continue
            if producer.communicates or member.communicates:
                yield producer, beside

    def beside(self, producer: _Member, member: _Member) -> list[_Member] | None:
        """Consumers of `producer`, except `member`, that must join the loop. None if one of these consumers cannot join.

        These consumers must be streamed like `member`. If `producer` is an all_gather, later consumers without a stream can follow the
        loop.
        """
        stated, others = member.op.result.stream, [op for op in self.uses[producer.name] if op != member.op]
        here = self.number[member.name]
        if producer.change and producer.change.kind == "all_gather":
            others = [op for op in others if op and (op.result.stream or self.number[op.result.name] < here)]
        if not others:
            return []
        if stated is None or not producer.communicates or len({op.result.name for op in others if op}) < len(others):
            return None
        walked = {producer.name: producer.dim, member.name: member.dim}  # value that the loop computes -> its chunked dim
        found = []
        for op in others:
            stream = op.result.stream if op else None
            alike = stream is not None and replace(stream, dim=0) == replace(stated, dim=0)
            if op is None or stream is None or not alike or op.callee or op.result.type.partial or self.number[op.result.name] < here:
                return None
            indices = index_map(op, operand_types(op, self.types))
            taken = [(name, indices.operand_dim(i, stream.dim)) for i, name in enumerate(op.operands) if isinstance(name, str)]
            if any(walked[name] != dim if name in walked else self.number.get(name, -1) > here for name, dim in taken):
                return None
            walked[op.result.name] = stream.dim
            found.append(self.member(op, stream.dim))
        return found

    def warn_of_gathers_before(self, member: _Member) -> None:
        """Warns if a gather stays before the loop for consumers outside of the loop. The loop then has no communication."""
        indices, op = index_map(member.op, operand_types(member.op, self.types)), member.op
        for i, name in enumerate(op.operands):
            gather, dim = self.made.get(str(name)), indices.operand_dim(i, member.dim)
            if gather is None or dim is None or gather.kind != "all_gather" or gather.result.stream or gather.result.name in self.streams:
                continue
            others = [f"%{user.result.name}" if user else "the caller" for user in self.uses[gather.result.name] if user != op]
            if others and self.member(gather, dim).changes_streamed_dim("all_gather"):
                why = f"the all_gather of %{gather.tensors[0]} is before the loop, because its result is used by {' and '.join(others)} too"
                remedy = "stream all users over the same dim, in equal chunks, so that no user needs a whole result of another"
                self.warn(op, f"{why}; {remedy}")

    def communicate(self, root: Op, stream: Stream, members: list[_Member]) -> tuple[str, dict[str, Algorithm]]:
        """Chunking of the loop, and algorithm of each reshard. Both are empty if the loop has no communication."""
        possible = {m.name: (m.change.kind, self.algorithms(m, m.change, stream)) for m in members if m.change and m.communicates}
        for chunking in (stream.chunking,) if stream.chunking else CHUNKINGS:
            fitting = {name: [one for one in algorithms if one.chunking == chunking] for name, (_, algorithms) in possible.items()}
            by = {name: next((one for one in fits if one.name == stream.algorithm), fits[0]) for name, fits in fitting.items() if fits}
            rotations, names = {one.rotation for one in by.values()}, {one.name for one in by.values()}
            if by and len(by) == len(possible) and len(rotations) == 1 and (stream.algorithm is None or stream.algorithm in names):
                return chunking, by
        is_alone = 1 in [size for _, size in root.result.type.mesh_in(self.mesh).axes]  # A process group of one rank communicates nothing.
        if possible or (stream.algorithm and not is_alone):
            self.refuse(root, stream, possible)
        return "", {}

    def algorithms(self, member: _Member, change: ReshardStep, stream: Stream) -> list[Algorithm]:
        if self.moves_streamed_dim(member, change):
            return []
        whole = member.op.result.type if change.kind == "all_gather" else self.types[member.op.tensors[0]]
        fits = stream.chunks is None or stream.chunks % whole.mesh_in(self.mesh).size_of(change.axes) == 0
        by_shard = member.changes_streamed_dim("all_gather", "reduce_scatter") and not whole.dims[member.dim].axes and fits
        is_counted = stream.chunks is not None or member.op.result.type.shape[member.dim].is_int
        is_on_all_ranks = all(type.mesh is None for type in self.types.values())
        return [
            algorithm
            for algorithm, transport in algorithms_of(change.kind, self.options)
            if algorithm.fits(change, transport, is_counted, is_on_all_ranks) and (by_shard or algorithm.chunking == "across_shards")
        ]

    def moves_streamed_dim(self, member: _Member, change: ReshardStep) -> bool:
        if change.kind in TO_OTHER_MESHES:
            return OPS[change.kind].reduces or not self.moves_whole_blocks(member)
        before, after = (type.dims[member.dim].axes for type in (self.types[member.op.tensors[0]], member.op.result.type))
        return change.kind in ("all_to_all", "permute_shards") and before != after

    def moves_whole_blocks(self, member: _Member) -> bool:
        """True if the two meshes of a move are disjoint, and each rank sends or receives its local tensor as one block."""
        source, target = self.types[member.op.tensors[0]], member.op.result.type
        blocks = member.op[BLOCKS]
        apart = set(source.mesh_in(self.mesh).all_ranks).isdisjoint(target.mesh_in(self.mesh).all_ranks)
        return apart and set(blocks.sent) | set(blocks.received) <= {1}

    def refuse(self, root: Op, stream: Stream, possible: dict[str, tuple[str, list[Algorithm]]]) -> NoReturn:
        stated = ", ".join(f"{word}={value!r}" for word, value in (("chunking", stream.chunking), ("algorithm", stream.algorithm)) if value)
        transport = self.options.transport
        stated += f"transport={transport!r}" if transport != "auto" and not stated else ""
        usable = {name: ", ".join(f"{one.name} ({one.chunking})" for one in algorithms) for name, (_, algorithms) in possible.items()}
        able = {name: f"can use {words}" if words else "cannot be divided into chunks" for name, words in usable.items()}
        remedies = [f"the {kind} of %{name} {able[name]}" for name, (kind, _) in possible.items()]
        if not possible:
            remedies = ["no op of the loop communicates, so leave the algorithm out"]
        elif transport != "auto":
            remedies.append(f'transport={transport!r} has no other algorithm, use transport="auto"')
        elif not any(usable.values()):
            remedies.append("leave .stream out")
        why = f"{stated or 'a chunk loop'} is not possible here"
        raise ProgramError(f"stream of %{root.result.name}: {why}; {'; '.join(remedies)}", root.location)

    def compute(self, root: Op, stream: Stream) -> tuple[str, str | None]:
        """Chunking and rotation of a loop without communication: by default like an earlier loop that can fuse with this loop."""
        if root.result.type.dims[stream.dim].axes:
            if stream.chunking == "by_shard":
                why = f"chunking='by_shard' is not possible, because a rank holds only one block of {root.result.type}"
                raise ProgramError(f"stream of %{root.result.name}: {why}; use chunking='across_shards'", root.location)
            return "across_shards", None
        before = next(self.loops_before(root, stream), None)
        if before and stream.chunking in (None, before[0]):
            return before
        return stream.chunking or "across_shards", None

    def loops_before(self, root: Op, stream: Stream) -> Iterator[tuple[str, str | None]]:
        """Yields chunking and rotation of loops that compute an operand, if iteration i reads only chunk i along an unsharded dim."""
        indices = index_map(root, operand_types(root, self.types))
        for i, name in enumerate(root.operands):
            made = self.streams.get(name) if isinstance(name, str) else None
            has_same_chunks = made and made.chunks == stream.chunks and made.dim == indices.operand_dim(i, stream.dim)
            if made and has_same_chunks and not self.types[str(name)].dims[made.dim].axes:
                yield made.chunking or "across_shards", self.rotations[str(name)]

    def shared_unevenly(self, member: _Member) -> str:
        """Describes a dim of known size with unequal shards, if the loop splits it or a reshard changes the dim's axes or mesh. Otherwise
        ""."""
        types = [member.op.result.type, *([self.types[member.op.tensors[0]]] if member.change else [])]
        for type in types:
            for dim, own in enumerate(type.dims):
                ranks, is_moved = type.mesh_in(self.mesh).size_of(own.axes), member.op.kind in TO_OTHER_MESHES
                changes = is_moved or len({other.dims[dim].axes for other in types}) > 1
                if (dim == member.dim or changes) and own.size.is_int and int(own.size) % ranks:
                    return f"{ranks} ranks do not split the size {own.size} of dim {dim} of %{member.name} evenly"
        return ""

    def warn(self, op: Op, why: str) -> None:
        text, at = f"stream of %{op.result.name} overlaps nothing: {why}", op.location or Location("program", 1)
        warnings.warn_explicit(text, OverlapWarning, at.file, at.line, registry=_shown)

    def ordered(self) -> Iterator[Op]:
        moved = {member.name for members in self.joined.values() for member in members}
        for op in self.ops:
            if op.result.name not in moved:
                members = [op, *(member.op for member in self.joined.get(op.result.name, []))]
                yield from map(self.streamed, sorted(members, key=lambda op: self.number[op.result.name]))

    def streamed(self, op: Op) -> Op:
        return replaced(op, result=replaced(op.result, stream=self.streams.get(op.result.name)))


class _Loops:
    """Moves streamed ops into loops. Adjacent ops share a loop only if their chunks are equal, and iteration i reads only chunks of
    iteration i.

        %h: f32[M, K] stream(M, 4, by_shard) = negative(%x)
        %v: f32[K, M] = permute_dims(%x, axes=(1, 0))
        %y: f32[M, N] stream(M, 4, by_shard) = matmul(%h, %w)

    becomes the view %v and one loop of %h and %y. Views alone do not form a loop.
    """

    def __init__(self, flow: Dataflow, rotations: Mapping[str, str | None]):
        self.flow, self.rotations = flow, rotations

    def formed(self) -> Iterator[Op | ChunkLoop]:
        items: list[Op | ChunkLoop] = []
        for op in self.flow.fusion.ops:
            last = items[-1] if items else None
            if op.result.stream is None:
                is_first = isinstance(last, ChunkLoop) and self.flow.is_view(op) and not last.makes(op.tensors[0])
                items.insert(len(items) - is_first, op)
            elif isinstance(last, ChunkLoop) and self.joins(op, loop := self.loop_of(op), last):
                items[-1] = replace(last, ops=(*last.ops, *loop.ops))
            else:
                items.append(self.loop_of(op))
        for item in items:
            if isinstance(item, Op):
                yield item
            elif all(map(self.flow.is_view, item.ops)):
                yield from (replace(op, result=replace(op.result, stream=None)) for op in item.ops)
            else:
                inside = ((op, replace(op.result.walked, chunks=None, chunking=None)) for op in item.ops)  # The loop states the chunks.
                yield replace(item, ops=tuple(replace(op, result=replace(op.result, stream=stream)) for op, stream in inside))

    def loop_of(self, op: Op) -> ChunkLoop:
        stream, drops_dim = op.result.walked, op.result.walked.chunks is None
        size, chunking = op.result.type.dims[stream.dim].size, stream.chunking or "across_shards"
        indices = size if chunking == "by_shard" else size // shards(self.flow, (op,))
        trips = indices if stream.chunks is None else Size(stream.chunks)
        return ChunkLoop((op,), trips, drops_dim, chunking, self.rotations[op.result.name])

    def joins(self, op: Op, alone: ChunkLoop, loop: ChunkLoop) -> bool:
        """True if an op can join `loop`. `alone` is the loop of the op alone."""
        flow, stream = self.flow, op.result.walked
        if replace(alone, ops=loop.ops) != loop or not self.walk_alike(alone, loop):
            return False
        fed = (user.result.stream for user in flow.consumers[op.result.name])
        if loop.by_block and (any(other and other.algorithm for other in fed) or (stream.algorithm and not self.moves_with(op, loop))):
            return False  # Only one communication of a loop can determine the block of an iteration.
        for number, operand in enumerate(op.operands):
            if not isinstance(operand, str) or not loop.makes(operand):
                continue
            produced = flow.values[operand].walked
            if flow.map(op).operand_dim(number, stream.dim) != produced.dim:
                return False  # The op reads beyond the chunk of its iteration.
            is_communicated = loop.communication is not None and loop.communication.result.name == operand
            if loop.by_block and is_communicated and flow.types[operand].dims[produced.dim].axes:
                return False  # The shard is complete only after the last iteration.
        return True

    def moves_with(self, op: Op, loop: ChunkLoop) -> bool:
        """True if `op` and all ops of the loop are all_gathers that one communication can do. A third op must read the results of `op` and
        of the first gather."""
        first, gathers = loop.ops[0], {each.kind for each in (*loop.ops, op)} == {"all_gather"}
        if not gathers or not any(user in self.flow.consumers[first.result.name] for user in self.flow.consumers[op.result.name]):
            return False
        return (step_of(op).axes, op.result.walked.algorithm) == (step_of(first).axes, first.result.walked.algorithm)

    def walk_alike(self, alone: ChunkLoop, loop: ChunkLoop) -> bool:
        """True if the chunked dims of all ops have the same size, or if the chunks of each dim have equal sizes."""
        joined = replace(loop, ops=(*loop.ops, *alone.ops))
        sizes = {op.result.type.dims[op.result.walked.dim].size for op in joined.ops}
        return len(sizes) == 1 or all(even.rows is None for each in (alone, loop, joined) for even in even_loops(self.flow, each))
