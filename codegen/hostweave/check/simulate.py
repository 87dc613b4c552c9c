"""Runs the control flow of a host program for given sizes, and lists the operations of each rank.

for %i in 0..2 {                     rank 1, loop[0], %i = 0: copy %x -> %y_i      reads %x bytes 0..64, writes %y bytes 64..128
  %p = (rank.x + %i) % 2      ->     rank 1, loop[1], %i = 1: recv %y_i from 0 ...
  stream loop[%i] { ... }
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

from hostweave.check.operations import ALWAYS, Access, ByteLayout, ByteRegion, Instances, Operation, Root, StreamInPool, layout
from hostweave.check.run import RankRun, Variables, compiled, coordinates, size_of
from hostweave.check.sizes import all_sizes
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import dedupe_functions, inlined, missing_deallocations
from hostweave.host_ir.expr import Const, Expr
from hostweave.host_ir.instructions.inlined import AsGiven, Returned, TakeOver
from hostweave.types.blocks import boxes, elements
from hostweave.types.mesh import Mesh, RankSizes, Sizes, share
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import BufferType, strides_of

MAX_ITERATIONS = 2**16  # largest total number of iterations of a rank's loops


def instantiate(program: ir.HostProgram, sizes: Sizes, calls: int = 1) -> Instances:
    """Runs the control flow of `program` on every rank of its mesh, for `calls` consecutive calls. Raises ProgramError for an instruction
    that cannot run at `sizes`, and for more than MAX_ITERATIONS iterations."""
    all_of_program = all_sizes(dedupe_functions(program))
    atoms = dict.fromkeys(atom for size in all_of_program for atom in size.atoms)
    local_atoms = [atom for atom in atoms if isinstance(atom, LocalSize)]
    program = inlined(program)
    bound: dict[tuple[int, ...], tuple[_Binder, list[BoundInstruction]]] = {}  # Ranks with the same local sizes share an entry.
    local_sizes, roots, ranks = [], [], []
    for rank in range(program.mesh.size):
        local_sizes.append(RankSizes(sizes, program.mesh, rank))
        key = tuple(size_of(program, local_sizes[-1], Size(1, (atom,)), None) for atom in local_atoms)
        if key not in bound:
            binder = _Binder(program, local_sizes[-1])
            bound[key] = binder, binder.body(program.body)
            for size in all_of_program:  # also the sizes of pieces in zigzag
                binder.size(size, None)
        binder, body = bound[key]
        run = RankRun(program, rank, binder.layouts)
        for call in range(calls):
            if call:
                run.issue(_between_calls(binder, run))
            for execute in body:
                execute(run)
        roots.append(binder.roots)
        ranks.append(tuple(run.operations))
    return Instances(program, tuple(local_sizes), tuple(roots), tuple(ranks))


def _between_calls(binder: _Binder, run: RankRun) -> Operation:
    """The caller's operation between two calls: reads the outputs, and writes the inputs."""
    own = [(name, binder.roots[name]) for name, region in run.regions.items() if region.root == name and name in binder.roots]
    parameters = ((ByteRegion(name, 0, root.layout, 0), root.role) for name, root in own if root.role != "allocation")
    accesses = tuple([Access(region.root, region, reads=role == "output", writes=role == "input") for region, role in parameters])
    return Operation(tree.Instruction(), run.rank, None, (), accesses)


BoundInstruction = Callable[[RankRun], None]


