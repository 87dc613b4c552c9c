"""Tensor types, and blocks of global arrays."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

from hostweave.base.errors import ArgumentError, Location, ProgramError, SizeError
from hostweave.base.lexer import MAX_INT
from hostweave.base.signatures import checked, with_ints
from hostweave.types.mesh import Mesh, listed_ranks
from hostweave.types.size import LocalSize, Size
from hostweave.types.zigzag import ZIGZAG, Zigzag, indices, pieces, runs

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class DType:
    """An element type, such as `hw.bf16` (also `hw.bfloat16`). `hw.bf16["M@x", "K"]` is the type of a tensor.

    The dtypes are f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u64, u32, u16, u8 and bool. `cpp` is the C++ type.
    """

    name: str
    itemsize: int  # bytes
    kind: str  # float, int, uint or bool
    cpp: str

    def __repr__(self) -> str:
        return f"hw.{self.name}"

    def __getitem__(self, dims: int | str | tuple[int | str, ...]) -> TensorType:
        """Tensor type, such as `bf16["M@x", "K"]`. A dim is a name or an int. The mesh axes that split a dim follow `@`. Raises
        ProgramError if the type is not valid."""
        given: tuple[int | str, ...] = with_ints(dims if isinstance(dims, tuple) else (dims,))
        type = TensorType(self, tuple(map(_spec_dim, given)))
        type.check(Location.of_caller())
        return type

    @property
    def long_name(self) -> str:
        """Name of the dtype in NumPy, PyTorch and CuPy."""
        return _LONG_NAMES.get(self.name, f"{self.kind}{8 * self.itemsize}")

    @property
    def roundoff(self) -> float:
        """Unit roundoff u of a float dtype: rounding changes x by at most u |x| if the result is a normal number."""
        return 2.0 ** -(_MANTISSA_BITS[self.name] + 1)

    def __str__(self) -> str:
        return self.name


_LONG_NAMES = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "bool": "bool"}
_MANTISSA_BITS = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2}

f64 = DType("f64", 8, "float", "double")
f32 = DType("f32", 4, "float", "float")
f16 = DType("f16", 2, "float", "hw::f16")
bf16 = DType("bf16", 2, "float", "hw::bf16")
f8e4m3 = DType("f8e4m3", 1, "float", "hw::f8e4m3")
f8e5m2 = DType("f8e5m2", 1, "float", "hw::f8e5m2")
i64 = DType("i64", 8, "int", "int64_t")
i32 = DType("i32", 4, "int", "int32_t")
i16 = DType("i16", 2, "int", "int16_t")
i8 = DType("i8", 1, "int", "int8_t")
u64 = DType("u64", 8, "uint", "uint64_t")
u32 = DType("u32", 4, "uint", "uint32_t")
u16 = DType("u16", 2, "uint", "uint16_t")
u8 = DType("u8", 1, "uint", "uint8_t")
bool_ = DType("bool", 1, "bool", "bool")

MAX_DIMS = 8  # hw::Shape has the same limit
FLOATS, SIGNED, NUMBERS, BOOLS, INTS = ("float",), ("float", "int"), ("float", "int", "uint"), ("bool",), ("int", "uint")  # kinds of dtypes
DTYPES = {d.name: d for d in (f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool_)}


@dataclass(frozen=True)
class Dim:
    """A dim of a global tensor: the global size, and the mesh axes that split the dim, outermost axis first."""

    size: Size
    axes: tuple[str, ...] = ()  # may be a Zigzag

    def __str__(self) -> str:
        axes = str(self.axes) if isinstance(self.axes, Zigzag) else ",".join(self.axes)
        return f"{self.size}@{axes}" if axes else str(self.size)

    @staticmethod
    def of(value: int | str | Size | Dim) -> Dim:
        """A dim from an int, a size, or text such as `M@x`, `8@x`, `M/4@dp,tp` and `M@zigzag(x)`. Raises ValueError for any other text."""
        if isinstance(value, Dim):
            return value
        if not isinstance(value, str):
            return Dim(Size.of(value))
        size, at, axes = value.partition("@")
        is_zigzag = axes.startswith(f"{ZIGZAG}(") and axes.endswith(")")
        axes = axes[len(ZIGZAG) + 1 : -1] if is_zigzag else axes
        names = (Zigzag if is_zigzag else tuple)(axis.strip() for axis in axes.split(",")) if at else ()
        try:
            if all(name.isidentifier() and name.isascii() for name in names):
                return Dim(Size.of(size), names)
        except ValueError:
            pass
        raise ValueError(f"not a dim: {value!r}; write it like 'M', 'M@x' or 'M@dp,tp'")


def _spec_dim(value: int | str) -> Dim:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"not a dim: {value!r}; write a name or an int")
        dim = Dim.of(value)
        if not (dim.size.is_int or dim.size.name):
            raise ValueError(f"not a dim of an input: {value!r}; give it one name")
        if dim.size.coefficient < 1:
            raise ValueError(f"a dim has at least one element, not {value}")
        return dim
    except ValueError as error:
        raise ProgramError.here(str(error)) from None


@dataclass(frozen=True)
class Partial:
    """Marks a tensor that is not reduced yet: each rank holds one term of the reduction by `op` over the mesh axes."""

    op: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"partial({self.op}, {', '.join(self.axes)})"


@dataclass(frozen=True)
class TensorType:
    """Type of a global tensor: `bf16[M@x, K]`. `mesh` is None for a tensor on the program's mesh."""

    dtype: DType
    dims: tuple[Dim, ...]
    partial: Partial | None = None
    mesh: Mesh | None = None

    def __repr__(self) -> str:
        return str(self)

    @checked
    def on(self, mesh: Mesh) -> TensorType:
        """The same type on another mesh: `bf16["M@x", "K"].on(hw.Mesh(x=4).ranks([0, 1]))`. Raises ProgramError if the type does not fit
        the mesh."""
        if not isinstance(mesh, Mesh):
            raise ProgramError.here(f"on: {mesh!r} is not an hw.Mesh; write it like hw.Mesh(x=4).ranks([0, 1])")
        on_mesh = replace(self, mesh=mesh)
        on_mesh.check(Location.of_caller(), mesh)
        return on_mesh

    def mesh_in(self, program: Mesh) -> Mesh:
        """The mesh whose ranks hold the tensor, in a program on mesh `program`."""
        return self.mesh or program

    @cached_property
    def shape(self) -> tuple[Size, ...]:
        return tuple(dim.size for dim in self.dims)

    def fills(self, other: TensorType) -> bool:
        """True if the types have the same dtype, mesh, and dims in any order. Local tensors then have equal sizes in bytes."""
        return (self.dtype, self.mesh) == (other.dtype, other.mesh) and sorted(map(str, self.dims)) == sorted(map(str, other.dims))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the dims."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def local_shape(self, mesh: Mesh, uneven: Container[str] = ()) -> tuple[Size, ...]:
        """Local shape, in a program on `mesh`. If 8 ranks split M, the local size is `M/8`, or `local(M, x)` if `M.is_uneven(8,
        uneven)`."""

        def local(dim: Dim) -> Size:
            if not dim.axes:
                return dim.size
            ranks = self.mesh_in(mesh).size_of(dim.axes)
            return Size(1, (LocalSize(dim.size, dim.axes, self.mesh),)) if dim.size.is_uneven(ranks, uneven) else dim.size // ranks

        return tuple(map(local, self.dims))

    def local(self, mesh: Mesh, uneven: Container[str] = ()) -> BufferType:
        return BufferType(self.dtype, self.local_shape(mesh, uneven))

    def dim(self, axis: int | str) -> int:
        """Index of a dim, given by index (negative from the end) or name. Raises ValueError unless exactly one dim matches."""
        if isinstance(axis, str):
            found = [i for i, dim in enumerate(self.dims) if str(dim.size) == axis]
            if len(found) == 1:
                return found[0]
            which = f"{len(found)} dims named {axis}: choose one by its index" if found else f"no dim named {axis}"
            raise ValueError(f"{self} has {which}")
        rank = len(self.dims)
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise ValueError(f"{axis!r} is not a dim of {self}; write its index or its name")
        if not -rank <= axis < rank:
            raise ValueError(f"{self} has no dim {axis}: dims go from 0 to {rank - 1}" if rank else f"{self} has no dims")
        return axis % rank

    def check(self, location: Location | None, mesh: Mesh | None = None) -> None:
        """Raises ProgramError if the type is invalid, or does not fit the mesh."""
        if len(self.dims) > MAX_DIMS:
            raise ProgramError(f"{self} has {len(self.dims)} dims, and an array has at most {MAX_DIMS}; reshape it", location)
        if prod([dim.size.coefficient for dim in self.dims]) > MAX_INT:
            raise ProgramError(f"{self} has more than 2**63 - 1 elements; reduce its sizes", location)
        repeated = next((axis for axis in self.axes if self.axes.count(axis) > 1), None)
        if repeated is not None:
            raise ProgramError(f"{self}: mesh axis {repeated} is used twice; each axis can split one dim", location)
        if mesh is None:
            return
        if self.mesh is not None and self.mesh is not mesh:
            if outside := set(self.mesh.members or ()) - set(mesh.all_ranks):
                raise ProgramError(f"{self}: {mesh} has no rank {min(outside)}; its ranks: {listed_ranks(mesh.all_ranks)}", location)
            mesh = self.mesh
        for axis in (*self.axes, *(self.partial.axes if self.partial else ())):
            if axis not in dict(mesh.axes):
                known = ", ".join(name for name, _ in mesh.axes) or "none"
                raise ProgramError(f"{self}: there is no axis {axis} in {mesh}; its axes: {known}", location)
        for dim in self.dims:
            if isinstance(dim.axes, Zigzag) and dim.size.is_uneven(count := pieces(dim.axes, mesh), ()):
                why = f"each of {mesh.size_of(dim.axes)} ranks has two pieces of dim {dim}, but {count} does not divide {dim.size}"
                raise ProgramError(f"{self}: {why}; pad it to {-(-int(dim.size) // count) * count}", location)

    @checked
    def shard(self, array: NDArray[Any], rank: int, mesh: Mesh) -> NDArray[Any]:
        """Local array of `rank`, cut from a global array. The result is a view, or a copy if several ranks split a dim in zigzag.

        Raises ProgramError if the type does not fit the mesh, and ArgumentError if the shape or the rank does not fit the type.
        """
        own: NDArray[Any] = array[checked_block(self, _shape_of(array, "shard"), rank, mesh, "shard")]
        return own

    @checked
    def block(self, shape: Sequence[int], rank: int, mesh: Mesh) -> tuple[Any, ...]:
        """Index of a rank's block in a global array with the shape `shape`, for example to read only this block from a file.

        The index consists of slices, or contains arrays if several ranks split a dim in zigzag. Raises the errors of `shard`.

        Example with a safetensors file: `handle.get_slice("w")[hw.bf16["K", "N@tp"].block((4096, 4096), rank, mesh)]`.
        """
        return checked_block(self, tuple(shape), rank, mesh, "block")

    @checked
    def unshard(self, arrays: Sequence[NDArray[Any]], mesh: Mesh) -> NDArray[Any]:
        """Joins local arrays to the global array. `arrays` has one array per rank of the tensor's mesh, in the mesh's order of ranks. If
        several ranks have the same block, the block of the last rank is used.

        Raises ProgramError if the type does not fit the mesh, and ArgumentError if the arrays do not fit the type.
        """
        import numpy as np

        mesh = self.mesh_in(mesh)
        if not hasattr(arrays, "__len__"):
            raise ArgumentError(f"unshard: {arrays!r} is not a list of arrays; pass one per rank, in the mesh's order")
        if len(arrays) != mesh.size:
            raise ArgumentError(f"unshard: {len(arrays)} arrays for the {mesh.size} ranks of {mesh}; pass one per rank, in this order")
        self.check(Location.of_caller(), mesh)
        for array in arrays:
            _check_rank(self, _shape_of(array, "unshard"))
        shape = shape_of_global(self, mesh, {rank: array.shape for rank, array in zip(mesh.all_ranks, arrays, strict=True)})
        result = np.empty(shape, np.asarray(arrays[0]).dtype)
        for rank, array in zip(mesh.all_ranks, arrays, strict=True):
            if array.shape != (wanted := block_shape(self, mesh, rank, shape)):
                why = f"rank {rank} holds {list(array.shape)}, not its block {list(wanted)} of {list(shape)}"
                raise ArgumentError(f"unshard: {why}; pass its block")
            result[block_of(self, mesh, rank, shape)] = array
        return result

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.dims))}]"
        return " ".join([text, *([str(self.partial)] if self.partial else []), *([f"on {self.mesh}"] if self.mesh else [])])


