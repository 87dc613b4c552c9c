"""The rules of host programs. Each instruction has one rule, which raises a ProgramError that names the instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from hostweave.errors import ProgramError
from hostweave.fusion.extent import Extent, block_of, part_of, product
from hostweave.fusion.ops import widens
from hostweave.fusion.source import Source, held
from hostweave.fusion.types import BufferType, Mesh, mesh_of_part
from hostweave.host import ir
from hostweave.host.blocks import bodies, events_of
from hostweave.host.expr import Binary, Const, Coordinate, Expr, Rank, Size, Var, divisibility, leaves
from hostweave.host.requirements import slack
from hostweave.host.roots import Roots
from hostweave.host.text import print_instruction

REDUCTIONS = ("sum", "prod", "min", "max", "avg")
NOT_REDUCED = {"bool": "u8", "f8e4m3": "f32", "f8e5m2": "f32"}  # NCCL has no sums of these; the dtype that carries them


def verify_host(program: ir.HostProgram) -> None:
    """Raises ProgramError for the first instruction that is not legal: its text, why, and what to do."""
    checker = _Checker(program)
    checker.header()
    for kernel in program.kernels:
        checker.kernel(kernel)
    for source in program.sources:
        checker.source(source)
    parts = bodies(program)
    for part in parts:
        body = _Checker(part, kernels=checker.kernels)
        body.parameters()
        body.body(part.body, _Scope())
    checker.apart(parts)


@dataclass(frozen=True)
class _Scope:
    """What surrounds an instruction."""

    in_stream: bool = False
    condition: Expr | None = None  # the innermost rank-dependent condition
    steps: Extent | None = None  # of a loop that ranks may walk another number of times
    divides: tuple[tuple[str, int], ...] = ()  # sizes and what is known here to divide them


@dataclass
class _Checker:
    program: ir.HostProgram  # or a block as one
    kernels: dict[str, ir.Kernel] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    types: dict[str, BufferType] = field(default_factory=dict)
    indices: set[str] = field(default_factory=set)
    rank_dependent: set[str] = field(default_factory=set)
    roots: Roots = field(default_factory=Roots)
    freed: set[str] = field(default_factory=set)
    current: ir.Instruction | None = None
    scope: _Scope = field(default_factory=lambda: _Scope())
    mesh: Mesh = field(init=False)  # of the `on` body around, or the program's

    def __post_init__(self) -> None:
        self.mesh = self.program.mesh

    def header(self) -> None:
        pools: list[ir.Streams | ir.Events] = [*self.program.streams, *self.program.events]
        for pool in pools:
            if pool.count < 1:
                self.fail(f"{pool.name}[{pool.count}] holds nothing: declare at least one")
            if sum(pool.name == other.name for other in pools) > 1:
                self.fail(f"{pool.name} is declared twice: rename one")
        for name in self.program.uneven:
            if name not in self.program.symbols():
                self.fail(f"uneven({name}): {name} is not a size of any input or output; leave it out")
        names = [block.name for block in self.program.blocks]
        for name in names:
            if names.count(name) > 1:
                self.fail(f"block @{name} is declared twice: rename one")

    def apart(self, parts: tuple[ir.HostProgram, ...]) -> None:
        """Events belong to one body, so that a wait cannot meet the record of another."""
        users: dict[str, str] = {}
        for part in parts:
            for event in sorted(events_of(part.body)):
                if users.setdefault(event, part.name) != part.name:
                    self.fail(f"both @{users[event]} and @{part.name} use {event}: declare events for each")

    def parameters(self) -> None:
        self.inputs.update(p.name for p in self.program.inputs)
        for parameter in (*self.program.inputs, *self.program.outputs):
            if parameter.name in self.types:
                self.fail(f"%{parameter.name} is declared twice: rename one")
            if parameter.type.mesh:
                self.part(parameter.type.mesh)
            for axis in parameter.type.axes:
                self.axis(axis, parameter.type.mesh)
            self.types[parameter.name] = self.program.local_type(parameter)

    def fail(self, message: str) -> NoReturn:
        if self.current is None:
            raise ProgramError(f"@{self.program.name}: {message}")
        text = print_instruction(self.current)[0].removesuffix(" {")
        raise ProgramError(f"@{self.program.name}: {text}: {message}", self.current.location)

    # --- structure ---

    def body(self, body: ir.Body, scope: _Scope) -> None:
        for instruction in body:
            self.current = instruction
            for name in ir.names(instruction, "read", "write", "alias"):
                self.buffer(name)
            for name in ir.names(instruction, "write"):
                if self.roots.of(name) in self.inputs:
                    self.fail(f"%{name} is an input and may not be written: allocate a buffer")
            for name in ir.names(instruction, "define", "index"):
                if name in self.types or name in self.indices:
                    self.fail(f"%{name} is defined twice: rename one")
                self.freed.discard(name)  # another body may have used the name
            self.roots.define(instruction)
            self.scope = scope
            RULES[type(instruction)](self, instruction, scope)

    def inner(self, body: ir.Body, scope: _Scope) -> None:
        """A nested body: what it defines ends with it."""
        outside, current = len(self.types), self.current
        indices = set(self.indices)
        self.body(body, scope)
        while len(self.types) > outside:
            self.types.popitem()
        self.indices, self.current = indices, current

    def buffer(self, name: str) -> BufferType:
        if name in self.types and self.roots.of(name) in self.freed:
            self.fail(f"%{name} is used after its deallocate: move the deallocate down")
        if name not in self.types:
            self.fail(f"%{name} is used before its definition: define it above, in this body or around it")
        return self.types[name]

    def expr(self, expr: Expr) -> None:
        self.divisors(expr)
        for leaf in leaves(expr):
            if isinstance(leaf, Var) and leaf.name not in self.indices:
                self.fail(f"%{leaf.name} is not an index that is known here: define it above")
            if isinstance(leaf, Coordinate):
                self.axis(leaf.axis)
            if isinstance(leaf, Size) and (name := self.unknown(Extent(1, (leaf.name,)))):
                self.fail(f"{name} is not a size of any input or output; the sizes are {', '.join(self.program.symbols()) or 'none'}")

    def divisors(self, expr: Expr) -> None:
        if not isinstance(expr, Binary):
            return
        if expr.op in ("/", "%") and (
            expr.right == Const(0) or any(isinstance(leaf, Var | Coordinate | Rank) for leaf in leaves(expr.right))
        ):
            self.fail(f"{expr}: the divisor may be 0: divide by a positive number or a size")
        self.divisors(expr.left)
        self.divisors(expr.right)

    def depends_on_rank(self, expr: Expr) -> bool:
        return any(
            isinstance(leaf, Coordinate | Rank)
            or (isinstance(leaf, Var) and leaf.name in self.rank_dependent)
            or (isinstance(leaf, Size) and part_of(leaf.name) is not None)
            for leaf in leaves(expr)
        )

    def axis(self, axis: str, mesh: Mesh | None = None) -> None:
        mesh = mesh or self.mesh
        if axis not in dict(mesh.axes):
            self.fail(f"{mesh} has no axis {axis!r}: its axes are {', '.join(dict(mesh.axes))}")

    def part(self, mesh: Mesh) -> None:
        """A mesh of some of the program's ranks."""
        if outside := set(mesh.all_ranks) - set(self.program.mesh.all_ranks):
            self.fail(f"{self.program.mesh} has no rank {min(outside)}: name ranks of it")

    def axes_of_parts(self) -> set[str]:
        """The axes of the meshes of some of the ranks."""
        return {axis for i in ir.walk(self.program.body) if isinstance(i, ir.OnMesh) for axis, _ in i.mesh.axes}

    def team_size(self, team: ir.Team) -> int:
        if team == ir.EVERYONE:
            return self.program.mesh.size
        for axis in team:
            self.axis(axis)
            if team.count(axis) > 1:
                self.fail(f"axis {axis} is named twice: name each axis of the team once")
        return self.mesh.size_of(team)

    # --- types ---

    def same_dtype(self, *names: str) -> None:
        if len({self.types[name].dtype for name in names}) > 1:
            self.fail("dtypes differ: " + ", ".join(f"%{name} is {self.types[name]}" for name in names) + "; cast first")

    def same_shape(self, *names: str) -> None:
        if len({self.types[name].shape for name in names}) > 1:
            self.fail("shapes differ: " + ", ".join(f"%{name} is {self.types[name]}" for name in names))

    def contiguous(self, *names: str) -> None:
        for name in names:
            if self.types[name].strides is not None:
                self.fail(f"%{name} is not contiguous, which communication needs: copy it to a buffer of its own first")

    def counts(self, small: str, large: str, factor: int) -> None:
        have, want = (self.known(product(self.types[name].shape)) for name in (large, small))
        want = want * factor
        if have != want:
            self.fail(f"%{large} must hold {factor} x %{small}: it has {have} elements, not {want}")

    def known(self, extent: Extent) -> Extent:
        """An extent with the quotients in place of blocks and parts of sizes that are known to divide."""
        divisors = dict(self.scope.divides)
        exact: dict[str, Extent] = {}
        for name in extent.names:
            size, ranks = block_of(name) or (None, 0)
            if size is None and (found := part_of(name)):
                size, ranks = found[0], mesh_of_part(name, self.program.mesh).size_of(found[1])
            if size is not None and divisors.get(str(size), 0) == ranks:
                exact[name] = size // ranks
        return extent.replaced(exact)

    def alike(self, extent: Extent) -> Extent:
        """An extent in which a part is named by its size and the number of ranks alone."""
        alike: dict[str, Extent] = {}
        for name in extent.names:
            if found := part_of(name):
                size, axes, _ = found
                alike[name] = Extent(1, (f"part of {size} for one of {mesh_of_part(name, self.program.mesh).size_of(axes)}",))
        return self.known(extent).replaced(alike)

    def unknown(self, extent: Extent) -> str | None:
        """A name in an extent that no input or output tells."""
        for name in extent.names:
            size = (block_of(name) or part_of(name) or (Extent(1, (name,)),))[0]
            missing = [symbol for symbol in size.symbols if symbol not in self.program.symbols()]
            if missing:
                return missing[0]
            if found := part_of(name):
                mesh = mesh_of_part(name, self.program.mesh)
                self.part(mesh)
                for axis in found[1]:
                    self.axis(axis, mesh)
        return None

    def kernel(self, kernel: ir.Kernel) -> None:
        from hostweave.fusion.verify import verify_ops

        if kernel.name in self.kernels:
            self.fail(f"kernel @{kernel.name} is declared twice: rename one")
        if not kernel.ops:
            self.fail(f"kernel @{kernel.name} has no ops: give it one")
        self.kernels[kernel.name] = kernel
        verify_ops(kernel.inputs, kernel.ops)
        if unknown := set(kernel.returned) - {op.result.name for op in kernel.ops}:
            self.fail(f"kernel @{kernel.name} returns %{min(unknown)}, which no op of it computes: return what one does")
        if len(set(kernel.returned)) < len(kernel.returned):
            self.fail(f"kernel @{kernel.name} returns a value twice: return it once")

    def source(self, source: Source) -> None:
        if source.name in self.kernels or sum(source.name == other.name for other in self.program.sources) > 1:
            self.fail(f"source @{source.name} is declared twice: rename one")
        types = (*source.inputs, *source.outputs)
        dims = (*source.grid, *(a.dim for a in source.arguments if a.dim))
        for axis in (axis for dim in (*dims, *(dim for type in types for dim in type.dims)) for axis in dim.axes):
            if axis not in self.axes_of_parts():  # on the program's mesh, then
                self.axis(axis)
        for dim in dims:
            if unknown := self.unknown(dim.extent):
                self.fail(f"source @{source.name}: {unknown} is not a size of any input or output")
        if source.signature is None:
            self.fail(f"source @{source.name} has no `__global__ void {source.function}(...)`: give it one")


