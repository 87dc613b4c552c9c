"""What an entry of the op table says, and what entries have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hostweave.fusion_ir.index_map import ONE, IndexMap, aligned, numbered
from hostweave.fusion_ir.ir import Attribute, Op
from hostweave.types.mesh import Mesh, Sizes
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim, DType, TensorType

Types = Sequence[TensorType]
Infer = Callable[[Types, Op], TensorType]
Indices = Callable[[Types, Op], IndexMap]

FLOATS, SIGNED, NUMBERS, BOOLS, INTS = ("float",), ("float", "int"), ("float", "int", "uint"), ("bool",), ("int", "uint")  # kinds of dtypes


class Mismatch(Exception):
    """Operands that do not go together; the caller adds the op and its place."""


@dataclass(frozen=True)
class Combine:
    """How a reduction makes one of two values in C++: a functor, or the sign that does the same.

    `total` names what it has so far, which begins at `starts` for floats, ints and uints. Without an `identity` it gives an element, or
    the place of one, so that there has to be one.
    """

    total: str
    functor: str
    starts: tuple[str, str, str]
    sign: str = ""
    identity: bool = False
    is_mean: bool = False  # the total is divided by how many they are, or by the attribute `count`


@dataclass(frozen=True)
class OpDef:
    """One kind of op.

    `infer(operand types, op)` gives the result's dtype and global shape, or raises Mismatch. `map(operand types, op)` gives the
    indices that operands and result share. `numpy(np, *arrays, **attributes)` computes it on arrays; where the result's shape or
    dtype is part of what the user states (`target`) it also gets `shape` or `dtype`, or both where that is `type`; a call gets `run`,
    which computes its function.
    """

    arity: int | None  # None: one or more
    infer: Infer
    map: Indices
    numpy: Callable[..., Any]
    attributes: tuple[Attribute[Any], ...] = ()
    target: str = ""  # shape, dtype, type (both) or sharding: what of the result's type the user states

    # C++ of one element over operands {0}, {1}, ... of the compute type T: float or double, or the integer itself.
    cpp: str = ""
    fast: tuple[str, str] | None = None  # a function in it, and one that takes its place where elements have 16 bits or less
    cpp_of_ints: str = ""  # where theirs is another
    lane: str = ""  # a function that takes all along one dim, of one kernel alone
    parts_lanes: bool = False  # threads that share a lane need not meet: each has elements of the result of its own
    in_clusters: bool = False  # several blocks may have a lane of elements side by side together
    updates: bool = False  # its first operand, in place: of the result it writes some elements alone
    cost: int = 1  # of an element, in additions
    combine: Combine | None = None  # of a reduction
    locates: bool = False  # a reduction that gives where an element is: of one element not the element

    # Shardings follow from the indices: those that the result keeps, those that it reduces, and what else is said here.
    partial: str = ""  # the reduction that makes one of the ranks' results, where what is reduced is sharded; none takes whole dims
    linear: str = ""  # in its first operand alone (first), in each one (factors), or in all together (terms)
    is_exact: bool = False  # of these results one at most is not zero, or they are added up in the result's dtype anyway
    last_is_first: bool = False  # of the operands' shardings the last one's goes before the others'
    stated: Callable[[Types, Op], tuple[TensorType, Types]] | None = None  # what it gives and takes, where it is stated
    carried: Callable[[TensorType, Op, Mesh], tuple[tuple[str, ...], ...] | None] | None = (
        None  # the axes of each dim, where no index says it
    )
    adds_up: tuple[tuple[int, int], ...] = ()  # operands and their dims that its elements are sums over, where no index says it
    scores_add_up: tuple[tuple[int, int], ...] = ()  # likewise of the scores, times the scale, of a softmax inside
    whole: str = ""  # what it does to a dim of which it needs all, however a loop walks it

    is_view: bool = False  # pointer arithmetic on what a rank holds, no call
    is_reshard_step: bool = False  # one communication or one local slice: its attributes are all that it does to a layout
    to_other_mesh: bool = False  # a step whose result is on another mesh

    is_product: bool = False  # a matrix product of its first two operands, [..., m, k] and [..., k, n]
    makes: str = ""  # of its operand, where it only moves elements: "transposed", as in `x_transposed`
    written: str = ""  # as Python's operators write it: `a + b`
    is_public: bool = False  # its function is made from this entry

    def cpp_for(self, dtype: DType, is_fast: bool) -> str:
        """The C++ for operands of this dtype; `is_fast` in kernels whose elements have 16 bits or less."""
        if dtype.kind != "float":
            return self.cpp_of_ints or self.cpp
        return self.cpp.replace(*self.fast) if self.fast and is_fast and dtype.itemsize <= 4 else self.cpp

    def stated_type(self, shape: Callable[[], tuple[int, ...]], dtype: object) -> dict[str, Any]:
        """What `numpy` gets of the result's type."""
        result: dict[str, Any] = {"shape": shape()} if self.target in ("shape", "type") else {}
        return result | ({"dtype": dtype} if self.target in ("dtype", "type") else {})


