"""A brute-force check of host programs. It unrolls the program into tasks of all ranks, and tests every pair of accesses.

The module knows copies, fills, all_reduce, broadcast, send and recv on two-sided channels. It shares no code with the check, so that the
two can be compared.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, zip_longest
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Binary, Const, Coordinate, Expr, Rank, Symbol, Var
from hostweave.types.mesh import RankSizes, Sizes
from hostweave.types.size import bound

Stream = tuple[str, int] | None  # pool and index of a stream; None: the caller's stream
Static = tuple[int | str, int]  # id of an allocate and the index of the stream that owns the buffer, or the name of a parameter
OPERATORS: dict[str, Any] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod},
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}


class Fault(Exception):
    """A fault that ends the unrolling. The argument is the kind of the fault."""


@dataclass(eq=False)
class Buffer:
    """One execution of an allocate, or a parameter. Elements are bits of an int."""

    static: Static
    elements: int
    is_freed: bool = False


@dataclass(frozen=True, eq=False)
class View:
    buffer: Buffer
    at: NDArray[np.int64]  # indices of the elements

    @property
    def bits(self) -> int:
        return sum(1 << int(element) for element in self.at.ravel())


@dataclass(eq=False)
class Access:
    buffer: Buffer
    bits: int
    writes: bool
    kind: str = "data"  # or "allocate", "free"


@dataclass(eq=False)
class Message:
    """A communication of a task: instruction, channel and process group, rank of the peer."""

    instruction: tree.Instruction
    channel: tuple[str, tuple[int, ...]]
    peer: int
    elements: int
    task: Task | None = None


@dataclass(eq=False)
class Task:
    rank: int
    stream: Stream
    instruction: tree.Instruction
    accesses: list[Access] = field(default_factory=list)
    after: list[Task] = field(default_factory=list)  # tasks that end before this task starts
    messages: list[Message] = field(default_factory=list)
    sources: list[Task] = field(default_factory=list)  # tasks that start before this task ends, because their data arrives
    meets: list[Task] = field(default_factory=list)  # tasks that must start before this task ends
    number: int = -1


@dataclass
class RankTasks:
    """Executes a program on one rank, and collects the tasks in the order of issue."""

    program: ir.HostProgram
    sizes: RankSizes
    rank: int
    tasks: list[Task] = field(default_factory=list)
    last: dict[Stream, Task] = field(default_factory=dict)
    records: dict[tuple[str, int], Task] = field(default_factory=dict)
    parameters: dict[str, Buffer] = field(default_factory=dict)
    faults: set[str] = field(default_factory=set)

    def run(self) -> None:
        self.counts = {pool.name: pool.count for pool in (*self.program.streams, *self.program.events)}
        views = dict[str, View]()
        self.caller = self.issue(Task(self.rank, None, tree.Instruction()))
        for p in (*self.program.inputs, *self.program.outputs):
            shape = [size.bind(self.sizes) for size in self.program.local_type(p).shape]
            self.parameters[p.name] = Buffer((p.name, -1), prod(shape))
            views[p.name] = View(self.parameters[p.name], np.arange(prod(shape)).reshape(shape))
        self.body(self.program.body, views, {}, None, [])

    def issue(self, task: Task) -> Task:
        if task.stream in self.last:
            task.after.append(self.last[task.stream])
        self.last[task.stream] = task
        self.tasks.append(task)
        for access in task.accesses:
            if access.buffer.is_freed:
                self.faults.add("freed")
        return task

    def nested(self, body: tree.Body, views: dict[str, View], numbers: Mapping[str, int], stream: Stream) -> None:
        """Executes a body, then frees the buffers that the body allocated and nothing freed."""
        live: list[Buffer] = []
        self.body(body, dict(views), dict(numbers), stream, live)
        for buffer in (one for one in live if not one.is_freed):
            self.free(buffer, stream)

    def free(self, buffer: Buffer, stream: Stream) -> None:
        self.issue(Task(self.rank, stream, ir.Deallocate(""), [Access(buffer, (1 << buffer.elements) - 1, True, "free")]))
        buffer.is_freed = True

    def body(self, body: tree.Body, views: dict[str, View], numbers: dict[str, int], stream: Stream, live: list[Buffer]) -> None:
        for i in body:
            self.instruction(i, views, numbers, stream, live)

    def instruction(self, i: tree.Instruction, views: dict[str, View], numbers: dict[str, int], stream: Stream, live: list[Buffer]) -> None:
        def value(expr: Expr) -> int:
            match expr:
                case Const(number):
                    return number
                case Symbol(size):
                    return bound(size, self.sizes)
                case Var(name):
                    return numbers[name]
                case Rank():
                    return self.rank
                case Coordinate(axis):
                    return self.program.mesh.coordinate(self.rank, axis)
                case Binary(op, left, right):
                    return int(OPERATORS[op](value(left), value(right)))
            raise TypeError(expr)

        def within(expr: Expr, count: int) -> int:
            if not 0 <= (number := value(expr)) < count:
                raise Fault("index")
            return number

        def add(*after: Task, on: Stream = stream, accesses: Sequence[Access] = ()) -> Task:
            return self.issue(Task(self.rank, on, i, list(accesses), list(after)))

        match i:
            case ir.Let(out, expr):
                numbers[out] = value(expr)
            case ir.For(out, count, inner):
                for number in range(count.bind(self.sizes)):
                    self.nested(inner, views, {**numbers, out: number}, stream)
            case ir.If(condition, inner, orelse):
                self.nested(inner if value(condition) else orelse, views, numbers, stream)
            case ir.OnStream(pool, index, inner):
                self.nested(inner, views, numbers, (pool, value(index) % self.counts[pool]))
            case ir.OnMesh(mesh, inner):
                if self.rank in mesh.all_ranks:
                    self.body(inner, views, numbers, stream, live)
            case ir.Fork(pool, first):
                fork = add()
                for index in range(first or self.counts[pool]):
                    add(fork, on=(pool, index))
            case ir.Join(pool, first):
                add(*(self.last[pool, index] for index in range(first or self.counts[pool]) if (pool, index) in self.last))
            case ir.Record(event, index):
                self.records[event, within(index, self.counts[event])] = add()
            case ir.Wait(event, index):
                slot = event, within(index, self.counts[event])
                if slot not in self.records:
                    raise Fault("record")
                add(self.records[slot])
            case ir.Allocate(out, type):
                shape = [size.bind(self.sizes) for size in type.shape]
                buffer = Buffer((id(i), stream[1] if stream else -1), prod(shape))
                views[out] = View(buffer, np.arange(prod(shape)).reshape(shape))
                add(accesses=[Access(buffer, (1 << buffer.elements) - 1, True, "allocate")])
                live.append(buffer)
            case ir.Deallocate(src):
                self.free(views[src].buffer, stream)
            case ir.Chunk(out, src, dim, index, count):
                at, chunks = views[src].at, count.bind(self.sizes)
                start, length = within(index, chunks) * (at.shape[dim] // chunks), at.shape[dim] // chunks
                views[out] = View(views[src].buffer, at.take(range(start, start + length), dim))
            case ir.Select(out, src, dim, index):
                at = views[src].at
                views[out] = View(views[src].buffer, at.take(within(index, at.shape[dim]), dim))
            case ir.Choose(out, src, condition, other):
                views[out] = views[src] if value(condition) else views[other]
            case ir.Call(name, srcs, dsts):
                function = next(function for function in self.program.functions if function.name == name)
                parameters = [p.name for p in (*function.inputs, *function.outputs)]
                arguments = {name: views[given] for name, given in zip(parameters, (*srcs, *dsts), strict=True)}
                self.nested(function.body, arguments, {}, stream)
            case ir.Group() | ir.Communication():
                self.communicate(i, add(), views, value)
            case _:
                reads, writes = ([views[name] for name in tree.names(i, role)] for role in ("read", "write"))
                touched = [*((view, False) for view in reads), *((view, True) for view in writes)]
                add(accesses=[Access(view.buffer, view.bits, is_write) for view, is_write in touched])

    def communicate(self, i: tree.Instruction, task: Task, views: dict[str, View], value: Any) -> None:
        for member in i.body if isinstance(i, ir.Group) else (i,):
            channel = self.program.channel(member.channel)
            group = channel.mesh.process_group(self.rank, channel.axes)
            other = getattr(member, "peer", None) or getattr(member, "root", None)
            peer = value(other) if other else 0
            if not 0 <= peer < len(group):
                raise Fault("index")
            for role in ("read", "write"):
                for view in (views[name] for name in tree.names(member, role)):
                    task.accesses.append(Access(view.buffer, view.bits, role == "write"))
                    elements = view.at.size
                    if view.buffer.is_freed:
                        self.faults.add("freed")
            task.messages.append(Message(member, (channel.name, group), group[peer], elements, task))


def unrolled_ranks(program: ir.HostProgram, sizes: Sizes) -> list[RankTasks]:
    """Tasks of all ranks. Raises Fault for an index outside of its range, and for a wait without a record."""
    ranks = [RankTasks(program, RankSizes(sizes, program.mesh, rank), rank) for rank in program.mesh.all_ranks]
    for rank in ranks:
        rank.run()
    return ranks


def match(ranks: list[RankTasks]) -> None:
    """Connects the tasks of communications that belong together. Raises Fault if a communication has no match."""
    pairs: dict[Any, tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    collectives: dict[Any, dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for message in (message for task in rank.tasks for message in task.messages):
            match message.instruction:
                case ir.Send():
                    pairs[message.channel, rank.rank, message.peer][0].append(message)
                case ir.Recv():
                    pairs[message.channel, message.peer, rank.rank][1].append(message)
                case _:
                    collectives[message.channel][rank.rank].append(message)
    for sends, recvs in pairs.values():
        for send, recv in zip_longest(sends, recvs):
            if send is None or recv is None or send.elements != recv.elements:
                raise Fault("match")
            recv.task.sources.append(send.task)
            recv.task.meets.append(send.task)
            send.task.meets.append(recv.task)
    for (_, group), by_rank in collectives.items():
        for column in zip_longest(*(by_rank[rank] for rank in group)):
            keys = {(type(m.instruction), getattr(m.instruction, "op", ""), m.peer, m.elements) for m in column if m}
            if None in column or len(keys) > 1:
                raise Fault("match")
            for message in column:
                is_broadcast = isinstance(message.instruction, ir.Broadcast)
                message.task.sources += [other.task for other in column if not is_broadcast or other.task.rank == message.peer]
                message.task.meets += [other.task for other in column]


class Order:
    """All tasks in an order that all dependencies allow, and for each task, the tasks that end before it starts."""

    def __init__(self, program: ir.HostProgram, ranks: list[RankTasks]):
        tasks = [task for rank in ranks for task in rank.tasks]
        for number, task in enumerate(tasks):
            task.number = number
        # Node 2n is the start of task n, and node 2n + 1 is its end.
        proven: list[set[int]] = [set() for _ in range(2 * len(tasks))]
        for task in tasks:
            proven[2 * task.number] |= {2 * one.number + 1 for one in task.after}
            proven[2 * task.number + 1] |= {2 * task.number, *(2 * one.number for one in task.sources)}
        needed = [set(before) for before in proven]
        for rank in ranks:
            posted = [task for task in rank.tasks if any(program.channel(m.channel[0]).size > 1 for m in task.messages)]
            for one, then in pairwise(posted):
                needed[2 * then.number].add(2 * one.number + 1)
        for task in tasks:
            needed[2 * task.number + 1] |= {2 * one.number for one in task.meets}
        followers: list[list[int]] = [[] for _ in needed]
        for node, before in enumerate(needed):
            for one in before:
                followers[one].append(node)
        missing = [len(before) for before in needed]
        ready, order = [node for node, count in enumerate(missing) if not count], list[int]()
        while ready:
            order.append(node := ready.pop())
            for follower in followers[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        if len(order) < len(needed):
            raise Fault("deadlock")
        self.before = [0] * len(needed)  # bits of the earlier nodes
        for node in order:
            for one in proven[node]:
                self.before[node] |= self.before[one] | 1 << one
        self.tasks = [tasks[node // 2] for node in order if node % 2 == 0]

    def is_before(self, one: Task, then: Task) -> bool:
        return bool(self.before[2 * then.number] >> (2 * one.number + 1) & 1)

    def ordered(self, one: Task, other: Task) -> bool:
        return one is other or self.is_before(one, other) or self.is_before(other, one)


def faults(program: ir.HostProgram, sizes: Sizes) -> set[str]:
    """Kinds of the faults of a program. Empty if the program is correct."""
    try:
        ranks = unrolled_ranks(program, sizes)
        match(ranks)
        order = Order(program, ranks)
    except Fault as fault:
        return {fault.args[0]}
    found = set[str]().union(*(rank.faults for rank in ranks))
    sharing = Sharing(program)
    for rank in ranks:
        by_static: dict[Static, list[tuple[Task, Access]]] = defaultdict(list)
        for task in rank.tasks:
            for access in task.accesses:
                by_static[access.buffer.static].append((task, access))
        accesses = [(task, access) for of in by_static.values() for task, access in of]
        for of in by_static.values():
            if any(is_race(order, *pair) for pair in combinations(of, 2)):
                found.add("race")
        end = rank.last[None]
        if any(not order.is_before(rank.caller, task) or not (task is end or order.is_before(task, end)) for task, _ in accesses):
            found.add("race")
        frees, allocates = ([(t, a) for t, a in accesses if a.kind == kind] for kind in ("free", "allocate"))
        number = {task: k for k, task in enumerate(rank.tasks)}
        for freed, allocated in ((f, a) for f in frees for a in allocates if number[f[0]] < number[a[0]]):
            one, other = freed[1].buffer.static, allocated[1].buffer.static
            if one[0] != other[0] and not order.is_before(freed[0], allocated[0]):
                if sharing.may_share(one, other):
                    found.add("race")
                elif one[0] not in sharing.pools or not sharing.may_share(one, other, on_any_stream=True):
                    found.add("alarm")  # The buffers share no bytes, for example because they live at the same time.
        posted = [(task, {m.channel for m in task.messages if program.channel(m.channel[0]).size > 1}) for task in rank.tasks]
        for (one, channels), (then, others) in combinations([entry for entry in posted if entry[1]], 2):
            if (channels != others or len(channels) > 1) and not order.ordered(one, then):
                found.add("channels")
    return found | unwritten(program, ranks, order)


def is_race(order: Order, one: tuple[Task, Access], other: tuple[Task, Access]) -> bool:
    (task, access), (then, second) = one, other
    return bool((access.writes or second.writes) and access.bits & second.bits) and not order.ordered(task, then)


def unwritten(program: ir.HostProgram, ranks: list[RankTasks], order: Order) -> set[str]:
    """Finds reads of memory that was not written, and incomplete outputs."""
    found, written = set[str](), defaultdict[Buffer, int](int)
    for rank in ranks:
        for p in program.inputs:
            written[rank.parameters[p.name]] = -1
    for task in order.tasks:
        for access in (one for one in task.accesses if one.kind == "data" and not one.writes):
            if access.bits & ~written[access.buffer]:
                found.add("unwritten")
        for access in (one for one in task.accesses if one.kind == "data" and one.writes):
            written[access.buffer] |= access.bits
    for buffer in (rank.parameters[p.name] for rank in ranks for p in program.outputs):
        if ~written[buffer] & (1 << buffer.elements) - 1:
            found.add("output")
    return found


Range = list[float]  # [first, last, visible]: positions in the text with calls inlined


class Sharing:
    """Pairs of buffers that may share bytes, by the positions of their live ranges in the text of the program."""

    def __init__(self, program: ir.HostProgram):
        self.program, self.now = program, 0
        self.ranges: dict[int | str, list[Range]] = defaultdict(list)  # by the id of the allocate
        self.pools: dict[int | str, str] = {}  # id of an allocate -> pool of the stream that owns the buffer
        self.visit(program.body, {}, "", [])

    def visit(self, body: tree.Body, names: dict[str, Range], pool: str, own: list[Range]) -> None:
        for i in body:
            self.now += 1
            match i:
                case ir.Allocate(out, _):
                    names[out] = [self.now, np.inf, np.inf]
                    self.ranges[id(i)].append(names[out])
                    if pool:
                        self.pools[id(i)] = pool
                    own.append(names[out])
                case ir.Deallocate(src):
                    names[src][1] = self.now
                case ir.Join(joined, _):
                    for allocate, of in self.pools.items():
                        for one in self.ranges[allocate] if of == joined else ():
                            one[1:] = min(one[1], self.now), min(one[2], self.now)
                case ir.Call(name):
                    function = next(function for function in self.program.functions if function.name == name)
                    self.nested(function.body, {}, pool)
                case ir.OnMesh(_, inner):
                    self.visit(inner, names, pool, own)
                case ir.OnStream(on, _, inner):
                    self.nested(inner, names, on)
                case _:
                    for inner in tree.bodies(i):
                        self.nested(inner, names, pool)

    def nested(self, body: tree.Body, names: dict[str, Range], pool: str) -> None:
        own: list[Range] = []
        self.visit(body, dict(names), pool, own)
        self.now += 1
        for one in own:
            one[1] = min(one[1], self.now)

    def may_share(self, a: Static, b: Static, on_any_stream: bool = False) -> bool:
        """True if the live ranges of two buffers are disjoint. Without `on_any_stream`, the live range of a buffer that belongs to another
        stream ends at the join."""
        return all(self.are_disjoint(a, one, b, other, on_any_stream) for one in self.ranges[a[0]] for other in self.ranges[b[0]])

    def are_disjoint(self, a: Static, one: Range, b: Static, other: Range, on_any_stream: bool) -> bool:
        if other[0] < one[0]:
            return self.are_disjoint(b, other, a, one, on_any_stream)
        pool = self.pools.get(a[0])
        is_free = on_any_stream or pool is None or (pool == self.pools.get(b[0]) and a[1] == b[1])
        return (one[1] if is_free else max(one[1], one[2])) <= other[0]


Offsets = Mapping[int, tuple[tuple[int, ...], int]]  # id of an allocate -> offset in bytes of each stream's buffer, and bytes of a buffer


def clashes(program: ir.HostProgram, sizes: Sizes, offsets: Sequence[Offsets]) -> Iterator[str]:
    """Unordered accesses of the same bytes of the arena, and reads of bytes that another buffer has overwritten. `offsets` has one entry
    per rank."""
    ranks = unrolled_ranks(program, sizes)
    match(ranks)
    order = Order(program, ranks)
    valid: list[dict[Buffer, int]] = [{} for _ in ranks]  # by rank: bits of the arena that have the values of a buffer

    def in_arena(task: Task, access: Access) -> Access:
        allocate, stream = access.buffer.static
        at, _ = offsets[task.rank][int(allocate)]
        return Access(access.buffer, access.bits << at[max(stream, 0)] // 4, access.writes)

    found: list[list[tuple[Task, Access]]] = [[] for _ in ranks]
    for task in order.tasks:
        own = [in_arena(task, one) for one in task.accesses if one.kind == "data" and not isinstance(one.buffer.static[0], str)]
        found[task.rank] += [(task, access) for access in own]
        for access in (one for one in own if not one.writes):
            if access.bits & ~valid[task.rank].get(access.buffer, 0):
                yield f"rank {task.rank}: {task.instruction} reads bytes that another buffer has overwritten"
        for access in (one for one in own if one.writes):
            of_rank = valid[task.rank]
            of_rank |= {other: bits & ~access.bits for other, bits in of_rank.items()}
            of_rank[access.buffer] = of_rank.get(access.buffer, 0) | access.bits
    for accesses in found:
        for one, other in combinations(accesses, 2):
            if is_race(order, one, other):
                yield f"rank {one[0].rank}: {one[0].instruction} and {other[0].instruction} access the same bytes of the arena"