# --- one rule an instruction ------------------------------------------------------------------------------------------


def _allocate(c: _Checker, i: ir.Allocate, scope: _Scope) -> None:
    if unknown := next(filter(None, map(c.unknown, i.type.shape)), None):
        c.fail(f"{unknown} is not a size of any input or output")
    c.types[i.out] = i.type


def _deallocate(c: _Checker, i: ir.Deallocate, scope: _Scope) -> None:
    if (root := c.roots.of(i.src)) != i.src:
        c.fail(f"%{i.src} is a view: deallocate %{root}")
    if i.src in c.inputs or any(p.name == i.src for p in c.program.outputs):
        c.fail(f"%{i.src} belongs to the caller: only what this program allocates can be deallocated")
    c.freed.add(i.src)


def _view(c: _Checker, i: Any, scope: _Scope) -> None:
    source = c.types[i.src]
    if isinstance(i, ir.Select | ir.Slice | ir.Section | ir.Strided):
        c.expr(i.start if isinstance(i, ir.Section | ir.Strided) else i.index)
        if i.dim >= len(source.shape):
            c.fail(f"%{i.src} is {source}: it has no dim {i.dim}")
    if isinstance(i, ir.Permute) and sorted(i.order) != list(range(len(source.shape))):
        c.fail(f"%{i.src} is {source}: the order must name each of its dims once")
    if isinstance(i, ir.Strided) and i.step < 1:
        c.fail(f"the step is {i.step}: it must be at least 1")
    outside = next((room for room in slack(i, source) if room.is_int and int(room) < 0), None)
    if outside is not None:
        c.fail(f"%{i.src} is {source}: {-int(outside)} of the indices are outside of dim {i.dim}")
    try:
        c.types[i.out] = ir.view_type(i, source)
    except ValueError as error:
        c.fail(f"%{i.src} is {source}: {error}")


