"""Random host programs with loops, pools, branches, functions and communication, and random changes of host programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random

from hostweave.base.names import claim_unique
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import missing_deallocations, names_in, renamed
from hostweave.host_ir.expr import Const, Expr, Var, binary
from hostweave.types.mesh import Sizes
from hostweave.types.size import Size

SMALL, LARGE = "f32[4, N]", "f32[4, 64*N]"  # types of buffers. Several small buffers fit into the memory of one large buffer.
EVENTS = 4  # events per pool
MAX_DEPTH = 3  # maximum number of nested loops and branches


class Generator:
    """Writes the text of a random program. `carelessness` is the probability with which each synchronisation is left out."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.ranks = self.random.choice([1, 2, 2, 3, 4])
        self.mesh = "x=2, y=2" if self.ranks == 4 else f"x={self.ranks}"
        self.is_uneven = self.random.random() < 0.3
        self.carelessness = self.random.choice([0, 0, 0, 0.03, 0.1])
        self.pools = {name: self.random.randint(1, 3) for name in ("loop", "side")}
        self.sizes: Sizes = {"N": 1, "T": 5 if self.is_uneven and self.ranks > 1 else 2 * self.ranks if self.ranks < 3 else self.ranks}
        self.functions: list[str] = []
        self.channels: set[str] = set()
        self.start("")

    def start(self, function: str) -> None:
        self.lines: list[str] = []
        self.function = function
        self.indent, self.depth = 1, 0
        self.in_branch = bool(function)  # True where collectives are not allowed; a branch may call any function
        self.names: list[str] = []  # buffers, views and indices in scope
        self.indices: list[str] = []
        self.ready: list[str] = []  # small buffers with values
        self.own: list[list[str]] = [[]]  # for each enclosing body, the buffers that the body may deallocate

    # --- text -------------------------------------------------------------------------------------------------------

    def add(self, line: str) -> None:
        self.lines.append("  " * self.indent + line)

    def may(self, probability: float) -> bool:
        return self.random.random() < probability

    def synchronise(self, line: str) -> None:
        if not self.may(self.carelessness):
            self.add(line)

    def name(self, letters: str) -> str:
        """A name that is not in scope. Bodies next to each other often use the same names."""
        names = (f"%{letter}{number}" for number in ("", *range(2, 99)) for letter in self.random.sample(letters, len(letters)))
        self.names.append(name := next(name for name in names if name not in self.names))
        return name

    @contextmanager
    def body(self, line: str) -> Iterator[None]:
        """Writes a body with its own scope. Buffers that the body fills are not ready after the body."""
        self.add(line + " {")
        names, indices, ready = len(self.names), len(self.indices), list(self.ready)
        self.indent += 1
        self.own.append([])
        yield
        self.own.pop()
        self.indent -= 1
        self.ready = [name for name in ready if name in self.ready]
        del self.names[names:], self.indices[indices:]
        self.add("}")

    def trips(self) -> str:
        of_ranks = ["local(T, x)"] if self.is_uneven and not self.function else []
        return self.random.choice(["1", "2", "2", "3", "4", str(self.ranks), *of_ranks * 2, *([] if self.function else ["T"])])

    def number(self) -> str:
        """An expression that is not negative."""
        if self.indices and self.may(0.8):
            index = self.random.choice(self.indices[-2:])
            changed = [f"{index} % 2", f"({index} + 1) % 2", f"{index} + 1", f"({index} + rank) % {self.ranks}"]
            return self.random.choice([index, index, *changed])
        return self.random.choice(["0", "0", "1", "rank.x", "rank"])

    # --- instructions -----------------------------------------------------------------------------------------------

    def program(self) -> str:
        for number in range(self.random.choice([0, 0, 1, 1, 2])):
            self.function_(f"f{number}")
        self.start("")
        self.names += ["%x", "%y", "%t"]
        self.ready += ["%x"]
        self.statements(self.random.randint(2, 6))
        self.add(f"copy {self.random.choice(self.ready)} -> %y")
        pools = ", ".join(f"{name}[{count}]" for name, count in self.pools.items())
        events = ", ".join(f"{name}[{EVENTS}]" for name in sorted(self.events()))
        header = f"{self.channel_text()} streams({pools})" + (f" events({events})" if events else "") + " uneven(T)" * self.is_uneven
        head = f"host @t(%x: {SMALL}, %t: f32[T@x]) -> (%y: {SMALL}) mesh({self.mesh}){header} {{"
        return "\n".join([*self.functions, head, *self.lines, "}"]) + "\n"

    def channel_text(self) -> str:
        axes = {"x": "x", "y": "y", "xy": "x, y"}
        used = [f"{name}: {axes[name]} two_sided" for name in sorted(self.channels)]
        return f" channels({', '.join(used)})" if used else ""

    def events(self) -> set[str]:
        words = " ".join((*self.functions, *self.lines)).split()
        return {then.partition("[")[0] for word, then in pairwise(words) if word in ("record", "wait")}

    def function_(self, name: str) -> None:
        self.start(name)
        self.names += ["%p", "%q"]
        self.ready += ["%p"]
        self.statements(self.random.randint(1, 3))
        self.add(f"copy {self.random.choice(self.ready)} -> %q")
        self.functions.append("\n".join([f"function @{name}(%p: {SMALL}) -> (%q: {SMALL}) {{", *self.lines, "}"]))

    def statements(self, count: int) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.temporary, 4),
            (self.large, 1),
            (self.deallocate, 2),
            (self.loop, 2),
            (self.branch, 1),
            (self.region, 4),
            (self.pipeline, 2),
            (self.asynchronous, 2),
            (self.communication, 1),
            (self.call, 2),
            (self.on_some_ranks, 1),
        ]
        for _ in range(count):
            self.random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]()

    def allocate(self, type: str = SMALL) -> str:
        name = self.name("abc")
        self.add(f"{name} = allocate {type}")
        self.own[-1].append(name)
        return name

    def temporary(self) -> None:
        source, name = self.random.choice(self.ready), self.allocate()
        self.add(f"copy {source} -> {name}")
        self.ready.append(name)

    def large(self) -> None:
        name = self.allocate(LARGE)
        self.add(f"fill {name} with 1.0")

    def deallocate(self) -> None:
        if not self.own[-1]:
            return self.temporary()
        name = self.random.choice(self.own[-1])
        self.own[-1].remove(name)
        self.ready = [other for other in self.ready if other != name]
        self.add(f"deallocate {name}")

    def loop(self) -> None:
        if self.depth >= MAX_DEPTH:
            return self.temporary()
        index = self.name("ij")
        trips, self.depth, in_branch = self.trips(), self.depth + 1, self.in_branch
        self.in_branch |= "local" in trips
        with self.body(f"for {index} in 0..{trips}"):
            self.indices.append(index)
            self.statements(self.random.randint(1, 3))
        self.depth, self.in_branch = self.depth - 1, in_branch
        self.names = [name for name in self.names if name != index]

    def branch(self) -> None:
        if self.depth >= MAX_DEPTH:
            return self.temporary()
        condition = self.random.choice([f"{self.number()} == 0", f"{self.number()} < 2", "rank == 0", "rank.x != 0"])
        in_branch, self.in_branch, self.depth = self.in_branch, True, self.depth + 1
        with self.body(f"if {condition}"):
            self.statements(self.random.randint(1, 2))
        if self.may(0.5):
            self.lines[-1] += " else {"
            line = self.lines.pop()
            with self.body("-"):
                self.statements(self.random.randint(1, 2))
            self.lines[self.lines.index("  " * self.indent + "- {")] = line
        self.in_branch, self.depth = in_branch, self.depth - 1

    def on_some_ranks(self) -> None:
        """Two bodies that only one rank executes. The second body uses memory that the first body allocates."""
        if self.depth:  # The memory would live until the end of the loop or branch on one rank.
            return self.temporary()
        rank, source, name = self.random.randrange(self.ranks), self.random.choice(self.ready), self.name("d")
        self.add(f"on mesh(of ranks {rank}) {{")
        self.add(f"  {name} = allocate {SMALL}")
        self.add(f"  copy {source} -> {name}")
        self.add("}")
        self.random.choice([self.temporary, self.large, self.region, self.call])()
        self.add(f"on mesh(of ranks {rank}) {{")
        self.add(f"  copy {name} -> {self.allocate_before()}")
        if self.may(0.5):
            self.add(f"  deallocate {name}")
        self.add("}")

    def allocate_before(self) -> str:
        """Allocates a buffer in front of the current line."""
        line = self.lines.pop()
        name = self.allocate()
        self.lines.append(line)
        return name

    def work(self, source: str) -> str:
        """Instructions of a stream block. Returns a buffer with values."""
        if self.may(0.3):
            return source
        if self.may(0.2):
            index = self.name("k")
            with self.body(f"for {index} in 0..{self.random.choice('123')}"):
                other = self.allocate(self.random.choice([SMALL, LARGE]))
                self.add(f"fill {other} with 1.0")
                if self.may(0.5):
                    self.deallocate()
        if self.may(0.2):
            with self.body(f"if {self.number()} == 0"):
                own = self.allocate()
                self.add(f"copy {source} -> {own}")
                if self.may(0.5):
                    self.deallocate()
        if self.may(0.2):
            self.large()
        own = self.allocate()
        self.add(f"copy {source} -> {own}")
        return own

    def filled(self) -> str:
        name = self.allocate()
        self.add(f"fill {name} with 0.0")
        return name

    def region(self) -> None:
        """A loop with one stream block per iteration. Each iteration writes one row of the result."""
        pool, trips = self.random.choice(list(self.pools)), self.trips()
        source, result, index = self.random.choice(self.ready), self.filled(), self.name("ij")
        first = f" first {self.random.randint(1, self.pools[pool])}" if self.may(0.1) else ""
        self.synchronise(f"fork {pool}{first}")
        with self.body(f"for {index} in 0..{trips}"):
            self.indices.append(index)
            with self.body(f"stream {pool}[{self.random.choice([index, index, index, self.number()])}]"):
                source_here = self.work(source)
                view, row = self.name("v"), self.name("w")
                at = f"{index} % 4" if trips in ("T", "local(T, x)") else index
                self.add(f"{view} = chunk {source_here}[0: {at} of 4]")
                self.add(f"{row} = chunk {result}[0: {at} of 4]")
                self.add(f"copy {view} -> {row}")
                if self.may(0.3) and self.own[-1]:
                    self.deallocate()
                    if self.may(0.5):
                        other = self.allocate(self.random.choice([SMALL, LARGE]))
                        self.add(f"fill {other} with 1.0")
        self.names = [name for name in self.names if name != index]
        self.synchronise(f"join {pool}{first}")
        self.ready.append(result)

    def event(self, name: str) -> str:
        return f"{name}_{self.function}" if self.function else name

    def pipeline(self) -> None:
        """One stream writes chunks of a buffer, and another stream reads them. Events protect each chunk."""
        chunks, trips = self.random.choice([1, 2, 4]), self.trips()
        first, second = self.random.choice([("loop[0]", "side[0]"), ("side[0]", "loop[0]"), ("loop[0]", "loop[1]")])
        pools = dict.fromkeys((first[:4], second[:4]))
        source, buffer, result = self.random.choice(self.ready), self.filled(), self.filled()
        for pool in pools:
            self.synchronise(f"fork {pool}")
        index = self.name("ij")
        at = self.random.choice([f"{index} % {chunks}", f"({index} + 1) % {chunks}"])
        full, free = self.event("full"), self.event("free")
        with self.body(f"for {index} in 0..{trips}"):
            with self.body(f"stream {first}"):
                if not self.may(self.carelessness):
                    with self.body(f"if {index} >= {chunks}"):
                        self.add(f"wait {free}[{at}]")
                self.add(f"%v = chunk {source}[0: {at} of {chunks}]")
                self.add(f"%w = chunk {buffer}[0: {at} of {chunks}]")
                self.add("copy %v -> %w")
                self.synchronise(f"record {full}[{at}]")
            with self.body(f"stream {second}"):
                self.synchronise(f"wait {full}[{at}]")
                self.add(f"%v = chunk {buffer}[0: {at} of {chunks}]")
                self.add(f"%w = chunk {result}[0: {at} of {chunks}]")
                self.add("copy %v -> %w")
                self.synchronise(f"record {free}[{at}]")
        self.names = [name for name in self.names if name != index]
        for pool in pools:
            self.synchronise(f"join {pool}")
        self.ready.append(result)

    def asynchronous(self) -> None:
        """Work on one stream at the same time as other statements. An event or a join orders the result before its uses."""
        pool, source, result = self.random.choice(list(self.pools)), self.random.choice(self.ready), self.allocate()
        index, done = self.number(), f"{self.event('done')}[{self.random.randrange(2)}]"
        ends = self.random.choice(["join", "join", "wait"])
        self.own[-1].remove(result)
        self.synchronise(f"fork {pool}")
        with self.body(f"stream {pool}[{index}]"):
            self.add(f"copy {self.work(source)} -> {result}")
            if source in self.own[-2] and self.may(0.3):
                self.own[-2].remove(source)
                self.ready.remove(source)
                self.add(f"deallocate {source}")
            if ends == "wait":
                self.synchronise(f"record {done}")
        ready, own_here = self.ready, self.own[-1]
        self.ready, self.own[-1] = list(self.ready), [name for name in own_here if name != source]
        kept = list(self.own[-1])
        for _ in range(self.random.randint(0, 2)):
            self.random.choice([self.temporary, self.large, self.deallocate, self.call])()
        gone = {name for name in kept if name not in self.own[-1]}
        self.own[-1] = [name for name in (*own_here, *(name for name in self.own[-1] if name not in own_here)) if name not in gone]
        self.ready = [*ready, *(name for name in self.ready if name not in ready)]
        self.ready = [name for name in self.ready if name not in gone]
        self.synchronise(f"{ends} {pool if ends == 'join' else done}")
        self.own[-1].append(result)
        self.ready.append(result)

    def communication(self) -> None:
        name = "xy" if self.ranks == 4 and self.may(0.3) else self.random.choice("xy" if self.ranks == 4 else "x")
        source, result = self.random.choice(self.ready), self.allocate()
        size = self.ranks if name == "xy" else 2 if self.ranks == 4 else self.ranks
        coordinate = "rank" if name == "xy" else f"rank.{name}"
        on_stream = self.random.choice([*self.pools, "", ""])
        self.channels.add(name)
        if on_stream:
            self.synchronise(f"fork {on_stream}")
            self.indent += 1
        at = len(self.lines)
        if self.in_branch or self.may(0.5):
            self.add("group {")
            self.add(f"  send {source} to ({coordinate} + 1) % {size} on {name}")
            self.add(f"  recv {result} from ({coordinate} + {size - 1}) % {size} on {name}")
            self.add("}")
        else:
            self.add(f"all_reduce sum {source} -> {result} on {name}")
        if on_stream:
            self.indent -= 1
            self.lines.insert(at, "  " * self.indent + f"stream {on_stream}[0] {{")
            self.add("}")
            self.synchronise(f"join {on_stream}")
        self.ready.append(result)

    def call(self) -> None:
        if not self.functions:
            return self.temporary()
        source, result = self.random.choice(self.ready), self.allocate()
        self.add(f"call @f{self.random.randrange(len(self.functions))} {source} -> {result}")
        self.ready.append(result)