@dataclass(frozen=True)
class BufferType:
    """Type of a rank's local buffer: local sizes, and strides in elements. If `strides` is None, the buffer is contiguous and row-major."""

    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = field(default=None)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


# --- blocks of global arrays ------------------------------------------------------------------------------------------


Shape = tuple[int, ...]


def checked_block(type_: TensorType, shape: Shape, rank: int, mesh: Mesh, word: str) -> tuple[Any, ...]:
    """Calls `block_of` after checks of the user's arguments."""
    type_.check(Location.of_caller(), mesh)
    if not holds(type_, mesh, rank):
        raise ArgumentError(f"{word}: rank {rank} holds no part of {type_}; choose a rank of its mesh")
    _check_rank(type_, shape)
    if any(size < 0 for size in shape):
        raise ArgumentError(f"{word}: {list(shape)} is not a shape; pass the shape of the global array")
    bind_sizes(word, mesh, {"array": type_}, {"array": shape}, None)
    return block_of(type_, mesh, rank, shape)


def shape_of_global(type_: TensorType, mesh: Mesh, shapes: Sequence[Shape] | Mapping[int, Shape]) -> Shape:
    """Shape of the global array, given the local shapes of ranks."""
    mesh = type_.mesh_in(mesh)
    return tuple(sum(shapes[rank][i] for rank in mesh.process_group(mesh.all_ranks[0], dim.axes)) for i, dim in enumerate(type_.dims))


