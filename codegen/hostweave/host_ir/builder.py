"""Builder of host programs. Names of buffers become unique, and visible equal views are reused."""

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from hostweave.base.errors import Location
from hostweave.base.names import claim_unique, unique_name
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const, Expr, Var, divisor_of
from hostweave.host_ir.tree import eliminate_dead_code
from hostweave.transports.transport import COLLECTIVES, MESSAGES, Transport, find_transport, first_carrying
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


class _Scope:
    """A body under construction, and the views that it defines. The views of the current `on` body are separate."""

    def __init__(self) -> None:
        self.instructions: list[tree.Instruction] = []
        self.views: dict[tree.Instruction, str] = {}
        self.mesh: Mesh | None = None
        self.views_on_mesh: dict[tree.Instruction, str] = {}
        self.integers: list[str] = []

    def move_to(self, mesh: Mesh | None) -> None:
        """Sets the ranks that execute the next instructions. Views of the previous `on` body are no longer visible."""
        if mesh != self.mesh:
            self.mesh, self.views_on_mesh = mesh, {}


class Builder:
    def __init__(self, program: Mesh, channels: dict[str, ir.Channel], transports: tuple[Transport, ...]) -> None:
        self._program, self.channels = program, channels  # `channels`: of the whole program, by name
        self.transports = transports  # in order of preference; a channel gets the first transport that supports the channel's instructions
        self.types: dict[str, BufferType] = {}
        self.events: list[ir.Events] = []
        self.location: Location | None = None  # location of the op that is being lowered
        self.mesh: Mesh | None = None  # mesh of the current `on` body
        self.hoists_views = True  # False in a loop that several meshes execute: views must not move before the loop
        # Copies of the current asynchronous communication that may run on another stream. None: copies are emitted at once.
        self.aside: list[tree.Instruction] | None = None
        # Functions that emit sums of the current asynchronous communication, to fuse with later kernels. None: sums are emitted at once.
        self.sums: list[Callable[[], None]] | None = None
        self._used_names: set[str] = set()
        self._indices: list[str] = []  # names of loop indices, by loop depth
        self._depth = 0
        self._scopes: list[_Scope] = [_Scope()]  # innermost last
        self._outside = 1  # number of scopes outside of the loops and blocks that `is_outside` is about
        self._permuted: dict[str, tuple[str, tuple[int, ...]]] = {}  # permuted view -> its source and order
        self._view_of: dict[str, ir.View] = {}
        self._windows: set[str] = set()

    def name(self, wanted: str) -> str:
        """Returns `wanted`, with a number appended if the name is taken."""
        return claim_unique(wanted, self._used_names)

    def new_events(self, wanted: str, count: int = 1) -> str:
        self.events.append(ir.Events(unique_name(wanted, {pool.name for pool in self.events}), count))
        return self.events[-1].name

    def loop_index(self) -> str:
        """Name of the index of the next loop: the first unused name of i, j, k and l, otherwise i_2 and so on. Loops at one depth share the
        name."""
        if self._depth == len(self._indices):
            self._indices.append(self.name(next((letter for letter in "ijkl" if letter not in self._used_names), "i")))
        return self._indices[self._depth]

    def emit(self, instruction: tree.Instruction) -> None:
        scope = self._scopes[-1]
        scope.move_to(self.mesh)
        placed = replace(instruction, location=self.location)
        scope.instructions.append(ir.OnMesh(self.mesh, (placed,), location=self.location) if self.mesh else placed)

    def issued(self) -> Iterator[tree.Instruction]:
        """Instructions of the current body that do more than define a name, latest first."""
        return (i for i in reversed(self._scopes[-1].instructions) if i.calls)

    def copy_aside(self, src: str, dst: str) -> None:
        """Emits a copy whose result the current body does not read, or appends the copy to `aside` if `aside` is a list."""
        if self.aside is None:
            self.emit(ir.Copy(src, dst))
        else:
            self.aside.append(ir.Copy(src, dst))

    def sum_later(self, emit: Callable[[], None]) -> None:
        """Calls `emit`, which emits a sum of terms, or appends `emit` to `sums` if `sums` is a list."""
        if self.sums is None:
            emit()
        else:
            self.sums.append(emit)

    @contextmanager
    def on(self, mesh: Mesh | None) -> Iterator[None]:
        outer, self.mesh = self.mesh, mesh
        yield
        self.mesh = outer

    @contextmanager
    def by(self, transport: str) -> Iterator[None]:
        """Prefers a transport inside the `with` block. "" changes nothing."""
        outer, self.transports = self.transports, (*([find_transport(transport)] if transport else []), *self.transports)
        yield
        self.transports = outer

    @contextmanager
    def nested(self) -> Iterator[list[tree.Instruction]]:
        """Emits into a new body, which the caller attaches to an instruction."""
        self._scopes[-1].move_to(self.mesh)
        self._scopes.append(_Scope())
        yield self._scopes[-1].instructions
        self._scopes.pop()

    @contextmanager
    def inside(self, made_of: Callable[[tree.Body], tree.Instruction]) -> Iterator[None]:
        """Emits into a new body, then emits the instruction that `made_of` makes from the body."""
        with self.nested() as body:
            yield
        self.emit(made_of(tuple(body)))

    @contextmanager
    def looped(self) -> Iterator[list[tree.Instruction]]:
        """Emits into the body of a loop. Names of `let` integers in the body may be reused after the loop."""
        self._depth += 1
        with self.nested() as body:
            yield body
            self._used_names.difference_update(self._scopes[-1].integers)
        self._depth -= 1

    @contextmanager
    def loop(self, count: Size) -> Iterator[Var]:
        index = Var(self.loop_index())
        with self.looped() as body:
            yield index
        self.emit(ir.For(index.name, count, tuple(body)))

    @contextmanager
    def outermost(self, depth: int = 1) -> Iterator[None]:
        """Emits into the outermost body, before the loop or block that is being built, or into the body at `depth`."""
        scopes = self._scopes
        self._scopes = scopes[:depth]
        yield
        self._scopes = scopes

    @contextmanager
    def from_here(self) -> Iterator[None]:
        """Names that are defined so far count as outside of the blocks that the caller builds."""
        before, self._outside = self._outside, len(self._scopes)
        yield
        self._outside = before

    def outside(self) -> AbstractContextManager[None]:
        """Emits before the loops and blocks that `is_outside` is about."""
        return self.outermost(self._outside)

    def hoisted(self) -> AbstractContextManager[None]:
        return self.outermost() if self.hoists_views else nullcontext()

    def body(self) -> tree.Body:
        body = eliminate_dead_code(_joined(tuple(self._scopes[0].instructions), None), ("view",))
        return tree.rewrite(body, lambda i: () if i.ranks and not any(tree.bodies(i)) else None)

    @property
    def present_mesh(self) -> Mesh:
        return self.mesh or self._program

    def carrying(self, *needs: Set[str]) -> Transport:
        """Preferred transport that supports all instructions of at least one of the sets `needs`."""
        transport = first_carrying(self.transports, *needs)
        assert transport, f"no transport carries any of {needs}"
        return transport

    def channel(self, axes: tuple[str, ...], needs: Set[str] = COLLECTIVES) -> str:
        """Channel of the current mesh along `axes`, on a transport that supports `needs`."""
        return self._channel(self.present_mesh, axes, needs)

    @property
    def channel_of_all(self) -> str:
        """Channel of all ranks. The index of a rank in the process group is the number of the rank in the program."""
        return self._channel(self._program, tuple(name for name, _ in self._program.axes), MESSAGES)

    def _channel(self, mesh: Mesh, axes: tuple[str, ...], needs: Set[str]) -> str:
        wanted = (mesh, axes, self.carrying(needs))
        found = next((name for name, known in self.channels.items() if (known.mesh, known.axes, known.transport) == wanted), None)
        if found is None:
            along = "_".join(axes)
            found = unique_name(along if mesh == self._program else f"{along}_of_{mesh.label}", self.channels)
            self.channels[found] = ir.Channel(found, *wanted)
        return found

    def parameter(self, name: str, type: BufferType, in_window: bool = False) -> str:
        name = self.name(name)
        self.types[name] = type
        self._windows |= {name} if in_window else set()
        return name

    def allocate(self, wanted: str, type: BufferType) -> str:
        with self.outermost():
            return self.allocate_here(wanted, type)

    def allocate_here(self, wanted: str, type: BufferType) -> str:
        """Allocates memory in the current body."""
        name = self.parameter(wanted, BufferType(type.dtype, type.shape), in_window=True)
        self.emit(ir.Allocate(name, self.types[name]))
        return name

    def let(self, wanted: str, value: Expr) -> str:
        name = self.name(wanted)
        self.emit(ir.Let(name, value))
        self._scopes[-1].integers.append(name)
        return name

    def select(self, src: str, dim: int, index: Expr, wanted: str) -> str:
        return self._view(ir.Select("", src, dim, index), wanted)

    def choose(self, condition: Expr, src: str, other: str, wanted: str) -> str:
        return self._view(ir.Choose("", src, condition, other), wanted)

    def chunk(self, src: str, dim: int, index: Expr, count: Size, wanted: str) -> str:
        if count == Size():
            return src
        return self._view(ir.Chunk("", src, dim, index, count), wanted)

    def slice(self, src: str, dim: int, size: Size, start: Expr, wanted: str) -> str:
        if size == self.types[src].shape[dim]:
            return src
        return self._view(ir.Slice("", src, dim, size, start), wanted)

    def first(self, src: str, shape: tuple[Size, ...], wanted: str) -> str:
        """View of the first `shape[i]` indices of dim i, for each i."""
        for dim, size in enumerate(shape):
            src = self.slice(src, dim, size, Const(0), wanted)
        return src

    def strided(self, src: str, dim: int, size: Size, start: Expr, step: int, wanted: str) -> str:
        return self._view(ir.Strided("", src, dim, size, start, step), wanted)

    def reshape(self, src: str, shape: tuple[Size, ...], wanted: str) -> str:
        if shape == self.types[src].shape:
            return src
        return self._view(ir.Reshape("", src, shape), wanted)

    def permute(self, src: str, order: tuple[int, ...], wanted: str) -> str:
        if src in self._permuted:
            src, first = self._permuted[src]
            order = tuple(first[i] for i in order)
        if order == tuple(range(len(order))):
            return src
        shape = self.types[src].shape
        longer = [i for i in order if shape[i] != Size()]
        is_reshape = longer == sorted(longer) and self.is_contiguous(src)  # Only dims of size 1 move.
        permuted_shape = tuple(shape[i] for i in order)
        name = self._view(ir.Reshape("", src, permuted_shape) if is_reshape else ir.Permute("", src, order), wanted)
        self._permuted[name] = (src, order)
        return name

    def split(self, src: str, dim: int, outer: Size, wanted: str) -> str:
        """Splits dim `dim` into two dims: `outer` blocks, and the indices within a block."""
        shape = self.types[src].shape
        inner = shape[dim].divided_by(outer)
        assert inner is not None
        return self.reshape(src, (*shape[:dim], outer, inner, *shape[dim + 1 :]), wanted)

    def drop(self, src: str, dim: int, wanted: str) -> str:
        """View at index 0 of dim `dim`, without this dim."""
        shape = self.types[src].shape
        if shape[dim] == Size():
            return self.reshape(src, shape[:dim] + shape[dim + 1 :], wanted)
        return self.select(src, dim, Const(0), wanted)

    def memory_of(self, name: str) -> str:
        """Follows views that show all elements of a contiguous source. Returns the last source, or `name` if there is no such view."""
        while (view := self._view_of.get(name)) and view.shows and self.is_contiguous(view.src):
            name = view.src
        return name

    def is_memory(self, name: str) -> bool:
        return name not in self._view_of

    def is_in_window(self, name: str) -> bool:
        """True for parameters that peers can access, and for every allocation, because `with_windows` can move allocations to windows. Also
        true for slots."""
        return name in self._windows

    def slot(self, allocation: str, index: Expr, wanted: str) -> str:
        """View at an index of dim 0. The ranks that communicate have the view at the same offset in the allocation."""
        name = self.select(allocation, 0, index, wanted)
        self._windows.add(name)
        return name

    def is_outside(self, name: str) -> bool:
        """True if a buffer or view is defined outside of the loops and blocks that are being built, or since `from_here`."""
        return not any(name in tree.names(i, "define") for scope in self._scopes[self._outside :] for i in scope.instructions)

    def is_visible(self, name: str) -> bool:
        """True if the next instruction may use this buffer or view."""
        return self.is_memory(name) or any(name in views.values() for views in self._visible_views())

    def is_contiguous(self, name: str) -> bool:
        return self.types[name].strides is None

    def begins_at(self, name: str, multiple: int) -> bool:
        """False if a buffer may begin elsewhere than at a multiple of `multiple` elements in its memory. Offsets in units of a symbolic
        size count as multiples."""
        if (view := self._view_of.get(name)) is None:
            return True
        stride = view.stride(self.types[view.src])
        is_multiple = not stride.is_int or int(stride) * divisor_of(view.offset) % multiple == 0
        return is_multiple and all(self.begins_at(source, multiple) for source in tree.names(view, "alias"))

    def _visible_views(self) -> Iterator[dict[tree.Instruction, str]]:
        for scope in self._scopes:
            yield scope.views
            if scope.mesh == self.mesh:
                yield scope.views_on_mesh

    def _view(self, view: ir.View, wanted: str) -> str:
        for views in self._visible_views():
            if view in views:
                return views[view]
        type = view.type_of(self.types[view.src])
        name = self.name(wanted)
        self.types[name] = type
        self.emit(replace(view, out=name))
        self._view_of[name] = view
        scope = self._scopes[-1]
        (scope.views_on_mesh if self.mesh else scope.views)[view] = name
        return name


def _joined(body: tree.Body, mesh: Mesh | None) -> tree.Body:
    """Merges consecutive `on` bodies of one mesh, and inlines `on` bodies of `mesh`, the mesh of the enclosing body."""
    result: list[tree.Instruction] = []
    for instruction in body:
        if instruction.ranks and instruction.ranks == mesh:
            result.extend(_joined(tree.bodies(instruction)[0], mesh))
        else:
            result.append(tree.with_bodies(instruction, partial(_joined, mesh=instruction.ranks or mesh)))
    return tree.together(result)