def unrolled(program: ir.HostProgram) -> ir.HostProgram:
    """Replaces each loop of the main body by its iterations, unless the trip count depends on a size."""
    used = names_in(program)

    def unroll(body: tree.Body) -> tree.Body:
        result: list[tree.Instruction] = []
        for i in body:
            i = tree.with_bodies(i, unroll)
            if not isinstance(i, ir.For) or not i.count.is_int:
                result.append(i)
                continue
            inner = (*i.body, *missing_deallocations(i.body, i.body))
            for number in range(int(i.count)):
                names = {name: claim_unique(name, used) for j in tree.walk(inner) for name in tree.names(j, "define", "index")}
                result += renamed(inner, names, {i.out: Const(number)})
        return tuple(result)

    return replace(program, body=unroll(program.body))


# --- changes of a program -------------------------------------------------------------------------------------------


def changed(program: ir.HostProgram, random: Random) -> ir.HostProgram:
    """Applies one random change to the main body, to a function, or to a pool. Returns the program itself if the change is not possible."""
    if random.random() < 0.1:
        pools = list(random.choice([program.streams, program.events]))
        if pools:
            at = random.randrange(len(pools))
            pools[at] = replace(pools[at], count=random.randint(1, EVENTS))
            field = "streams" if isinstance(pools[at], ir.Streams) else "events"
            return replace(program, **{field: tuple(pools)})
    number = random.randrange(len(program.functions) + 1)
    if number == len(program.functions):
        return replace(program, body=_changed_body(program, program.body, random))
    functions = list(program.functions)
    functions[number] = replace(functions[number], body=_changed_body(program, functions[number].body, random))
    return replace(program, functions=tuple(functions))


