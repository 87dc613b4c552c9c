"""Decomposes every reshard into collectives, transfers and local ops. Removes reshards without effect, or replaces them by copies.

    %y: bf16[M, N@y] pinned = reshard(%x)               # x: bf16[M@x, N]

becomes

    %y_sliced: bf16[M@x, N@y] = shard(%x, dim=1, axes=(y))
    %y: bf16[M, N@y] pinned = all_gather(%y_sliced, dim=0, axes=(x))
"""

from dataclasses import replace
from functools import reduce

from hostweave.base.errors import ProgramError
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops import OPS, needs_whole, operand_types
from hostweave.fusion_ir.resharding import ReshardStep, in_rank_order, plan, zigzag_changes
from hostweave.fusion_ir.rewriting import consumers, eliminate_dead_code
from hostweave.fusion_ir.sharding import Axes, layout, with_axes
from hostweave.options import Options
from hostweave.transports.transport import MESSAGES, SIGNALS
from hostweave.types.blocks import shared_dims
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType
from hostweave.types.zigzag import Zigzag, inverse, order_of_pieces


def decompose_reshards(fusion: Fusion, options: Options) -> Fusion:
    decomposed = _Decomposition(fusion, options).rewritten()
    return replaced(decomposed, body=eliminate_dead_code(decomposed.ops, fusion.outputs))


