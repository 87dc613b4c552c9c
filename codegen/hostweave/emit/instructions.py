"""From host IR instructions to views for the templates, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hostweave.analysis.live_ranges import begins, live_ranges
from hostweave.emit import program_views, views
from hostweave.emit.copies import copied, copy_kernel, fill_kernel
from hostweave.emit.cpp import CUDA_TYPES, NCCL_REDUCTIONS, nccl_type
from hostweave.emit.kernels import emit_kernel
from hostweave.emit.meshes import label
from hostweave.emit.shared import WORKSPACE, Shared
from hostweave.fusion_ir.user_kernel import Source, elements, held_of
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const, Coordinate, Expr, divisibility
from hostweave.host_ir.text import print_instruction
from hostweave.types.routes import Route
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, DType

Moved = ir.Select | ir.Chunk | ir.Slice | ir.Strided  # views that begin elsewhere

CUBLAS_ACTIVATIONS = {"relu": "RELU", "gelu_tanh": "GELU"}
CALLER = "caller"


@dataclass(frozen=True)
class Buffer:
    """What an instruction names: its C++ expression, its type, and the parameter or temporary that it is part of."""

    text: str
    type: BufferType
    root: str
    read_only: bool


class Emitter:
    """Emits one body: that of the program, or of a block as a program of its own."""

    def __init__(self, program: ir.HostProgram, shared: Shared, block: str = ""):
        self.program, self.shared, self.block = program, shared, block
        self.names, self.members, self.integers = shared.names, shared.members, shared.integers
        self.buffers = {
            p.name: Buffer(self.names.of(p.name), program.local_type(p), p.name, p in program.inputs)
            for p in (*program.inputs, *program.outputs)
        }
        self.temporaries = shared.temporaries
        self.steps = live_ranges(program, is_block=bool(block))
        self.begins = {id(begin.allocate): begin for begin in begins(self.steps)}
        self.used: set[str] = set()  # parameters and temporaries that some call names
        self.stream = CALLER
        self.in_group = False

    def body(self, body: ir.Body) -> views.Body:
        result: list[views.InstructionView] = []
        for instruction in body:
            view = _EMIT[type(instruction)](self, instruction, instruction is body[-1])
            if view is not None:
                result.append(view)
        return tuple(result)

    # --- what instructions name ---

    def text(self, name: str) -> str:
        """The C++ expression of a buffer that a call takes."""
        self.used.add(self.buffers[name].root)
        return self.buffers[name].text

    def type_of(self, name: str) -> BufferType:
        return self.buffers[name].type

    def count(self, name: str) -> str:
        return self.count_of(self.type_of(name))

    def count_of(self, type: BufferType) -> str:
        return self.integers.extent(product(type.shape))

    def bytes(self, name: str) -> str:
        return self.in_bytes(product(self.type_of(name).shape), self.type_of(name).dtype)

    def in_bytes(self, elements: Size, dtype: DType) -> str:
        size = f"sizeof({dtype.cpp})"
        return size if elements == Size() else f"{self.integers.extent(elements)} * {size}"

    def channel(self, axes: ir.Axes) -> str:
        """The channel of a channel."""
        mesh, program, channels = self.integers.mesh, self.program.mesh, self.shared.channels
        if axes == ir.ALL_RANKS:
            mesh, axes = program, tuple(name for name, _ in program.axes)
        if (mesh, axes) not in channels:
            name, submesh = "_".join(["channel", *axes]), None
            if mesh is not program:
                name, rows = f"{name}_of_{label(mesh)}", tuple(program_views.Axis(axis, size) for axis, size in mesh.axes)
                submesh = program_views.Submesh(str(mesh), self.shared.flag(mesh), rows, tuple(mesh.all_ranks))
            member = self.members.of(name, f"channel of {mesh}")
            channels[mesh, axes] = program_views.Channel(member, ", ".join(axes), mesh.size_of(axes), submesh)
        return channels[mesh, axes].member

    # --- memory and views ---

    def allocate(self, i: ir.Allocate, last: bool) -> views.Allocate | None:
        """What is one a stream has a local name for the present stream's."""
        begin = self.begins[id(i)]
        member = self.members.of(f"{self.block}_{i.out}" if self.block else i.out, f"buffer {len(self.temporaries)}")
        pointer, comment = f"{i.type.dtype.cpp}*", f"%{i.out}: {i.type}" + (f" of @{self.block}" if self.block else "")
        if begin.block is None:
            self.temporaries[id(i)] = program_views.Temporary(f"{pointer} {member} = nullptr", member, self.count_of(i.type), comment)
            self.buffers[i.out] = Buffer(member, i.type, i.out, read_only=False)
            return None
        pool, name = self.shared.streams[begin.block.stream], self.names.of(i.out)
        declaration, comment = f"std::array<{pointer}, {begin.slots}> {member}{{}}", f"{comment}, one a stream"
        self.temporaries[id(i)] = program_views.Temporary(declaration, member, self.count_of(i.type), comment, pool.member)
        self.buffers[i.out] = Buffer(name, i.type, i.out, read_only=False)
        index, (least, greatest) = begin.block.index, self.integers.range(begin.block.index)
        if least is None or least < 0 or greatest is None or greatest >= pool.count:
            index = index % pool.count
        return views.Allocate("auto*", name, member, self.integers.expr(index))

    def deallocate(self, i: ir.Deallocate, last: bool) -> None:
        """Nothing at the time of the call: `prepare` lays the arena out."""

    def alias(self, i: ir.Reshape | ir.Permute, last: bool) -> None:
        """The same pointer."""
        self.define(i, self.buffers[i.src].text)

    def define(self, i: ir.View, text: str) -> None:
        source = self.buffers[i.src]
        self.buffers[i.out] = Buffer(text, i.type_of(source.type), source.root, source.read_only)

    def select(self, i: ir.Select, last: bool) -> views.Select | None:
        return self.view_at(views.Select, i, i.index, ir.strides_of(self.type_of(i.src))[i.dim])

    def slice(self, i: ir.Slice, last: bool) -> views.Select | None:
        return self.view_at(views.Slice, i, i.start, ir.strides_of(self.type_of(i.src))[i.dim])

    def strided_view(self, i: ir.Strided, last: bool) -> views.Select | None:
        return self.view_at(views.Strided, i, i.start, ir.strides_of(self.type_of(i.src))[i.dim])

    def chunk(self, i: ir.Chunk, last: bool) -> views.Select | None:
        chunk = i.type_of(self.type_of(i.src)).shape[i.dim]
        return self.view_at(views.Chunk, i, i.index, chunk * ir.strides_of(self.type_of(i.src))[i.dim])

    def view_at(self, kind: type[views.Select], i: Moved, index: Expr, step: Size) -> views.Select | None:
        """The pointer that lies `index` steps further, or nothing to do for index 0."""
        if index == Const(0):
            self.define(i, self.buffers[i.src].text)
            return None
        base, name = self.text(i.src), self.names.of(i.out)
        self.define(i, name)
        return kind("const auto*" if self.buffers[i.src].read_only else "auto*", name, base, self.integers.times(index, step))

    # --- compute ---

    def matmul(self, i: ir.Matmul, last: bool) -> views.Matmul:
        stream = self.stream
        if stream == CALLER:
            self.shared.needs_workspace = True
            stream = f"{{{CALLER}, {WORKSPACE}}}"
        terms = [f".scale = {i.scale!r}"] if i.scale != 1 else []
        terms += [f".{field} = {self.text(name)}" for field, names in (("accumulate", i.accumulate), ("bias", i.bias)) for name in names]
        return views.Matmul(self.plan(i), self.text(i.a), self.text(i.b), self.text(i.dst), stream, tuple(terms))

    def plan(self, i: ir.Matmul) -> str:
        a, b, dst = types = (self.type_of(i.a), self.type_of(i.b), self.type_of(i.dst))
        plans, key = self.shared.plans, (types, i.precision, bool(i.bias), i.activation)
        if key not in plans:
            member = self.members.of(f"plan_{self.buffers[i.dst].root}", f"plan {len(plans)}")
            operands = CUDA_TYPES[a.dtype.name], CUDA_TYPES[dst.dtype.name]
            shapes = self.strided(a), self.strided(b), self.strided(dst)
            plans[key] = program_views.Plan(member, *operands, _ends(i), *shapes, print_instruction(i)[0])
        self.shared.uses_of_plan.setdefault(key, set()).add(self.integers.mesh)
        return plans[key].member

    def strided(self, type: BufferType) -> str:
        shape = self.integers.extents(type.shape)
        return shape if type.strides is None else f"hw::Strided({shape}, {self.integers.extents(type.strides)})"

    def launch(self, i: ir.Launch, last: bool) -> views.Launch:
        if i.kernel in self.shared.sources:
            return self.launch_source(i, self.shared.sources[i.kernel])
        return self.launch_of(self.shared.declared[i.kernel], i.srcs, i.dsts)

    def launch_of(self, kernel: ir.Kernel, srcs: Sequence[str], dsts: Sequence[str]) -> views.Launch:
        """A launch of the kernel as compiled for buffers of these types: their strides are in its code."""
        key, kernels = (kernel, tuple(self.type_of(name) for name in (*srcs, *dsts))), self.shared.kernels
        if key not in kernels:
            kernels[key] = emit_kernel(kernel, key[1], self.integers, self.names, len(kernels))
        emitted = kernels[key]
        buffers = [*(self.access("reads", name) for name in srcs), *(self.access("writes", name) for name in dsts)]
        return views.Launch("launch_pdl", emitted.view.name, emitted.grid, self.stream, (*buffers, *emitted.sizes))

    def launch_source(self, i: ir.Launch, source: Source) -> views.Launch:
        """A kernel of the user, on what the rank holds."""
        mesh, uneven = self.integers.mesh, self.program.uneven
        buffers = {"in": iter(i.srcs), "out": iter(i.dsts)}
        arguments = []
        for argument in source.arguments:
            if argument.dim:
                arguments.append(self.integers.extent(held_of(argument.dim, mesh, uneven)))
            elif argument.type:
                arguments.append(self.access("reads" if argument.role == "in" else "writes", next(buffers[argument.role])))
            else:
                arguments.append(repr(argument.number))
        shared = self.integers.extent(elements(source, mesh, uneven))
        blocks = f"hw::divided_up({shared}, {source.per})" if source.per > 1 else shared
        return views.Launch("launch", source.function, f"hw::Grid{{{blocks}, {source.block}}}", self.stream, tuple(arguments))

    def access(self, verb: str, name: str) -> str:
        type = self.type_of(name)
        shape = self.count(name) if type.strides is None else f"{self.integers.extents(type.shape)}, {self.integers.extents(type.strides)}"
        return f"hw::{verb}({self.text(name)}, {shape})"

    def copy(self, i: ir.Copy, last: bool) -> views.InstructionView:
        src, dst = self.type_of(i.src), self.type_of(i.dst)
        if src.strides is None and dst.strides is None:
            return views.Copy(self.text(i.dst), self.text(i.src), self.bytes(i.dst), self.stream)
        rows = copied(src, dst)
        if rows is None:
            return self.launch_of(copy_kernel(f"copy_{i.dst}", dst), (i.src,), (i.dst,))

        return views.CopyRows(
            dst=self.text(i.dst),
            dst_pitch=self.in_bytes(rows.dst_pitch, dst.dtype),
            src=self.text(i.src),
            src_pitch=self.in_bytes(rows.src_pitch, dst.dtype),
            bytes=self.in_bytes(rows.elements, dst.dtype),
            rows=self.integers.extent(rows.rows),
            stream=self.stream,
        )

    def fill(self, i: ir.Fill, last: bool) -> views.InstructionView:
        type = self.type_of(i.dst)
        if type.strides is None and repr(i.value) == "0.0":  # all bytes 0, which -0.0 is not
            return views.Fill(self.text(i.dst), self.bytes(i.dst), self.stream)
        return self.launch_of(fill_kernel(f"fill_{i.dst}", type, i.value), (), (i.dst,))

    # --- communication ---

    def collective(self, src: str, dst: str, axes: ir.Axes) -> dict[str, str]:
        return {"src": self.text(src), "dst": self.text(dst), "channel": self.channel(axes), "stream": self.stream}

    def moved(self, name: str) -> str:
        return nccl_type(self.type_of(name).dtype)

    def all_gather(self, i: ir.AllGather, last: bool) -> views.AllGather:
        return views.AllGather(**self.collective(i.src, i.dst, i.axes), count=self.count(i.src), dtype=self.moved(i.src))

    def reduction(self, i: ir.AllReduce | ir.ReduceScatter, last: bool) -> views.AllReduce:
        kind = views.AllReduce if isinstance(i, ir.AllReduce) else views.ReduceScatter
        dtype = nccl_type(self.type_of(i.src).dtype, i)
        return kind(**self.collective(i.src, i.dst, i.axes), count=self.count(i.dst), dtype=dtype, op=NCCL_REDUCTIONS[i.op])

    def broadcast(self, i: ir.Broadcast, last: bool) -> views.Broadcast:
        root = self.integers.expr(i.root)
        return views.Broadcast(**self.collective(i.src, i.dst, i.axes), count=self.count(i.dst), dtype=self.moved(i.src), root=root)

    def broadcast_to_others(self, i: ir.BroadcastToOthers, last: bool) -> views.BroadcastToOthers:
        place: Expr = Const(0)
        for axis in i.axes:
            place = place * self.integers.mesh.axis_size(axis) + Coordinate(axis)
        common, src, cpp = self.collective(i.src, i.dst, i.axes), self.text(i.src), self.type_of(i.dst).dtype.cpp
        return views.BroadcastToOthers(
            **common,
            count=self.count(i.dst),
            dtype=self.moved(i.src),
            root=self.integers.expr(i.root),
            place=self.integers.expr(place),
            kept=f"const_cast<{cpp}*>({src})" if self.buffers[i.src].read_only else src,
        )

    def reduce(self, i: ir.Reduce, last: bool) -> views.Reduce:
        dtype, op, root = nccl_type(self.type_of(i.src).dtype, i), NCCL_REDUCTIONS[i.op], self.integers.expr(i.root)
        return views.Reduce(**self.collective(i.src, i.dst, i.axes), count=self.count(i.src), dtype=dtype, op=op, root=root)

    def all_to_all(self, i: ir.AllToAll, last: bool) -> views.InstructionView:
        block = product(self.type_of(i.src).shape) // self.integers.mesh.size_of(i.axes)
        return self.grouped(views.AllToAll(**self.blocks(i.src, i.dst, i.axes, block)), last)

    def gather(self, i: ir.Gather, last: bool) -> views.InstructionView:
        block = product(self.type_of(i.src).shape)
        return self.grouped(views.Gather(**self.blocks(i.src, i.dst, i.axes, block), root=self.integers.expr(i.root)), last)

    def scatter(self, i: ir.Scatter, last: bool) -> views.InstructionView:
        block = product(self.type_of(i.dst).shape)
        return self.grouped(views.Scatter(**self.blocks(i.src, i.dst, i.axes, block), root=self.integers.expr(i.root)), last)

    def blocks(self, src: str, dst: str, axes: ir.Axes, block: Size) -> dict[str, str]:
        """A collective that walks the ranks of its channel and sends or receives a block of each."""
        peer = self.names.of("peer", "rank of a channel")
        offset = peer if block == Size() else f"{peer} * {self.integers.factor(block)}"
        common = self.collective(src, dst, axes)
        return {**common, "count": self.integers.extent(block), "dtype": self.moved(src), "peer": peer, "offset": offset}

    def collective_permute(self, i: ir.CollectivePermute, last: bool) -> views.InstructionView:
        targets = tuple(i.sources.index(place) if place in i.sources else None for place in range(len(i.sources)))
        sources, targets_text = (tuple("-1" if place is None else str(place) for place in places) for places in (i.sources, targets))
        moved = {"count": self.count(i.dst), "dtype": self.moved(i.src), "bytes": self.bytes(i.dst)}
        return self.grouped(
            views.CollectivePermute(**self.collective(i.src, i.dst, i.axes), **moved, sources=sources, targets=targets_text), last
        )

    def grouped(self, view: views.InstructionView, last: bool) -> views.InstructionView:
        """Sends and recvs in a group, the one around it where there is one."""
        return view if self.in_group else views.Group((view,), braces=not last)

    def barrier(self, i: ir.Barrier, last: bool) -> views.AllReduce:
        dtype = nccl_type(self.type_of(i.token).dtype, i)
        return views.AllReduce(**self.collective(i.token, i.token, i.axes), count="1", dtype=dtype, op="ncclSum")

    def send(self, i: ir.Send, last: bool) -> views.Send:
        peer = self.integers.expr(i.peer)
        return views.Send(self.text(i.src), self.count(i.src), self.moved(i.src), peer, self.channel(i.axes), self.stream)

    def recv(self, i: ir.Recv, last: bool) -> views.Recv:
        peer = self.integers.expr(i.peer)
        return views.Recv(self.text(i.dst), self.count(i.dst), self.moved(i.dst), peer, self.channel(i.axes), self.stream)

    def send_blocks(self, i: ir.SendBlocks | ir.RecvBlocks, last: bool) -> views.InstructionView:
        name, kind = (i.src, views.SendBlocks) if isinstance(i, ir.SendBlocks) else (i.dst, views.RecvBlocks)
        if i.routes not in self.shared.routes:
            self.shared.routes[i.routes] = program_views.Routes(
                self.names.of(f"kRoutes_{name}", f"routes {len(self.shared.routes)}"), tuple(map(_route, i.routes))
            )
        block, route = product(self.type_of(name).shape) // i.count, self.names.of("route", "of blocks")
        view = kind(
            buffer=self.text(name),
            count=self.integers.extent(block),
            dtype=self.moved(name),
            routes=self.shared.routes[i.routes].name,
            rank=self.integers.rank(),
            route=route,
            sent=f"{route}.sent * {self.integers.factor(block)}" if i.count > 1 else "",
            received=f"{route}.received * {self.integers.factor(block)}" if i.count > 1 else "",
            channel=self.channel(i.axes),
            stream=self.stream,
        )
        return self.grouped(view, last)

    def group(self, i: ir.Group, last: bool) -> views.Group:
        self.in_group = True
        body = self.body(i.body)
        self.in_group = False
        return views.Group(body, braces=not last)

    # --- streams, events, control ---

    def on_stream(self, i: ir.OnStream, last: bool) -> views.OnStream:
        index = self.integers.expr(i.index)
        self.stream = "stream"
        body = self.body(i.body)
        self.stream = CALLER
        return views.OnStream(self.shared.streams[i.stream].member, index, body, braces=not last)

    def fork(self, i: ir.Fork, last: bool) -> views.Fork:
        return views.Fork(self.shared.streams[i.stream].member)

    def join(self, i: ir.Join, last: bool) -> views.Join:
        return views.Join(self.shared.streams[i.stream].member)

    def record(self, i: ir.Record, last: bool) -> views.Record:
        return views.Record(self.shared.events[i.event].member, self.integers.expr(i.index), self.stream)

    def wait(self, i: ir.Wait, last: bool) -> views.Wait:
        return views.Wait(self.shared.events[i.event].member, self.integers.expr(i.index), self.stream)

    def let(self, i: ir.Let, last: bool) -> views.Let:
        value = self.integers.expr(i.value)
        return views.Let(self.integers.define(i.out, self.names.of(i.out), self.integers.range(i.value)), value)

    def loop(self, i: ir.For, last: bool) -> views.For:
        index = self.integers.define(i.out, self.names.of(i.out), (0, int(i.count) - 1 if i.count.is_int else None))
        return views.For(index, self.integers.extent(i.count), self.body(i.body))

    def branch(self, i: ir.If, last: bool) -> views.If:
        condition, divisors = self.integers.expr(i.condition), divisibility(i.condition)
        if not divisors:
            with self.integers.given(i.condition):
                body = self.body(i.body)
            return views.If(condition, body, self.body(i.orelse))
        with self.integers.knowing(divisors):
            body = self.body(i.body)
        return views.If(condition, body, self.body(i.orelse))

    def call(self, i: ir.Call, last: bool) -> views.Call:
        return views.Call(self.shared.blocks[i.block], (*map(self.text, (*i.srcs, *i.dsts)), self.stream))

    def on_mesh(self, i: ir.OnMesh, last: bool) -> views.If | None:
        """Nothing where the body only allocates."""
        flag = self.shared.flag(i.mesh)
        for axis, _ in i.mesh.axes:
            self.integers.coordinates[i.mesh, axis] = self.names.of(f"{axis}_in_{label(i.mesh)}", f"coordinate in {i.mesh}")
        with self.integers.on(i.mesh):
            body = self.body(i.body)
        return views.If(flag, body, ()) if body else None


