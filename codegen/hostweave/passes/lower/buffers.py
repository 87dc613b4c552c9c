"""Maps values, and their chunks in a loop, to buffers and views, on first use."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hostweave.base.errors import ProgramError
from hostweave.communication.dataflow import Dataflow, LoopIteration, chunk, chunk_shape, dim_of_chunk, expr_of, keeps_dim, rank_in_group
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.ops.attributes import AXIS, BLOCKS, CONTRACTED, HIGH, INDEX, LOW, ORDER, START, STEP
from hostweave.fusion_ir.ops.shapes import padded_dims
from hostweave.fusion_ir.resharding import step_of
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr
from hostweave.passes.lower.asynchronous import Asynchronous
from hostweave.passes.lower.placement import Placement, reversed_view
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


class Buffers:
    def __init__(self, flow: Dataflow, placement: Placement, b: Builder, asynchronous: Asynchronous):
        self.flow, self.placement, self.b, self.asynchronous = flow, placement, b, asynchronous
        self.by_value: dict[str, str] = {}  # value -> buffer or view that contains the whole value
        self.by_iteration: dict[str, str] = {}  # value that only one loop uses -> buffer with a chunk for each iteration
        self.chunks: dict[str, str] = {}  # result of a view op in a loop -> view of the current chunk

    def begin(self, inputs: Sequence[ir.Parameter], outputs: Sequence[ir.Parameter]) -> None:
        """Maps inputs, and outputs that ops write, to their parameters. Other outputs (views and inputs) are copied later. So is a result
        in donated memory, because a later op may still read this memory. `reuse_in_place` later removes such copies if possible."""
        inverse_view = {op.result.name for op in self.placement.inverse_view.values()}
        written = {name for name, op in self.flow.made.items() if not self.flow.is_view(op)} | inverse_view
        self.by_value |= {p.name: p.name for p in inputs} | {p.name: p.name for p in outputs if p.name in written and not p.memory}

    def buffer_of(self, name: str) -> str:
        is_known = name in self.by_value and self.b.is_visible(self.by_value[name])
        if not is_known and name in self.placement.parts:
            op, number = self.placement.parts[name]
            with self.b.hoisted():
                self.by_value[name] = part(self.b, self.flow, op, number, self.buffer_of(op.result.name), None, name)
        elif not is_known and name in self.placement.inverse_view:
            self.by_value[name] = self._inverse_view(self.placement.inverse_view[name])
        elif not is_known:
            producer = self.flow.made[name]
            local = self.flow.local(self.flow.values[name])
            self.by_value[name] = self._view_of_all(producer) if self.flow.is_view(producer) else self.b.allocate(name, local)
        return self.by_value[name]

    def contiguous(self, name: str) -> str:
        source, is_elsewhere = self.buffer_of(name), self.flow.types[name].mesh is not None
        if is_elsewhere and self.b.is_contiguous(source) and self.b.types[self.b.memory_of(source)] == self.b.types[source]:
            source = self.b.memory_of(source)  # An allocation is visible outside of the `on` body. A view is not.
        if not self.b.is_contiguous(source) or (is_elsewhere and not self.b.is_memory(source)):
            self.by_value[name] = source = self._copied(name, source)
        return source

    def _copied(self, name: str, source: str) -> str:
        packed = self.b.allocate(f"{name}_packed", self.b.types[source])
        self.b.emit(ir.Copy(source, packed))
        return packed

    def _inverse_view(self, op: Op) -> str:
        """Buffer for the operand of the view `op`: a view of the result's memory, with the operand's shape."""
        (source,), name = op.tensors, op.result.name
        with self.b.hoisted():
            if name not in {*self.placement.inverse_view, *self.placement.parts, *self.by_value}:
                self.by_value[name] = self.b.allocate(name, self.flow.local(op.result))
            view = reversed_view(self.flow, op, self.buffer_of(name))
            if isinstance(view, ir.Permute):
                return self.b.permute(view.src, view.order, source)
            return self.b.reshape(view.src, view.shape, source)

    def operand(self, op: Op, number: int, iteration: LoopIteration | None) -> str:
        """Buffer that an op reads: the current chunk if the loop splits the operand, otherwise the whole operand. The buffer broadcasts to
        the result's chunk like the operand to the result."""
        name, stream = op.operands[number], op.result.stream
        assert isinstance(name, str)
        if iteration is None or stream is None:
            return self.buffer_of(name)
        dim, keeps = self.flow.map(op).operand_dim(number, stream.dim), keeps_dim(op)
        if dim is not None:
            return self.chunk(name, dim, iteration, keeps)
        # The contracted dims of a matmul are merged into one.
        buffer, rank = self.buffer_of(name), len(self.flow.types[name].dims) - (op[CONTRACTED] - 1)
        position = stream.dim - (len(op.result.type.dims) - rank)
        if keeps:
            position = rank - 2  # Shards of M or N are stacked before the matrix.
        if iteration.splits(op.result, stream.dim) and position > 0:
            shape = self.b.types[buffer].shape
            return self.b.reshape(buffer, (*shape[:position], Size(), *shape[position:]), f"{name}_stacked")
        if iteration.drops_dim and not keeps and position >= 0:
            with self.b.hoisted():
                return self.b.drop(buffer, position, f"{name}_{iteration.index.name}")
        return buffer

    def operands(self, op: Op, iteration: LoopIteration | None) -> list[str]:
        return [self.operand(op, number, iteration) for number, operand in enumerate(op.operands) if isinstance(operand, str)]

    def destination(self, op: Op, iteration: LoopIteration | None) -> str:
        value, stream = op.result, op.result.stream
        if iteration is None or stream is None:
            return self.buffer_of(value.name)
        self.take_chunks(op, iteration)
        return self.chunk(value.name, stream.dim, iteration, keeps_dim(op))

    def take_chunks(self, op: Op, iteration: LoopIteration) -> None:
        """Allocates a buffer of chunks for a value that only one loop uses, if chunks of the whole value would be strided."""
        value, stream = op.result, op.result.walked
        is_new = value.name not in self.by_value and value.name not in self.by_iteration
        if is_new and value.name in self.placement.within_loops:
            shape = chunk_shape(iteration, self.flow.mesh, value, stream.dim)
            splits = iteration.splits(value, stream.dim)
            if splits or any(size != Size() for size in self.flow.local(value).shape[: stream.dim]):
                if splits:  # Collectives need contiguous chunks, with the shards along the first dim.
                    shape = (shape[stream.dim], *shape[: stream.dim], *shape[stream.dim + 1 :])
                self.by_iteration[value.name] = self.b.allocate(value.name, BufferType(value.type.dtype, (iteration.count, *shape)))

    def chunk(self, name: str, dim: int, iteration: LoopIteration, keeps: bool = False) -> str:
        """Chunk of a value in one iteration. If `keeps`, the chunk has the dim `dim` even if this dim has a single index."""
        value = self.flow.values[name]
        if name in self.chunks and not self.b.is_visible(self.chunks[name]):
            self.view(self.flow.made[name], iteration)
        if name in self.chunks:
            return self.chunks[name]
        if name in self.by_iteration:
            wanted = f"{name}_{iteration.index.name}"
            view = self.b.select(self.by_iteration[name], 0, iteration.block, wanted)
            if iteration.splits(value, dim):  # Chunks with several shards are stored with the shards along the first dim.
                rank = len(self.b.types[view].shape)
                view = self.b.permute(view, (*range(1, dim + 1), 0, *range(dim + 1, rank)), f"{wanted}_in_order")
            shape = chunk_shape(replace(iteration, drops_dim=iteration.drops_dim and not keeps), self.flow.mesh, value, dim)
            return self.b.reshape(view, shape, wanted)
        with self.b.hoisted():
            buffer = self.buffer_of(name)
            if iteration.splits(value, dim):
                self.b.split(buffer, dim, Size(iteration.shards_in(value, dim)), f"{name}_shards")
        return chunk(self.b, iteration, buffer, value, dim, keeps)

    def view(self, op: Op, iteration: LoopIteration | None) -> None:
        result, stream, source = op.result, op.result.stream, op.tensors[0]
        if self.placement.inverse_view.get(source) == op:
            self.buffer_of(source)
            return
        if source in self.placement.by_shards:  # The loop views the shards one by one.
            return
        is_of_chunks = not OPS[op.kind].is_reshard_step and op.kind != "permute_dims"
        dim = self.flow.map(op).operand_dim(0, stream.dim) if iteration and stream and is_of_chunks else None
        if iteration is None or stream is None or dim is None:
            self.buffer_of(result.name)
            return
        here, wanted = self.chunk(source, dim, iteration), f"{result.name}_{iteration.index.name}"
        if OPS[op.kind].cuts:
            shift = iteration.splits(self.flow.values[source], dim) - iteration.drops_dim
            self.chunks[result.name] = self._cut(op, here, shift if op[AXIS] > dim else 0, wanted)
        else:
            self.chunks[result.name] = self.b.reshape(here, chunk_shape(iteration, self.flow.mesh, result, stream.dim), wanted)

    def _own_block(self, op: Op) -> str:
        mesh, buffer, step = self.flow.mesh_of(op), self.buffer_of(op.tensors[0]), step_of(op)
        have, want = self.flow.local(self.flow.values[op.tensors[0]]).shape, self.flow.local(op.result).shape
        gained = {step.gains: step.axes}
        if OPS[op.kind].to_other_mesh:  # Along sharded dims, the operand already is the rank's block.
            gained = {i: op.result.type.dims[i].axes for i, blocks in enumerate(op[BLOCKS].sent) if blocks > 1}
        for i, (dim, own) in enumerate(zip(op.result.type.dims, want, strict=True)):
            if have[i] == own:
                continue
            rank, ranks = rank_in_group(mesh, gained.get(i, ())), mesh.size_of(gained.get(i, ()))
            if own == dim.size // mesh.size_of(dim.axes):
                buffer = self.b.chunk(buffer, i, rank, Size(ranks), op.result.name)
            else:
                buffer = self.b.slice(buffer, i, own, rank * expr_of(dim.size.ceil_div(ranks)), op.result.name)
        return buffer

    def _view_of_all(self, op: Op) -> str:
        if OPS[op.kind].is_reshard_step:
            with self.b.hoisted():
                return self._own_block(op)
        source, name = self.buffer_of(op.tensors[0]), op.result.name
        with self.b.hoisted():
            if op.kind == "permute_dims":
                return self.b.permute(source, op[ORDER], name)
            if OPS[op.kind].cuts:
                return self._cut(op, source, 0, name)
            shape = self.flow.local(op.result).shape
            try:
                return self.b.reshape(source, shape, name)
            except ValueError:  # No strides give this shape.
                return self.b.reshape(self._packed(op, source), shape, name)

    def _cut(self, op: Op, source: str, shift: int, name: str) -> str:
        """View of the indices that a slice or select covers. The op cuts dim `axis + shift` of `source`."""
        axis, start = op[AXIS], op[INDEX if op.kind == "select" else START]
        first: Expr = Const(start) if start >= 0 else expr_of(self.flow.types[op.tensors[0]].shape[axis]) - -start
        if op.kind == "select":
            return self.b.select(source, axis + shift, first, name)
        taken, step = op.result.type.shape[axis], op[STEP]
        if step == 1:
            return self.b.slice(source, axis + shift, taken, first, name)
        return self.b.strided(source, axis + shift, taken, first, step, name)

    def _packed(self, op: Op, source: str) -> str:
        name = op.tensors[0]
        if self.flow.values[name].stream is not None:
            raise ProgramError(f"{op.kind}: %{name} is not contiguous here; take the view before the stream loop", op.location)
        self.asynchronous.wait_for(name)
        return self._copied(name, source)


