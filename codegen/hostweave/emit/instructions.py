"""C++ of host IR instructions: the operands and names that the template of each instruction needs."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hostweave.analysis.def_use import def_use
from hostweave.analysis.kernel_indices import updated
from hostweave.analysis.live_ranges import begins, live_ranges
from hostweave.base.errors import Location
from hostweave.communication import dataflow
from hostweave.emit.context import WORKSPACE, Plan, ProgramContext, Temporary
from hostweave.emit.cpp import CUDA_TYPES
from hostweave.emit.layout import COMMON, lay_out
from hostweave.emit.meshes import rank_in_group
from hostweave.emit.names import only_in_calls, other_names, short_names
from hostweave.emit.plans import (
    EitherAttention,
    OptionalOperands,
    attention_made_with,
    attention_prepared_with,
    operands_of,
    plan_arguments,
)
from hostweave.emit.products import copied, copy_kernel, fill_kernel
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.user_kernel import UserKernel, elements, local_size
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const, Expr, Symbol, leaves, opposite
from hostweave.transports.transport import Transport
from hostweave.types.blocks import Cut, Cuts
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType

ROUTES_PER_LINE = 8  # in a table of routes
MAX_COMMENT_CHARACTERS = 114  # for a line of the user, without " ..."


@dataclass(frozen=True)
class OperandBuffer:
    """Operand of an instruction. `root` is the parameter or temporary that contains the memory of the operand."""

    text: str
    type: BufferType
    root: str
    read_only: bool
    in_window: bool = False  # True for memory in a window of the program's arena


class Emitter:
    """Emits the body of a program or of a function."""

    def __init__(self, program: ir.HostProgram, context: ProgramContext, function: str = ""):
        self.program, self.context, self.function = program, context, function
        self.names, self.members, self.integers = context.names, context.members, context.integers
        self.buffers = {
            p.name: OperandBuffer(self.names.of(p.name), program.local_type(p), p.name, p in program.inputs)
            for p in (*program.inputs, *program.outputs)
        }
        self.temporaries = context.temporaries
        self.memory_events = live_ranges(program, is_function=bool(function))
        self.begins = iter(begins(self.memory_events))  # one per allocate, in program order
        self.used: set[str] = set()  # parameters and temporaries in the emitted code
        self.stream, self.streams = ir.CALLER, 1  # the current stream, and the number of streams in the current pool
        self.in_group = False
        self.sizes_given = ""  # C++ condition on sizes under which the current instruction runs
        self.comments: list[str] = []  # the source lines that were printed last, as comments
        self.others, self.short_names = other_names(program), short_names(program)
        self.arguments = only_in_calls(program)
        self.elements: dict[str, tuple[str, Expr]] = {}  # view of one tensor of a parameter group -> group and index of the tensor

    def body(self, body: tree.Body, ends_scope: bool = True) -> str:
        """C++ of a body, with the user's source lines as comments. If `ends_scope`, the C++ scope ends with the body."""
        return "".join(f"{comments}{code}" for comments, code in self.commented(body, ends_scope))

    def commented(self, body: tree.Body, ends_scope: bool = True) -> Iterator[tuple[str, str]]:
        body = tree.together(i for i in body if not tree.names(i, "free"))  # `prepare` plans the arena, and a run frees no memory.
        for number, i in enumerate(body):
            follows = tree.names(i, "join", "record")  # A join or record belongs to the instructions before it.
            lines = [] if follows else self.lines_of(body[number:])
            before, self.comments = self.comments, lines or self.comments
            # The comment above may end with the first lines of this comment.
            continued = next(n for n in range(len(before), -1, -1) if before[len(before) - n :] == self.comments[:n])
            shown = "".join(f"{comment}\n" for comment in self.comments[continued:])
            code = self.instruction(i, last=ends_scope and i is body[-1])
            if code:
                yield shown, code
            else:
                self.comments = before

    def lines_of(self, body: tree.Body) -> list[str]:
        """Source line, as a comment, of the first instruction that does work. If an op of a launched kernel has this line, returns the
        lines of all ops of the kernel."""
        works = (i for i in tree.walk(body) if i.calls and not i.orders and not tree.bodies(i) and not tree.names(i, "free"))
        i = next(works, tree.Instruction())
        kernel = next((self.context.declared.get(name) for name in tree.names(i, "launch")), None)
        locations = [op.location for op in kernel.ops] if kernel else []
        if i.location not in locations:
            locations = [i.location]
        return list(dict.fromkeys(_comment(location) for location in locations if location and location.text))

    def emit_call(self, i: ir.Call) -> str:
        structs = {at: each for each in self.context.passed.get(i.function, ()) for at in each.members}
        arguments: dict[object, str] = {}  # keyed by position, or by the struct that contains the argument
        for at, name in enumerate((*i.srcs, *i.dsts)):
            if at in structs:
                struct = structs[at].structs.at(self.expr(self.elements[name][1]))
                arguments[struct] = struct
            else:
                arguments[at] = self.text(name)
        return f"{self.context.functions[i.function]}({', '.join((*arguments.values(), self.stream))});\n"

    def instruction(self, i: tree.Instruction, last: bool) -> str:
        text = method_of(type(i))(self, i)
        opens_group = i.grouped and not self.in_group
        if opens_group:  # Outside of a Group, an instruction that posts several sends or recvs gets a separate group.
            text = lay_out("Group", self.transport(i).template, body=text)
        declares = tree.names(i, "stream") or opens_group
        return lay_out("braces", body=text) if declares and not last else text

    def lay_out(self, i: tree.Instruction, **decided: object) -> str:
        file = self.transport(i).template if isinstance(i, ir.Communication) else COMMON
        return lay_out(type(i).__name__, file, e=self, i=i, **decided)

    # --- operands of instructions ---

    def text(self, name: str) -> str:
        self.used.add(self.buffers[name].root)
        return self.buffers[name].text

    def local(self, name: str) -> str:
        return self.names.of(self.short_names.get(name, name))

    def texts(self, names: Sequence[str]) -> list[str]:
        return [self.text(name) for name in names]

    def type_of(self, name: str) -> BufferType:
        return self.buffers[name].type

    def count(self, name: str) -> str:
        return self.count_of(self.type_of(name))

    def count_of(self, type: BufferType) -> str:
        return self.integers.size(product(type.shape))

    def bytes(self, name: str, elements: Size | None = None) -> str:
        type = self.type_of(name)
        elements, size = product(type.shape) if elements is None else elements, f"sizeof({type.dtype.cpp})"
        return size if elements == Size() else f"{self.integers.first_factor(elements)} * {size}"

    def expr(self, expr: Expr) -> str:
        return self.integers.expr(expr)

    def pool(self, i: ir.Fork | ir.Join | ir.OnStream) -> str:
        return self.context.streams[i.stream]

    def event(self, i: ir.Record | ir.Wait) -> str:
        return f"{self.context.events[i.event]}[{self.expr(i.index)}]"

    def channel(self, i: ir.Communication) -> str:
        return self.context.channel(self.program.channel(i.channel)).member

    def handle(self, i: ir.Communication) -> str:
        """Last arguments of a library call: the channel's handle and the stream."""
        return f"{self.channel(i)}.comm(), {self.stream}"

    def transport(self, i: tree.Instruction) -> Transport:
        return next(self.program.channel(inner.channel).transport for inner in tree.walk((i,)) if isinstance(inner, ir.Communication))

    def lie_in_windows(self, *names: str) -> bool:
        return all(self.buffers[name].in_window for name in names)

    # --- memory and views ---

    def emit_allocate(self, i: ir.Allocate) -> str:
        """Declares a temporary as a member. If each stream has a copy, also declares a pointer to the copy of the current stream."""
        begin = next(self.begins)
        member = self.members.of(f"{self.function}_{i.out}" if self.function else i.out, f"buffer {len(self.temporaries)}")
        others = "".join(f", also {other}" for other in self.others.get(i.out, ()))
        pointer, comment = f"{i.type.dtype.cpp}*", f"{i.type}{others}"
        with self.integers.noting() as used:
            count = self.count_of(i.type)
        made = partial(Temporary, member=member, count=count, in_window=i.in_window, sizes=frozenset(used))
        if begin.place.stream is None:
            self.temporaries[begin] = made(f"{pointer} {member} = nullptr", comment=comment)
            self.buffers[i.out] = OperandBuffer(member, i.type, i.out, False, i.in_window)
            return ""
        stream, index = begin.place.stream
        pool, name = self.context.streams[stream], self.names.of(i.out)
        declaration = f"std::array<{pointer}, {begin.slots}> {member}{{}}"
        self.temporaries[begin] = made(declaration, comment=f"{comment}, one per stream", pool=pool)
        self.buffers[i.out] = OperandBuffer(name, i.type, i.out, False, i.in_window)
        least, greatest = self.integers.range(index)
        if least is None or least < 0 or greatest is None or greatest >= self.streams:
            index = index % self.streams
        return lay_out("pointer", name=name, value=f"{member}[{self.expr(index)}]")

    def emit_view(self, i: ir.View) -> str:
        """Declares a pointer at the view's offset.

        Declares no pointer for tensors of a parameter group, for views at offset 0, and for views that only one call of a function uses.
        The uses of these tensors and views contain the address.
        """
        source = self.buffers[i.src]
        out, index = i.type_of(source.type), i.offset
        if not self.function and i.src in self.context.struct_of:
            self.elements[i.out] = i.src, index
            self.buffers[i.out] = OperandBuffer(self.element(i.out), out, i.src, source.read_only)
            return ""
        base, offset = self.text(i.src), self.integers.times(index, i.stride(source.type))
        if not offset:
            self.buffers[i.out] = replace(source, type=out)
            return ""
        if i.out in self.arguments:
            self.buffers[i.out] = replace(source, text=f"{base} + {offset}", type=out)
            return ""
        self.buffers[i.out] = replace(source, text=self.local(i.out), type=out)
        return lay_out("pointer", name=self.text(i.out), value=f"{base} + {offset}", const=source.read_only)

    def element(self, name: str) -> str:
        """C++ of the address of one tensor of a parameter group."""
        group, index = self.elements[name]
        return f"{self.context.struct_of[group].member(group, self.expr(index))}.as<{self.type_of(group).dtype.cpp}>()"

    def text_if(self, name: str, condition: Expr) -> str:
        """C++ of a buffer that is used only if the condition holds."""
        with self.integers.given(condition):
            return self.element(name) if name in self.elements else self.text(name)

    def emit_choose(self, i: ir.Choose) -> str:
        condition = self.integers.known(i.condition)
        if isinstance(condition, Const):
            self.buffers[i.out] = self.buffers[i.src if condition.value else i.other]
            return ""
        src, other = self.text_if(i.src, i.condition), self.text_if(i.other, opposite(i.condition))
        read_only = self.buffers[i.src].read_only or self.buffers[i.other].read_only
        in_window = self.lie_in_windows(i.src, i.other)
        self.buffers[i.out] = replace(self.buffers[i.other], text=self.local(i.out), read_only=read_only, in_window=in_window)
        return lay_out("pointer", name=self.text(i.out), value=f"{self.expr(condition)} ? {src} : {other}", const=read_only)

    # --- compute ---

    def emit_matmul(self, i: ir.Matmul) -> str:
        stream = self.stream
        if stream == ir.CALLER:
            self.context.needs_workspace = True
            stream = f"{{{ir.CALLER}, {WORKSPACE}}}"
        terms = [f".scale = {i.scale!r}"] if i.scale != 1 else []
        terms += [f".{field} = {self.text(name)}" for field, names in (("accumulate", i.accumulate), ("bias", i.bias)) for name in names]
        terms += [f".{field} = {self.text(name)}" for field, name in zip(("scale_a", "scale_b"), i.scales, strict=False)]
        types = [self.type_of(name) for name in operands_of(i)]
        made_with = CUDA_TYPES[types[0].dtype.name], CUDA_TYPES[types[2].dtype.name], *plan_arguments(i, types)
        name = self.context.products.name(i, types)
        plan = self.planned("MatmulPlan", (name,), made_with, lambda: tuple(map(self.integers.strided, types[:3])))
        return self.lay_out(i, plan=plan, stream=stream, terms=terms)

    def planned(self, kind: str, names: Sequence[str], made_with: tuple[str, ...], prepared_with: Callable[[], tuple[str, ...]]) -> str:
        """C++ member that holds a plan. The name of the member is the first of `names` that no other plan has, or `names[0]` with a number.
        Instructions with equal arguments share one plan."""
        with self.integers.noting() as used:
            plans, key = self.context.plans, (kind, made_with, prepared_with())
        self.context.used_by_plans |= used
        if key not in plans:
            taken = {plan.member for plan in plans.values()}
            free = (name for name in names if f"plan_{name}_" not in taken)
            member = self.members.of(f"plan_{next(free, names[0])}", f"plan {len(plans)}")
            plans[key] = Plan(member, *key)
        self.context.uses_of_plan.setdefault(key, set()).add((self.integers.mesh, self.sizes_given))
        return plans[key].member

    def emit_grouped(self, i: ir.Grouped) -> str:
        types = [self.type_of(name) for name in (i.x, i.other, i.dst)]
        made_with = CUDA_TYPES[types[0].dtype.name], CUDA_TYPES[types[2].dtype.name]
        plan = self.planned("GroupedPlan", (self.buffers[i.dst].root,), made_with, lambda: tuple(map(self.integers.strided, types)))
        first = self.expr(i.first) if i.first not in (None, Const(0)) else ""
        return lay_out("Grouped", e=self, i=i, plan=plan, first=first)

    def emit_attention(self, i: ir.Attention) -> str:
        beside = [*(("lse", name) for name in i.lse), *i.masked_by.items()]
        return self.attend(i, i.dst, (i.q, i.k, i.v, i.dst), beside, i.blind)

    def emit_attention_backward(self, i: ir.AttentionBackward) -> str:
        beside = [*i.masked_by.items(), *(("bias_gradient", name) for name in i.dbias)]
        return self.attend(i, i.dq, (i.q, i.k, i.v, i.o, i.gradient, i.dq, i.dk, i.dv), beside)

    def attend(self, i: EitherAttention, dst: str, operands: tuple[str, ...], beside: OptionalOperands, blind: str = "") -> str:
        made_with = attention_made_with(i, self.type_of(i.q), blind, self.streams)
        prepared_with = partial(attention_prepared_with, i, operands, beside, self.type_of, self.integers)
        name = self.context.products.result(dst, def_use(self.program))
        names = (name, f"{name}_{'not_' if i.diagonal is None else ''}causal", f"{name}_of_{i.q}")
        plan = self.planned(f"{type(i).__name__}Plan", names, made_with, prepared_with)
        return self.lay_out(i, plan=plan, beside=[f".{field} = {self.text(name)}" for field, name in beside])

    def emit_launch(self, i: ir.Launch) -> str:
        if i.kernel in self.context.user_kernels:
            return self.launch_user_kernel(i, self.context.user_kernels[i.kernel])
        lies_in = dict(updated(i, self.context.declared, ()))  # If an operand is updated in place, the result is passed instead.
        srcs = [i.dsts[lies_in[number]] if number in lies_in else src for number, src in enumerate(i.srcs)]
        kernel = self.context.declared[i.kernel]
        if not i.sent_on:
            return self.launch_of(kernel, srcs, i.dsts)
        channel, (y,) = self.program.channel(i.sent_on), i.dsts
        kernel = replace(kernel, name=f"{kernel.name}_sent", receivers=channel.size)
        block = self.integers.size(product(self.type_of(y).shape) // channel.size)
        blocks = f"{self.context.exchange(channel)}.sent<{self.type_of(y).dtype.cpp}, {channel.size}>({self.text(y)}, {block})"
        return self.launch_of(kernel, srcs, i.dsts, last=(blocks,))

    def emit_launch_exchange(self, i: ir.LaunchExchange) -> str:
        exchange = self.context.exchange(self.program.channel(i.channel))
        kernel = self.context.declared[i.kernel]
        block = self.count_of(kernel.delivered) if OPS[i.kind].reduces_to_blocks else self.count(i.srcs[0])
        return self.launch_of(kernel, i.srcs, i.dsts, "launch_exchange", (exchange, self.text(i.srcs[0]), block))

    def launch_of(
        self,
        kernel: ir.Kernel,
        srcs: Sequence[str],
        dsts: Sequence[str],
        launch: str = "launch_pdl",
        first: Sequence[str] = (),
        last: Sequence[str] = (),
    ) -> str:
        """Launch of a generated kernel. `first` replaces the argument of the first buffer, and `last` the argument of the last buffer."""
        types = [self.type_of(name) for name in (*srcs, *dsts)]
        emitted = self.context.launched(kernel, (kernel.delivered, *types[1:]) if first else tuple(types))
        buffers = self.texts([*srcs, *dsts])
        own = buffers[bool(first) : len(buffers) - bool(last)]
        arguments = (*first, *own, *last, *map(self.integers.size, emitted.sizes))
        return self.call(launch, emitted.kernel, emitted.grid, arguments)

    def call(self, launch: str, kernel: str, grid: str, arguments: Sequence[str]) -> str:
        return lay_out("launch", function=launch, kernel=kernel, grid=grid, stream=self.stream, arguments=arguments)

    def launch_user_kernel(self, i: ir.Launch, source: UserKernel) -> str:
        mesh, uneven = self.integers.mesh, self.program.uneven
        buffers = {"in": iter(i.srcs), "out": iter(i.dsts)}
        arguments = []
        for argument in source.arguments:
            if argument.dim:
                arguments.append(self.integers.size(local_size(argument.dim, mesh, uneven)))
            elif argument.type:
                arguments.append(self.access("reads" if argument.role == "in" else "writes", next(buffers[argument.role])))
            else:
                arguments.append(repr(argument.number))
        shared = self.integers.size(elements(source, mesh, uneven))
        blocks = f"hw::ceil_div({shared}, {source.per})" if source.per > 1 else shared
        return self.call("launch", source.function, f"hw::Grid{{{blocks}, {source.block}}}", arguments)

    def access(self, verb: str, name: str) -> str:
        type = self.type_of(name)
        shape = self.count(name) if type.strides is None else f"{self.integers.shape(type.shape)}, {self.integers.shape(type.strides)}"
        return f"hw::{verb}({self.text(name)}, {shape})"

    def emit_copy(self, i: ir.Copy) -> str:
        src, dst = self.type_of(i.src), self.type_of(i.dst)
        if src.strides is None and dst.strides is None:
            return self.lay_out(i)
        if rows := copied(src, dst):
            return lay_out("copy_rows", e=self, i=i, rows=rows)
        return self.launch_of(copy_kernel(f"copy_{self.buffers[i.dst].root}", dst), (i.src,), (i.dst,))

    def emit_fill(self, i: ir.Fill) -> str:
        type = self.type_of(i.dst)
        if type.strides is None and repr(i.value) in ("0", "0.0"):  # A memset suffices, because all bytes are 0, unlike for -0.0.
            return self.lay_out(i)
        return self.launch_of(fill_kernel(self.buffers[i.dst].root, type, i.value), (), (i.dst,))

    # --- communication ---

    def emit_broadcast_to_others(self, i: ir.BroadcastToOthers) -> str:
        """Emits a broadcast in place. The root only reads the buffer, so the C++ may cast away `const`."""
        channel, src = self.program.channel(i.channel), self.text(i.src)
        kept = f"const_cast<{self.type_of(i.dst).dtype.cpp}*>({src})" if self.buffers[i.src].read_only else src
        return self.lay_out(i, rank_in_group=self.expr(dataflow.rank_in_group(channel.mesh, channel.axes)), kept=kept)

    def by_rank(self, i: ir.AllToAll | ir.Gather | ir.Scatter) -> str:
        """Emits a loop over the ranks of the channel, or a call of the runtime if blocks may have different sizes."""
        if i.is_shared:
            return self.lay_out(i)
        block, peer = product(self.type_of(i.dst if i.blocks == "src" else i.src).shape), self.names.of("peer", "rank of a channel")
        if not i.blocks:
            block //= self.program.channel(i.channel).size
        offset = peer if block == Size() else f"{peer} * {self.integers.factor(block)}"
        return self.lay_out(i, count=self.integers.size(block), peer=peer, offset=offset)

    emit_all_to_all = emit_gather = emit_scatter = by_rank

    def emit_collective_permute(self, i: ir.CollectivePermute) -> str:
        targets = [i.sources.index(rank) if rank in i.sources else None for rank in range(len(i.sources))]
        sources, targets_text = (["-1" if rank is None else str(rank) for rank in ranks] for ranks in (i.sources, targets))
        return self.lay_out(i, sources=sources, targets=targets_text)

    def emit_routed(self, i: ir.Routed) -> str:
        (name,), tables = tree.names(i, "read", "write"), self.context.routes
        if i.routes not in tables:
            rows = [f"{{{route.sender}, {route.sent}, {route.receiver}, {route.received}}}" for route in i.routes]
            lines = [", ".join(rows[at : at + ROUTES_PER_LINE]) + "," for at in range(0, len(rows), ROUTES_PER_LINE)]
            tables[i.routes] = self.names.of(f"kRoutes_{name}", f"routes {len(tables)}"), lines
        ends = ("send", "sender", "sent", "receiver") if i.posts == "send" else ("recv", "receiver", "received", "sender")
        macro = partial(lay_out, "Routed", self.transport(i).template, e=self, i=i, name=name, ends=ends, routes=tables[i.routes][0])
        if not isinstance(i.count, int):
            return macro()
        block, route = product(self.type_of(name).shape) // i.count, self.names.of("route", "of blocks")
        times = f" * {self.integers.factor(block)}" if i.count > 1 else ""
        return macro(route=route, count=self.integers.size(block), times=times)

    def emit_group(self, i: ir.Group) -> str:
        self.in_group = True
        body = self.body(i.body)
        self.in_group = False
        return body

    def in_block(self, i: ir.Get, what: str) -> str:
        """C++ for the number of elements before ("begin") or in ("size") a peer's shard of the sharded dim."""
        shape, along, ranks = self.type_of(i.dst).shape, i.received_along or 0, self.program.channel(i.channel).size
        local = f"hw::local_{what}({self.integers.size(shape[along])}, {ranks}, {self.expr(i.peer)})"
        each = product(shape[:along] + shape[along + 1 :])
        return local if each == Size() else f"{local} * {self.integers.factor(each)}"

    def shared(self, name: str, along: int) -> str:
        """C++ for the size of a sharded dim, and for the number of elements per index of this dim."""
        shape = self.type_of(name).shape
        return self.integers.shape((shape[along], product(shape[:along] + shape[along + 1 :])))

    def cuts(self, cuts: Cuts) -> str:
        """C++ of the cuts of a packed tensor: `hw::Blocks{{A}, {M, 4}}`."""
        return f"hw::Blocks{{{', '.join(map(self.cut, cuts))}}}"

    def cut(self, cut: Cut) -> str:
        words = [self.integers.size(cut.size)] + ([str(cut.blocks)] if cut.blocks > 1 else [])
        if cut.blocks > 1 and cut.local:
            mesh, end = cut.local.mesh_in(self.program.mesh), self.integers.size(cut.global_size)
            words += [end, f"hw::local_begin({end}, {mesh.size_of(cut.local.axes)}, {rank_in_group(mesh, cut.local.axes)})"]
        return f"{{{', '.join(words)}}}"

    # --- streams, events, control ---

    def emit_on_stream(self, i: ir.OnStream) -> str:
        index = self.expr(i.index)
        self.stream, self.streams = "stream", next(pool.count for pool in self.program.streams if pool.name == i.stream)
        body = self.body(i.body)
        self.stream, self.streams = ir.CALLER, 1
        return lay_out("on_stream", pool=self.pool(i), index=index, body=body)

    def emit_let(self, i: ir.Let) -> str:
        value = self.expr(i.value)
        return lay_out("let", name=self.integers.define(i.out, self.names.of(i.out), self.integers.range(i.value)), value=value)

    def emit_for(self, i: ir.For) -> str:
        count = int(i.count) if i.count.is_int else self.integers.depths.get(i.count.name or "")
        index = self.integers.define(i.out, self.names.of(i.out), (0, count - 1 if count else None))
        return lay_out("loop", index=index, count=self.integers.size(i.count), body=self.body(i.body))

    def emit_if(self, i: ir.If) -> str:
        condition = self.expr(i.condition)
        with self.integers.given(i.condition), self.given_sizes(i.condition):
            body = self.body(i.body)
        with self.given_sizes(opposite(i.condition)):
            orelse = list(self.commented(i.orelse))
        is_chain = [type(one) for one in i.orelse] == [ir.If] and [comments for comments, _ in orelse] == [""]
        return lay_out("branch", condition=condition, body=body, orelse="".join(map("".join, orelse)), is_chain=is_chain)

    @contextmanager
    def given_sizes(self, condition: Expr) -> Iterator[None]:
        """Records the condition for plans of the `with` block if the condition depends on sizes alone."""
        before = self.sizes_given
        if all(isinstance(leaf, Const | Symbol) for leaf in leaves(condition)):
            self.sizes_given = " && ".join(filter(None, (before, self.expr(condition))))
        yield
        self.sizes_given = before

    def emit_on_mesh(self, i: ir.OnMesh) -> str:
        """Emits the body in an `if` for the ranks of the mesh. Emits nothing if the body emits nothing."""
        flag = self.context.flag(i.mesh)
        for axis, _ in i.mesh.axes:
            self.integers.coordinates[i.mesh, axis] = self.names.of(f"{axis}_in_{i.mesh.label}", f"coordinate in {i.mesh}")
        with self.integers.on(i.mesh):
            body = self.body(i.body)
        self.comments = []  # The comments in the body do not belong to later instructions.
        return lay_out("branch", condition=flag, body=body) if body else ""


def _comment(location: Location) -> str:
    """Formats a source line as a C++ comment. A line that is too long loses its own comment first. Removes trailing characters that would
    continue the comment on the next line."""
    whole = re.sub(r"[^ -~]", "?", f"// {location}  {location.text.strip()}")
    code = whole if len(whole) <= MAX_COMMENT_CHARACTERS else re.sub("  # .*", "", whole)
    cut = code if len(code) <= MAX_COMMENT_CHARACTERS else re.sub(r"[.\w]+$", "", code[:MAX_COMMENT_CHARACTERS])
    kept = re.sub(r"(\\|\?\?/| )+$", "", cut)
    return kept if kept == code else f"{kept} ..."


@tree.per_kind
def method_of(kind: type[tree.Instruction]) -> Callable[[Emitter, Any], str]:
    """Emission method of an instruction class, such as `emit_on_stream` for OnStream. The default renders the template."""
    names = ("emit" + re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", base.__name__) for base in kind.__mro__)
    return next((getattr(Emitter, name) for name in names if hasattr(Emitter, name)), Emitter.lay_out)