def _ends(i: ir.Matmul) -> tuple[str, ...]:
    """What a plan is made with besides dtypes: cuBLASLt's names of the epilogue and of the compute type."""
    words = [CUBLAS_ACTIVATIONS[i.activation]] if i.activation else []
    epilogue = "_".join(["CUBLASLT_EPILOGUE", *words, *(["BIAS"] if i.bias else [])])
    if i.precision:
        return (epilogue if words or i.bias else "CUBLASLT_EPILOGUE_DEFAULT", "CUBLAS_COMPUTE_32F_FAST_TF32")
    return (epilogue,) if words or i.bias else ()


def _route(route: Route) -> str:
    return f"{{{route.sender}, {route.sent}, {route.receiver}, {route.received}}}"


_EMIT: dict[type[ir.Instruction], Callable[[Emitter, Any, bool], views.InstructionView | None]] = {
    ir.Allocate: Emitter.allocate,
    ir.Deallocate: Emitter.deallocate,
    ir.Select: Emitter.select,
    ir.Chunk: Emitter.chunk,
    ir.Slice: Emitter.slice,
    ir.Strided: Emitter.strided_view,
    ir.Reshape: Emitter.alias,
    ir.Permute: Emitter.alias,
    ir.Matmul: Emitter.matmul,
    ir.Launch: Emitter.launch,
    ir.Copy: Emitter.copy,
    ir.Fill: Emitter.fill,
    ir.AllGather: Emitter.all_gather,
    ir.AllReduce: Emitter.reduction,
    ir.ReduceScatter: Emitter.reduction,
    ir.Broadcast: Emitter.broadcast,
    ir.BroadcastToOthers: Emitter.broadcast_to_others,
    ir.Reduce: Emitter.reduce,
    ir.Gather: Emitter.gather,
    ir.Scatter: Emitter.scatter,
    ir.AllToAll: Emitter.all_to_all,
    ir.CollectivePermute: Emitter.collective_permute,
    ir.Barrier: Emitter.barrier,
    ir.Send: Emitter.send,
    ir.Recv: Emitter.recv,
    ir.SendBlocks: Emitter.send_blocks,
    ir.RecvBlocks: Emitter.send_blocks,
    ir.Group: Emitter.group,
    ir.OnStream: Emitter.on_stream,
    ir.Fork: Emitter.fork,
    ir.Join: Emitter.join,
    ir.Record: Emitter.record,
    ir.Wait: Emitter.wait,
    ir.Let: Emitter.let,
    ir.For: Emitter.loop,
    ir.If: Emitter.branch,
    ir.Call: Emitter.call,
    ir.OnMesh: Emitter.on_mesh,
}
