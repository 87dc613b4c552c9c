"""Lowers a reshard of a whole value, or of one chunk in a loop, to a collective. If no collective has the reduction, ranks gather the
terms, and a kernel reduces them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hostweave.communication.dataflow import Dataflow, LoopIteration, Values, dim_of_chunk
from hostweave.communication.library_collectives import collectives_on
from hostweave.communication.packing import (
    Shards,
    TermReduction,
    branch,
    contiguous_source,
    destination_blocks,
    packed_destination,
    per_iteration,
    source_blocks,
)
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attributes import DIM
from hostweave.fusion_ir.resharding import step_of
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.transports.transport import DEFAULT, find_transport
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim


@dataclass(frozen=True, eq=False)
class CollectiveLowering:
    b: Builder
    flow: Dataflow
    values: Values
    op: Op
    reduction: TermReduction

    def run(self, iteration: LoopIteration | None) -> None:
        change, src, dst = step_of(self.op), self.values.operand(self.op, 0, iteration), self.values.destination(self.op, iteration)
        shards = Shards(self.flow.mesh_of(self.op), change.axes, self._dim_of_chunk(change.dim, iteration), _is_uneven(self.flow, self.op))
        if change.kind == "all_to_all" and shards.is_uneven and not collectives_on(self.b, shards.axes).takes_uneven:
            with self._padded(src, dst) as padded:
                self._emit(*padded, replace(shards, is_uneven=False), iteration)
        else:
            self._emit(src, dst, shards, iteration)

    def _emit(self, src: str, dst: str, shards: Shards, iteration: LoopIteration | None) -> None:
        b, change, reduction = self.b, step_of(self.op), self.reduction
        match change.kind:
            case "all_reduce" if change.reduction not in find_transport(DEFAULT).reduces:
                reduction.emit((self._gathered(src, shards, iteration),), dst)
            case "all_reduce":
                with packed_destination(b, dst, iteration) as landing:
                    collectives_on(b, shards.axes).all_reduce(contiguous_source(b, src, iteration), landing, reduction)
            case "reduce_scatter":
                blocks = source_blocks(b, src, shards, iteration, b.types[dst])
                with packed_destination(b, dst, iteration) as landing:
                    collectives_on(b, shards.axes).reduce_scatter(blocks, landing, reduction, shards.along)
            case "all_to_all":  # The blocks of src are along dim `to`, and the blocks of dst along dim `dim`.
                cut = replace(shards, dim=self._dim_of_chunk(change.to, iteration))
                blocks = source_blocks(b, src, cut, iteration)
                with destination_blocks(b, dst, shards, iteration) as landing:
                    collectives_on(b, shards.axes).all_to_all(blocks, landing, cut.along, shards.along)
            case "permute_shards":
                assert change.sources is not None
                permute(b, src, dst, change.sources, change.axes, iteration)
            case "all_gather":
                gather(b, src, dst, shards, iteration)

    def _gathered(self, src: str, shards: Shards, iteration: LoopIteration | None) -> str:
        """Buffer with the `src` of all ranks, in rank order."""
        type = self.b.types[src]
        terms = per_iteration(self.b, f"{self.op.tensors[0]}_terms", BufferType(type.dtype, (Size(shards.size), *type.shape)), iteration)
        gather(self.b, src, terms, replace(shards, dim=0), iteration)
        return terms

    def _dim_of_chunk(self, dim: int | None, iteration: LoopIteration | None) -> int | None:
        return None if dim is None else dim_of_chunk(dim, self.op, self.flow.values[self.op.tensors[0]], iteration)

    @contextmanager
    def _padded(self, src: str, dst: str) -> Iterator[tuple[str, str]]:
        """Yields padded buffers for `src` and `dst` with blocks of equal size. Copies `src` to the first buffer and, on exit, the second
        buffer to `dst`."""
        b, mesh, source, target = self.b, self.flow.mesh_of(self.op), self.flow.types[self.op.tensors[0]].dims, self.op.result.type.dims
        pairs = [(old.size, mesh.size_of(old.axes or new.axes)) for old, new in zip(source, target, strict=True)]
        shape = tuple(size.ceil_div(ranks) * ranks if size.is_uneven(ranks, self.flow.uneven) else size for size, ranks in pairs)

        def padded(name: str, dims: tuple[Dim, ...]) -> tuple[str, str]:
            """A padded buffer, and a view of it without the padding."""
            sizes = tuple(size // mesh.size_of(dim.axes) for size, dim in zip(shape, dims, strict=True))
            made = b.allocate_here(f"{name}_padded", BufferType(b.types[name].dtype, sizes))
            return made, b.first(made, b.types[name].shape, f"{name}_part")

        (sent, given), (landing, wanted) = padded(src, source), padded(dst, target)
        if given != sent:
            b.emit(ir.Fill(sent, 0.0))
        b.emit(ir.Copy(src, given))
        yield sent, landing
        b.emit(ir.Copy(wanted, dst))


def _is_uneven(flow: Dataflow, op: Op) -> bool:
    """True if shards may differ in size along a dim whose sharding the op changes."""
    dims = zip(flow.types[op.tensors[0]].dims, op.result.type.dims, strict=True)
    mesh, changed = flow.mesh_of(op), ((old, old.axes or new.axes) for old, new in dims if old.axes != new.axes)
    return any(old.size.is_uneven(mesh.size_of(axes), flow.uneven) for old, axes in changed)


def gather_one(b: Builder, flow: Dataflow, op: Op, src: str, dst: str) -> None:
    """Gathers one tensor, `src`, of the stack that the all_gather `op` reads."""
    shards = Shards(flow.mesh_of(op), step_of(op).axes, op[DIM] - 1, _is_uneven(flow, op))
    gather(b, src, dst, shards, None)


def gather(b: Builder, src: str, dst: str, shards: Shards, iteration: LoopIteration | None, wants_own: bool = True) -> None:
    """Gathers the `src` of all ranks to `dst`. If `wants_own` is False, `dst` need not contain this rank's block."""
    with destination_blocks(b, dst, shards, iteration, b.types[src]) as landing:
        collectives_on(b, shards.axes).all_gather(contiguous_source(b, src, iteration), landing, shards.along, wants_own)


def permute(b: Builder, src: str, dst: str, sources: ir.Sources, axes: tuple[str, ...], iteration: LoopIteration | None) -> None:
    with packed_destination(b, dst, iteration) as landing:
        collectives_on(b, axes).collective_permute(contiguous_source(b, src, iteration), landing, sources)


# --- gathers that keep shards separate --------------------------------------------------------------------------------


def gather_apart(b: Builder, flow: Dataflow, values: Values, op: Op) -> None:
    """Gathers the shards of all other ranks into one buffer, in rank order. `take_shard` copies the rank's own shard to this buffer."""
    shards = Shards(flow.mesh_of(op), step_of(op).axes, 0)
    src = contiguous_source(b, values.operand(op, 0, None), None)
    type = BufferType(op.result.type.dtype, (Size(shards.size), *b.types[src].shape))
    landing = values.by_iteration[op.result.name] = b.allocate(op.result.name, type)
    gather(b, src, landing, shards, None, wants_own=False)


def take_shard(b: Builder, values: Values, op: Op, iteration: LoopIteration) -> str:
    """View of an iteration's shard in the buffer of `gather_apart`. If the shard is the rank's own, copies the shard to the buffer."""
    source = values.operand(op, 0, None)
    shard = values.chunk(op.result.name, step_of(op).dim or 0, iteration)
    branch(b, iteration.is_own, lambda: b.emit(ir.Copy(source, shard)))
    return shard