def _matmul(c: _Checker, i: ir.Matmul, scope: _Scope) -> None:
    c.same_dtype(i.a, i.b, *(() if widens(c.types[i.a].dtype, c.types[i.dst].dtype) else (i.dst,)))
    a, b, dst = (c.types[name].shape for name in (i.a, i.b, i.dst))
    if min(len(a), len(b)) < 2:
        c.fail("both operands need at least two dims")
    if a[-1] != b[-2]:
        c.fail(f"inner dims differ: {c.types[i.a]} x {c.types[i.b]}")
    batch = broadcast_shapes(a[:-2], b[:-2])
    if batch is None:
        c.fail(f"leading dims do not broadcast: {c.types[i.a]} x {c.types[i.b]}")
    if dst != (*batch, a[-2], b[-1]):
        c.fail(f"%{i.dst} is {c.types[i.dst]}, not {BufferType(c.types[i.dst].dtype, (*batch, a[-2], b[-1]))}")
    if i.precision and i.precision != "tf32":
        c.fail(f"there is no precision {i.precision}: write tf32, or leave it out")
    if i.precision and c.types[i.a].dtype.name != "f32":
        c.fail(f"only products of f32 can be in tf32, and %{i.a} is {c.types[i.a]}: leave it out")
    _epilogue(c, i)