def _changed_body(program: ir.HostProgram, body: tree.Body, random: Random) -> tree.Body:
    all_instructions = list(tree.walk(body))
    likely = [i for i in all_instructions if i.orders or isinstance(i, ir.Deallocate | ir.OnStream | ir.For | ir.Chunk)]
    chosen = random.choice(likely if likely and random.random() < 0.8 else all_instructions)
    if random.random() < 0.3:
        return _moved(body, chosen, random)
    new = _changed_instruction(program, chosen, random)
    return tree.rewrite(body, lambda i: new if i == chosen and i.location == chosen.location else None)


def _moved(body: tree.Body, chosen: tree.Instruction, random: Random) -> tree.Body:
    """Moves an instruction to another position in its body."""
    if any(i is chosen for i in body):
        others = [i for i in body if i is not chosen]
        at = random.randint(0, len(others))
        return (*others[:at], chosen, *others[at:])
    return tuple(tree.with_bodies(i, lambda inner: _moved(inner, chosen, random) if inner else inner) for i in body)


def _changed_instruction(program: ir.HostProgram, i: tree.Instruction, random: Random) -> tree.Instruction | tree.Body:
    match i:
        case ir.For(count=count) if random.random() < 0.7:
            return replace(i, count=random.choice([Size(1), Size(2), Size(3), Size(4), count * 2]))
        case ir.OnStream(body=body, stream=pool) if random.random() < 0.3:
            others = [other.name for other in program.streams if other.name != pool]
            return random.choice([body, replace(i, stream=random.choice(others))] if others else [body])
        case ir.Fork() | ir.Join() if random.random() < 0.3:
            return replace(i, first=random.choice([None, 1, 2]))
        case ir.OnStream() | ir.Record() | ir.Wait() | ir.Chunk() if random.random() < 0.7:
            return tree.with_expressions(i, lambda expr: _changed_expr(expr, random))
        case ir.If(body=body, orelse=orelse) if random.random() < 0.5:
            return random.choice([body, orelse])
    return ()


def _changed_expr(expr: Expr, random: Random) -> Expr:
    indices = [leaf for leaf in (expr, *vars(expr).values()) if isinstance(leaf, Var)]
    simple = [Const(0), Const(1), *indices]
    return random.choice([binary("+", expr, 1), binary("%", expr, 2), binary("%", binary("+", expr, 1), 2), *simple])
