"""Buffers share memory if forks, joins and events make their live ranges disjoint.

    %h = allocate f32[M, K]                   %h = allocate f32[M, K]
    %g = allocate f32[M, N]                   launch @exp_h %x -> %h
    %gs = allocate f32[4*M, N]                %g = allocate f32[M, N]
    launch @exp_h %x -> %h           becomes  matmul %h, %w -> %g
    matmul %h, %w -> %g                       deallocate %h
    all_gather %g -> %gs on x                 %gs = allocate f32[4*M, N]
    ...                                       all_gather %g -> %gs on x

A buffer is allocated before its first use or view. If an allocation follows, the buffer is deallocated when the caller's stream is ordered
after all uses. A buffer may reuse the bytes of buffers that are deallocated before its allocation. Offsets are computed at run time, when
sizes are known.
"""

from collections import defaultdict
from collections.abc import Iterator

from hostweave.analysis.def_use import def_use
from hostweave.analysis.live_ranges import allocating_functions
from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const
from hostweave.options import Options
from hostweave.types.mesh import Mesh


def plan_memory(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    return replaced(program, body=Planner(program).body(program.body, on_caller=True))


StreamId = tuple[str, int]  # pool of a stream, and index in the pool
StreamIds = tuple[StreamId, ...]
ON_CALLER: StreamIds = ()  # an access on the stream of the caller names no other streams
# event -> stream of its last record (None: the caller's stream), and index of the body's instruction that contains the record
RecordedEvents = dict[tree.Slot, tuple[StreamId | None, int]]
_Touch = tuple[int, StreamIds]  # an access: index of a child, and the streams on which the child accesses a buffer, or ON_CALLER


class _VectorClock:
    """Order of streams and children. A child is an instruction of the body, given by its index."""

    def __init__(self) -> None:
        # For each child: stream -> the last fork, or record on the caller's stream, for which the stream has waited.
        self.begun: list[dict[StreamId, int]] = []
        # stream -> pairs (a, b): after child a, the caller's stream is ordered after work of the stream up to child b
        self.done = defaultdict[StreamId, list[tuple[int, int]]](list)


class Planner:
    def __init__(self, program: ir.HostProgram):
        self.uses = def_use(program)
        self.allocating = allocating_functions(program)
        self.pools = {pool.name: [(pool.name, k) for k in range(pool.count)] for pool in program.streams}

    def body(self, body: tree.Body, on_caller: bool) -> tree.Body:
        """Plans the memory of a body. `on_caller` is True outside of stream blocks. Each instruction of an `on` body is a separate
        child."""
        children = [self.child(i, on_caller) for i in _one_by_one(body)]
        own = {name: (mesh, i) for mesh, i in map(_on, children) for name in tree.names(i, "allocate")}
        if not own:
            return tree.together(children)
        defined = ((name, k) for k, child in enumerate(children) for name in tree.names(_on(child)[1], "view"))
        views = [(root, k) for name, k in defined for root in self.uses.roots.all_of(name)]
        touches, viewed = self.touches(children, on_caller), dict(reversed(views))  # index of each buffer's first view
        known = {mesh: self.known([_seen_by(mesh, i) for i in children]) for mesh in dict(own.values())}
        ties = _ties(body)
        begun, ended = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
        for name, (mesh, _) in own.items():
            begin = min(viewed.get(name, len(children)), self.begin(touches[name], known[mesh]))
            while begin - 1 in ties and _on(children[begin])[0] != mesh:
                begin -= 1
            begun[begin].append(name)
        allocating = [(k, own[name][0]) for k, names in begun.items() for name in names]
        allocating += [(k, _on(i)[0]) for k, i in enumerate(children) if not tree.names(_on(i)[1], "allocate") and self.allocates(i)]
        on_streams = self.on_streams(children)
        for name, (mesh, _) in own.items():
            ranks = set(mesh.all_ranks if mesh else ())
            last = max(k for k, other in allocating if mesh is None or other is None or not ranks.isdisjoint(other.all_ranks))
            tied = {k for k in ties if _on(children[k])[0] != mesh}
            if (end := self.end(touches[name], known[mesh], on_streams, tied, len(children))) < last:
                ended[end].append(name)
        result: list[tree.Instruction] = []
        for k, child in enumerate(children):
            result += (_for_ranks_of(*own[name]) for name in begun[k])
            result += () if tree.names(_on(child)[1], "allocate") else (child,)
            result += (_for_ranks_of(own[name][0], ir.Deallocate(name, location=own[name][1].location)) for name in ended[k])
        return tree.together(result)

    def child(self, i: tree.Instruction, on_caller: bool) -> tree.Instruction:
        if i.ranks:
            return tree.with_bodies(i, lambda body: tuple(self.child(inner, on_caller) for inner in body))
        return tree.with_bodies(i, lambda body: self.body(body, on_caller and not tree.names(i, "stream")))

    def begin(self, touches: list[_Touch], known: _VectorClock) -> int:
        """Child before which a buffer must be allocated, because a stream may access the buffer from this child on."""
        return min(min([known.begun[child].get(stream, 0) for stream in streams], default=child) for child, streams in touches)

    def end(self, touches: list[_Touch], known: _VectorClock, on_streams: dict[int, list[StreamId]], tied: set[int], never: int) -> int:
        """Child after which the buffer may be deallocated, or `never`. The stream of the body is then ordered after all uses."""
        end, found = -1, max(_known_done(touch, known, never) for touch in touches)
        while found > end:
            end = found
            for k, streams in on_streams.items():  # A block may reuse the bytes, so its stream must also be ordered after the uses.
                if k > found and any(known.begun[k].get(stream, 0) <= found for stream in streams):
                    found = k
            while found in tied:
                found += 1
        return end

    def allocates(self, i: tree.Instruction) -> bool:
        return any(tree.names(j, "allocate") or not self.allocating.isdisjoint(tree.names(j, "call")) for j in tree.walk((i,)))

    def on_streams(self, children: list[tree.Instruction]) -> dict[int, list[StreamId]]:
        """Child -> streams of the child's blocks that allocate."""
        found = defaultdict[int, list[StreamId]](list)
        for k, i in ((k, i) for k, child in enumerate(children) for i in tree.walk((child,))):
            if (stream := tree.slot(i, "stream")) and self.allocates(i):
                found[k] += self.streams_of(stream)
        return found

    def touches(self, children: list[tree.Instruction], on_caller: bool) -> dict[str, list[_Touch]]:
        """Accesses of every buffer. A stream that the child forks and joins counts as the caller's stream."""
        found = defaultdict[str, list[_Touch]](list)
        for k, child in enumerate(children):
            for i, streams in self.on_streams_of(child, _joined(child)) if on_caller else ((i, ON_CALLER) for i in tree.walk((child,))):
                for root in self.uses.roots_of(i, "read", "write"):
                    found[root].append((k, streams))
        return found

    def on_streams_of(
        self, i: tree.Instruction, joined: set[str], streams: StreamIds = ON_CALLER
    ) -> Iterator[tuple[tree.Instruction, StreamIds]]:
        if stream := tree.slot(i, "stream"):
            streams = ON_CALLER if stream[0] in joined else self.streams_of(stream)
        yield i, streams
        for body in tree.bodies(i):
            for inner in body:
                yield from self.on_streams_of(inner, joined, streams)

    def streams_of(self, stream: tree.Slot) -> StreamIds:
        pool, index = self.pools[stream[0]], stream[1]
        return (pool[index.value % len(pool)],) if isinstance(index, Const) else tuple(pool)

    def known(self, children: list[tree.Instruction]) -> _VectorClock:
        """Derives the order from forks, joins, records and waits."""
        known = _VectorClock()
        begun: dict[StreamId, int] = {}
        recorded: RecordedEvents = {}
        for k, child in enumerate(children):
            for pool in tree.names(child, "fork"):
                begun = begun | dict.fromkeys(self.pools[pool], k)
            for joined in (one for pool in tree.names(child, "join") for one in self.pools[pool]):
                known.done[joined].append((k, k))
            waited, stream = tree.slot(child, "wait"), tree.slot(child, "stream")
            stream_then = recorded.get(waited) if waited else None
            if stream_then and stream_then[0]:
                known.done[stream_then[0]].append((k, stream_then[1]))
            if event := tree.slot(child, "record"):
                recorded[event] = None, k
            elif stream and len(streams := self.streams_of(stream)) == 1:
                begun = self.on_one_stream(tree.bodies(child)[0], streams[0], k, dict(begun), recorded)
            else:
                _record_anew(child, recorded)
            known.begun.append(begun)
        return known

    def on_one_stream(
        self, body: tree.Body, stream: StreamId, k: int, begun: dict[StreamId, int], recorded: RecordedEvents
    ) -> dict[StreamId, int]:
        """Adds the order that follows from waits at the start of a stream block, and from a record at the end of the block. Forgets the
        events of other records, because work of the block follows these records."""
        touched = False
        for i in body:
            waited, event = tree.slot(i, "wait"), tree.slot(i, "record")
            if waited and not touched:
                stream_then = recorded.get(waited)
                if stream_then and stream_then[0] is None:
                    begun[stream] = max(begun.get(stream, 0), stream_then[1])
            elif event and i is body[-1]:
                recorded[event] = stream, k
            else:
                _record_anew(i, recorded)
                touched = True
        return begun


def _record_anew(i: tree.Instruction, recorded: RecordedEvents) -> None:
    """Forgets events that an instruction or its bodies record. A body may run any number of times."""
    events = {name for inner in tree.walk((i,)) for name in tree.names(inner, "record")}
    for event, index in list(recorded):
        if event in events:
            del recorded[event, index]


def _known_done(touch: _Touch, known: _VectorClock, never: int) -> int:
    """First child at whose end the caller's stream is ordered after an access, or `never`."""
    child, streams = touch
    for_each = (next((at for at, up_to in known.done.get(stream, ()) if min(at, up_to) >= child), never) for stream in streams)
    return max(for_each, default=child)


def _joined(child: tree.Instruction) -> set[str]:
    """Pools that a child both forks and joins, on every rank."""
    if any(i.ranks for inner in tree.bodies(_on(child)[1]) for i in tree.walk(inner)):
        return set()
    forked, joined = ({name for i in tree.walk((child,)) for name in tree.names(i, role)} for role in ("fork", "join"))
    return forked & joined


def _one_by_one(body: tree.Body) -> Iterator[tree.Instruction]:
    for i in body:
        if i.ranks:
            yield from (tree.with_bodies(i, lambda _, inner=inner: (inner,)) for inner in tree.bodies(i)[0])  # type: ignore[misc]
        else:
            yield i


def _ties(body: tree.Body) -> set[int]:
    """Children after which an `on` body must not end: later children use views and indices of the body."""
    ties: set[int] = set()
    first = 0
    for i in body:
        inner = tree.bodies(i)[0] if i.ranks else (i,)
        named: dict[str, int] = {}
        for k, child in enumerate(inner, first):
            for used in (name for j in tree.walk((child,)) for name in (*tree.names(j, "read", "write", "alias"), *tree.indices_in(j))):
                if used in named:
                    ties.update(range(named[used], k))
                    named[used] = k
            if not child.calls:
                named.update(dict.fromkeys(tree.names(child, "view", "index"), k))
        first += len(inner)
    return ties


def _on(child: tree.Instruction) -> tuple[Mesh | None, tree.Instruction]:
    """Mesh of an `on` body, and the instruction in the body. For any other child, None and the child."""
    return (child.ranks, tree.bodies(child)[0][0]) if child.ranks else (None, child)


def _for_ranks_of(mesh: Mesh | None, i: tree.Instruction) -> tree.Instruction:
    return ir.OnMesh(mesh, (i,), location=i.location) if mesh else i


def _seen_by(mesh: Mesh | None, child: tree.Instruction) -> tree.Instruction:
    """The instruction in the child's `on` body if all ranks of `mesh` execute this body. Otherwise the child."""
    on, i = _on(child)
    return i if on and mesh and set(mesh.all_ranks) <= set(on.all_ranks) else child