def _epilogue(c: _Checker, i: ir.Matmul) -> None:
    """What cuBLASLt adds and applies to a product, as far as it does for every size."""
    dst, a, b = c.types[i.dst], c.types[i.a], c.types[i.b]
    if len(i.plus) > 1 or len(i.bias) > 1:
        c.fail("one buffer can be added, and one bias: add the others before")
    for name in i.plus:
        c.same_dtype(name, i.dst)
        c.same_shape(name, i.dst)
        if c.types[name] != dst:
            c.fail(f"%{name} does not lie in memory as %{i.dst} does: copy it to a buffer that does")
    for name in i.bias:
        if (c.types[name].dtype, c.types[name].shape) != (dst.dtype, dst.shape[-1:]):
            c.fail(f"%{name} is {c.types[name]}, not {BufferType(dst.dtype, dst.shape[-1:])}, one element for each column of %{i.dst}")
        if c.types[name].strides is not None:
            c.fail(f"%{name} is not contiguous, which a bias must be: copy it to a buffer of its own first")
    if i.activation and i.activation not in ir.ACTIVATIONS:
        c.fail(f"cuBLASLt has no {i.activation}, only {' and '.join(ir.ACTIVATIONS)}: launch a kernel after it")
    if (i.bias or i.activation) and (why := why_no_epilogue(a, b, dst)):
        c.fail(f"cuBLASLt has no bias and no activation for this product, because {why}: launch a kernel after it")


