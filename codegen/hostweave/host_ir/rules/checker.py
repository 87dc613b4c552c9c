"""State of the verifier: names and types of a program, and the context of the current instruction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.fusion_ir.verify import verify_ops
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import channels_of, events_of
from hostweave.host_ir.expr import Const, Coordinate, Expr, Rank, Symbol, Var, divisions, leaves, range_of
from hostweave.host_ir.size_requirements import MAX_SIZE, size_of
from hostweave.host_ir.tree import AliasRoots
from hostweave.types.blocks import Cuts
from hostweave.types.mesh import Mesh
from hostweave.types.size import Factor, LocalSize, Size, product
from hostweave.types.tensor import BufferType

MAX_EVENTS, MAX_STREAMS = 2**16, 2**10  # maximum sizes of pools; each stream has a workspace for matmuls


@dataclass(frozen=True)
class Scope:
    in_stream: bool = False
    condition: Expr | None = None  # innermost enclosing condition that depends on the rank
    trips: Size | None = None  # trip count of an enclosing loop, if the count may differ between ranks


Rule = Callable[["Checker", Any, Scope], None]  # verifies one kind of instruction


@dataclass
class Checker:
    program: ir.HostProgram  # the main program, or a function as a separate program
    rules: Mapping[type[tree.Instruction], Rule]
    kernels: dict[str, ir.Kernel] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    types: dict[str, BufferType] = field(default_factory=dict)
    indices: set[str] = field(default_factory=set)
    rank_dependent: set[str] = field(default_factory=set)
    roots: AliasRoots = field(default_factory=AliasRoots)
    freed: set[str] = field(default_factory=set)
    allocated: set[str] = field(default_factory=set)  # in the innermost loop or branch, or outside of loops and branches
    windows: set[str] = field(default_factory=set)  # allocations and parameters in windows
    current: tree.Instruction | None = None
    around: tree.Body = ()  # body that contains the current instruction
    number: int = 0  # index of the current instruction in `around`
    trips: tuple[Size, ...] = ()  # iterations of the enclosing loops
    mesh: Mesh = field(init=False)  # mesh of the enclosing `on` body, or of the program

    def __post_init__(self) -> None:
        self.mesh = self.program.mesh

    def header(self) -> None:
        self.channels()
        pools: list[ir.Pool] = [*self.program.streams, *self.program.events]
        for pool in pools:
            most = MAX_STREAMS if isinstance(pool, ir.Streams) else MAX_EVENTS
            if pool.count > most:
                self.fail(f"{pool.name}[{pool.count}] is more than {most}: declare fewer, and reuse them cyclically (index % count)")
            if pool.count < 1:
                self.fail(f"{pool.name}[{pool.count}] is empty: declare at least one")
        self.once([pool.name for pool in pools], "")
        sizes_of_inputs = {size.name for p in self.program.inputs for size in p.type.shape} | self.program.depths().keys()
        for name in self.program.symbols():
            if name not in sizes_of_inputs:
                self.fail(f"no input has a dim {name}, so its size is unknown; add it to an input, or write an int")
        for p in (*self.program.inputs, *self.program.outputs):
            if p.type.partial:
                self.fail(f"%{p.name} is {p.type}: a caller has no partial sums; reduce it in the program")
        for name in self.program.uneven:
            if name not in self.program.symbols():
                self.fail(f"uneven({name}): {name} is not a size of any input or output; leave it out")
        self.once([function.name for function in self.program.functions], "function @")

    def channels(self) -> None:
        self.once([channel.name for channel in self.program.channels], "channel ")
        used = channels_of(self.program)
        declared: dict[object, str] = {}
        for channel in self.program.channels:
            self.submesh(channel.mesh)
            for axis in channel.axes:
                self.axis(axis, channel.mesh)
                if channel.axes.count(axis) > 1:
                    self.fail(f"channel {channel.name}: axis {axis} is named twice: name each axis once")
            same = declared.setdefault((channel.mesh, channel.axes, channel.transport), channel.name)
            if same != channel.name:
                self.fail(f"channels {same} and {channel.name} have the same ranks and transport: declare one")
            if channel.name not in used:
                self.fail(f"channel {channel.name} is unused: remove it from the header")

    def expect_separate_events(self, bodies: tuple[ir.HostProgram, ...]) -> None:
        """Checks that the main program and its functions use separate events. Otherwise a wait could match a record of another function."""
        users: dict[str, str] = {}
        for body in bodies:
            for event in sorted(events_of(body.body)):
                if users.setdefault(event, body.name) != body.name:
                    self.fail(f"both @{users[event]} and @{body.name} use {event}: declare events for each")

    def parameters(self) -> None:
        self.inputs.update(p.name for p in self.program.inputs)
        for parameter in (*self.program.inputs, *self.program.outputs):
            if parameter.name in self.types:
                self.fail(f"%{parameter.name} is declared twice: rename one")
            if parameter.type.mesh:
                self.submesh(parameter.type.mesh)
            for axis in parameter.type.axes:
                self.axis(axis, parameter.type.mesh)
            parameter.type.check(None, self.program.mesh)
            self.types[parameter.name] = self.program.local_type(parameter)
            if parameter.in_window and parameter.type.mesh:
                self.fail(f"%{parameter.name} in window: only ranks of {parameter.type.mesh} have it; all ranks must have a window")
        self.memories()
        self.windows.update(self.program.windows)

    def memories(self) -> None:
        """Checks that only outputs reuse inputs, and each input at most once. An output must have the dtype and mesh of the input, and the
        same dims in any order."""
        inputs, reused = {p.name: p.type for p in self.program.inputs}, set[str]()
        for parameter in (p for p in (*self.program.inputs, *self.program.outputs) if p.memory):
            here = f"%{parameter.name} in %{parameter.memory}"
            if parameter in self.program.inputs or parameter.memory not in inputs:
                self.fail(f"{here}: only an output may be in an input: write one of {', '.join(map('%{}'.format, inputs))}")
            if not parameter.type.fills(inputs[parameter.memory]):
                self.fail(f"{here}: %{parameter.memory} is {inputs[parameter.memory]}: give them the same dtype, mesh and dims")
            if parameter.memory in reused:
                self.fail(f"{here}: another output uses the same input: name a separate input for each")
            reused.add(parameter.memory)

    def once(self, names: Sequence[str], word: str) -> None:
        for name in names:
            if names.count(name) > 1:
                self.fail(f"{word}{name} is declared twice: rename one")

    def fail(self, message: str) -> NoReturn:
        if self.current is None:
            raise ProgramError(f"@{self.program.name}: {message}")
        text = self.current.lines()[0].removesuffix(" {")
        raise ProgramError(f"@{self.program.name}: {text}: {message}", self.current.location)

    def body(self, body: tree.Body, scope: Scope) -> None:
        groups = {p.name for p in (*self.program.inputs, *self.program.outputs) if p.group}
        for number, instruction in enumerate(body):
            self.current, self.around, self.number = instruction, body, number
            for name in tree.names(instruction, "read", "write", "alias"):
                source, span = self.buffer(name), instruction.span
                if name in groups and not (span and span[::2] == (0, Size()) and instruction.chunk_of(source)):
                    self.fail(f"%{name} is a group of tensors: use one of them, such as %{name}_i = select %{name}[0: 0]")
            guarded = tree.names(instruction, "guard")
            for name in tree.names(instruction, "write"):
                if name not in guarded and not self.inputs.isdisjoint(self.roots.all_of(name)):
                    self.fail(f"%{name} is an input and may not be written: allocate a buffer")
            for name in tree.names(instruction, "define", "index"):
                if name in self.types or name in self.indices:
                    self.fail(f"%{name} is defined twice: rename one")
                self.freed.discard(name)  # An earlier body may have freed a buffer of this name.
            for pool in tree.names(instruction, "stream", "fork", "join"):
                self.declared(pool, self.program.streams, "streams")
            for pool in tree.names(instruction, "record", "wait"):
                self.declared(pool, self.program.events, "events")
            for expr in tree.expressions(instruction):
                self.expr(expr)
            self.roots.define(instruction)
            tree.of_kind(self.rules, type(instruction))(self, instruction, scope)

    def inner(self, body: tree.Body, scope: Scope, is_always_run: bool = True) -> None:
        """Checks a nested body. Names of the body are not visible after the body."""
        outside, current, allocated = len(self.types), self.current, self.allocated
        indices = set(self.indices)
        self.allocated = allocated if is_always_run else set()
        self.body(body, scope)
        self.allocated = allocated
        while len(self.types) > outside:
            self.types.popitem()
        self.indices, self.current = indices, current

    def declared(self, name: str, pools: tuple[ir.Pool, ...], word: str) -> None:
        if name not in {pool.name for pool in pools}:
            self.fail(f"{name} is not declared: add {word}({name}[...]) to the header")

    def buffer(self, name: str) -> BufferType:
        if name in self.types and not self.freed.isdisjoint(self.roots.all_of(name)):
            self.fail(f"%{name} is used after its deallocate: move the deallocate down")
        if name not in self.types:
            self.fail(f"%{name} is used before its definition: define it above, in this body or around it")
        return self.types[name]

    def expr(self, expr: Expr) -> None:
        self.divisors(expr)
        for leaf in leaves(expr):
            if isinstance(leaf, Var) and leaf.name not in self.indices:
                self.fail(f"%{leaf.name} is not a known index: define it above")
            if isinstance(leaf, Coordinate):
                self.axis(leaf.axis)
            if isinstance(leaf, Const) and abs(leaf.value) > MAX_SIZE:
                self.fail(f"{leaf.value} may overflow int64_t in a sum or product: write at most {MAX_SIZE}")
            if isinstance(leaf, Symbol):
                self.size(Size(1, (leaf.size,)))

    def size(self, size: Size) -> None:
        if name := self.unknown(size):
            self.fail(f"{name} is not a size of any input or output; the sizes are {', '.join(self.program.symbols()) or 'none'}")

    def divisors(self, expr: Expr) -> None:
        for divided, divisor in divisions(expr):
            least, _ = range_of(divisor, {}, self.mesh)
            size = size_of(divisor)
            # A size of 0 divides nothing in a loop whose iterations are a multiple of the size.
            divides_loop = size is not None and size.coefficient > 0 and any(trips.divided_by(size) for trips in self.trips)
            if not divides_loop and (least is None or least < 1):
                remedy = "divide by a positive number, or by a size of an enclosing loop"
                self.fail(f"{divided}: the divisor may be 0 or negative: {remedy}")

    def depends_on_rank(self, expr: Expr) -> bool:
        return any(
            isinstance(leaf, Coordinate | Rank)
            or (isinstance(leaf, Var) and leaf.name in self.rank_dependent)
            or (isinstance(leaf, Symbol) and isinstance(leaf.size, LocalSize))
            for leaf in leaves(expr)
        )

    def axis(self, axis: str, mesh: Mesh | None = None) -> None:
        mesh = mesh or self.mesh
        if axis not in dict(mesh.axes):
            self.fail(f"{mesh} has no axis {axis!r}: its axes are {', '.join(dict(mesh.axes))}")

    def submesh(self, mesh: Mesh) -> None:
        """Checks that a mesh has only ranks of the program's mesh."""
        if outside := set(mesh.all_ranks) - set(self.program.mesh.all_ranks):
            self.fail(f"{self.program.mesh} has no rank {min(outside)}: name only its ranks")

    def channel(self, i: ir.Communication) -> ir.Channel:
        """Channel of a communication. Checks that the channel supports the communication, and that all executing ranks are in the
        channel."""
        channel = next((channel for channel in self.program.channels if channel.name == i.channel), None)
        if channel is None:
            known = ", ".join(channel.name for channel in self.program.channels) or "none"
            self.fail(f"channel {i.channel} is not declared: add channels({i.channel}: ...) to the header; declared: {known}")
        if i.posts not in channel.transport.carries:
            self.fail(
                f"channel {i.channel} is {channel.transport.name}, which supports only {', '.join(sorted(channel.transport.carries))}"
            )
        if outside := set(self.mesh.all_ranks) - set(channel.mesh.all_ranks):
            self.fail(
                f"rank {min(outside)} executes this, but channel {i.channel} is on {channel.mesh}: use a channel that includes the rank"
            )
        return channel

    def same_dtype(self, *names: str) -> None:
        if len({self.types[name].dtype for name in names}) > 1:
            self.fail("dtypes differ: " + ", ".join(f"%{name} is {self.types[name]}" for name in names) + "; cast first")

    def same_shape(self, *names: str) -> None:
        if len({self.types[name].shape for name in names}) > 1:
            self.fail("shapes differ: " + ", ".join(f"%{name} is {self.types[name]}" for name in names))

    def contiguous(self, *names: str, what: str = ", which communication needs") -> None:
        for name in names:
            if self.types[name].strides is not None:
                self.fail(f"%{name} is not contiguous{what}: copy it to a contiguous buffer first")

    def expect_type(self, name: str, wanted: BufferType, what: str) -> None:
        """Checks the dtype and the shape of a buffer."""
        if (self.types[name].dtype, self.types[name].shape) != (wanted.dtype, wanted.shape):
            self.fail(f"%{name} is {self.types[name]}, {what}")

    def cuts(self, cuts: Cuts, name: str) -> None:
        """Checks that a buffer has as many elements as the tensor with these cuts."""
        for cut in cuts:
            self.size(cut.size)
        actual, wanted = (self.known(product(shape)) for shape in (self.types[name].shape, tuple(cut.size for cut in cuts)))
        if actual != wanted:
            self.fail(f"%{name} is {self.types[name]}, of {actual} elements, but the blocks have {wanted}: make them equal")

    def counts(self, small: str, large: str, factor: int) -> None:
        actual, expected = (self.known(product(self.types[name].shape)) for name in (large, small))
        expected = expected * factor
        if actual != expected:
            self.fail(f"%{large} must hold {factor} x %{small}, but has {actual} elements, not {expected}")

    def known(self, size: Size) -> Size:
        """Replaces each local size by a quotient if all shards are equal. Equal sizes then compare equal."""
        exact = dict[Factor, Size]()
        for local in size.factors:
            if isinstance(local, LocalSize) and not local.size.is_uneven(ranks := local.ranks_in(self.program.mesh), self.program.uneven):
                exact[local] = local.size // ranks
        return size.replaced(exact)

    def with_equal_shards(self, size: Size) -> Size:
        """Renames the axes of local sizes. Local sizes with equal global sizes and numbers of ranks then compare equal."""
        factors = [factor for factor in size.factors if isinstance(factor, LocalSize)]
        meshes = {local: Mesh(ranks=local.ranks_in(self.program.mesh)) for local in factors}
        return self.known(size).replaced({local: Size(1, (LocalSize(local.size, ("ranks",), mesh),)) for local, mesh in meshes.items()})

    def unknown(self, size: Size) -> str | None:
        """First symbol of `size` that no input or output has, or None. If None, also checks the meshes and axes of local sizes."""
        missing = [symbol for symbol in size.symbols if symbol not in self.program.symbols()]
        for atom in size.atoms:
            if isinstance(atom, LocalSize) and not missing:
                mesh = atom.mesh_in(self.program.mesh)
                self.submesh(mesh)
                for axis in atom.axes:
                    self.axis(axis, mesh)
        return missing[0] if missing else None

    def kernel(self, kernel: ir.Kernel) -> None:
        if kernel.name in self.kernels:
            self.fail(f"kernel @{kernel.name} is declared twice: rename one")
        if not kernel.ops:
            self.fail(f"kernel @{kernel.name} has no ops: give it one")
        self.kernels[kernel.name] = kernel
        verify_ops([(parameter.name, parameter.type) for parameter in kernel.inputs], kernel.ops)
        if unknown := set(kernel.returned) - {op.result.name for op in kernel.ops}:
            self.fail(f"kernel @{kernel.name} returns %{min(unknown)}, which no op of it computes: return a result of an op")
        if len(set(kernel.returned)) < len(kernel.returned):
            self.fail(f"kernel @{kernel.name} returns a value twice: return it once")

    def user_kernel(self, kernel: UserKernel) -> None:
        if kernel.name in self.kernels or sum(kernel.name == other.name for other in self.program.user_kernels) > 1:
            self.fail(f"user kernel @{kernel.name} is declared twice: rename one")
        types = (*kernel.inputs, *kernel.outputs)
        for type in (type for type in types if type.mesh):
            type.check(kernel.location, self.program.mesh)
        of_submeshes = {axis for i in tree.walk(self.program.body) if i.ranks for axis, _ in i.ranks.axes}
        dims = (*kernel.grid, *(a.dim for a in kernel.arguments if a.dim))
        for axis in (axis for dim in (*dims, *(dim for type in types if not type.mesh for dim in type.dims)) for axis in dim.axes):
            if axis not in of_submeshes:  # Other axes must be axes of the program's mesh.
                self.axis(axis)
        for dim in dims:
            if unknown := self.unknown(dim.size):
                self.fail(f"user kernel @{kernel.name}: {unknown} is not a size of any input or output")
        if kernel.signature is None:
            self.fail(f"user kernel @{kernel.name} has no `__global__ void {kernel.function}(...)`: give it one")
