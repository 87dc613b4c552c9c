"""Facts for lowering: `Dataflow` describes a fusion, `LoopIteration` an iteration of a chunk loop, and `Values` the buffers of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from hostweave.fusion_ir.index_map import IndexMap
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import OPS, index_map, operand_types
from hostweave.fusion_ir.ops.attributes import BLOCKS, CAUSAL, KEY_BLOCKS, PIECES
from hostweave.fusion_ir.ops.reductions import is_one_element
from hostweave.fusion_ir.rewriting import consumers
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Coordinate, Expr, Symbol, Var
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size, Sum
from hostweave.types.tensor import BufferType, TensorType

NEVER = Const(0)  # a condition that is false


@dataclass(frozen=True, eq=False)
class Dataflow:
    """Dataflow of a fusion. Each reshard of the fusion is one communication or one local slice."""

    fusion: Fusion
    uneven: tuple[str, ...] = ()  # sizes that ranks may split unevenly

    @property
    def mesh(self) -> Mesh:
        return self.fusion.mesh

    @cached_property
    def values(self) -> Mapping[str, Value]:
        return self.fusion.values()

    @property
    def types(self) -> Mapping[str, TensorType]:
        return self.fusion.types

    @property
    def made(self) -> Mapping[str, Op]:
        return self.fusion.made

    @cached_property
    def consumers(self) -> dict[str, list[Op]]:
        """Value -> ops that read it, one entry per operand."""
        return {name: [op for op in users if op] for name, users in consumers(self.fusion).items()}

    def mesh_of(self, op: Op) -> Mesh:
        return op.result.type.mesh_in(self.mesh)

    def local(self, value: Value) -> BufferType:
        return value.type.local(self.mesh, self.uneven)

    def map(self, op: Op) -> IndexMap:
        return index_map(op, operand_types(op, self.types))

    def is_view(self, op: Op) -> bool:
        """True if an op is only pointer arithmetic: a view, a reduction over one local element, or a local transfer: each rank
        of the target mesh already holds its shard, as its whole local operand or as a block of the operand along unsharded dims."""
        if BLOCKS in OPS[op.kind].attributes:
            blocks = op[BLOCKS]
            dims = zip(self.types[op.tensors[0]].dims, blocks.sent, blocks.received, strict=True)
            return not blocks.moved and all(received == 1 and (sent == 1 or not dim.axes) for dim, sent, received in dims)
        if OPS[op.kind].combine:
            return is_one_element(op, self.types[op.tensors[0]].local_shape(self.mesh, self.uneven))
        return OPS[op.kind].is_view

    def skips_later_blocks(self, name: str) -> bool:
        """True if only causal attention to blocks of keys reads a gathered value. Each rank then skips the blocks of later ranks."""

        def skips(op: Op) -> bool:
            attends = op.kind in ("attention", "attention_lse") and op[KEY_BLOCKS] > 0 and bool(op[CAUSAL]) and not op[PIECES]
            return attends or (self.is_view(op) and self.skips_later_blocks(op.result.name))

        return name not in self.fusion.outputs and all(map(skips, self.consumers[name]))

    def viewed(self, name: str) -> str:
        """The value that `name` views, possibly through other views, or `name` itself."""
        op = self.made.get(name)
        return self.viewed(op.tensors[0]) if op is not None and self.is_view(op) else name


@dataclass(frozen=True)
class LoopIteration:
    """An iteration of a loop, as expressions over the loop index. In a loop by shard, the iteration covers chunk `subchunk` of the
    `subchunks` chunks of rank `owner`. Across shards, the iteration covers the same slice of every rank's shard. See
    `chunk_loops.shards` for `shards`, and `EvenLoop` for `rows` and `start`."""

    mesh: Mesh
    index: Var
    count: Size  # number of iterations
    drops_dim: bool  # True if an iteration covers a single index, and the chunks lack the chunked dim
    shards: int
    owner: Expr | None = None  # in a loop by shard, the rank that owns the block
    is_own: Expr = NEVER  # in a loop by shard, the condition that this rank owns the block
    uneven: tuple[str, ...] = ()  # sizes that ranks may split unevenly
    rows: Size | None = None  # rows of a chunk; None if the chunks divide each shard evenly
    start: int = 0
    suffix: str = ""  # suffix of the names of chunks, by default the name of the loop index

    @property
    def subchunks(self) -> Size:
        return self.count // self.shards

    @property
    def owned_by(self) -> Expr:
        assert self.owner is not None
        return self.owner

    @property
    def distance(self) -> Expr:
        """Number of shards that earlier iterations covered, in a loop by shard."""
        return self.index // expr_of(self.subchunks)

    @property
    def precedes_last_shard(self) -> Expr:
        """Condition that later iterations cover other shards, in a loop by shard."""
        return self.index.less(expr_of(self.count) - expr_of(self.subchunks))

    @property
    def subchunk(self) -> Expr:
        return self.index % expr_of(self.subchunks)

    @property
    def block(self) -> Expr:
        """Index of the chunk in the global dim (by shard), or of the slice in each shard (across shards)."""
        return self.index if self.owner is None else self.owner * expr_of(self.subchunks) + self.subchunk

    @property
    def next_hop(self) -> LoopIteration:
        """This iteration, but `owner` is the owner of the block that now arrives in a ring."""
        return replace(self, owner=(self.owned_by - 1) % self.shards, suffix="next")

    def shards_in(self, value: Value, dim: int) -> int:
        """Number of shards along `dim` in a rank's local tensor."""
        return self.shards // value.type.mesh_in(self.mesh).size_of(value.type.dims[dim].axes)

    def splits(self, value: Value, dim: int) -> bool:
        """True if an iteration covers one slice of each of several shards in a rank's local tensor."""
        return self.owner is None and self.shards_in(value, dim) > 1

    def rows_in(self, size: Size) -> Size:
        """Number of rows that the loop covers in a shard with `size` rows."""
        return size if self.rows is None else self.rows * (self.subchunks if self.owner is not None else self.count)

    def covered(self, builder: Builder, buffer: str, dim: int, wanted: str) -> str:
        """View of the rows that the loop covers, in a buffer with one shard along `dim`."""
        return builder.slice(buffer, dim, self.rows_in(builder.types[buffer].shape[dim]), Const(self.start), wanted)

    def subchunks_of(self, value: Value, dim: int) -> Size:
        """Number of chunks into which the loop cuts dim `dim` of a rank's local tensor."""
        return self.subchunks if self.owner is not None and value.type.dims[dim].axes else self.count