class _Binder:
    """Converts instructions to functions that execute them. Ranks with equal local sizes share the functions."""

    def __init__(self, program: ir.HostProgram, sizes: Sizes):
        self.program = program
        self.sizes = sizes
        self.bound: dict[Size, int] = {}
        self.types: dict[str, BufferType] = {}
        self.layouts: dict[str, ByteLayout] = {}
        self.roots: dict[str, Root] = {}
        self.numbers: dict[str, int | None] = {}  # allocation in a stream block -> its number in program order; other allocation -> None
        self.block: ir.OnStream | None = None  # the enclosing stream block
        self.loops: tuple[ir.For, ...] = ()  # the enclosing loops, outermost first
        for role, parameters in (("input", program.inputs), ("output", program.outputs)):
            for parameter in parameters:
                self.define(parameter.name, program.local_type(parameter), None)
                if not parameter.memory:
                    self.roots[parameter.name] = Root(self.layouts[parameter.name], role)

    def define(self, name: str, buffer: BufferType, instruction: tree.Instruction | None) -> None:
        shape = tuple(self.size(size, instruction) for size in buffer.shape)
        strides = tuple(self.size(size, instruction) for size in strides_of(buffer))
        self.types[name], self.layouts[name] = buffer, layout(buffer.dtype, shape, strides)

    def size(self, dim_size: Size, instruction: tree.Instruction | None) -> int:
        bound = self.bound.get(dim_size)
        if bound is None:
            bound = self.bound[dim_size] = size_of(self.program, self.sizes, dim_size, instruction)
        return bound

    def expr(self, expr: Expr) -> Callable[[Variables], int]:
        return compiled(expr, self.sizes)

    def body(self, body: tree.Body) -> list[BoundInstruction]:
        return [tree.of_kind(_BINDERS, type(instruction))(self, instruction) for instruction in body]

    def nested(self, body: tree.Body) -> list[BoundInstruction]:
        """Binds a body. Adds a deallocate for each buffer that the body or one of its `on` bodies allocates and does not free."""
        on_ranks = (tree.with_bodies(i, lambda inner: tuple(missing_deallocations(inner, body))) for i in body if i.ranks)
        return self.body((*body, *missing_deallocations(body, body), *(i for i in on_ranks if any(tree.bodies(i)))))


def _allocate(b: _Binder, i: ir.Allocate) -> BoundInstruction:
    b.define(i.out, i.type, i)
    name = i.out
    while name in b.roots or f"{name}[0]" in b.roots:  # Two bodies may use one name for different buffers.
        name += "'"
    pool = b.block.stream if b.block else None
    roots = [f"{name}[{k}]" for k in range(_count(b.program.streams, pool))] if pool else [name]
    number = len(b.roots)
    b.roots.update(dict.fromkeys(roots, Root(b.layouts[i.out], "allocation")))
    b.numbers[i.out] = number if pool else None
    layout_of_buffer = b.layouts[i.out]
    joining = [loop.out for loop in b.loops if any(pool in tree.names(j, "join") for j in tree.walk(loop.body))]
    # Enclosing loops whose next iteration may reuse freed memory. The first list applies if a stream of another pool freed the memory, and
    # the second list if a stream of `pool` did.
    loops = [loop.out for loop in b.loops], joining

    def execute(run: RankRun) -> None:
        root = roots[run.stream[1] if pool and run.stream else 0]
        generation = run.generations[root] = run.generations.get(root, -1) + 1
        run.regions[i.out] = ByteRegion(root, 0, layout_of_buffer, generation)
        claim = Access(i.out, run.regions[i.out], reads=False, writes=True)
        freed = list(run.freed.values())
        iteration = dict(run.iteration)
        for (stream, freed_number), last in run.freed_until_join.items():
            # A later instruction of a previous iteration may have freed memory.
            then = dict(last.iteration) if freed_number > number else {}
            if any(index in then and then[index] != iteration[index] for index in loops[stream[0] == pool]):
                freed.append(last)
        run.issue(Operation(i, run.rank, run.stream, run.iteration, (claim,), frees=tuple(freed)))

    return execute


def _deallocate(b: _Binder, i: ir.Deallocate) -> BoundInstruction:
    build, number = _operation(b, i), b.numbers[i.src]

    def execute(run: RankRun) -> None:
        operation = run.issue(build(run))
        if number is not None and run.stream:
            run.freed_until_join.pop((run.stream, number), None)  # The new entry is the last one.
            run.freed_until_join[run.stream, number] = operation
            return
        run.free_at_join(run.stream)  # A join must not replace the operation by an earlier one of the same stream.
        run.freed[run.stream] = operation

    return execute


def _view(b: _Binder, i: ir.View) -> BoundInstruction:
    type = b.types[i.src]
    b.define(i.out, i.type_of(type), i)
    source, result, where, chosen = b.layouts[i.src], b.layouts[i.out], b.expr(i.offset), b.expr(i.chosen_by or Const(1))
    first, *_, last = (i.src, *tree.names(i, "alias"))
    distance = b.size(i.stride(type), i) * source.dtype.itemsize if result.count else 0
    count = b.size(chunk[2], i) if (chunk := i.chunk_of(type)) else 0
    dim, _, indices = i.span if i.span and not chunk else (0, None, None)
    spread = b.size(indices, i) if indices is not None and result.shape[dim] else 0  # An empty slice may begin anywhere.

    def execute(run: RankRun) -> None:
        value = where(run.environment)
        if chunk and not 0 <= value < count:
            run.fail(i, f"{_outside(i.offset, value, count)}: keep the index inside the dim")
        if spread and not 0 <= value <= source.shape[dim] - spread:
            run.fail(i, f"indices {value}..{value + spread} exceed 0..{source.shape[dim]}: keep the slice inside the dim")
        region = run.region(first if chosen(run.environment) else last, i)
        run.regions[i.out] = region._replace(offset=region.offset + value * distance, layout=result)

    return execute


