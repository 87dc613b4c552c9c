"""What a tensor is: dtype, dims, the mesh axes that split each dim, and the axes over which it is still to be reduced."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from hostweave.errors import Location, ProgramError
from hostweave.fusion.extent import Extent, block_of, is_sum, part, part_of, product

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class DType:
    """An element type. `cpp` is its name in generated code, in namespace hw where it is not a built-in type."""

    name: str
    itemsize: int  # bytes
    kind: str  # float, int, uint or bool
    cpp: str

    def __getitem__(self, dims: int | str | tuple[int | str, ...]) -> TensorType:
        """The type of a tensor: `bf16["M@x", "K"]`. A dim is a name or an int, with the mesh axes that split it.

        Raises ProgramError where a dim does not read so, or where one mesh axis splits two dims.
        """
        dims = dims if isinstance(dims, tuple) else (dims,)
        type = TensorType(self, tuple(_spec_dim(dim) for dim in dims))
        type.check(Location.of_caller())
        return type

    def __str__(self) -> str:
        return self.name


f64 = DType("f64", 8, "float", "double")
f32 = DType("f32", 4, "float", "float")
f16 = DType("f16", 2, "float", "hw::f16")
bf16 = DType("bf16", 2, "float", "hw::bf16")
f8e4m3 = DType("f8e4m3", 1, "float", "hw::f8e4m3")
f8e5m2 = DType("f8e5m2", 1, "float", "hw::f8e5m2")
i64 = DType("i64", 8, "int", "int64_t")
i32 = DType("i32", 4, "int", "int32_t")
i8 = DType("i8", 1, "int", "int8_t")
u32 = DType("u32", 4, "uint", "uint32_t")
u8 = DType("u8", 1, "uint", "uint8_t")
bool_ = DType("bool", 1, "bool", "bool")
MAX_RANKS = 2**16  # of a mesh
MAX_SIZE = 2**63 - 1  # of a dim and of the elements of a tensor: they are int64_t
MAX_DIMS = 8  # of an array, as hw::Shape has them
DTYPES = {d.name: d for d in (f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u32, u8, bool_)}


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes of devices, `Mesh(dp=2, tp=4)`. Ranks are row-major coordinates, the last axis fastest.

    A mesh of some of a program's ranks names them, in the order of their coordinates; `ranks` makes one of another mesh.
    """

    axes: tuple[tuple[str, int], ...]
    members: tuple[int, ...] | None  # None: all ranks of the program, from 0 on

    def __init__(self, axes: tuple[tuple[str, int], ...] = (), members: tuple[int, ...] | None = None, /, **sizes: int) -> None:
        if not isinstance(axes, tuple) or not all(isinstance(axis, tuple) and len(axis) == 2 for axis in axes):
            raise ProgramError(f"Mesh({axes!r}): the axes have no names; write hw.Mesh(x={_named_sizes(axes)})", Location.of_caller())
        object.__setattr__(self, "axes", (*axes, *sizes.items()))
        object.__setattr__(self, "members", members)
        if members is not None and (len(set(members)) < len(members) or any(rank < 0 for rank in members)):
            raise ProgramError(f"mesh of ranks {_listed(members)}: name each rank once", Location.of_caller())
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
                raise ProgramError(f"mesh axis {name!r} is not a name; use letters, digits and _", Location.of_caller())
            if names.count(name) > 1:
                raise ProgramError(f"mesh axis {name} is given twice; give each axis a name of its own", Location.of_caller())
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ProgramError(f"mesh axis {name} has size {size!r}: it must be an int of at least 1", Location.of_caller())
        if self.size > MAX_RANKS:
            raise ProgramError(
                f"a mesh has at most {MAX_RANKS} ranks, not {' x '.join(str(s) for _, s in self.axes)}", Location.of_caller()
            )

    def ranks(self, ranks: Sequence[int], /, **axes: int) -> Mesh:
        """The mesh of these ranks of this one, in this order: `mesh.ranks([4, 5, 6, 7], dp=2, tp=2)`.

        Without `axes` a mesh of one axis gives it to them; of several axes they keep those along which they differ, where they
        are a block of this mesh in its order. Raises ProgramError where that says nothing, or the ranks are not of this mesh.
        """
        location, chosen = Location.of_caller(), tuple(ranks)
        outside = [rank for rank in chosen if rank not in self.all_ranks]
        if outside:
            raise ProgramError(f"ranks: {self} has no rank {outside[0]}; its ranks: {_listed(self.all_ranks)}", location)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ProgramError(f"ranks: {list(chosen)}: name at least one rank, and each once", location)
        if axes:
            mesh = Mesh(tuple(axes.items()), chosen)
            if prod(size for _, size in mesh.axes) != len(chosen):
                raise ProgramError(
                    f"ranks: {len(chosen)} ranks are no mesh of {_axes_text(mesh.axes)}; the product must be equal", location
                )
            return mesh
        if len(self.axes) == 1:
            return Mesh(((self.axes[0][0], len(chosen)),), chosen)
        found = [(name, sorted({self.coordinate(rank, name) for rank in chosen})) for name, _ in self.axes]
        block = [rank for rank in self.all_ranks if all(self.coordinate(rank, name) in kept for name, kept in found)]
        if tuple(block) != chosen:
            why = f"{list(chosen)} is no block of {self} in its order"
            raise ProgramError(f"ranks: {why}, so its axes cannot be told; give them: .ranks([...], x={len(chosen)})", location)
        return Mesh(tuple((name, len(kept)) for name, kept in found if len(kept) > 1), chosen)

    @cached_property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def all_ranks(self) -> Sequence[int]:
        """The ranks of the program that it has, in the order of their coordinates."""
        return range(self.size) if self.members is None else self.members

    def axis_size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def size_of(self, axes: tuple[str, ...]) -> int:
        """How many ranks differ only along `axes`."""
        return prod(map(self.axis_size, axes))

    def coordinate(self, rank: int, axis: str) -> int:
        """Where `rank`, one of the program that this mesh has, stands along `axis`."""
        index = self.all_ranks.index(rank)
        for name, size in reversed(self.axes):
            if name == axis:
                return index % size
            index //= size
        raise KeyError(axis)

    def place(self, rank: int, axes: tuple[str, ...]) -> int:
        """Where `rank` stands in its team along `axes`."""
        place = 0
        for axis in axes:
            place = place * self.axis_size(axis) + self.coordinate(rank, axis)
        return place

    def team(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in row-major order of `axes` as given."""
        strides, stride = {}, 1
        for name, size in reversed(self.axes):
            strides[name] = stride
            stride *= size
        base = self.all_ranks.index(rank) - sum(self.coordinate(rank, axis) * strides[axis] for axis in axes)
        places = [base]
        for axis in axes:
            places = [place + i * strides[axis] for place in places for i in range(self.axis_size(axis))]
        return tuple(self.all_ranks[place] for place in places)

    def __str__(self) -> str:
        of = "" if self.members is None else f"of ranks {_listed(self.members)}"
        return f"mesh({' '.join(filter(None, (_axes_text(self.axes), of)))})"


def _named_sizes(sizes: Any) -> str:
    """`2, y=4` of (2, 4), for a remedy."""
    given = [size for size in (sizes if isinstance(sizes, Sequence) else (sizes,)) if isinstance(size, int)]
    return ", ".join([str(given[0]), *(f"{name}={size}" for name, size in zip("yzuvw", given[1:], strict=False))]) if given else "8"


def _axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)


def _listed(ranks: Sequence[int]) -> str:
    """`0, 2, 5`, or `0..4` of neighbours."""
    first = ranks[0]
    in_a_row = len(ranks) > 2 and tuple(ranks) == tuple(range(first, first + len(ranks)))
    return f"{first}..{first + len(ranks)}" if in_a_row else ", ".join(map(str, ranks))


@dataclass(frozen=True)
class Dim:
    """A dim of a global tensor: its global extent and the mesh axes that split it, the first one outermost."""

    extent: Extent
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.extent}@{','.join(self.axes)}" if self.axes else str(self.extent)

    @staticmethod
    def of(value: int | str | Extent | Dim) -> Dim:
        """A dim from an int, an extent, or text such as `M@x`, `8@x` and `M/4@dp,tp`. Raises ValueError."""
        if isinstance(value, Dim):
            return value
        if not isinstance(value, str):
            return Dim(Extent.of(value))
        extent, at, axes = value.replace(" ", "").partition("@")
        names = tuple(axes.split(",")) if at else ()
        if re.fullmatch(r"\w+(\s+\w+)+", value.strip()) or not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
            raise ValueError(f"not a dim: {value!r}; write it like 'M', 'M@x' or 'M@dp,tp'")
        return Dim(Extent.of(int(extent) if extent.isdigit() else extent), names)


def _spec_dim(value: int | str) -> Dim:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"not a dim: {value!r}; write a name or an int")
        dim = Dim.of(value)
        if (
            dim.extent.divisor != 1
            or len(dim.extent.names) + (dim.extent.coefficient != 1 or not dim.extent.names) > 1
            or any(map(is_sum, dim.extent.names))
        ):
            raise ValueError(f"not a dim of an input: {value!r}; give it a name of its own")
        if dim.extent.coefficient < 1:
            raise ValueError(f"a dim has at least one element, not {value}")
        return dim
    except ValueError as error:
        raise ProgramError(str(error), Location.of_caller()) from None


@dataclass(frozen=True)
class Partial:
    """What each rank holds is a term still to be reduced by `op` (sum, prod, min, max or avg) over the mesh axes."""

    op: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"partial({self.op}, {', '.join(self.axes)})"


@dataclass(frozen=True)
class TensorType:
    """A global tensor: `bf16[M@x, K]`. Its mesh is the program's, or one of some of the program's ranks, which alone hold it."""

    dtype: DType
    dims: tuple[Dim, ...]
    partial: Partial | None = None
    mesh: Mesh | None = None  # None: the program's

    def on(self, mesh: Mesh) -> TensorType:
        """The same on another mesh: `bf16["M@x", "K"].on(hw.Mesh(x=4).ranks([0, 1]))`."""
        if not isinstance(mesh, Mesh):
            raise ProgramError(f"on: {mesh!r} is no hw.Mesh; write it like hw.Mesh(x=4).ranks([0, 1])", Location.of_caller())
        placed = replace(self, mesh=mesh)
        placed.check(Location.of_caller(), mesh)
        return placed

    def mesh_in(self, program: Mesh) -> Mesh:
        """The mesh whose ranks hold it, in a program on that mesh."""
        return self.mesh or program

    @cached_property
    def shape(self) -> tuple[Extent, ...]:
        return tuple(dim.extent for dim in self.dims)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that splits some dim."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def local_shape(self, mesh: Mesh, uneven: Container[str] = ()) -> tuple[Extent, ...]:
        """What one rank holds: `M/8` rows where 8 ranks split M, `part(M, x)` where M is uneven or an int that 8 does not divide.

        `mesh` is the program's.
        """
        return tuple(self._held(dim, self.mesh_in(mesh), uneven) for dim in self.dims)

    def _held(self, dim: Dim, mesh: Mesh, uneven: Container[str]) -> Extent:
        ranks = mesh.size_of(dim.axes)
        is_uneven = int(dim.extent) % ranks > 0 if dim.extent.is_int else ranks > 1 and str(dim.extent) in uneven
        return part(dim.extent, dim.axes, _name_of(self.mesh) if self.mesh else "") if is_uneven else dim.extent // ranks

    def dim(self, axis: int | str) -> int:
        """The number of a dim from its number (negative from the end) or its name. Raises ValueError where it names none or several."""
        if isinstance(axis, str):
            found = [i for i, dim in enumerate(self.dims) if str(dim.extent) == axis]
            if len(found) == 1:
                return found[0]
            raise ValueError(
                f"{self} has {len(found)} dims named {axis}: say which by its number" if found else f"{self} has no dim named {axis}"
            )
        rank = len(self.dims)
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise ValueError(f"{axis!r} is no dim of {self}; write its number or its name")
        if not -rank <= axis < rank:
            raise ValueError(f"{self} has no dim {axis}: dims go from 0 to {rank - 1}" if rank else f"{self} has no dims")
        return axis % rank

    def check(self, location: Location | None, mesh: Mesh | None = None) -> None:
        """Raises ProgramError where a mesh axis splits two dims or is not in the mesh, and for more than MAX_DIMS dims."""
        if len(self.dims) > MAX_DIMS:
            raise ProgramError(f"{self}: has {len(self.dims)} dims, and an array has at most {MAX_DIMS}; reshape it", location)
        if product(tuple(Extent(dim.extent.coefficient) for dim in self.dims)).coefficient > MAX_SIZE:
            raise ProgramError(f"{self}: has more elements than 64 bits can count; its sizes are too large", location)
        twice = [axis for axis, count in Counter(self.axes).items() if count > 1]
        if twice:
            raise ProgramError(f"{self}: mesh axis {twice[0]} is used twice; it can split one dim once", location)
        if mesh is None:
            return
        if self.mesh is not None and self.mesh is not mesh:
            if outside := set(self.mesh.members or ()) - set(mesh.all_ranks):
                raise ProgramError(f"{self}: {mesh} has no rank {min(outside)}; its ranks: {_listed(mesh.all_ranks)}", location)
            mesh = self.mesh
        for axis in (*self.axes, *(self.partial.axes if self.partial else ())):
            if axis not in dict(mesh.axes):
                known = ", ".join(name for name, _ in mesh.axes) or "none"
                raise ProgramError(f"{self}: no axis {axis} in {mesh}; its axes: {known}", location)

    def shard(self, array: NDArray[Any], rank: int, mesh: Mesh) -> NDArray[Any]:
        """What `rank` of the mesh holds of a global array: a view of its block. Raises ArgumentError where the shape does not fit."""
        from hostweave.runtime.shards import shard

        return shard(self, array, rank, mesh)

    def unshard(self, arrays: Sequence[NDArray[Any]], mesh: Mesh) -> NDArray[Any]:
        """The global array of what the ranks of the mesh hold, in rank order. Raises ArgumentError where a shape does not fit."""
        from hostweave.runtime.shards import unshard

        return unshard(self, arrays, mesh)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.dims))}]"
        return " ".join([text, *([str(self.partial)] if self.partial else []), *([f"on {self.mesh}"] if self.mesh else [])])


MAX_STEPS = 2**12  # of a loop over chunks: passes run all of them against each other


@dataclass(frozen=True)
class Stream:
    """Stream parallelism over one dim of a value.

    `chunks` is the number of steps, or None for one step an index (which drops the dim inside the loop).
    `step` is `block` (the i-th contiguous block of the global dim) or `across` (the i-th slice of every rank's shard).
    `by` is how it communicates: p2p, all_gather, broadcast, reduce_scatter, all_reduce or ring; None where it does not, or while open.
    `rotation` says which block a rank takes at step 0 when steps go by block: `own_first`, `own_last` or None.
    """

    dim: int
    chunks: int | None = None
    step: str | None = None
    by: str | None = None
    rotation: str | None = None

    def too_many(self, extent: Extent) -> str:
        """Why it has too many steps over a dim of this extent, where that is known, or ""."""
        steps = self.chunks if self.chunks is not None else int(extent) if extent.is_int else 0
        return f"{steps} steps are more than {MAX_STEPS}, the most that a loop can have; give fewer chunks" if steps > MAX_STEPS else ""


@dataclass(frozen=True)
class BufferType:
    """What one rank holds in memory: local extents, and strides in elements (None: row-major, contiguous)."""

    dtype: DType
    shape: tuple[Extent, ...]
    strides: tuple[Extent, ...] | None = field(default=None)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


Sizes = Mapping[str, int]


class RankSizes(dict[str, int]):
    """Sizes by name, and what follows from them for one rank of a mesh: `ceil(M/8)` and `part(M, x)`."""

    def __init__(self, sizes: Sizes, mesh: Mesh, rank: int = 0):
        super().__init__(sizes)
        self.mesh, self.rank = mesh, rank

    def __missing__(self, name: str) -> int:
        if shared := block_of(name):
            size, ranks = shared
            return -(-size.bind(self) // ranks)
        if held := part_of(name):
            size, axes, _ = held
            mesh = mesh_of_part(name, self.mesh)
            place = mesh.place(self.rank, axes) if self.rank in mesh.all_ranks else 0  # others never have it
            return len(held_by(size.bind(self), mesh.size_of(axes), place))
        raise KeyError(name)


@cache
def mesh_of_part(name: str, program: Mesh) -> Mesh:
    """The mesh whose axes a name such as `part(M, x)` speaks of."""
    found = part_of(name)
    assert found is not None
    if not found[2]:
        return program
    members = found[2].removesuffix(")").partition("ranks ")[2]
    first, dots, end = members.partition("..")
    ranks = tuple(range(int(first), int(end)) if dots else map(int, members.split(", ")) if members else ())
    if found[2].startswith("ranks"):
        return Mesh(((found[1][0], len(ranks)),), ranks)
    return Mesh(tuple((axis, int(size)) for axis, size in re.findall(r"(\w+)=(\d+)", found[2])), ranks or None)


def _name_of(mesh: Mesh) -> str:
    """The text of a mesh beside the name of its axis, if it has but one."""
    return str(mesh) if len(mesh.axes) > 1 or mesh.members is None else f"ranks {_listed(mesh.members)}"


def held_by(size: int, ranks: int, place: int) -> range:
    """The indices of a dim that the rank at `place` holds: a block of ceil(size / ranks), of which the last ranks have less or nothing."""
    block = -(-size // ranks)
    return range(min(place * block, size), min((place + 1) * block, size))