class Values(Protocol):
    """Interface through which the lowering of communication gets the buffers of values."""

    by_iteration: dict[str, str]  # value that exists only in a loop -> buffer, with one chunk per iteration

    def buffer_of(self, name: str) -> str: ...

    def chunk(self, name: str, dim: int, iteration: LoopIteration) -> str:
        """Chunk of a value that one iteration accesses."""

    def operand(self, op: Op, number: int, iteration: LoopIteration | None) -> str:
        """Buffer from which an op reads operand `number`."""

    def destination(self, op: Op, iteration: LoopIteration | None) -> str:
        """Buffer to which an op writes its result."""

    def take_chunks(self, op: Op, iteration: LoopIteration) -> None:
        """Allocates memory for the chunks that the iterations of an op write."""


def expr_of(size: Size | Sum) -> Expr:
    if isinstance(size, Sum):
        total: Expr = Const(0)
        for term in size.terms:
            total = total + expr_of(term) if term.coefficient > 0 else total - expr_of(-1 * term)
        return total
    result: Expr = Const(size.coefficient)
    for factor in size.factors:
        result = result * (expr_of(factor) if isinstance(factor, Sum) else Symbol(factor))
    return result // size.divisor


def rank_in_group(mesh: Mesh, axes: tuple[str, ...]) -> Expr:
    number: Expr = Const(0)
    for axis in axes:
        number = number * mesh.axis_size(axis) + Coordinate(axis)
    return number


def chunk(builder: Builder, iteration: LoopIteration, buffer: str, value: Value, dim: int, keeps_dim: bool = False) -> str:
    """View of an iteration's chunk in `buffer`, which contains the local tensor of `value`. If the chunk is a slice of each of several
    shards, two dims replace `dim`: the shards, and the rows of a slice."""
    index, wanted = iteration.block, f"{value.name}_{iteration.suffix or iteration.index.name}"
    if iteration.splits(value, dim):
        buffer = builder.split(buffer, dim, Size(iteration.shards_in(value, dim)), f"{value.name}_shards")
        dim = dim + 1
    elif iteration.owner is not None and value.type.dims[dim].axes:
        index = iteration.subchunk
    if iteration.rows is not None:
        first = (iteration.index if iteration.owner is None else iteration.subchunk) * expr_of(iteration.rows) + iteration.start
        if iteration.owner is not None and (shards := iteration.shards_in(value, dim)) > 1:
            first = iteration.owner * expr_of(builder.types[buffer].shape[dim] // shards) + first
        return builder.slice(buffer, dim, iteration.rows, first, wanted)
    if iteration.drops_dim and not keeps_dim:
        return builder.select(buffer, dim, index, wanted)
    return builder.chunk(buffer, dim, index, iteration.subchunks_of(value, dim), wanted)


def chunk_shape(iteration: LoopIteration, mesh: Mesh, value: Value, dim: int) -> tuple[Size, ...]:
    shape = value.type.local_shape(mesh, iteration.uneven)
    size = shape[dim]
    shards: tuple[Size, ...] = ()
    if iteration.splits(value, dim):
        count = iteration.shards_in(value, dim)
        size, shards = size // count, (Size(count),)
    subchunk = iteration.rows or size.divided_by(iteration.subchunks_of(value, dim))
    assert subchunk is not None
    return (*shape[:dim], *shards, *(() if iteration.drops_dim else (subchunk,)), *shape[dim + 1 :])


def keeps_dim(op: Op) -> bool:
    """True if a chunk keeps the chunked dim even with size 1. A matmul needs the last two dims."""
    stream = op.result.stream
    return OPS[op.kind].is_product and stream is not None and stream.dim >= len(op.result.type.dims) - 2


def dim_of_chunk(dim: int, op: Op, source: Value, iteration: LoopIteration | None) -> int:
    """Position of a dim in views of an iteration's chunks. `source` is the op's first operand."""
    stream = op.result.stream
    if iteration is None or stream is None or dim <= stream.dim:
        return dim
    return dim + (iteration.splits(op.result, stream.dim) or iteration.splits(source, stream.dim)) - iteration.drops_dim