def _parameter(b: _Binder, i: AsGiven | TakeOver) -> BoundInstruction:
    b.define(i.out, b.types[i.src], i)

    def execute(run: RankRun) -> None:
        if region := run.regions.get(i.src):
            now = run.generations.get(region.root, 0)
            if isinstance(i, TakeOver):
                run.generations[region.root] = now + 1
                run.regions[i.out] = region._replace(generation=now + 1, last=ALWAYS)
            else:
                run.regions[i.out] = region._replace(last=min(region.last, now))

    return execute


def _returned(b: _Binder, i: Returned) -> BoundInstruction:
    build = _operation(b, i)

    def execute(run: RankRun) -> None:
        if i.src in run.regions:
            run.issue(build(run))

    return execute


def _post(b: _Binder, i: tree.Instruction) -> BoundInstruction:
    """Binds an instruction that is one operation. In a computation, values replace the expressions."""
    build, values = _operation(b, i), {expr: b.expr(expr) for expr in tree.expressions(i)} if i.work == "compute" else {}

    def execute(run: RankRun) -> None:
        operation = build(run)
        if values:
            operation.instruction = tree.with_expressions(i, lambda expr: Const(values[expr](run.environment)))
        run.issue(operation)

    return execute


# role -> (reads, writes, is on the peer). A deallocate is a write, because it must be ordered before the next use of the bytes.
_TOUCHES = {
    "read": (True, False, False),
    "update": (True, True, False),
    "write": (False, True, False),
    "free": (False, True, False),
    "remote_read": (True, False, True),
    "remote_write": (False, True, True),
}