def holds(type_: TensorType, mesh: Mesh, rank: int) -> bool:
    return rank in type_.mesh_in(mesh).all_ranks


def shape_given(array: Any) -> Shape | None:
    """Shape of an array, or None for a value that is not an array."""
    try:
        shape = array.shape
    except Exception:  # another library may raise any exception
        return None
    return shape if isinstance(shape, tuple) else None


def _shape_of(array: Any, word: str) -> Shape:
    if (shape := shape_given(array)) is None:
        raise ArgumentError(f"{word}: {type(array).__name__} is not an array; pass an array, such as np.asarray of a list")
    return shape


def _check_rank(type_: TensorType, shape: Shape) -> None:
    if len(shape) != len(type_.dims):
        raise ArgumentError(f"an array of {len(shape)} dims does not fit {type_}; pass one of {len(type_.dims)} dims")


def global_shape(type_: TensorType, sizes: Mapping[str, int]) -> Shape:
    return tuple(size.bind(sizes) for size in type_.shape)


def block_shape(type_: TensorType, mesh: Mesh, rank: int, shape: Sequence[int]) -> Shape:
    """Local shape of a rank, for a global array of `shape`."""
    return tuple(sum(map(len, own)) for own in _runs(type_, mesh, rank, shape))


def block_of(type_: TensorType, mesh: Mesh, rank: int, shape: Sequence[int]) -> tuple[Any, ...]:
    """Index of a rank's block in a global array of `shape`."""
    return indices(_runs(type_, mesh, rank, shape))