class _Decomposition(OpRewriter):
    def __init__(self, fusion: Fusion, options: Options):
        super().__init__(fusion)
        self.options, self.sizes = options, options.sizes
        self.types = dict(fusion.types)
        self.producer: dict[str, int] = {}  # value -> index of its op in `ops`
        self.consumers = consumers(fusion)
        self.same: dict[str, str] = {}  # removed value -> value that replaces it
        self.done: dict[tuple[str, TensorType], str] = {}

    def emit(self, op: Op) -> None:
        self.producer[op.result.name] = len(self.ops)
        self.consumers.setdefault(op.result.name, [self.op])
        super().emit(op)

    def add(self, op: Op) -> None:
        self.op = op = op.renamed(self.same)
        if op.kind != "reshard":
            self.emit(op)
            return
        (source,) = op.tensors
        # A move to another mesh can take a block from any rank that stores the block, so the move skips local slices.
        if op.result.type.mesh != self.types[source].mesh:
            while source in self.producer and self.ops[self.producer[source]].kind == "shard":
                (source,) = self.ops[self.producer[source]].tensors
        if zigzag_changes(self.types[source], op.result.type):
            self.through_rank_order(op, source)
            return
        if op.result.type.mesh != self.types[source].mesh and not op.result.stream and (uneven := self.unread(source, op.result.type)):
            self.remove(op, self.through_whole_dims(op, source, uneven))
            return
        steps = plan(self.types[source], op.result.type, self.mesh, self.sizes, op.location)
        if not steps:
            self.remove(op, source)
            return
        for step in steps[:-1]:
            source = self.step(source, step)
        if (before := self.done.get((source, op.result.type))) and not op.result.stream:
            self.use(op, before)
            return
        self.emit(steps[-1].op(source, self.types[source], op.result, self.mesh, op.location))
        if not op.result.stream:
            self.done[source, op.result.type] = op.result.name

    def unread(self, source: str, wanted: TensorType) -> list[int]:
        """Dims with blocks of different sizes, if the transport moves blocks by gets. Gets need equal blocks."""
        transport = self.options.transport_carrying(MESSAGES, SIGNALS)
        if not transport or transport.carries >= MESSAGES:
            return []
        return [number for number, dim in enumerate(shared_dims(self.types[source], wanted, self.mesh)) if dim.is_uneven(())]

    def through_whole_dims(self, op: Op, source: str, dims: list[int]) -> str:
        """Moves a value to another mesh. Gathers `dims` before the move, and slices them after the move."""
        ends = (replace(type, partial=None) for type in (self.types[source], op.result.type))
        given, wanted = (reduce(lambda type, dim: with_axes(type, dim, ()), dims, type) for type in ends)
        for type in (given, wanted, op.result.type):
            source = self.resharded(source, type)
        return source

    def through_rank_order(self, op: Op, source: str) -> None:
        """Reshards to or from zigzag: gathers a dim, reorders its pieces on each rank, and slices the dim."""
        given, wanted = self.types[source], op.result.type
        if op.result.stream:
            why = f"%{op.result.name} is streamed, but the reshard from {given} to {wanted} reorders the pieces of a dim"
            raise ProgramError(f"reshard: {why}; stream a value computed from it, or remove zigzag", op.location)
        changed = zigzag_changes(given, wanted)
        before, after = ([dim for dim in changed if isinstance(layout(type)[dim], Zigzag)] for type in (given, wanted))
        between = in_rank_order(given, wanted)[0][1]
        for dim in before:
            source = self.put_in_order(source, dim, between if dim == before[-1] else with_axes(self.types[source], dim, ()))
        source = self.resharded(source, between)
        for number, dim in enumerate(after, 1):
            source = self.put_by_rank(source, dim, reduce(lambda type, later: with_axes(type, later, ()), after[number:], wanted))
        self.remove(op, self.resharded(source, wanted))

    def put_in_order(self, source: str, dim: int, wanted: TensorType) -> str:
        """Converts a dim from zigzag to plain order: gathers the shards, then moves the pieces to their positions."""
        axes = layout(self.types[source])[dim]
        ranks, piece = self.pieces(source, dim, axes)
        by_rank = self.make("renumber", source, how=attributes(axis=dim, sources=order_of_pieces(int(ranks))), word="by_rank")
        shards = self.moved(self.reshaped(by_rank, dim, 1, (ranks, Size(2), piece)), dim, 0, "shards")
        shards = self.resharded(shards, self.by_shard(wanted, dim, (), (ranks, piece)))
        halves = self.moved(shards, 0, dim + 1, "halves")
        return self.reshaped(self.second_reversed(halves, dim + 1, dim), dim, 3, (wanted.shape[dim],))

    def put_by_rank(self, source: str, dim: int, wanted: TensorType) -> str:
        """Converts a dim from plain order to zigzag, by the inverse of the steps of `put_in_order`."""
        axes = tuple(layout(wanted)[dim])
        ranks, piece = self.pieces(source, dim, axes)
        halves = self.moved(self.reshaped(source, dim, 1, (Size(2), ranks, piece)), dim + 1, 0, "halves")
        shards = self.second_reversed(halves, 0, dim + 1)
        shards = self.moved(self.resharded(shards, self.by_shard(wanted, dim, axes, (ranks, piece))), 0, dim, "shards")
        by_rank = self.reshaped(shards, dim, 3, (wanted.shape[dim],))
        order = inverse(order_of_pieces(int(ranks)))
        return self.make("renumber", by_rank, how=attributes(axis=dim, sources=order), word="in_zigzag")

    def pieces(self, source: str, dim: int, axes: Axes) -> tuple[Size, Size]:
        """Number of ranks, and size of a piece. Each rank has two pieces."""
        ranks = self.types[source].mesh_in(self.mesh).size_of(axes)
        return Size(ranks), self.types[source].shape[dim] // (2 * ranks)

    def by_shard(self, type: TensorType, dim: int, axes: Axes, pieces: tuple[Size, Size]) -> TensorType:
        """Replaces a dim by two dims: the pieces of a rank, and the elements of a piece. Adds an outermost dim for the ranks."""
        ranks, piece = pieces
        return replace(type, dims=(Dim(ranks, axes), *type.dims[:dim], Dim(Size(2)), Dim(piece), *type.dims[dim + 1 :]))

    def second_reversed(self, source: str, axis: int, halves: int) -> str:
        """Reverses the order of the second pieces. Rank 0 has the first piece of the first half, and the last piece of the second half."""
        return self.make("reverse_second", source, how=attributes(axis=axis, halves=halves), word="pieces")

    def moved(self, source: str, dim: int, to: int, word: str) -> str:
        order = [i for i in range(len(self.types[source].dims)) if i != dim]
        return self.make("permute_dims", source, how=attributes(axes=(*order[:to], dim, *order[to:])), word=word)

    def resharded(self, source: str, wanted: TensorType) -> str:
        for step in plan(self.types[source], wanted, self.mesh, self.sizes, self.op.location):
            source = self.step(source, step)
        return source

    def step(self, source: str, step: ReshardStep) -> str:
        """Emits a step of a reshard. Returns the result of the step, or of an equal earlier step."""
        before, type = self.types[source], step.applied(self.types[source], self.mesh)
        if (source, type) not in self.done:
            between = Value(self.free_name(f"{self.op.result.name}_{OPS[step.kind].makes}"), type)
            self.emit(step.op(source, before, between, self.mesh, self.op.location))
            self.done[source, type] = between.name
        return self.done[source, type]

    def remove(self, op: Op, source: str) -> None:
        """Removes a reshard without effect. If possible, the producer of the operand gets the name and stream of the reshard's result."""
        at, name = self.producer.get(source), op.result.name
        users = self.consumers.get(source, [])
        is_alone = [user and user.result.name for user in users] == [name]
        is_returned = None in self.consumers[name] and None not in users and not op.result.stream
        producer = self.ops[at] if at is not None else None
        if producer and at is not None and self.can_state(producer, op.result) and (is_alone or (is_returned and not producer.callee)):
            self.producer[name] = at
            self.ops[at] = replace(producer, result=op.result)
            self.ops[at + 1 :] = [other.renamed({source: name}) for other in self.ops[at + 1 :]]
            self.same = {gone: name if kept == source else kept for gone, kept in self.same.items()} | {source: name}
            self.done = {key: name if made == source else made for key, made in self.done.items()}
            self.consumers[name] += () if is_alone else users
        else:
            self.use(op, source)

    def can_state(self, producer: Op, result: Value) -> bool:
        if producer.result.stream or producer.result.pinned:
            return False
        stream = result.stream
        return not stream or not (producer.callee or needs_whole(producer, operand_types(producer, self.types), stream.dim))

    def use(self, op: Op, source: str) -> None:
        """Uses an existing value as the result of a reshard. Emits a copy only if the result is returned or in a chunk loop."""
        if op.result.stream or None in self.consumers[op.result.name]:
            self.emit(replace(op, kind="copy", operands=(source,)))
        else:
            self.same[op.result.name] = source
            self.consumers[source] += self.consumers[op.result.name]
