"""Lowers a fusion to the host IR. Most ops become one instruction. A reshard becomes communication or a view. A chunk loop becomes one or
two `for`.

    loop 8 chunks by_shard local_first {
      %xg: bf16[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
      %y: bf16[M, N] stream(M) = matmul(%xg, %w)
    }

becomes

    %xg = allocate bf16[M, K]
    fork loop
    for %i in 0..8 { %p = (rank.x + %i) % 8; stream loop[%i] { communication of %xg_i; matmul %xg_i, %w -> %y_i } }
    join loop

`placement.py` decides which results need no separate memory.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace

from hostweave.communication.algorithm import Lowering
from hostweave.communication.algorithms import find_algorithm
from hostweave.communication.chunk_loops import EvenLoop, even_loops, shards
from hostweave.communication.collective import permute, take_shard
from hostweave.communication.dataflow import Dataflow, LoopIteration, dim_of_chunk, expr_of, rank_in_group
from hostweave.communication.packing import branch, contiguous_source, copied, packed_destination
from hostweave.communication.put import PEER_COPIES
from hostweave.communication.windows import with_reached, with_windows
from hostweave.fusion_ir.ir import ChunkLoop, Fusion, Op
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS, TO_OTHER_MESHES, communicates
from hostweave.fusion_ir.ops.attributes import AXES, AXIS, CARRIED, CONTRACTED, INDEX, LAGGED, ORDER, SOURCES, VALUE
from hostweave.fusion_ir.ops.calls import is_gathered_by_call, is_repeat
from hostweave.fusion_ir.ops.grouped import GROUPED, OUTER
from hostweave.fusion_ir.ops.resharding import NO_SOURCE
from hostweave.fusion_ir.resharding import step_of
from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.calls import joined
from hostweave.host_ir.expr import Const, Var
from hostweave.host_ir.rules.computing import lies_along
from hostweave.options import Options
from hostweave.passes.lower import attention
from hostweave.passes.lower.asynchronous import COMM, COPIES, Asynchronous
from hostweave.passes.lower.buffers import Buffers, borders, part
from hostweave.passes.lower.kernels import Kernels
from hostweave.passes.lower.placement import placement_of
from hostweave.passes.lower.repeats import RepeatLowering, gathers_by_call
from hostweave.passes.lower.reshards import Reshards
from hostweave.passes.lower.scaled_matmuls import ScaledMatmuls
from hostweave.passes.lower.uneven_sizes import uneven_sizes
from hostweave.types.group import ParameterGroup
from hostweave.types.size import Size, product
from hostweave.types.tensor import TensorType, f32, is_matrix

LOOP = "loop"


def lower_to_host(fusion: Fusion, options: Options) -> ir.HostProgram:
    """Lowers a fusion and its functions. Every reshard must be a single step."""
    uneven = uneven_sizes(fusion, options.transports[0])
    channels: dict[str, ir.Channel] = {}
    windows = _in_windows(fusion, frozenset(options.windows))
    flows = [Dataflow(body, uneven) for body in (*fusion.functions, fusion)]
    beside = {op.called.name for flow in flows for op in flow.fusion.ops if is_repeat(op) and gathers_by_call(flow, op)}
    bodies = [_Lowering(flow, options, channels, windows[flow.fusion.name], beside) for flow in flows]
    streams = max((body.streams_of(item) for body in bodies for item in body.flow.fusion.body if isinstance(item, ChunkLoop)), default=1)
    lowered: dict[str, ir.HostProgram] = {}
    for body in bodies:
        program = with_reached(body.program(streams), lowered)
        lowered[program.name] = program
    program = joined(tuple(lowered.values()))
    choices = tuple(choice for body in (*fusion.functions, fusion) for choice in body.choices)
    return replace(program, channels=tuple(channels.values()), user_kernels=fusion.user_kernels, choices=choices)


def _in_windows(fusion: Fusion, names: frozenset[str]) -> dict[str, frozenset[str]]:
    """Parameters in windows, by body. A function's parameter is in a window if every call passes memory in a window."""
    found = {fusion.name: names}
    for body in (fusion, *reversed(fusion.functions)):  # Callers come before callees.
        for op in body.ops:
            if op.callee and op.kind != "output":
                carried = (*op[CARRIED], *op[LAGGED])  # Calls of a repeat pass different memory.
                numbered = enumerate(zip(op.callee.inputs, op.operands, strict=False))
                given = frozenset(value.name for at, (value, operand) in numbered if operand in found[body.name] and at not in carried)
                found[op.callee.name] = found.get(op.callee.name, given) & given
    return found