def why_no_epilogue(a: BufferType, b: BufferType, dst: BufferType) -> str:
    """Why a product cannot end with a bias or an activation, or "": it has to be one matrix product with whole rows."""
    if dst.dtype.name == "f64":
        return "it is of f64"
    if len(b.shape) != 2:
        return "it is a batch of products"
    if len(dst.shape) > 2 and (a.strides is not None or dst.strides is not None):
        return "its rows do not lie one after another"
    if ir.strides_of(dst)[-1] != Extent():
        return "the elements of a row do not lie side by side"
    return ""


def broadcast_shapes(a: tuple[Extent, ...], b: tuple[Extent, ...]) -> tuple[Extent, ...] | None:
    """The shape that two shapes broadcast to, as NumPy does, or None."""
    rank, one = max(len(a), len(b)), Extent()
    padded = zip((one,) * (rank - len(a)) + a, (one,) * (rank - len(b)) + b, strict=True)
    result = [x if y == one else y if x in (one, y) else None for x, y in padded]
    return None if None in result else tuple(e for e in result if e is not None)


def _launch_source(c: _Checker, i: ir.Launch, source: Source) -> None:
    for role, names, types in (("takes", i.srcs, source.inputs), ("gives", i.dsts, source.outputs)):
        if len(names) != len(types):
            c.fail(f"@{source.name} {role} {len(types)} buffers, not {len(names)}")
        for name, type in zip(names, types, strict=True):
            wanted = held(type, c.mesh, c.program.uneven)
            if (c.types[name].dtype, c.types[name].shape) != (wanted.dtype, wanted.shape):
                c.fail(f"%{name} is {c.types[name]}, and @{source.name} {role} {wanted}")
            if c.types[name].strides is not None:
                c.fail(f"%{name} is not contiguous, which @{source.name} needs: copy it to a buffer of its own first")


def _launch(c: _Checker, i: ir.Launch, scope: _Scope) -> None:
    source = next((source for source in c.program.sources if source.name == i.kernel), None)
    if source:
        _launch_source(c, i, source)
        return
    if i.kernel not in c.kernels:
        c.fail(f"there is no kernel @{i.kernel}; the kernels are {', '.join('@' + name for name in c.kernels) or 'none'}")
    kernel = c.kernels[i.kernel]
    if len(i.srcs) != len(kernel.inputs):
        c.fail(f"@{i.kernel} takes {len(kernel.inputs)} buffers, not {len(i.srcs)}")
    if len(i.dsts) != len(kernel.results):
        c.fail(f"@{i.kernel} gives {len(kernel.results)} results, not {len(i.dsts)}")
    for name, parameter in zip((*i.srcs, *i.dsts), (*kernel.inputs, *kernel.results), strict=True):
        buffer = c.types[name]
        if (buffer.dtype, buffer.shape) != (parameter.type.dtype, parameter.type.shape):
            c.fail(f"%{name} is {buffer}, and @{i.kernel} takes {parameter.type} as %{parameter.name}")


