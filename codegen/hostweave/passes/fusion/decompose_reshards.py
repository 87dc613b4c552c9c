"""Decomposes every reshard into ops of one collective or local slice each, shares equal ones, and removes those without effect.

    %y: bf16[M, N@y] pinned = reshard(%x)               # x: bf16[M@x, N]

becomes

    %y_sliced: bf16[M@x, N@y] = shard(%x, dim=1, axes=(y))
    %y: bf16[M, N@y] pinned = all_gather(%y_sliced, dim=0, axes=(x))
"""

from collections.abc import Iterable
from dataclasses import replace

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops import needs_whole, operand_types
from hostweave.fusion_ir.resharding import ReshardStep, in_rank_order, plan, zigzag_changes
from hostweave.fusion_ir.rewriting import Names, consumers, eliminate_dead_code
from hostweave.fusion_ir.sharding import Axes, layout, with_layout
from hostweave.options import Options
from hostweave.passes.fusion.insert_reshards import SUFFIXES
from hostweave.types.tensor import TensorType
from hostweave.types.zigzag import Zigzag, inverse, order_of_pieces


def decompose_reshards(fusion: Fusion, options: Options) -> Fusion:
    """After it a reshard is one of ops.RESHARD_STEPS, with all that it does in its attributes. Of several ways the one that moves the
    fewest bytes is taken.
    """
    decomposition = _Decomposition(fusion, options)
    for op in fusion.ops:
        decomposition.add(op)
    return replace(fusion, ops=eliminate_dead_code(decomposition.ops, fusion.outputs))


class _Decomposition:
    def __init__(self, fusion: Fusion, options: Options):
        self.mesh, self.sizes = fusion.mesh, options.sizes
        self.ops: list[Op] = []
        self.types = {name: value.type for name, value in fusion.values().items()}
        self.producer: dict[str, int] = {}  # value -> place of its op in `ops`
        self.consumers = consumers(fusion)
        self.names = Names(fusion)
        self.same: dict[str, str] = {}  # the result of a reshard that changes nothing, or that was made before -> the value to use
        self.done: dict[tuple[str, TensorType], str] = {}

    def emit(self, op: Op) -> None:
        self.producer[op.result.name] = len(self.ops)
        self.ops.append(op)

    def add(self, op: Op) -> None:
        op = op.renamed(self.same)
        if op.kind != "reshard":
            self.emit(op)
            return
        (source,) = op.tensors
        if op.result.type.mesh != self.types[source].mesh:  # which takes its shards from whoever has them: not those of a local slice
            while source in self.producer and self.ops[self.producer[source]].kind == "shard":
                (source,) = self.ops[self.producer[source]].tensors
        if zigzag_changes(self.types[source], op.result.type):
            self.through_rank_order(op, source)
            return
        steps = plan(self.types[source], op.result.type, self.mesh, self.sizes, op.location)
        if not steps:
            self.remove(op, source)
            return
        type = self.types[source]
        for step in steps[:-1]:
            source, type = self.step(op, source, step, type), step.applied(type, self.mesh)
        if (before := self.done.get((source, op.result.type))) and not op.result.stream:
            self.use(op, before)
            return
        self.emit(steps[-1].op(source, type, op.result, self.mesh, op.location))
        if not op.result.stream:
            self.done[source, op.result.type] = op.result.name

    def through_rank_order(self, op: Op, source: str) -> None:
        """A reshard to zigzag, or from it: the pieces change places where a rank has all of them."""
        given, wanted = self.types[source], op.result.type
        if op.result.stream:
            why = f"%{op.result.name} is streamed, and {given} changes the order of its pieces to become {wanted}"
            raise ProgramError(f"reshard: {why}; stream what is computed from it, or leave zigzag out", op.location)
        (_, between), (_, last) = in_rank_order(given, wanted)
        before, after = (
            [(dim, layout(type)[dim]) for dim in zigzag_changes(given, wanted) if isinstance(layout(type)[dim], Zigzag)]
            for type in (given, wanted)
        )
        source = self.reordered(op, source, "renumber", before)
        source = self.resharded(op, source, between)
        source = self.reordered(op, source, "collective_permute", before, is_back=True)
        source = self.reordered(op, source, "collective_permute", after)
        source = self.resharded(op, source, last)
        source = self.reordered(op, source, "renumber", after, is_back=True)
        self.remove(op, source)

    def reordered(self, op: Op, source: str, kind: str, dims: Iterable[tuple[int, Axes]], is_back: bool = False) -> str:
        """The value with the pieces of these dims as the ranks along the axes have them, or back."""
        for dim, axes in dims:
            type = self.types[source]
            if kind == "renumber":
                now = axes if is_back else tuple(axes)
                type = with_layout(type, (*layout(type)[:dim], now, *layout(type)[dim + 1 :]), type.partial)
            order = order_of_pieces(type.mesh_in(self.mesh).size_of(axes))
            value = self.between(op, "in_order" if is_back else "by_rank", type)
            self.emit(Op(kind, (source,), value, attributes(axis=dim, sources=inverse(order) if is_back else order), op.location))
            source = value.name
        return source

    def resharded(self, op: Op, source: str, wanted: TensorType) -> str:
        for step in plan(self.types[source], wanted, self.mesh, self.sizes, op.location):
            source = self.step(op, source, step, self.types[source])
        return source

    def between(self, op: Op, word: str, type: TensorType) -> Value:
        value = Value(self.names.new(f"{op.result.name}_{word}"), type)
        self.types[value.name] = type
        self.consumers[value.name] = [op]
        return value

    def step(self, op: Op, source: str, step: ReshardStep, before: TensorType) -> str:
        """The value between two steps, made once."""
        type = step.applied(before, self.mesh)
        if (source, type) not in self.done:
            between = self.between(op, SUFFIXES[step.kind], type)
            self.emit(step.op(source, before, between, self.mesh, op.location))
            self.done[source, type] = between.name
        return self.done[source, type]

    def remove(self, op: Op, source: str) -> None:
        """What a reshard that changes nothing states (a name, a stream) goes to its producer; where that has other uses, to a copy."""
        producer = self.ops[self.producer[source]] if source in self.producer else None
        if producer and self.can_state(producer, op.result) and len(self.consumers[source]) == 1:
            self.producer[op.result.name] = self.producer[source]
            self.ops[self.producer[source]] = replace(producer, result=op.result)
        else:
            self.use(op, source)

    def can_state(self, producer: Op, result: Value) -> bool:
        """Whether an op can make what a reshard states, itself."""
        if producer.result.stream or producer.result.pinned:
            return False
        stream = result.stream
        return not stream or not (producer.callee or needs_whole(producer, operand_types(producer, self.types), stream.dim))

    def use(self, op: Op, source: str) -> None:
        """What this reshard gives is there under another name; only what is returned or streamed is copied."""
        if op.result.stream or None in self.consumers[op.result.name]:
            self.emit(replace(op, kind="copy", operands=(source,)))
        else:
            self.same[op.result.name] = source
            self.consumers[source] += self.consumers[op.result.name]
