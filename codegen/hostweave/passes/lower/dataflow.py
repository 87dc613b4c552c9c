"""Facts about the values of a fusion: producer, consumers, local type, and which ops are views."""

from dataclasses import dataclass
from functools import cached_property

from hostweave.fusion_ir.index_map import IndexMap
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import OPS, index_map, operand_types
from hostweave.fusion_ir.ops.attributes import BLOCKS
from hostweave.fusion_ir.ops.reductions import is_one_element
from hostweave.fusion_ir.rewriting import consumers
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import BufferType, TensorType


@dataclass(frozen=True, eq=False)
class Dataflow:
    """A fusion whose reshards are each one communication or one local slice."""

    fusion: Fusion
    uneven: tuple[str, ...] = ()  # sizes that ranks may share unevenly

    @property
    def mesh(self) -> Mesh:
        return self.fusion.mesh

    @cached_property
    def values(self) -> dict[str, Value]:
        return self.fusion.values()

    @cached_property
    def types(self) -> dict[str, TensorType]:
        return {name: value.type for name, value in self.values.items()}

    @cached_property
    def producer(self) -> dict[str, Op]:
        return {op.result.name: op for op in self.fusion.ops}

    @cached_property
    def consumers(self) -> dict[str, list[Op]]:
        """For every value one entry for each operand that it is."""
        return {name: [op for op in users if op] for name, users in consumers(self.fusion).items()}

    # --- on one rank ---

    def mesh_of(self, op: Op) -> Mesh:
        return op.result.type.mesh_in(self.mesh)

    def local(self, value: Value) -> BufferType:
        """What a rank holds of a value."""
        return value.type.local(self.mesh, self.uneven)

    # --- what an op does ---

    def map(self, op: Op) -> IndexMap:
        return index_map(op, operand_types(op, self.types))

    def is_local(self, op: Op) -> bool:
        """Whether each rank of another mesh has its shard already, as all that it has or as a shard of a dim that is not sharded."""
        blocks = op[BLOCKS]
        dims = zip(self.types[op.tensors[0]].dims, blocks.sent, blocks.received, strict=True)
        return not blocks.moved and all(received == 1 and (sent == 1 or not dim.axes) for dim, sent, received in dims)

    # --- views ---

    def is_view(self, op: Op) -> bool:
        """Whether an op is pointer arithmetic: also a reduction of one local element, and a transfer of what is here."""
        if op.kind == "transfer":
            return self.is_local(op)
        if OPS[op.kind].combine:
            return is_one_element(op, self.types[op.tensors[0]].local_shape(self.mesh, self.uneven))
        return OPS[op.kind].is_view

    def viewed(self, name: str) -> str:
        """The value whose memory a value is a view of."""
        op = self.producer.get(name)
        return self.viewed(op.tensors[0]) if op is not None and self.is_view(op) else name