# Slices of the result of a concat or pad. Operands can be computed directly in these slices.


def part(b: Builder, flow: Dataflow, op: Op, number: int, target: str, iteration: LoopIteration | None, wanted: str) -> str:
    """Part of `target` for operand `number`. `target` is the result of a concat or pad, or the current chunk of this result."""
    types, source = operand_types(op, flow.types), flow.values[op.tensors[0]]
    begin = OPS[op.kind].parts
    assert begin is not None
    name = f"{op.result.name}_inside" if op.kind == "pad" else wanted
    for axis, start in begin(types, op)[number].items():
        target = b.slice(target, dim_of_chunk(axis, op, source, iteration), types[number].shape[axis], expr_of(start), name)
    return target


def borders(b: Builder, flow: Dataflow, op: Op, target: str, iteration: LoopIteration | None) -> Iterator[str]:
    """Views of the borders that a pad adds. Borders along a dim omit the borders along earlier dims, so no two borders overlap."""
    low, high, name = op[LOW], op[HIGH], op.result.name
    source = flow.values[op.tensors[0]]
    for axis in padded_dims(op):
        own, dim = source.type.shape[axis], dim_of_chunk(axis, op, source, iteration)
        if low[axis]:
            yield b.slice(target, dim, Size(low[axis]), Const(0), f"{name}_before")
        if high[axis]:
            yield b.slice(target, dim, Size(high[axis]), expr_of(own + low[axis]), f"{name}_after")
        target = b.slice(target, dim, own, Const(low[axis]), f"{name}_inside")