class _Lowering:
    def __init__(self, flow: Dataflow, options: Options, channels: dict[str, ir.Channel], windows: frozenset[str], beside: Set[str]):
        self.windows, self.beside = windows, beside  # `beside`: functions that a repeat calls while it gathers for the next call
        self.flow, self.options, self.b = flow, options, Builder(flow.mesh, channels, options.transports)
        self.placement = placement_of(flow)
        self.asynchronous = Asynchronous(flow, self.b, flow.fusion.name in beside)
        self.buffers = Buffers(flow, self.placement, self.b, self.asynchronous)
        self.kernels = Kernels(self.b.types)
        self.attentions = attention.Attentions(flow, self.buffers, self.b)
        self.reshards = Reshards(flow, self.buffers, self.kernels, self.b)
        self.scaled = ScaledMatmuls(self.kernels, self.b)
        self.repeats = RepeatLowering(flow, self.buffers, self.asynchronous, self.b)
        self.lowering: Lowering | None = None  # communication of the current loop
        self.by_kind = {  # how to compute an op; one kernel computes each op of another kind
            "matmul": self.matmul,
            "scaled_matmul": self.scaled_matmul,
            **dict.fromkeys(GROUPED, self.grouped),
            "collective_permute": self.collective_permute,
            "copy": self.copy,
        }

    def streams_of(self, loop: ChunkLoop) -> int:
        count, op = loop.trips, loop.communication
        stated = find_algorithm(op.kind, op.result.walked.algorithm or "").max_streams if op else None
        most = stated or self.options.streams
        return min(most, self.options.streams, int(count) if count.is_int else most)

    def program(self, streams: int) -> ir.HostProgram:
        b, flow, f = self.b, self.flow, self.flow.fusion
        self.streams = streams
        donated = f.donated or ("",) * len(f.outputs)
        inputs = tuple(self.parameter(v.name, group=v.group) for v in f.inputs)
        returned = zip(f.outputs, donated, f.returned or (None,) * len(f.outputs), strict=True)
        outputs = tuple(self.parameter(name, memory, group) for name, memory, group in returned)
        self.buffers.begin(inputs, outputs)
        kept = self.keep_views(outputs)
        for item in f.body:
            if isinstance(item, Op):
                self.asynchronous.settle((item,))
                self.op(item, None)
            elif item.gathered:
                self.loop_over_shards(item)
            else:
                self.asynchronous.settle(item.ops)
                self.loop(item)
        b.location = None
        self.asynchronous.join()
        self.reshards.transfers.wait_for_readers()
        # Donated memory is written last, because copies to other results may still read this memory.
        for parameter, name in sorted(zip(outputs, f.outputs, strict=True), key=lambda pair: bool(pair[0].memory)):
            b.location = flow.made[name].location if parameter.memory else None
            with b.on(parameter.type.mesh):
                source = kept.get(name) or self.buffers.buffer_of(name)
                if source != parameter.name and parameter.group:  # The tensors of a group have unrelated addresses.
                    with b.loop(parameter.type.shape[0]) as index:
                        own, given = (b.select(buffer, 0, index, f"{buffer}_{index.name}") for buffer in (parameter.name, source))
                        b.emit(ir.Copy(given, own))
                elif source != parameter.name:  # The result is an input or a view, or is in donated memory.
                    b.emit(ir.Copy(source, parameter.name))
        body = with_windows(b)
        used = {name for i in tree.walk(body) for name in tree.names(i, "fork", "join", "stream")}
        counts = {LOOP: streams, COMM: 1, COPIES: 1, PEER_COPIES: 1}
        pools = tuple(ir.Streams(name, count) for name, count in counts.items() if name in used)
        kernels = tuple(self.kernels.made.values())
        return ir.HostProgram(f.name, f.mesh, inputs, outputs, (), pools, tuple(b.events), kernels, body, flow.uneven)

    def keep_views(self, outputs: Sequence[ir.Parameter]) -> dict[str, str]:
        """Copies results that are views of donated inputs, before the inputs are overwritten. Returns the buffers of these results."""
        b, f, kept = self.b, self.flow.fusion, dict[str, str]()
        for parameter, name in zip(outputs, f.outputs, strict=True):
            if self.flow.viewed(name) in f.donated:
                b.location = self.flow.made[name].location
                with b.on(parameter.type.mesh):
                    view = self.buffers.buffer_of(name)
                    kept[name] = b.allocate(f"{name}_kept", b.types[parameter.name]) if parameter.memory else parameter.name
                    b.emit(ir.Copy(view, kept[name]))
        return kept

    def parameter(self, name: str, memory: str = "", group: ParameterGroup | None = None) -> ir.Parameter:
        type = self.flow.types[name]
        in_window = self.windows.issuperset(group.names if group else (name,)) and not memory and type.mesh is None
        return ir.Parameter(self.b.parameter(name, self.flow.local(self.flow.values[name]), in_window), type, memory, in_window, group)

    def loop(self, loop: ChunkLoop) -> None:
        """Emits a chunk loop. If the chunks do not divide the rows, a second loop covers the remaining rows."""
        known = set(self.buffers.by_iteration)
        for even in even_loops(self.flow, loop):
            self.loop_over(even, loop)
            for name in self.buffers.by_iteration.keys() - known:  # The two loops have chunks of different sizes.
                del self.buffers.by_iteration[name]

    def loop_over(self, even: EvenLoop, loop: ChunkLoop) -> None:
        b, flow = self.b, self.flow
        count = even.count
        reached = 1 if self.streams_of(loop) == 1 else int(count) if count.is_int else self.streams
        used = reached if reached < self.streams else None
        iteration = LoopIteration(flow.mesh, Var(b.loop_index()), count, loop.drops_dim, shards(flow, loop.ops), uneven=flow.uneven)
        iteration = replace(iteration, rows=even.rows, start=even.start)
        b.location = loop.ops[-1].location
        meshes = {flow.types[name].mesh for op in loop.ops for name in (op.result.name, *op.tensors)}
        b.hoists_views = len(meshes) == 1
        with b.on(meshes.pop() if b.hoists_views else None):
            self.lowering = lowering = self.reshards.begin_loop(loop, iteration)
            if lowering:
                lowering.begin()
            with b.looped() as body:
                if lowering and loop.by_block:
                    iteration = replace(iteration, owner=lowering.owner(iteration), is_own=lowering.is_own(iteration))
                if lowering:
                    lowering.before_iteration(iteration)
                with b.nested() as on_stream:
                    for op in loop.ops:
                        self.op(op, iteration)
                b.location = loop.ops[-1].location
                b.emit(ir.OnStream(LOOP, Const(0) if reached == 1 else iteration.index, tuple(on_stream)))
                if lowering:
                    lowering.after_iteration(iteration)
            b.emit(ir.Fork(LOOP, used))
            b.emit(ir.For(iteration.index.name, count, tuple(body)))
            if lowering:
                lowering.end()
            b.emit(ir.Join(LOOP, used))
            if lowering:
                lowering.after_join()
        b.hoists_views, self.lowering = True, None
        self.buffers.chunks.clear()

    def loop_over_shards(self, loop: ChunkLoop) -> None:
        """Emits the loop of a matmul and its epilogues over the shards of an earlier gather. The rank's own shard comes first."""
        b, (_, weights), gather = self.b, loop.ops[0].tensors, self.flow.made[loop.gathered]
        for name in (*gather.tensors, *(name for op in loop.ops for name in op.tensors if name != weights)):
            self.asynchronous.wait_for(name)
        axes, mesh = step_of(gather).axes, self.flow.mesh
        ranks, view = mesh.size_of(axes), self.flow.made[weights]
        iteration = LoopIteration(mesh, Var(b.loop_index()), loop.trips, loop.drops_dim, ranks, uneven=self.flow.uneven)
        b.location = loop.ops[0].location
        with b.looped() as body:
            owner = Var(b.let("p", (rank_in_group(mesh, axes) + iteration.index) % ranks))
            iteration = replace(iteration, owner=owner, is_own=iteration.index.equals(0))
            branch(b, iteration.index.equals(Const(1)), lambda: self.asynchronous.wait_for(gather.result.name))
            shard = take_shard(b, self.buffers, gather, iteration)
            self.buffers.chunks[weights] = shard if view is gather else b.permute(shard, view[ORDER], f"{weights}_{iteration.index.name}")
            for op in loop.ops:
                self.op(op, iteration)
        b.location = loop.ops[-1].location
        b.emit(ir.For(iteration.index.name, iteration.count, tuple(body)))
        self.buffers.chunks.clear()

    def op(self, op: Op, iteration: LoopIteration | None) -> None:
        self.b.location = op.location
        with self.b.on(op.result.type.mesh):
            if self.flow.is_view(op):
                self.buffers.view(op, iteration)
            elif is_gathered_by_call(op, self.flow.consumers[op.result.name]):
                pass  # The repeat gathers one tensor for each call.
            elif self.asynchronous.takes(op):
                self.asynchronous.run(op, lambda: self.reshards.reshard(op, None))
            elif op.kind in RESHARD_STEPS:
                self.reshards.reshard(op, iteration)
            elif op.kind == "output":
                self.buffers.buffer_of(op.result.name)  # The launch or call has written the buffer.
            elif op.callee:
                if any(inner.kind in TO_OTHER_MESHES for inner in op.callee.all_ops):
                    self.reshards.transfers.wait_for_readers()  # Moves in the function use the same signal numbers.
                if op.callee.name in self.beside and communicates(op) and not gathers_by_call(self.flow, op):
                    self.b.emit(ir.Fork(COMM))  # The function joins the stream. In a CUDA graph, a fork must precede each join.
                (self.repeats.lower if is_repeat(op) else self.call)(op, op.callee)
            elif op.user_kernel:
                sources = tuple(map(self.buffers.contiguous, op.tensors))
                self.b.emit(ir.Launch(op.user_kernel.name, sources, self.targets(op, op.user_kernel.outputs)))
            elif op.kind in attention.KINDS:
                self.attentions.compute(op, iteration)
            else:
                self.compute(op, iteration)

    def compute(self, op: Op, iteration: LoopIteration | None) -> None:
        sources, target = self.buffers.operands(op, iteration), self.buffers.destination(op, iteration)
        if OPS[op.kind].parts and op.result.name not in self.placement.by_kernel:
            self.assemble(op, sources, target, iteration)
        else:
            self.by_kind.get(op.kind, self.launch)(op, sources, target, iteration)

    def launch(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None) -> None:
        if OPS[op.kind].updates and sources[0] in sources[1:]:  # A kernel must not read the tensor that it updates.
            x, *others = sources
            sources = [x, *(copied(self.b, one, iteration) if one == x else one for one in others)]
            names = iter(sources)
            op = replace(op, operands=tuple(next(names) if isinstance(one, str) else one for one in op.operands))
        kernel = self.kernels.computing(self.on_chunk(op, iteration), sources, target)
        self.b.emit(ir.Launch(kernel, tuple(dict.fromkeys(sources)), (target,)))

    def on_chunk(self, op: Op, iteration: LoopIteration | None) -> Op:
        """Adjusts the axes of a reduction to a chunk. A chunk may lack the dim of the loop, or have two dims instead of this dim."""
        stream = op.result.stream
        if AXES not in OPS[op.kind].attributes or iteration is None or stream is None:
            return op
        dim = self.flow.map(op).operand_dim(0, stream.dim)
        assert dim is not None
        shift = iteration.splits(self.flow.values[op.tensors[0]], dim) - iteration.drops_dim
        return op.with_attribute(AXES, tuple(axis + shift if axis > dim else axis for axis in op[AXES]))

    def matmul(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None) -> None:
        matrices = []
        for number, source in enumerate(sources):
            matrix = self.matrix(op, source, number, iteration)
            matrices.append(matrix if is_matrix(self.b.types[matrix]) else contiguous_source(self.b, matrix, iteration))
        a, b, dst = self.stack_shards(op, iteration, [*matrices, target])
        matmul = ir.Matmul(a, b, dst, precision="tf32" if self.options.tf32 and self.b.types[a].dtype == f32 else "")
        if self.lowering and op.result.name == self.lowering.adds:

            def multiply(accumulates: bool, into: str | None) -> None:
                result = self.b.reshape(into or dst, self.b.types[dst].shape, f"{into}_matrix")
                self.b.emit(replace(matmul, dst=result, accumulate=(dst,) * accumulates))

            self.lowering.multiply = multiply
        elif self.b.types[dst].dtype.kind != "float":
            b = copied(self.b, b, iteration) if a == b else b  # A kernel needs different buffers as inputs.
            self.b.emit(ir.Launch(self.kernels.multiplying(a, b, dst, op), (a, b), (dst,)))
        elif is_matrix(self.b.types[dst]):
            self.b.emit(matmul)
        else:
            with packed_destination(self.b, dst, iteration) as packed:
                self.b.emit(replace(matmul, dst=packed))

    def matrix(self, op: Op, source: str, number: int, iteration: LoopIteration | None) -> str:
        """Merges the contracted dims of operand `number`: the last dims of operand 0, or the dims before the last dim of operand 1."""
        shape, count = self.b.types[source].shape, op[CONTRACTED]
        end = len(shape) - number
        merged = (*shape[: end - count], product(shape[end - count : end]), *shape[end:])
        try:
            return self.b.reshape(source, merged, f"{source}_matrix")
        except ValueError:  # No strides give this shape.
            return self.b.reshape(contiguous_source(self.b, source, iteration), merged, f"{source}_matrix")

    def stack_shards(self, op: Op, iteration: LoopIteration | None, buffers: list[str]) -> list[str]:
        """If a chunk has a slice of each rank's columns, moves the dim that numbers ranks before the matrix dims, as a batch dim."""
        stream = op.result.stream
        if iteration is None or stream is None or stream.dim != len(op.result.type.dims) - 1 or not iteration.splits(op.result, stream.dim):
            return buffers

        def stacked(buffer: str) -> str:
            rank = len(self.b.types[buffer].shape)
            return self.b.permute(buffer, (*range(rank - 3), rank - 2, rank - 3, rank - 1), f"{buffer}_stacked")

        x, w, y = buffers
        return [x, stacked(w), stacked(y)]

    def scaled_matmul(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None) -> None:
        self.scaled.multiply(op, sources, target, iteration, self.lowering)

    def grouped(self, op: Op, sources: Sequence[str], target: str, _: LoopIteration | None) -> None:
        """Emits a grouped matmul, in a loop if there are several batches. `first` is the global index of this rank's first row."""
        x, other, starts, ends = sources
        rows = self.flow.types[op.tensors[0]].dims[-2]
        mesh, local = self.flow.mesh_of(op), self.b.types[x].shape[-2]
        even = rows.size // mesh.size_of(rows.axes)
        each = even if local == even else rows.size.ceil_div(mesh.size_of(rows.axes))
        first = rank_in_group(mesh, rows.axes) * expr_of(each) if rows.axes else None
        x = self.by_rows(x)
        starts, ends = (contiguous_source(self.b, name, None) for name in (starts, ends))
        if op.kind == OUTER or not lies_along(self.b.types[other], -2):
            other = self.by_rows(other)
        make = ir.GroupedOuter if op.kind == OUTER else ir.GroupedMatmul

        def emit(view: Callable[[str], str]) -> None:
            rows = view(x) if len(self.b.types[x].shape) == 3 else x
            self.b.emit(make(rows, view(other), view(starts), view(ends), view(dst), first))

        with packed_destination(self.b, target, None) if not lies_along(self.b.types[target], -1) else nullcontext(target) as dst:
            if len(self.b.types[starts].shape) == 1:
                emit(str)
            elif self.b.types[starts].shape[0] == Size():
                emit(lambda name: self.b.drop(name, 0, f"{name}_alone"))
            else:
                with self.b.loop(self.b.types[dst].shape[0]) as index:
                    emit(lambda name: self.b.select(name, 0, index, f"{name}_{index.name}"))

    def by_rows(self, name: str) -> str:
        """The buffer itself, or a copy with contiguous rows."""
        return name if lies_along(self.b.types[name], -1) else contiguous_source(self.b, name, None)

    def call(self, op: Op, function: Fusion) -> None:
        """Emits a call on all ranks. `on` bodies of the function restrict work to the ranks of a mesh."""
        sources = []
        for name in op.tensors:
            with self.b.on(self.flow.types[name].mesh):
                sources.append(self.buffers.contiguous(name))
        targets = self.targets(op, function.output_types)
        with self.b.on(None):
            self.b.emit(ir.Call(function.name, tuple(sources), targets))

    def targets(self, op: Op, types: Sequence[TensorType]) -> tuple[str, ...]:
        """Buffers that a function or user kernel writes. Allocates memory for unused outputs."""
        flow, name = self.flow, op.result.name
        used = {user[INDEX]: user.result.name for user in flow.consumers[name] if user.kind == "output"}
        targets = [self.buffers.buffer_of(name)]
        for index, type in enumerate(types[1:], 1):
            mesh = type.mesh if op.callee else op.result.type.mesh
            with self.b.on(mesh):
                unused = type.local(mesh or flow.mesh, flow.uneven)
                targets.append(self.buffers.buffer_of(used[index]) if index in used else self.b.allocate(f"{name}_unused", unused))
        return tuple(targets)

    # --- ops that copy ---

    def copy(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None) -> None:
        """Emits a copy. If a kernel computes the operand, emits a launch instead, because the kernel can then write both results."""
        made = self.flow.made.get(op.tensors[0])
        if iteration is None and made and OPS[made.kind].cpp and not self.flow.is_view(made):
            self.launch(op, sources, target, iteration)
        else:
            self.b.emit(ir.Copy(sources[0], target))

    def collective_permute(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None) -> None:
        """Moves blocks between ranks. If each rank stores all blocks, each rank moves the blocks in its own memory."""
        (source,), axis, blocks = sources, op[AXIS], op[SOURCES]
        if axes := op.result.type.dims[axis].axes:
            ranks = tuple(None if rank == NO_SOURCE else rank for rank in blocks)
            permute(self.b, source, target, ranks, axes, iteration)
            return
        dim, count = dim_of_chunk(axis, op, self.flow.values[op.tensors[0]], iteration), Size(len(blocks))
        for number, rank in enumerate(blocks):
            block = self.b.chunk(target, dim, Const(number), count, f"{target}_{number}")
            if rank == NO_SOURCE:
                self.b.emit(ir.Fill(block, 0.0))
            else:
                self.b.emit(ir.Copy(self.b.chunk(source, dim, Const(rank), count, f"{source}_{rank}"), block))

    def assemble(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None) -> None:
        """Copies operands of a concat or pad to their parts of the result, unless computed in these parts. Fills the borders of a pad."""
        for number, source in enumerate(sources):
            block = part(self.b, self.flow, op, number, target, iteration, f"{op.tensors[number]}_part")
            if block != source:
                self.b.emit(ir.Copy(source, block))
        if op.kind == "pad":
            for border in borders(self.b, self.flow, op, target, iteration):
                self.b.emit(ir.Fill(border, op[VALUE]))