def _copy(c: _Checker, i: ir.Copy, scope: _Scope) -> None:
    c.same_dtype(i.src, i.dst)
    c.same_shape(i.src, i.dst)


def _fill(c: _Checker, i: ir.Fill, scope: _Scope) -> None:
    dtype = c.types[i.dst].dtype
    if dtype.kind != "float" and i.value != int(i.value):
        c.fail(f"{dtype} cannot hold {i.value}")


def _communication(check: Callable[[_Checker, Any, int], None]) -> Callable[[_Checker, Any, _Scope], None]:
    def rule(c: _Checker, i: Any, scope: _Scope) -> None:
        buffers = ir.names(i, "read", "write")
        c.contiguous(*buffers)
        c.same_dtype(*buffers)
        if isinstance(i, ir.COLLECTIVES) and scope.condition is not None:
            c.fail(f"a collective cannot stand under `if {scope.condition}`, which differs between ranks: only send and recv can")
        if isinstance(i, ir.COLLECTIVES) and scope.steps is not None:
            c.fail(f"a collective cannot stand in a loop of {scope.steps} steps, which differ between ranks: only send and recv can")
        check(c, i, c.team_size(i.team))

    return rule


def _all_gather(c: _Checker, i: ir.AllGather, size: int) -> None:
    c.counts(i.src, i.dst, size)


def _all_reduce(c: _Checker, i: ir.AllReduce, size: int) -> None:
    _reduction(c, i)
    c.counts(i.src, i.dst, 1)


def _reduce_scatter(c: _Checker, i: ir.ReduceScatter, size: int) -> None:
    _reduction(c, i)
    c.counts(i.dst, i.src, size)


def _broadcast(c: _Checker, i: ir.Broadcast, size: int) -> None:
    c.expr(i.root)
    c.counts(i.src, i.dst, 1)


def _spread(c: _Checker, i: ir.Spread, size: int) -> None:
    """Parts of one dim, shared by as many ranks of two meshes, may be equal: that is seen when sizes are known."""
    c.expr(i.root)
    have, want = (c.alike(product(c.types[name].shape)) for name in (i.dst, i.src))
    if have != want:
        c.counts(i.src, i.dst, 1)


def _reduce(c: _Checker, i: ir.Reduce, size: int) -> None:
    _reduction(c, i)
    c.expr(i.root)
    c.counts(i.src, i.dst, 1)


def _gather(c: _Checker, i: ir.Gather, size: int) -> None:
    c.expr(i.root)
    c.counts(i.src, i.dst, size)


def _scatter(c: _Checker, i: ir.Scatter, size: int) -> None:
    c.expr(i.root)
    c.counts(i.dst, i.src, size)


def _all_to_all(c: _Checker, i: ir.AllToAll, size: int) -> None:
    c.counts(i.src, i.dst, 1)
    if not any(extent.divisor == 1 and extent.coefficient % size == 0 for extent in c.types[i.src].shape or (Extent(),)):
        c.fail(f"%{i.src} is {c.types[i.src]}: {size} ranks cannot be seen to share it evenly; give it a dim of {size}, a block a rank")


def _exchange(c: _Checker, i: ir.Exchange, size: int) -> None:
    c.counts(i.src, i.dst, 1)
    named = [source for source in i.sources if source is not None]
    if len(i.sources) != size or any(source >= size for source in named):
        c.fail(f"a team of {size} needs {size} sources, each a place below {size} or none")
    if len(set(named)) < len(named):
        twice = next(source for source in named if named.count(source) > 1)
        c.fail(f"place {twice} is named twice: a rank sends to one other; use a broadcast")