def _runs(type_: TensorType, mesh: Mesh, rank: int, shape: Sequence[int]) -> list[Sequence[range]]:
    mesh = type_.mesh_in(mesh)
    return [runs(size, dim.axes, mesh, rank) for dim, size in zip(type_.dims, shape, strict=True)]


def local_outputs(
    program: str, mesh: Mesh, inputs: Mapping[str, TensorType], outputs: Sequence[TensorType], shapes: Mapping[str, Shape], rank: int
) -> list[Shape]:
    """Local shapes of a rank's outputs, from the local shapes of the rank's inputs, if all sharded dims divide evenly."""
    even = {
        name: tuple(size * mesh.size_of(dim.axes) for size, dim in zip(shapes[name], type_.dims, strict=True))
        for name, type_ in inputs.items()
    }
    sizes = bind_sizes(program, mesh, inputs, even, None)
    return [block_shape(type_, mesh, rank, global_shape(type_, sizes)) for type_ in outputs]


def bind_sizes(
    program: str, mesh: Mesh, inputs: Mapping[str, TensorType], shapes: Mapping[str, Shape], uneven: Container[str] | None = ()
) -> dict[str, int]:
    """Values of the symbols that are dims of inputs. Raises ArgumentError if the shapes do not fit.

    Zigzag dims must divide evenly into pieces. Other sharded dims must divide evenly among ranks, unless `uneven` is None. A size that is
    an int, or a single factor with a symbol in `uneven`, need not divide evenly.
    """
    bound: dict[str, tuple[int, str]] = {}  # symbol -> value, and the input that determines it
    for name, type_ in inputs.items():
        for dim_size, size in zip(type_.shape, shapes[name], strict=True):
            known, other = bound.setdefault(dim_size.name, (size, name)) if dim_size.name else (size, name)
            if known != size:
                raise ArgumentError(f"{program}: {name}: {dim_size} is {size} here and {known} in {other}; pass arrays that agree")
    sizes = {symbol: size for symbol, (size, _) in bound.items()}
    for name, type_ in inputs.items():
        for index, (dim, size) in enumerate(zip(type_.dims, shapes[name], strict=True)):
            where = f"{program}: {name}: dim {index}"
            try:
                wanted = dim.size.bind(sizes) if all(symbol in sizes for symbol in dim.size.symbols) else size
            except ValueError as error:
                raise ArgumentError(f"{where} is {size}; no size fits, because {error}") from None
            if wanted != size:
                raise SizeError(f"{where} is {size}; it must be {wanted}{'' if dim.size.is_int else f' for {dim.size}'}")
            blocks, ranks = pieces(dim.axes, type_.mesh_in(mesh)), type_.mesh_in(mesh).size_of(dim.axes)
            if size % blocks and (blocks > ranks or (uneven is not None and not dim.size.is_uneven(blocks, uneven))):
                of_each = " in two pieces each" if blocks > ranks else ""
                raise ArgumentError(
                    f"{where} ({dim.size} = {size}) cannot be divided evenly by {ranks} ranks along {', '.join(dim.axes)}{of_each}; "
                    f"pad it to {-(-size // blocks) * blocks}"
                )
    return sizes


@lru_cache(maxsize=4096)
def row_major(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides of a contiguous buffer, in elements."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=Size()))[::-1] if shape else ()


def strides_of(buffer: BufferType) -> tuple[Size, ...]:
    return row_major(buffer.shape) if buffer.strides is None else buffer.strides


def is_matrix(buffer: BufferType) -> bool:
    """True if one of the last two dims has stride 1 or size 1, as cuBLASLt requires."""
    return any(Size() in pair for pair in zip(buffer.shape[-2:], strides_of(buffer)[-2:], strict=True))


def strided(buffer: BufferType, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> BufferType:
    """Type of a view. A contiguous view has no strides."""
    contiguous = all(e == Size() or s == c for e, s, c in zip(shape, strides, row_major(shape), strict=True))
    return BufferType(buffer.dtype, shape, None if contiguous else strides)
