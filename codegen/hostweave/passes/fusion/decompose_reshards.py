"""Decomposes every reshard into ops of one collective or local slice each, shares equal ones, and removes those without effect.

    %y: bf16[M, N@y] pinned = reshard(%x)               # x: bf16[M@x, N]

becomes

    %y_sliced: bf16[M@x, N@y] = shard(%x, dim=1, axes=(y))
    %y: bf16[M, N@y] pinned = all_gather(%y_sliced, dim=0, axes=(x))
"""

from dataclasses import replace

from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import needs_whole, operand_types
from hostweave.fusion_ir.resharding import ReshardStep, plan
from hostweave.fusion_ir.rewriting import Names, consumers, eliminate_dead_code
from hostweave.options import Options
from hostweave.passes.fusion.insert_reshards import SUFFIXES
from hostweave.types.tensor import TensorType


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
        op = replace(op, operands=tuple(self.same.get(name, name) if isinstance(name, str) else name for name in op.operands))
        if op.kind != "reshard":
            self.emit(op)
            return
        (source,) = op.tensors
        if op.result.type.mesh != self.types[source].mesh:  # which takes its shards from whoever has them: not those of a local slice
            while source in self.producer and self.ops[self.producer[source]].kind == "shard":
                (source,) = self.ops[self.producer[source]].tensors
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

    def step(self, op: Op, source: str, step: ReshardStep, before: TensorType) -> str:
        """The value between two steps, made once."""
        type = step.applied(before, self.mesh)
        if (source, type) not in self.done:
            between = Value(self.names.new(f"{op.result.name}_{SUFFIXES[step.kind]}"), type)
            self.types[between.name] = type
            self.consumers[between.name] = [op]
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