def _barrier(c: _Checker, i: ir.Barrier, size: int) -> None:
    buffer = c.types[i.token]
    if product(buffer.shape) != Extent() or buffer.dtype.name in NOT_REDUCED:
        c.fail(f"%{i.token} is {buffer}: a barrier needs one number, such as i32[1]")


def _reduction(c: _Checker, i: ir.AllReduce | ir.ReduceScatter | ir.Reduce) -> None:
    if i.op not in REDUCTIONS:
        c.fail(f"unknown reduction {i.op!r}; one of {', '.join(REDUCTIONS)}")
    dtype = c.types[i.src].dtype.name
    if dtype in NOT_REDUCED:
        c.fail(f"NCCL cannot reduce {dtype}: cast to {NOT_REDUCED[dtype]} before it and back after it")


def _point_to_point(c: _Checker, i: ir.Send | ir.Recv, size: int) -> None:
    c.expr(i.peer)


def _blocks(c: _Checker, i: ir.SendBlocks | ir.RecvBlocks, size: int) -> None:
    if i.team != ir.EVERYONE:
        c.fail("routes name ranks of the program: write on *")
    if i.count < 1:
        c.fail("a buffer has at least one block: cut it into 1 or more")
    sends = isinstance(i, ir.SendBlocks)
    for route in i.routes:
        if outside := [rank for rank in (route.sender, route.receiver) if rank >= size]:
            c.fail(f"{route}: {c.program.mesh} has no rank {outside[0]}: name ranks of it")
        if (route.sent if sends else route.received) >= i.count:
            c.fail(f"{route}: there are {i.count} blocks, the last one {i.count - 1}")


def _group(c: _Checker, i: ir.Group, scope: _Scope) -> None:
    for inner in i.body:
        if not isinstance(inner, ir.COMMUNICATIONS):
            c.current = inner
            c.fail("only communications can stand in a group: move it out")
    c.inner(i.body, scope)


def _on_stream(c: _Checker, i: ir.OnStream, scope: _Scope) -> None:
    if scope.in_stream:
        c.fail("a stream block cannot stand in a stream block: end the outer one first")
    _pool(c, i.stream, c.program.streams, "streams")
    c.expr(i.index)
    c.inner(i.body, replace(scope, in_stream=True))


def _fork_or_join(c: _Checker, i: ir.Fork | ir.Join, scope: _Scope) -> None:
    _pool(c, i.stream, c.program.streams, "streams")
    if scope.in_stream:
        c.fail("fork and join speak of the caller's stream: move it out of the stream block")


def _event(c: _Checker, i: ir.Record | ir.Wait, scope: _Scope) -> None:
    _pool(c, i.event, c.program.events, "events")
    c.expr(i.index)


def _pool(c: _Checker, name: str, pools: tuple[Any, ...], word: str) -> None:
    if name not in {pool.name for pool in pools}:
        c.fail(f"{name} is not declared: add {word}({name}[...]) to the header")


def _let(c: _Checker, i: ir.Let, scope: _Scope) -> None:
    c.expr(i.value)
    c.indices.add(i.out)
    if c.depends_on_rank(i.value):
        c.rank_dependent.add(i.out)


def _for(c: _Checker, i: ir.For, scope: _Scope) -> None:
    for name in i.count.names:
        c.expr(Size(name))
    indices = set(c.indices)
    c.indices.add(i.out)
    c.inner(i.body, replace(scope, steps=i.count) if any(map(part_of, i.count.names)) else scope)
    c.indices = indices


def _if(c: _Checker, i: ir.If, scope: _Scope) -> None:
    c.expr(i.condition)
    condition = i.condition if c.depends_on_rank(i.condition) else scope.condition
    c.inner(i.body, replace(scope, condition=condition, divides=(*scope.divides, *divisibility(i.condition))))
    c.inner(i.orelse, replace(scope, condition=condition))


