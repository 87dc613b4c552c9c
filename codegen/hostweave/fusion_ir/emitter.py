"""Base class of passes that add ops."""

from dataclasses import replace

from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import AttributeValue, Fusion, Op, Scalar, Stream, Value
from hostweave.fusion_ir.ops import OPS, infer_type, operand_types
from hostweave.fusion_ir.sharding import flow, with_layout
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType, f32

Attributes = tuple[tuple[str, AttributeValue], ...]


class OpRewriter:
    """Rewrites a fusion op by op. `op` is the op that is being replaced."""

    op: Op

    def __init__(self, fusion: Fusion):
        self.fusion, self.mesh, self.used_names = fusion, fusion.mesh, set(fusion.values())
        self.types = {value.name: value.type for value in fusion.inputs}
        self.ops: list[Op] = []

    def free_name(self, wanted: str) -> str:
        return claim_unique(wanted, self.used_names)

    def rewritten(self) -> Fusion:
        for op in self.fusion.ops:
            self.op = op
            self.add(op)
        return replaced(self.fusion, body=tuple(self.ops))

    def add(self, op: Op) -> None:
        self.emit(op)

    def make(
        self,
        kind: str,
        *operands: str | Scalar,
        how: Attributes = (),
        word: str = "",
        of: str = "",
        like: TensorType | None = None,
        stream: Stream | None = None,
    ) -> str:
        """Emits an op, with inferred type and sharding, and returns the name of its result. The name is `of`, `_` and `word`, with a number
        if this name is taken. By default, `of` is the name of the replaced result, and `word` is `kind`.

        `like` has properties of the result that the operands do not determine, such as the shape after a reshape.
        """
        op = Op(kind, operands, Value("", like or TensorType(f32, ())), how, self.op.location)
        given = operand_types(op, self.types)
        op = replace(op, result=Value(self.free_name(f"{of or self.op.result.name}_{word or kind}"), infer_type(op, given)))
        passed = given[0].partial if given and OPS[kind].linear == "first" else None
        sharded = with_layout(op.result.type, flow(op, given, self.mesh).result, passed)
        self.emit(replace(op, result=replace(op.result, type=sharded, stream=stream)))
        return op.result.name

    def emit(self, op: Op) -> None:
        self.ops.append(op)
        self.types[op.result.name] = op.result.type

    def reshaped(self, name: str, at: int, count: int, dims: tuple[Size, ...], word: str = "reshaped", of: str = "") -> str:
        """Emits a reshape that replaces `count` dims, from dim `at`, by `dims`."""
        shape = self.types[name].shape
        like = TensorType(self.types[name].dtype, tuple(map(Dim, (*shape[:at], *dims, *shape[at + count :]))))
        return self.make("reshape", name, like=like, word=word, of=of)