@cache
def _process_groups(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    return {rank: mesh.process_group(rank, axes) for rank in mesh.all_ranks}


def _operation(b: _Binder, i: tree.Instruction) -> Callable[[RankRun], Operation]:
    at_root: list[tuple[str, ByteLayout | None, bool, bool, bool]] = []  # accesses of the root, or of every rank if there is no root
    elsewhere: list[tuple[str, ByteLayout | None, bool, bool, bool]] = []  # accesses of the other ranks
    for field_name, role in tree.roles(type(i)).items():
        if role not in _TOUCHES:
            continue
        named = getattr(i, field_name)
        # The local buffer determines the bytes that a get reads.
        read_layout = b.layouts[tree.names(i, "write")[-1]] if role == "remote_read" else None
        touched = [(name, read_layout, *_TOUCHES[role]) for name in (named if isinstance(named, tuple) else (named,))]
        at_root.extend(touched if field_name != i.not_at_root else ())
        elsewhere.extend(touched if field_name != i.at_root else ())
    channel = b.program.channel(i.channel) if isinstance(i, ir.Communication) else None
    groups = _process_groups(channel.mesh, channel.axes) if channel else {}
    other: Expr | None = getattr(i, "peer", None) or getattr(i, "root", None)
    peer = b.expr(other) if other else None

    def build(run: RankRun) -> Operation:
        operation = Operation(i, run.rank, run.stream, run.iteration, channel=channel, process_group=groups.get(run.rank, ()))
        if other and peer:
            value = peer(run.environment)
            if not 0 <= value < len(operation.process_group):
                run.fail(i, f"{_outside(other, value, len(operation.process_group))}: keep it inside the process group")
            operation.peer = operation.process_group[value]
            if isinstance(i, ir.OneSided) and operation.peer == run.rank:
                run.fail(i, f"{other} = {value} is this rank itself: exclude this rank by a condition")
        if isinstance(i, ir.OneSided) and i.received_along is not None:
            operation.accesses = _get_of_block(b, i, run, operation)
            return operation
        here = at_root if operation.peer == run.rank or not i.at_root else elsewhere
        operation.accesses = tuple(
            [
                Access(name, run.region(name, i, read_layout), reads, writes, operation.peer if remote else None)
                for name, read_layout, reads, writes, remote in here
            ]
        )
        return operation

    return build


def _get_of_block(b: _Binder, i: ir.OneSided, run: RankRun, operation: Operation) -> tuple[Access, ...]:
    """Accesses of a get with `received_along`: the peer's shard, and the block of this shard in the local buffer."""
    assert operation.peer is not None
    (src,), (dst,) = tree.names(i, "remote_read"), tree.names(i, "write")
    layout_of_buffer, group = b.layouts[dst], operation.process_group
    block = share(layout_of_buffer.shape, i.received_along, len(group), group.index(operation.peer))
    taken = layout(layout_of_buffer.dtype, (len(block),), (1,))
    there, here = run.region(src, i, taken), run.region(dst, i, taken, block.start * layout_of_buffer.dtype.itemsize)
    return Access(src, there, reads=True, writes=False, at=operation.peer), Access(dst, here, reads=False, writes=True)


def _blocks(b: _Binder, i: ir.Routed) -> Callable[[RankRun], tuple[Operation, ...]]:
    sends, (name,) = i.posts == "send", tree.names(i, "read", "write")
    layout_of_buffer = b.layouts[name]
    equal = b.size(Size(layout_of_buffer.count, (), i.count), i) if isinstance(i.count, int) else 0
    channel = b.program.channel(i.channel)
    blocks: dict[int, list[tuple[tree.Instruction, int, int]]] = {}
    for route in i.routes:
        rank, number, peer = (route.sender, route.sent, route.receiver) if sends else (route.receiver, route.received, route.sender)
        instruction = (ir.Send if sends else ir.Recv)(name, Const(peer), i.channel, location=i.location)
        blocks.setdefault(rank, []).append((instruction, number, peer))

    def build(run: RankRun) -> tuple[Operation, ...]:
        members = []
        sizes = RankSizes(b.sizes, b.program.mesh, run.rank)
        counts = [equal] * i.count if isinstance(i.count, int) else [elements(box) for box in boxes(i.count, sizes)]
        starts = list(accumulate(counts, initial=0))
        for instruction, number, peer in blocks.get(run.rank, ()):
            if counts[number] == 0 and not isinstance(i.count, int):
                continue  # An empty block is not posted.
            block = layout(layout_of_buffer.dtype, (counts[number],), (1,))
            region = run.region(name, i, block, starts[number] * layout_of_buffer.dtype.itemsize)
            member = Operation(instruction, run.rank, run.stream, run.iteration, (Access(name, region, sends, not sends),))
            member.channel, member.process_group, member.peer = channel, tuple(channel.mesh.all_ranks), peer
            members.append(member)
        return tuple(members)

    return build


def _group(b: _Binder, i: ir.Group | ir.Routed) -> BoundInstruction:
    builders = [_blocks(b, i) if isinstance(i, ir.Routed) else _member(b, i) for i in next(iter(tree.bodies(i)), (i,))]

    def execute(run: RankRun) -> None:
        if members := tuple([member for build in builders for member in build(run)]):
            run.issue(Operation(i, run.rank, run.stream, run.iteration, members=members))

    return execute


def _member(b: _Binder, i: tree.Instruction) -> Callable[[RankRun], tuple[Operation, ...]]:
    build = _operation(b, i)
    return lambda run: (build(run),)


def _on_stream(b: _Binder, i: ir.OnStream) -> BoundInstruction:
    index, count = b.expr(i.index), _count(b.program.streams, i.stream)
    b.block = i
    body = b.nested(i.body)
    b.block = None

    def execute(run: RankRun) -> None:
        outer, run.stream = run.stream, (i.stream, index(run.environment) % count)
        for inner in body:
            inner(run)
        run.stream = outer

    return execute


def _fork(b: _Binder, i: ir.Fork) -> BoundInstruction:
    count = i.first or _count(b.program.streams, i.stream)

    def execute(run: RankRun) -> None:
        fork = run.issue(Operation(i, run.rank, None, run.iteration))
        for k in range(count):
            run.issue(Operation(i, run.rank, (i.stream, k), run.iteration, waits=(fork,)))

    return execute


def _join(b: _Binder, i: ir.Join) -> BoundInstruction:
    all_streams = [(i.stream, k) for k in range(_count(b.program.streams, i.stream))]
    streams = all_streams[: i.first]

    def execute(run: RankRun) -> None:
        running = tuple([run.last[stream] for stream in streams if stream in run.last])
        run.issue(Operation(i, run.rank, None, run.iteration, waits=running))
        for stream in all_streams:  # also the streams that `first` excludes
            run.free_at_join(stream)

    return execute


def _record(b: _Binder, i: ir.Record) -> BoundInstruction:
    slot = _slot(b, i)

    def execute(run: RankRun) -> None:
        run.records[slot(run)] = run.issue(Operation(i, run.rank, run.stream, run.iteration))

    return execute


def _wait(b: _Binder, i: ir.Wait) -> BoundInstruction:
    slot = _slot(b, i)

    def execute(run: RankRun) -> None:
        event = slot(run)
        if event not in run.records:
            run.fail(i, f"a wait whose record may not have run: record {event[0]}[{event[1]}] before it in the same call")
        run.issue(Operation(i, run.rank, run.stream, run.iteration, waits=(run.records[event],)))

    return execute


def _slot(b: _Binder, i: ir.Record | ir.Wait) -> Callable[[RankRun], tuple[str, int]]:
    index, count = b.expr(i.index), _count(b.program.events, i.event)

    def slot(run: RankRun) -> tuple[str, int]:
        value = index(run.environment)
        if not 0 <= value < count:
            run.fail(i, f"{_outside(i.index, value, count)}: declare more of {i.event}, or keep the index inside")
        return i.event, value

    return slot


def _outside(expr: Expr, value: int, count: int) -> str:
    return f"{value if isinstance(expr, Const) else f'{expr} = {value}'} is outside of 0..{count}"


def _count(pools: tuple[ir.Pool, ...], name: str) -> int:
    return next(pool.count for pool in pools if pool.name == name)


def _let(b: _Binder, i: ir.Let) -> BoundInstruction:
    value = b.expr(i.value)

    def execute(run: RankRun) -> None:
        run.environment[i.out] = value(run.environment)

    return execute


def _for(b: _Binder, i: ir.For) -> BoundInstruction:
    count, outer_loops, joined = b.size(i.count, i), b.loops, _joined(b, i.body)
    b.loops = (*outer_loops, i)
    body = b.nested(i.body)
    b.loops = outer_loops

    def execute(run: RankRun) -> None:
        outer = run.iteration
        run.iterations += count
        if run.iterations > MAX_ITERATIONS:  # All operations of a rank are in memory, so their number is limited.
            why = f"the loops of the rank have more than {MAX_ITERATIONS} iterations, the most that can be checked"
            run.fail(i, f"{why}; use fewer, or check at smaller sizes")
        for value in range(count):
            run.environment[i.out] = value
            run.iteration = (*outer, (i.out, value))
            for inner in body:
                inner(run)
        run.iteration = outer
        for stream in joined if not count else ():
            run.free_at_join(stream)

    return execute


def _if(b: _Binder, i: ir.If) -> BoundInstruction:
    condition = b.expr(i.condition)
    body, orelse = b.nested(i.body), b.nested(i.orelse)
    joined_in_body, joined_in_orelse = _joined(b, i.body), _joined(b, i.orelse)

    def execute(run: RankRun) -> None:
        holds = condition(run.environment)
        for stream in joined_in_body if not holds else ():
            run.free_at_join(stream)
        for inner in body if holds else orelse:
            inner(run)
        for stream in joined_in_orelse if holds else ():
            run.free_at_join(stream)

    return execute


def _joined(b: _Binder, body: tree.Body) -> list[StreamInPool]:
    """Streams that a body joins. If the body does not run, the arena frees their memory nevertheless, because its plan has all joins."""
    pools = {name for i in tree.walk(body) for name in tree.names(i, "join")}
    return [(pool.name, k) for pool in b.program.streams if pool.name in pools for k in range(pool.count)]


def _on_mesh(b: _Binder, i: ir.OnMesh) -> BoundInstruction:
    body = b.body(i.body)
    coordinates_of = {rank: coordinates(i.mesh, rank) for rank in i.mesh.all_ranks}

    def execute(run: RankRun) -> None:
        if run.rank not in coordinates_of:
            return
        around, run.environment = run.environment, {**run.environment, **coordinates_of[run.rank]}
        for inner in body:
            inner(run)
        run.environment = around

    return execute


_BINDERS: dict[type[tree.Instruction], Callable[[_Binder, Any], BoundInstruction]] = {
    tree.Instruction: _post,
    ir.Allocate: _allocate,
    ir.Deallocate: _deallocate,
    ir.View: _view,
    **dict.fromkeys((AsGiven, TakeOver), _parameter),
    Returned: _returned,
    **dict.fromkeys((ir.Routed, ir.Group), _group),
    ir.OnStream: _on_stream,
    ir.Fork: _fork,
    ir.Join: _join,
    ir.Record: _record,
    ir.Wait: _wait,
    ir.Let: _let,
    ir.For: _for,
    ir.If: _if,
    ir.OnMesh: _on_mesh,
}
