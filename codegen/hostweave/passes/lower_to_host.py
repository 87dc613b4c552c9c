"""Fusion to host: one op, one instruction; a reshard becomes communication; streamed dims become loops.

    %xg: bf16[M, K] stream(M, 8, block, p2p, own_first) = reshard(%x, kind=all_gather)
    %y: bf16[M, N] stream(M, 8, block, own_first) = matmul(%xg, %w)

becomes

    %xg = allocate bf16[M, K]
    fork ring
    for %i in 0..8 { %p = (rank.x + %i) % 8; stream ring[%i] { the exchange of %xg_i; matmul %xg_i, %w -> %y_i } }
    join ring
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hostweave.errors import ProgramError
from hostweave.fusion.extent import Extent, block
from hostweave.fusion.index_map import IndexMap, groups
from hostweave.fusion.ir import Fusion, Op, Value
from hostweave.fusion.ops import NO_SOURCE, OPS, axes_of, index_map, operand_types, padded_dims
from hostweave.fusion.resharding import Change, change_of, sources_of
from hostweave.fusion.source import held
from hostweave.fusion.transfer import Transfer, transfer
from hostweave.fusion.types import BufferType, Dim, Mesh, TensorType
from hostweave.host import ir
from hostweave.host.blocks import joined
from hostweave.host.builder import Builder
from hostweave.host.expr import Const, Expr, Var
from hostweave.options import Options
from hostweave.passes import lower_communication as communication
from hostweave.passes.lower_communication import Channel, Padding
from hostweave.passes.steps import Steps, chunk, chunk_shape, expr_of, team_coordinate, total
from hostweave.passes.uneven import uneven_sizes

RING = "ring"
COMM = "comm"  # the stream of what communicates aside
CUTS = ("slice", "select")
REVERSIBLE = ("reshape", "expand_dims", "transpose")  # views of all elements


def lower_to_host(fusion: Fusion, options: Options) -> ir.HostProgram:
    """The host program of a fusion whose reshards are each one communication or one local slice; of each block a block."""
    uneven = uneven_sizes(fusion)
    program = joined([_Lowering(body, options, uneven).program() for body in (*fusion.blocks, fusion)])
    return replace(program, sources=fusion.sources)


def _communicates(block: Fusion) -> bool:
    return any(op.kind == "reshard" and op.attribute("kind") != "shard" for body in (*block.blocks, block) for op in body.ops)


@dataclass
class _Loop:
    """Neighbouring ops of one loop; an op outside of every loop stands alone."""

    ops: list[Op]

    @property
    def communication(self) -> Op | None:
        """The op whose communication decides which block a step takes."""
        return next((op for op in self.ops if op.result.stream and op.result.stream.by), None)

    @property
    def by_block(self) -> bool:
        """Whether the blocks of a communication are walked; a loop that has none takes its steps in order."""
        stream = self.ops[0].result.stream
        return stream is not None and stream.step == "block" and self.communication is not None


class _Lowering:
    def __init__(self, fusion: Fusion, options: Options, uneven: tuple[str, ...]):
        self.fusion, self.mesh, self.options = fusion, fusion.mesh, options
        self.b = Builder()
        self.uneven = uneven
        self.values = fusion.values()
        self.types = {name: value.type for name, value in self.values.items()}
        self.made_by = {op.result.name: op for op in fusion.ops}
        self.consumers: dict[str, list[Op]] = {name: [] for name in self.values}
        for op in fusion.ops:
            for operand in op.tensors:
                self.consumers[operand].append(op)
        self.loop_of: dict[str, _Loop] = {}  # value -> where it is produced
        self.buffers: dict[str, str] = {}  # value -> the buffer or view that holds all of it
        self.by_step: dict[str, str] = {}  # value that lives in one loop -> buffer of one chunk a step
        self.chunks: dict[str, str] = {}  # value that is a view of another's chunk -> that view, in the present iteration
        self.kernels: dict[object, ir.Kernel] = {}
        self.events: list[ir.Events] = []
        self.deferred: dict[str, Callable[[bool], None]] = {}  # terms that a ring of sums adds when it comes to them
        self.after_loop: list[Callable[[], None]] = []
        self.pending: set[str] = set()  # values that the caller's stream has not waited for
        self.placed = self.made_in_place()
        self.homes = self.made_in_order()

    def program(self) -> ir.HostProgram:
        b, f = self.b, self.fusion
        inputs = tuple(ir.Parameter(b.parameter(v.name, self.local(v)), v.type) for v in f.inputs)
        self.buffers |= {v.name: v.name for v in f.inputs}
        outputs = tuple(ir.Parameter(b.parameter(name, self.local(self.values[name])), self.types[name]) for name in f.outputs)
        in_place = {op.result.name for op in f.ops if not self.is_view(op)} | {op.result.name for op in self.homes.values()}
        self.buffers |= {p.name: p.name for p in outputs if p.name in in_place}
        for loop in self.loops():
            self.settle(loop)
            if loop.ops[0].result.stream is None or all(map(self.is_view, loop.ops)):  # nothing to call in a loop
                for op in loop.ops:
                    self.op(op, None)
            else:
                self.loop(loop)
        b.location = None
        self.join()
        for parameter, name in zip(outputs, f.outputs, strict=True):
            with b.on(parameter.type.mesh):
                if self.whole(name) != parameter.name:  # an input, a view, or a value that is returned twice
                    b.emit(ir.Copy(self.whole(name), parameter.name))
        body = b.body()
        forked = {i.stream for i in ir.walk(body) if isinstance(i, ir.Fork)}
        pools = (ir.Streams(RING, self.options.streams), ir.Streams(COMM, 1))
        streams = tuple(pool for pool in pools if pool.name in forked)
        return ir.HostProgram(f.name, f.mesh, inputs, outputs, streams, tuple(self.events), tuple(self.kernels.values()), body, self.uneven)

    # --- what communicates aside ---

    def is_aside(self, op: Op) -> bool:
        return op.kind == "reshard" and op.result.aside and op.result.stream is None and not self.is_view(op) and not self.moves(op)

    def aside(self, op: Op) -> None:
        """The communication on a stream of its own, after all that the caller's stream holds; what uses its result waits for it."""
        b = self.b
        with b.nested() as body:
            self.reshard(op, None)
        b.emit(ir.Fork(COMM))
        b.emit(ir.OnStream(COMM, Const(0), tuple(body)))
        self.pending.add(op.result.name)

    def settle(self, loop: _Loop) -> None:
        """Waits for what was communicated aside, where these ops read some of it, or call what communicates beside it."""
        for op in loop.ops:
            if self.is_view(op) or self.is_aside(op):  # it touches no memory, or does so on the same stream
                continue
            if any(self.viewed(name) in self.pending for name in op.tensors) or (op.callee and _communicates(op.callee)):
                self.join()

    def viewed(self, name: str) -> str:
        """The value whose memory a value is a view of."""
        op = self.made_by.get(name)
        return self.viewed(op.tensors[0]) if op is not None and self.is_view(op) else name

    def join(self) -> None:
        if self.pending:
            self.b.emit(ir.Join(COMM))
            self.pending.clear()

    # --- what stands in one loop ---

    def loops(self) -> list[_Loop]:
        """Ops in order, neighbours with the same loop together. Views cost nothing, so they go before a loop that they would cut."""
        result: list[_Loop] = []
        for op in self.fusion.ops:
            last = result[-1] if result else None
            if last and op.result.stream and self.joins(op, last):
                last.ops.append(op)
            elif last and last.ops[0].result.stream and self.is_free_of(op, last):
                result.insert(-1, _Loop([op]))
            else:
                result.append(_Loop([op]))
            self.loop_of[op.result.name] = next(loop for loop in reversed(result) if loop.ops[-1] is op)
        return result

    def is_free_of(self, op: Op, loop: _Loop) -> bool:
        """Whether an op outside of loops is a view of what is there before this one."""
        return op.result.stream is None and self.is_view(op) and self.loop_of.get(op.tensors[0]) is not loop

    def joins(self, op: Op, loop: _Loop) -> bool:
        stream, other = op.result.stream, loop.ops[0].result.stream
        assert stream is not None
        if (
            other is None
            or self.iterations(op) != self.iterations(loop.ops[0])
            or (stream.step, stream.rotation) != (other.step, other.rotation)
        ):
            return False
        if loop.communication and loop.by_block and (stream.by or self.feeds_communication(op)):
            return False  # a step can follow the rotation of one communication
        for number, operand in enumerate(op.operands):
            if not isinstance(operand, str) or self.loop_of.get(operand) is not loop:
                continue
            produced = self.values[operand].stream
            if produced is None or self.map(op).operand_dim(number, stream.dim) != produced.dim:
                return False  # it reads more than the chunk of its own step
            if (
                loop.by_block
                and loop.communication
                and loop.communication.result.name == operand
                and self.values[operand].type.dims[produced.dim].axes
            ):
                return False  # the block is whole only after the last step
        return True

    def feeds_communication(self, op: Op) -> bool:
        streams = (consumer.result.stream for consumer in self.consumers[op.result.name])
        return any(stream is not None and stream.by is not None for stream in streams)

    def iterations(self, op: Op) -> tuple[Extent, bool]:
        """How many steps a streamed op takes, and whether each drops the dim."""
        stream = op.result.stream
        assert stream is not None
        if stream.chunks is not None:
            return Extent(stream.chunks), False
        extent = op.result.type.dims[stream.dim].extent
        return (extent if stream.step == "block" else extent // self.shards([op])), True

    def shards(self, ops: list[Op]) -> int:
        """Into how many shards the streamed dim is split, before or after the communication of these ops."""
        split = [1]
        for op in ops:
            assert op.result.stream is not None
            dims = [op.result.type.dims[op.result.stream.dim]]
            if op.kind == "reshard" and self.mesh_of(op) == self.types[op.tensors[0]].mesh_in(self.mesh):
                dims.append(self.types[op.tensors[0]].dims[op.result.stream.dim])
            split.extend(self.mesh_of(op).size_of(dim.axes) for dim in dims)
        return max(split)

    def private(self, name: str, loop: _Loop) -> bool:
        """Whether a value lives and dies in one loop, so that it may lie in memory as the loop likes.

        What a rank takes its part of lies there whole: the part is a view of that.
        """
        consumers = self.consumers[name]
        return name not in self.fusion.outputs and all(
            self.loop_of[op.result.name] is loop
            and op.attribute("kind") != "shard"
            and (not self.is_view(op) or self.private(op.result.name, loop))
            for op in consumers
        )

    # --- a loop ---

    def loop(self, loop: _Loop) -> None:
        b = self.b
        count, drops_dim = self.iterations(loop.ops[0])
        steps = Steps(self.mesh, Var(b.loop_index()), count, drops_dim, self.shards(loop.ops), uneven=self.uneven)
        b.location = loop.ops[-1].location
        meshes = {self.types[name].mesh for op in loop.ops for name in (op.result.name, *op.tensors)}
        b.hoists_views = len(meshes) == 1
        with b.on(meshes.pop() if b.hoists_views else None):
            with b.nested() as body:
                if loop.by_block:
                    steps = replace(steps, owner=self.owner(loop, steps))
                with b.nested() as on_stream:
                    self.defer_ring_terms(loop)
                    for op in loop.ops:
                        self.op(op, steps)
                b.location = loop.ops[-1].location
                b.emit(ir.OnStream(RING, steps.index, tuple(on_stream)))
            b.emit(ir.Fork(RING))
            b.emit(ir.For(steps.index.name, count, tuple(body)))
            b.emit(ir.Join(RING))
            for action in self.after_loop:
                action()
        b.hoists_views = True
        self.after_loop.clear()
        self.chunks.clear()

    def owner(self, loop: _Loop, steps: Steps) -> Expr:
        """Whose block a step by block takes: rotated, so that at every step all ranks speak with different ones."""
        op = loop.communication
        assert op is not None
        assert op.result.stream is not None
        by = op.result.stream.by
        if by in ("broadcast", "reduce"):
            return steps.index // expr_of(steps.pieces)
        rank = team_coordinate(self.mesh_of(op), self.change(op).axes)
        if op.attribute("kind") == "reduce_scatter":
            owner = rank - 1 - steps.hop if by == "ring" else rank + 1 + steps.hop
            return Var(self.b.let("q", owner % steps.shards))
        return Var(self.b.let("p", (rank - steps.hop if by == "ring" else rank + steps.hop) % steps.shards))

    # --- ops ---

    def op(self, op: Op, steps: Steps | None) -> None:
        self.b.location = op.location
        with self.b.on(op.result.type.mesh):
            if steps is None and self.is_aside(op):
                self.aside(op)
            elif op.kind == "reshard":
                self.reshard(op, steps)
            elif self.is_view(op):
                self.view(op, steps)
            elif op.kind == "output":
                self.whole(op.result.name)  # what its kernel or block wrote
            elif op.callee:
                self.call(op, op.callee)
            elif op.source:
                self.b.emit(ir.Launch(op.source.name, tuple(map(self.contiguous, op.tensors)), self.targets(op, op.source.outputs)))
            else:
                self.compute(op, steps)

    def mesh_of(self, op: Op) -> Mesh:
        return op.result.type.mesh_in(self.mesh)

    def compute(self, op: Op, steps: Steps | None) -> None:
        b = self.b
        sources = [self.operand(op, number, steps) for number, operand in enumerate(op.operands) if isinstance(operand, str)]
        target = self.destination(op.result, steps, self.keeps_dim(op))
        if op.kind in ("concat", "pad"):
            self.assemble(op, sources, target, steps)
        elif op.kind == "matmul":
            sources = [self.with_a_dense_dim(source, steps) for source in sources]
            x, w, y = self.stack_shards(op, steps, [*sources, target])
            if op.result.name in self.deferred:
                self.deferred[op.result.name] = lambda adds: b.emit(ir.MatmulAccumulate(x, w, y) if adds else ir.Matmul(x, w, y))
            else:
                b.emit(ir.Matmul(x, w, y))
        elif op.kind == "exchange":
            self.exchange(op, sources[0], target, steps)
        elif op.kind == "copy":
            b.emit(ir.Copy(sources[0], target))
        else:
            b.emit(ir.Launch(self.kernel(op, sources, target, steps), tuple(dict.fromkeys(sources)), (target,)))

    def call(self, op: Op, block: Fusion) -> None:
        """All ranks make it: what a block does on a mesh of some of them, it does by itself."""
        sources = []
        for name in op.tensors:
            with self.b.on(self.types[name].mesh):
                sources.append(self.contiguous(name))
        targets = self.targets(op, block.output_types)
        with self.b.on(None):
            self.b.emit(ir.Call(block.name, tuple(sources), targets))

    def targets(self, op: Op, types: Sequence[TensorType]) -> tuple[str, ...]:
        """What a block or a kernel of the user writes; an output that nothing uses has memory of its own."""
        used = {user.attribute("index"): user.result.name for user in self.consumers[op.result.name] if user.kind == "output"}
        targets = [self.whole(op.result.name)]
        for index, type in enumerate(types[1:], 1):
            mesh = type.mesh if op.callee else op.result.type.mesh
            with self.b.on(mesh):
                unused = held(type, mesh or self.mesh, self.uneven)
                targets.append(self.whole(used[index]) if index in used else self.b.allocate(f"{op.result.name}_unused", unused))
        return tuple(targets)

    def contiguous(self, name: str) -> str:
        """All of a value, as a block takes it."""
        source = self.whole(name)
        if self.types[name].mesh and self.b.is_contiguous(source):
            source = self.b.memory_of(source)  # which can be named where the mesh is left
        if not self.b.is_contiguous(source) or (self.types[name].mesh and not self.b.is_memory(source)):
            self.buffers[name] = self.b.allocate(f"{name}_packed", self.b.types[source])
            self.b.emit(ir.Copy(source, self.buffers[name]))
            return self.buffers[name]
        return source

    def exchange(self, op: Op, source: str, target: str, steps: Steps | None) -> None:
        """Blocks go from rank to rank, or, where a rank holds them all, from place to place."""
        axis, sources = op.attribute("axis"), axes_of(op, "sources")
        assert isinstance(axis, int)
        if axes := op.result.type.dims[axis].axes:
            places = tuple(None if place == NO_SOURCE else place for place in sources)
            communication.exchange(self.b, source, target, places, axes, steps)
            return
        dim = self.dim_of_chunk(axis, op, steps)
        assert dim is not None
        for number, place in enumerate(sources):
            block = self.b.slice(target, dim, Const(number), Extent(len(sources)), f"{target}_{number}")
            if place == NO_SOURCE:
                self.b.emit(ir.Fill(block, 0.0))
            else:
                self.b.emit(ir.Copy(self.b.slice(source, dim, Const(place), Extent(len(sources)), f"{source}_{place}"), block))

    def keeps_dim(self, op: Op) -> bool:
        """A matmul needs its last two dims, so a step that takes one index of them keeps a dim of 1."""
        stream = op.result.stream
        return op.kind == "matmul" and stream is not None and stream.dim >= len(op.result.type.dims) - 2

    def operand(self, op: Op, number: int, steps: Steps | None) -> str:
        """What an op reads: its chunk where the operand has the streamed dim, else all of it, with dims lined up with the result's."""
        name = op.operands[number]
        assert isinstance(name, str)
        stream = op.result.stream
        if steps is None or stream is None:
            return self.whole(name)
        dim = self.map(op).operand_dim(number, stream.dim)
        if dim is not None:
            return self.chunk(name, dim, steps, self.keeps_dim(op))
        buffer = self.whole(name)
        position = stream.dim - (len(op.result.type.dims) - len(self.types[name].dims))
        if op.kind == "matmul" and self.keeps_dim(op):
            position = len(self.types[name].dims) - 2  # shards of M or N are stacked before the matrix
        if steps.splits(op.result, stream.dim) and position > 0:
            shape = self.b.types[buffer].shape
            return self.b.reshape(buffer, (*shape[:position], Extent(), *shape[position:]), f"{name}_stacked")
        if steps.drops_dim and not self.keeps_dim(op) and position >= 0:
            with self.b.hoisted():
                return self.b.drop(buffer, position, f"{name}_{steps.index.name}")
        return buffer

    def stack_shards(self, op: Op, steps: Steps | None, buffers: list[str]) -> list[str]:
        """A matmul over slices of every rank's columns: the shards go before the matrix, as one more batch dim."""
        stream = op.result.stream
        if steps is None or stream is None or stream.dim != len(op.result.type.dims) - 1 or not steps.splits(op.result, stream.dim):
            return buffers

        def stacked(buffer: str) -> str:
            rank = len(self.b.types[buffer].shape)
            return self.b.permute(buffer, (*range(rank - 3), rank - 2, rank - 3, rank - 1), f"{buffer}_stacked")

        x, w, y = buffers
        return [x, stacked(w), stacked(y)]

    def kernel(self, op: Op, sources: list[str], target: str, steps: Steps | None) -> str:
        """The name of the kernel that computes `op` on these buffers; one for all ops that differ in names alone."""
        names: dict[str, str] = {}  # of buffers: two operands may be one, a view of all of it
        for operand, buffer in zip(op.tensors, sources, strict=True):
            names.setdefault(buffer, operand)
        called = {operand: names[buffer] for operand, buffer in zip(op.tensors, sources, strict=True)}
        operands = tuple(called[operand] if isinstance(operand, str) else operand for operand in op.operands)
        inputs = tuple(ir.Parameter(name, self.tensor(buffer)) for buffer, name in names.items())
        attributes = tuple((key, self.shifted(op, value, steps) if key == "axis" else value) for key, value in op.attributes)
        body = replace(op, operands=operands, result=Value(op.result.name, self.tensor(target)), attributes=attributes)
        positions = {name: i for i, name in enumerate(names.values())}
        same = (
            op.kind,
            attributes,
            tuple(positions[operand] if isinstance(operand, str) else operand for operand in operands),
            tuple(p.type for p in inputs),
            body.result.type,
        )
        if same not in self.kernels:
            taken = {kernel.name for kernel in self.kernels.values()}
            name = f"{op.kind}_{op.result.name}"
            self.kernels[same] = ir.Kernel(name if name not in taken else f"{name}_{len(taken)}", inputs, (body,))
        return self.kernels[same].name

    def shifted(self, op: Op, axes: object, steps: Steps | None) -> tuple[int, ...]:
        """The axes of a reduction as dims of the chunk, where the streamed dim is dropped or split in two."""
        assert isinstance(axes, tuple)
        stream = op.result.stream
        if steps is None or stream is None:
            return axes
        dim = self.map(op).operand_dim(0, stream.dim)
        assert dim is not None
        shift = steps.splits(self.values[op.tensors[0]], dim) - steps.drops_dim
        return tuple(axis + shift if axis > dim else axis for axis in axes)

    def tensor(self, buffer: str) -> TensorType:
        type = self.b.types[buffer]
        return TensorType(type.dtype, tuple(Dim(extent) for extent in type.shape))

    def with_a_dense_dim(self, source: str, steps: Steps | None) -> str:
        """A matrix whose rows or columns lie side by side, as cuBLASLt takes it."""
        type = self.b.types[source]
        dense = (stride == Extent() or extent == Extent() for extent, stride in zip(type.shape[-2:], ir.strides_of(type)[-2:], strict=True))
        return source if any(dense) else communication.packed_source(self.b, source, steps)

    # --- concat and pad ---

    def writes_strided(self, op: Op) -> bool:
        """Whether an op can write memory that is not contiguous. A reshard on one mesh can, by a copy."""
        return not (self.is_view(op) or self.moves(op) or op.callee or op.source or op.kind == "output")

    def made_in_place(self) -> dict[str, tuple[Op, int]]:
        """Operands of concat and pad that their own op can write where they belong in the result, as nothing else uses them."""
        made = {op.result.name for op in self.fusion.ops if op.result.stream is None and self.writes_strided(op)}
        return {
            name: (op, number)
            for op in self.fusion.ops
            if op.kind in ("concat", "pad") and op.result.stream is None
            for number, name in enumerate(op.tensors)
            if name in made and self.consumers[name] == [op] and name not in self.fusion.outputs
        }

    def made_in_order(self) -> dict[str, Op]:
        """Values that are used through one view alone, and lie in memory as that view has them: as it is returned, or as what
        merges its dims needs it. The view is then how their own op sees the memory, and nothing is copied."""
        homes: dict[str, Op] = {}
        for op in self.fusion.ops:
            users = self.consumers[op.result.name]
            is_returned = op.result.name in self.fusion.outputs and not users
            is_merged = op.kind == "transpose" and bool(users) and all(u.kind == "reshape" and self.merges(u) for u in users)
            if op.kind in REVERSIBLE and (is_returned or is_merged):
                homes |= self.chain(op, self.local(op.result))
        return homes

    def merges(self, op: Op) -> bool:
        return any(len(source) > 1 for source, _ in groups(self.types[op.tensors[0]].shape, op.result.type.shape))

    def chain(self, op: Op, memory: BufferType) -> dict[str, Op]:
        """The views from `op` down to what makes the elements; none where some cannot be seen through, or has other uses."""
        (name,) = op.tensors
        made = self.made_by.get(name)
        if made is None or op.result.stream or made.result.stream or self.consumers[name] != [op] or name in self.fusion.outputs:
            return {}
        try:
            memory = ir.view_type(self.reversed(op, ""), memory)
        except ValueError:
            return {}
        if made.kind in REVERSIBLE:
            rest = self.chain(made, memory)
            return {name: op, **rest} if rest else {}
        return {name: op} if made.kind != "reshard" and self.writes_strided(made) and name not in self.placed else {}

    def reversed(self, op: Op, src: str) -> ir.Reshape | ir.Permute:
        """The view that leads from the result of a view back to what it is of."""
        if op.kind == "transpose":
            axes = op.attribute("axes")
            assert isinstance(axes, tuple)
            return ir.Permute("", src, tuple(axes.index(i) for i in range(len(axes))))
        return ir.Reshape("", src, self.local(self.values[op.tensors[0]]).shape)

    def assemble(self, op: Op, sources: list[str], target: str, steps: Steps | None) -> None:
        """Every operand goes to its place, unless it was made there; what a pad adds is filled."""
        for number, source in enumerate(sources):
            place = self.place(op, number, target, steps)
            if place != source:
                self.b.emit(ir.Copy(source, place))
        if op.kind == "pad":
            value = op.attribute("value")
            assert isinstance(value, float)
            for border in self.borders(op, target, steps):
                self.b.emit(ir.Fill(border, value))

    def place(self, op: Op, number: int, target: str, steps: Steps | None) -> str:
        """Where in the result an operand of a concat or pad lies."""
        type, name = self.types[op.tensors[number]], op.result.name
        if op.kind == "concat":
            axis = op.attribute("axis")
            assert isinstance(axis, int)
            before = Extent(0)
            for other in op.tensors[:number]:
                before = before + self.types[other].shape[axis]
            dim = self.dim_of_chunk(axis, op, steps)
            assert dim is not None
            return self.b.section(target, dim, type.shape[axis], expr_of(before), f"{name}_{number}")
        low = op.attribute("low")
        assert isinstance(low, tuple)
        for axis in padded_dims(op):
            dim = self.dim_of_chunk(axis, op, steps)
            assert dim is not None
            target = self.b.section(target, dim, type.shape[axis], Const(low[axis]), f"{name}_inside")
        return target

    def borders(self, op: Op, target: str, steps: Steps | None) -> Iterator[str]:
        """What a pad adds, each element once: of every dim what lies inside of the dims before it."""
        low, high = op.attribute("low"), op.attribute("high")
        assert isinstance(low, tuple)
        assert isinstance(high, tuple)
        for axis in padded_dims(op):
            held, dim = self.types[op.tensors[0]].shape[axis], self.dim_of_chunk(axis, op, steps)
            assert dim is not None
            if low[axis]:
                yield self.b.section(target, dim, Extent(low[axis]), Const(0), f"{op.result.name}_before")
            if high[axis]:
                yield self.b.section(target, dim, Extent(high[axis]), expr_of(held + low[axis]), f"{op.result.name}_after")
            target = self.b.section(target, dim, held, Const(low[axis]), f"{op.result.name}_inside")

    # --- views ---

    def is_view(self, op: Op) -> bool:
        """Whether an op is pointer arithmetic: also a reduction of one local element, and a reshard to a slice of what is here."""
        if op.kind == "reshard":
            return op.attribute("kind") == "shard" or (op.attribute("kind") == "transfer" and self.is_there(op))
        if OPS[op.kind].combine and op.result.type.dtype == self.types[op.tensors[0]].dtype:
            local = self.types[op.tensors[0]].local_shape(self.mesh, self.uneven)
            axes = op.attribute("axis")
            assert isinstance(axes, tuple)
            return all(local[axis] == Extent() for axis in axes)
        return OPS[op.kind].is_view

    def view(self, op: Op, steps: Steps | None) -> None:
        result, stream = op.result, op.result.stream
        if self.homes.get(op.tensors[0]) == op:
            self.whole(op.tensors[0])
            return
        if steps is None or stream is None:
            self.buffers[result.name] = self.whole_view(op)
            return
        dim = self.map(op).operand_dim(0, stream.dim)
        if op.kind == "transpose" or dim is None:
            self.buffers[result.name] = self.whole_view(op)
            return
        source = self.chunk(op.tensors[0], dim, steps, keeps_dim=False)
        if op.kind in CUTS:
            shift = steps.splits(self.values[op.tensors[0]], dim) - steps.drops_dim
            self.chunks[result.name] = self.cut(op, source, shift if cut_axis(op) > dim else 0, f"{result.name}_{steps.index.name}")
            return
        shape = chunk_shape(steps, self.mesh, result, stream.dim)
        self.chunks[result.name] = self.b.reshape(source, shape, f"{result.name}_{steps.index.name}")

    def whole_view(self, op: Op) -> str:
        """The view of all of the operand that is all of the result."""
        if op.kind == "reshard":
            return self.own_block(op)
        source, name = self.whole(op.tensors[0]), op.result.name
        with self.b.hoisted():
            if op.kind == "transpose":
                axes = op.attribute("axes")
                assert isinstance(axes, tuple)
                return self.b.permute(source, axes, name)
            if op.kind in CUTS:
                return self.cut(op, source, 0, name)
            shape = op.result.type.local_shape(self.mesh, self.uneven)
            try:
                return self.b.reshape(source, shape, name)
            except ValueError:  # no strides give this shape
                return self.b.reshape(self.packed(op, source), shape, name)

    def cut(self, op: Op, source: str, shift: int, name: str) -> str:
        """The view of the indices that a slice or select takes; its axis is `shift` dims further in what is here."""
        axis, start = cut_axis(op), op.attribute("index" if op.kind == "select" else "start")
        assert isinstance(start, int)
        first: Expr = Const(start) if start >= 0 else expr_of(self.types[op.tensors[0]].shape[axis]) - -start
        if op.kind == "select":
            return self.b.select(source, axis + shift, first, name)
        taken, step = op.result.type.shape[axis], op.attribute("step")
        assert isinstance(step, int)
        if step == 1:
            return self.b.section(source, axis + shift, taken, first, name)
        return self.b.strided(source, axis + shift, taken, first, step, name)

    def packed(self, op: Op, source: str) -> str:
        if self.loop_of.get(op.tensors[0]) is not None and self.values[op.tensors[0]].stream is not None:
            raise ProgramError(f"{op.kind}: %{op.tensors[0]} is not contiguous here; take the view before the stream loop", op.location)
        if self.viewed(op.tensors[0]) in self.pending:
            self.join()
        packed = self.b.allocate(f"{op.tensors[0]}_packed", self.b.types[source])
        self.b.emit(ir.Copy(source, packed))
        return packed

    # --- buffers ---

    def local(self, value: Value) -> BufferType:
        return BufferType(value.type.dtype, value.type.local_shape(self.mesh, self.uneven))

    def whole(self, name: str) -> str:
        """The buffer or view that holds all of a value; memory is taken at its first use."""
        is_known = name in self.buffers and self.b.is_visible(self.buffers[name])
        if not is_known and name in self.placed:
            op, number = self.placed[name]
            with self.b.hoisted():
                self.buffers[name] = self.place(op, number, self.whole(op.result.name), None)
        elif not is_known and name in self.homes:
            self.buffers[name] = self.seen_through(self.homes[name])
        elif not is_known:
            producer = next(op for op in self.loop_of[name].ops if op.result.name == name)
            self.buffers[name] = (
                self.whole_view(producer) if self.is_view(producer) else self.b.allocate(name, self.local(self.values[name]))
            )
        return self.buffers[name]

    def seen_through(self, op: Op) -> str:
        """What a view is of, where the view's result has the memory."""
        (source,), name = op.tensors, op.result.name
        with self.b.hoisted():
            if name not in self.homes and name not in self.buffers:
                self.buffers[name] = self.b.allocate(name, self.local(self.values[name]))
            view = self.reversed(op, self.whole(name))
            if isinstance(view, ir.Permute):
                return self.b.permute(view.src, view.order, source)
            return self.b.reshape(view.src, view.shape, source)

    def chunk(self, name: str, dim: int, steps: Steps, keeps_dim: bool) -> str:
        """What one iteration touches of a value."""
        if name in self.chunks and not self.b.is_visible(self.chunks[name]):
            self.view(next(op for op in self.loop_of[name].ops if op.result.name == name), steps)
        if name in self.chunks:
            return self.chunks[name]
        if name in self.by_step:
            view = self.b.select(self.by_step[name], 0, steps.block, f"{name}_{steps.index.name}")
            if steps.splits(self.values[name], dim):  # laid out with the shards first
                rank = len(self.b.types[view].shape)
                view = self.b.permute(view, (*range(1, dim + 1), 0, *range(dim + 1, rank)), f"{name}_{steps.index.name}_in_order")
            shape = chunk_shape(replace(steps, drops_dim=steps.drops_dim and not keeps_dim), self.mesh, self.values[name], dim)
            return self.b.reshape(view, shape, f"{name}_{steps.index.name}")
        with self.b.hoisted():
            buffer = self.whole(name)
            if steps.splits(self.values[name], dim):
                self.b.split(buffer, dim, Extent(steps.shards_in(self.values[name], dim)), f"{name}_shards")
        return chunk(self.b, steps, buffer, self.values[name], dim, keeps_dim)

    def destination(self, value: Value, steps: Steps | None, keeps_dim: bool) -> str:
        """What an op writes."""
        if steps is None or value.stream is None:
            return self.whole(value.name)
        dim, loop = value.stream.dim, self.loop_of[value.name]
        if value.name not in self.buffers and value.name not in self.by_step and self.private(value.name, loop):
            shape = chunk_shape(steps, self.mesh, value, dim)
            if any(extent != Extent() for extent in self.local(value).shape[:dim]) or steps.splits(value, dim):
                # Chunks of the value as it is would be strided, and communication needs them contiguous.
                if steps.splits(value, dim):  # as collectives lay shards out
                    shape = (shape[dim], *shape[:dim], *shape[dim + 1 :])
                self.by_step[value.name] = self.b.allocate(value.name, BufferType(value.type.dtype, (steps.count, *shape)))
        return self.chunk(value.name, dim, steps, keeps_dim)

    # --- reshards ---

    def map(self, op: Op) -> IndexMap:
        return index_map(op, operand_types(op, self.types))

    def change(self, op: Op) -> Change:
        """What a reshard does."""
        change = change_of(self.types[op.tensors[0]], op.result.type, self.mesh)
        assert change is not None
        return change

    def reduction(self, op: Op) -> str:
        partial = self.types[op.tensors[0]].partial
        assert partial is not None
        return partial.op

    def reshard(self, op: Op, steps: Steps | None) -> None:
        change, value, stream = self.change(op), op.result, op.result.stream
        if self.is_view(op):
            with self.b.hoisted():
                self.buffers[value.name] = self.own_block(op)
            return
        if change.kind in ("transfer", "reduce"):
            self.to_other_ranks(op, change, steps)
            return
        if steps is not None and stream is not None and stream.by in ("p2p", "ring") and change.kind == "reduce_scatter":
            self.scatter_by_block(op, change, steps)
            return
        source = self.operand(op, 0, steps)
        target = self.destination(value, steps, keeps_dim=False)
        channel = Channel(self.mesh_of(op), change.axes, self.dim_of_chunk(change.dim, op, steps))
        if steps is None or steps.owner is None:

            def communicate(sent: str, received: str) -> None:
                self.collective(op, change, sent, received, channel, steps)

            if padding := self.padding(op):
                communication.with_padding(self.b, source, target, padding, communicate)
            else:
                communicate(source, target)
        elif change.kind == "reduce_scatter":
            communication.scatter_reduce(self.b, source, target, self.reduction(op), channel, steps)
        elif stream is not None and stream.by == "ring":
            event = self.new_events("arrived", steps, op)
            communication.gather_ring(self.b, source, target, lambda: self.next_chunk(op, value, steps), channel, steps, event)
        elif stream is not None and stream.by == "broadcast":
            communication.gather_broadcast(self.b, source, target, channel, steps)
        else:
            communication.gather_p2p(self.b, source, target, channel, steps)

    def collective(self, op: Op, change: Change, src: str, dst: str, channel: Channel, steps: Steps | None) -> None:
        match change.kind:
            case "all_reduce":
                communication.all_reduce(self.b, src, dst, self.reduction(op), channel, steps)
            case "reduce_scatter":
                communication.reduce_scatter(self.b, src, dst, self.reduction(op), channel, steps)
            case "all_to_all":
                cut = replace(channel, dim=self.dim_of_chunk(change.to, op, steps))
                communication.all_to_all(self.b, src, dst, cut, channel, steps)
            case "exchange":
                sources = sources_of(change, self.types[op.tensors[0]], self.mesh)
                communication.exchange(self.b, src, dst, sources, change.axes, steps)
            case "all_gather":
                communication.all_gather(self.b, src, dst, channel, steps)

    def own_block(self, op: Op) -> str:
        """The view of this rank's block of a value that it holds all of, or as much of each dim."""
        buffer, mesh = self.whole(op.tensors[0]), self.mesh_of(op)
        have, want = self.local(self.values[op.tensors[0]]).shape, self.local(op.result).shape
        for i, (dim, own) in enumerate(zip(op.result.type.dims, want, strict=True)):
            if have[i] == own:
                continue
            gained = dim.axes[len(self.types[op.tensors[0]].dims[i].axes) :]
            place, ranks = team_coordinate(mesh, gained), mesh.size_of(gained)
            if own == dim.extent // mesh.size_of(dim.axes):
                buffer = self.b.slice(buffer, i, place, Extent(ranks), op.result.name)
            else:
                buffer = self.b.section(buffer, i, own, place * expr_of(block(dim.extent, ranks)), op.result.name)
        return buffer

    # --- to other ranks ---

    def moves(self, op: Op) -> bool:
        """Whether an op is a communication of two meshes."""
        return op.kind == "reshard" and self.types[op.tensors[0]].mesh != op.result.type.mesh

    def transfer(self, op: Op) -> Transfer:
        return transfer(self.types[op.tensors[0]], op.result.type, self.mesh)

    def is_there(self, op: Op) -> bool:
        """Whether each rank of another mesh holds its block already, as all that it holds or as a block of a whole dim."""
        blocks = self.transfer(op)
        dims = zip(self.types[op.tensors[0]].dims, blocks.sent, blocks.received, strict=True)
        return not blocks.moved and all(received == 1 and (sent == 1 or not dim.axes) for dim, sent, received in dims)

    def to_other_ranks(self, op: Op, change: Change, steps: Steps | None) -> None:
        """Each side in the bodies of its own mesh, or where a rank may be on both, both in one group."""
        source, target = self.types[op.tensors[0]], op.result.type
        if change.kind == "reduce":
            dst = self.destination(op.result, steps, keeps_dim=False)
            with self.b.on(source.mesh):
                src, channel = self.operand(op, 0, steps), Channel(source.mesh_in(self.mesh), change.axes)
                communication.reduce(self.b, src, dst, self.reduction(op), channel, change.root or 0, steps)
            return
        blocks = self.transfer(op)
        apart = set(source.mesh_in(self.mesh).all_ranks).isdisjoint(target.mesh_in(self.mesh).all_ranks)
        with self.b.on(source.mesh):
            sent = communication.blocks_to_send(self.b, self.operand(op, 0, steps), blocks, steps)
            if apart:
                self.b.emit(communication.send(sent, blocks, apart))
        dst = self.destination(op.result, steps, keeps_dim=False)
        with communication.blocks_to_receive(self.b, dst, blocks, steps) as landing:
            if apart:
                self.b.emit(communication.recv(landing, blocks, apart))
            else:
                with self.b.on(None):
                    communication.group(self.b, communication.send(sent, blocks, apart), communication.recv(landing, blocks, apart))

    def padding(self, op: Op) -> Padding | None:
        """What an uneven reshard needs: whole blocks of each dim that changes."""
        sent: dict[int, Extent] = {}
        received: dict[int, Extent] = {}
        remainders: list[Expr] = []
        is_never_even = False
        for i, (old, new) in enumerate(zip(self.types[op.tensors[0]].dims, op.result.type.dims, strict=True)):
            ranks = self.mesh_of(op).size_of(old.axes or new.axes)
            is_uneven = int(old.extent) % ranks > 0 if old.extent.is_int else ranks > 1 and str(old.extent) in self.uneven
            if old.axes == new.axes or not is_uneven:
                continue
            whole_block = block(old.extent, ranks)
            sent[i] = whole_block if old.axes else whole_block * ranks
            received[i] = whole_block if new.axes else whole_block * ranks
            is_never_even |= old.extent.is_int
            if not old.extent.is_int:
                remainders.append(expr_of(old.extent) % ranks)
        if not sent:
            return None
        return Padding(sent, received, None if is_never_even else total(remainders).equals(0))

    def dim_of_chunk(self, dim: int | None, op: Op, steps: Steps | None) -> int | None:
        """Where a dim of a reshard stands in the chunks of one iteration."""
        stream = op.result.stream
        if dim is None or steps is None or stream is None or dim <= stream.dim:
            return dim
        splits = steps.splits(op.result, stream.dim) or steps.splits(self.values[op.tensors[0]], stream.dim)
        return dim + splits - steps.drops_dim

    def next_chunk(self, op: Op, value: Value, steps: Steps) -> str:
        """The chunk that a ring's neighbour sends in this iteration."""
        assert value.stream is not None
        if value.name in self.by_step or not self.b.is_contiguous(self.chunk(value.name, value.stream.dim, steps, False)):
            raise ProgramError(f"{op.kind}: a ring passes contiguous blocks on, so it streams the outermost dim; use by='p2p'", op.location)
        return chunk(self.b, steps.next_hop, self.whole(value.name), value, value.stream.dim, suffix="next")

    def new_events(self, wanted: str, steps: Steps, op: Op) -> str:
        if not steps.count.is_int:
            raise ProgramError(f"{op.kind}: a ring needs a number of steps that is known at compile time: give chunks=", op.location)
        taken = {events.name for events in self.events}
        name = wanted if wanted not in taken else f"{wanted}_{len(taken) + 1}"
        self.events.append(ir.Events(name, int(steps.count)))
        return name

    def defer_ring_terms(self, loop: _Loop) -> None:
        """A ring of sums adds this rank's term itself, after the sum so far has arrived."""
        op = loop.communication
        if op is None or op.attribute("kind") != "reduce_scatter" or op.result.stream is None or op.result.stream.by != "ring":
            return
        name = self.ring_term(op)
        self.deferred[name] = lambda adds: None

    def ring_term(self, op: Op) -> str:
        """The matmul whose result the ring sums, seen through views."""
        name = op.tensors[0]
        loop = self.loop_of[op.result.name]
        while self.loop_of.get(name) is loop:
            producer = next(o for o in loop.ops if o.result.name == name)
            if producer.kind == "matmul":
                return name
            if not self.is_view(producer):
                break
            name = producer.tensors[0]
        raise ProgramError("reshard: by='ring' sums the results of a matmul in its loop; use by='p2p' for other ops", op.location)

    def scatter_by_block(self, op: Op, change: Change, steps: Steps) -> None:
        b, value, stream = self.b, op.result, op.result.stream
        assert stream is not None
        assert change.dim is not None
        source = self.operand(op, 0, steps)
        channel = Channel(self.mesh_of(op), change.axes, change.dim)
        if stream.by == "ring":
            term = self.values[op.tensors[0]]
            event = self.new_events("arrived", steps, op)
            produce = self.deferred[self.ring_term(op)]
            communication.scatter_ring(b, produce, source, lambda: self.next_chunk(op, term, steps), channel, steps, event)
            rank, size = team_coordinate(self.mesh_of(op), change.axes), Extent(channel.size)

            def take_own() -> None:
                own = b.slice(self.whole(term.name), stream.dim, rank, size, f"{term.name}_own")
                b.emit(ir.Copy(own, self.whole(value.name)))

            self.after_loop.append(take_own)
            return
        local = self.local(value)
        landing = b.allocate("landing", BufferType(local.dtype, (Extent(channel.size), *local.shape)))
        communication.scatter_p2p(
            b, source, landing, channel, steps, lambda terms: chunk(b, steps, terms, value, stream.dim, suffix="landing")
        )

        def sum_terms() -> None:
            reduction = self.reduction(op)
            kind = "mean" if reduction == "avg" else reduction
            target = self.whole(value.name)
            summed = Op(kind, (landing,), value, (("axis", (0,)),), op.location)
            b.emit(ir.Launch(self.kernel_of_terms(summed, landing, target), (landing,), (target,)))

        self.after_loop.append(sum_terms)

    def kernel_of_terms(self, op: Op, landing: str, target: str) -> str:
        kernel = ir.Kernel(
            f"{op.kind}_{op.result.name}",
            (ir.Parameter(landing, self.tensor(landing)),),
            (replace(op, result=Value(op.result.name, self.tensor(target))),),
        )
        self.kernels[kernel] = kernel
        return kernel.name


def cut_axis(op: Op) -> int:
    axis = op.attribute("axis")
    assert isinstance(axis, int)
    return axis