def bound_attributes(op: Op, sizes: Sizes) -> dict[str, Any]:
    """The attributes of an op as `numpy` takes them, sizes as numbers."""
    return {name: value.bind(sizes) if isinstance(value, Size) else value for name, value in op.attributes}


# --- result types -----------------------------------------------------------------------------------------------------


def same_dtype(types: Types) -> DType:
    for other in types[1:]:
        if other.dtype != types[0].dtype:
            raise Mismatch(f"dtypes differ: {types[0]} and {other}; use hw.astype on one of them")
    return types[0].dtype


def require(type: TensorType, kinds: tuple[str, ...]) -> None:
    if type.dtype.kind not in kinds:
        raise Mismatch(f"not defined for {type.dtype}; use hw.astype to a dtype that is {' or '.join(kinds)}")


def broadcast(types: Types) -> tuple[Dim, ...]:
    rank = max(len(type.dims) for type in types)
    dims: list[Dim] = []
    for i in range(-rank, 0):
        sizes = {type.shape[i] for type in types if len(type.dims) >= -i} - {ONE}
        if len(sizes) > 1:
            raise Mismatch(f"shapes do not broadcast: {' and '.join(map(str, types))} differ in dim {i}; {_aligned(types)}")
        dims.append(Dim(sizes.pop() if sizes else ONE))
    return tuple(dims)


def _aligned(types: Types) -> str:
    """How operands that do not broadcast might: turned, or with a dim of 1 at the end."""
    a, b = (type.shape for type in sorted(types[-2:], key=lambda type: -len(type.dims)))
    if len(a) == len(b) == 2 and a == b[::-1]:
        return "transpose one of them, as in x + y.T"
    if len(b) == 1 and len(a) == 2 and a[0] == b[0]:
        return "dims are aligned from the right: give the smaller one a dim of 1 at its end, as in y[:, None]"
    return "dims are aligned from the right: make them equal or 1, as with x[:, None]"


def unsharded(type: TensorType | BufferType) -> TensorType:
    """A tensor of this dtype and shape."""
    return TensorType(type.dtype, tuple(Dim(size) for size in type.shape))


def checked_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if any(not 0 <= axis < rank for axis in axes):
        raise Mismatch(f"axis={axes} is out of range; dims go from 0 to {rank - 1}")
    if len(set(axes)) != len(axes):
        raise Mismatch(f"axis={axes} names a dim twice; name it once")
    return axes


def checked_axis(axis: int, x: TensorType) -> int:
    if not 0 <= axis < len(x.dims):
        raise Mismatch(f"axis={axis} is out of range; {x} has dims 0 to {len(x.dims) - 1}")
    return axis


# --- indices ----------------------------------------------------------------------------------------------------------


def elementwise(types: Types, op: Op) -> IndexMap:
    result = op.result.type.shape
    labels = numbered(result)
    return IndexMap(tuple(aligned(type.shape, result, labels) for type in types), labels)


def opaque(types: Types, op: Op) -> IndexMap:
    """Nothing is known of how operands become results: no dim is walked in step with another."""
    return IndexMap(tuple((None,) * len(type.dims) for type in types), (None,) * len(op.result.type.dims))