def _call(c: _Checker, i: ir.Call, scope: _Scope) -> None:
    block = next((block for block in c.program.blocks if block.name == i.block), None)
    if block is None:
        known = ", ".join(f"@{block.name}" for block in c.program.blocks) or "none"
        c.fail(f"there is no block @{i.block} before @{c.program.name}; those there are {known}")
    for word, names, parameters in (("takes", i.srcs, block.inputs), ("gives", i.dsts, block.outputs)):
        if len(names) != len(parameters):
            c.fail(f"@{i.block} {word} {len(parameters)} buffers, not {len(names)}")
        for name, parameter in zip(names, parameters, strict=True):
            wanted, buffer = c.program.local_type(parameter), c.types[name]
            if (buffer.dtype, buffer.shape) != (wanted.dtype, wanted.shape):
                c.fail(f"%{name} is {buffer}, and @{i.block} {word} {wanted} as %{parameter.name}")
            if buffer.strides is not None:
                c.fail(f"%{name} is not contiguous, which a block needs: copy it to a buffer of its own first")
    for name in i.dsts:
        if name in i.srcs or i.dsts.count(name) > 1:
            c.fail(f"%{name} is named twice: what a block writes is memory of its own")
    if scope.in_stream:
        c.fail("a block forks from the caller's stream: move the call out of the stream block")
    if scope.condition is not None and _is_collective(block, c.program.blocks):
        c.fail(f"a block with collectives cannot stand under `if {scope.condition}`, which differs between ranks")


def _is_collective(block: ir.Block, others: tuple[ir.Block, ...]) -> bool:
    for i in ir.walk(block.body):
        if isinstance(i, ir.COLLECTIVES):
            return True
        if isinstance(i, ir.Call) and any(_is_collective(other, others) for other in others if other.name == i.block):
            return True
    return False


def _on_mesh(c: _Checker, i: ir.OnMesh, scope: _Scope) -> None:
    if c.mesh is not c.program.mesh:
        c.fail("an on body cannot stand in an on body: end the outer one first")
    c.part(i.mesh)
    c.mesh = i.mesh
    c.inner(i.body, scope)
    c.mesh = c.program.mesh
    c.types.update({inner.out: inner.type for inner in i.body if isinstance(inner, ir.Allocate)})


RULES: dict[type[ir.Instruction], Callable[[_Checker, Any, _Scope], None]] = {
    ir.Allocate: _allocate,
    ir.Deallocate: _deallocate,
    ir.Select: _view,
    ir.Slice: _view,
    ir.Section: _view,
    ir.Strided: _view,
    ir.Reshape: _view,
    ir.Permute: _view,
    ir.Matmul: _matmul,
    ir.Launch: _launch,
    ir.Copy: _copy,
    ir.Fill: _fill,
    ir.AllGather: _communication(_all_gather),
    ir.AllReduce: _communication(_all_reduce),
    ir.ReduceScatter: _communication(_reduce_scatter),
    ir.Broadcast: _communication(_broadcast),
    ir.Spread: _communication(_spread),
    ir.Reduce: _communication(_reduce),
    ir.Gather: _communication(_gather),
    ir.Scatter: _communication(_scatter),
    ir.AllToAll: _communication(_all_to_all),
    ir.Exchange: _communication(_exchange),
    ir.Barrier: _communication(_barrier),
    ir.Send: _communication(_point_to_point),
    ir.Recv: _communication(_point_to_point),
    ir.SendBlocks: _communication(_blocks),
    ir.RecvBlocks: _communication(_blocks),
    ir.Group: _group,
    ir.OnStream: _on_stream,
    ir.Fork: _fork_or_join,
    ir.Join: _fork_or_join,
    ir.Record: _event,
    ir.Wait: _event,
    ir.Let: _let,
    ir.For: _for,
    ir.If: _if,
    ir.Call: _call,
    ir.OnMesh: _on_mesh,
}
