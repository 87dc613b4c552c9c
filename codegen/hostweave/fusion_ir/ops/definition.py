"""The class of the op table's entries, and helpers that several entries use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import Any

from hostweave.fusion_ir.index_map import ONE, IndexMap, aligned, numbered
from hostweave.fusion_ir.ir import Attribute, Op
from hostweave.fusion_ir.ops.attributes import DIM, MESH_AXES, OFFSET, REDUCTION, SCALE
from hostweave.types.mesh import Mesh, Sizes
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim, DType, TensorType

Types = Sequence[TensorType]
Infer = Callable[[Types, Op], TensorType]
Indices = Callable[[Types, Op], IndexMap]


class Mismatch(Exception):
    """The operands or attributes of an op are not valid. Callers turn a Mismatch into a ProgramError with the op and its location."""


@dataclass(frozen=True)
class Combine:
    """Combining function of a reduction in C++: a functor, and the equivalent operator `sign` if there is one.

    `total` is the name of the accumulator, and `starts` has initial values for floats, ints and uints. If `identity` is False, the
    reduction needs at least one element.
    """

    total: str
    functor: str
    starts: tuple[str, str, str]
    sign: str = ""
    identity: bool = False
    is_mean: bool = False  # the total is divided by the attribute `count`, by default the number of elements


@dataclass(frozen=True)
class OpDef:
    """Definition of one kind of op.

    - `infer(operand types, op)` returns the dtype and global shape of the result, or raises Mismatch.
    - `map(operand types, op)` returns the index map.
    - `numpy(np, *arrays, **attributes)` computes the op on arrays. If the op states the shape or dtype of the result (`target`), `numpy`
      also gets `shape` or `dtype`. The `numpy` of a call or repeat also gets `run`, which evaluates the called function.
    """

    arity: int | None  # None: one or more; 0: the elements depend only on their index, so that each rank computes its shard
    infer: Infer
    map: Indices
    numpy: Callable[..., Any]
    attributes: tuple[Attribute[Any], ...] = ()
    target: str = ""  # property of the result type that the op states: shape, dtype, type (shape and dtype) or sharding

    # C++ for one element, with operands {0}, {1}, ..., literals such as {T:0.5} in the compute type, and C library functions such as
    # {std:exp}
    cpp: str = ""
    fast: tuple[str, str] | None = None  # text in `cpp`, and faster C++ that suffices for results of at most 16 bits
    cpp_of_ints: str = ""  # C++ for ints and bools, if different from `cpp`
    prepared: str = ""  # C++ type that prepares an f32 last operand once, for all elements that share the operand
    rounds_operands: bool = False  # kernels round a computed operand of at most 16 bits to its dtype, as a store would
    fiber: str = ""  # C++ function that processes all elements along one dim; an op with a fiber is a separate kernel
    splits_fibers: bool = False  # threads that process a row together write separate elements, so the threads need no synchronisation
    in_clusters: bool = False  # the thread blocks of a cluster may process a row together
    gathers: bool = False  # reads its first operand at an index, which is the second operand or is computed
    updates: bool = False  # updates some elements of its first operand in place
    # For each operand: dim of the result -> start of the operand along this dim.
    parts: Callable[[Types, Op], tuple[dict[int, Size], ...]] | None = None
    cost: int = 1  # cost per element, in additions
    combine: Combine | None = None  # combining function of a reduction
    locates: bool = False  # the reduction returns a position, not a value

    # Shardings follow from the index map and the following fields.
    partial: str = ""  # reduction that combines the ranks' results if a reduced dim is sharded; "": a rank needs the whole dim
    linear: str = ""  # the op is linear in its first operand (first), in each single operand (factors), or in all operands together (terms)
    is_exact: bool = False  # a partial sum loses no precision: at most one term is not zero, or the op itself adds in the result's dtype
    last_is_first: bool = False  # if operands' shardings conflict, the last operand takes precedence
    # types of the result and operands, for an op whose shardings are stated, such as a call
    stated: Callable[[Types, Op], tuple[TensorType, Types]] | None = None
    # mesh axes of each result dim, if the index map cannot express them
    carried: Callable[[TensorType, Op, Mesh], tuple[tuple[str, ...], ...] | None] | None = None
    adds_up: tuple[tuple[int, int], ...] = ()  # (operand, dim) pairs of dims that are summed over but have no label
    scores_add_up: tuple[tuple[int, int], ...] = ()  # (operand, dim) pairs of dims over which scores are summed, before the softmax
    whole: str = ""  # participle for messages: "joined", if the op needs a dim completely because it joins along the dim

    is_view: bool = False  # pointer arithmetic on local data, without a kernel or call
    cuts: bool = False  # a view of some of the elements
    counts: bool = False  # uses only the size of its second operand, not the elements
    is_reshard_step: bool = False  # one communication or local slice
    to_other_mesh: bool = False  # a reshard step whose result is on another mesh

    is_product: bool = False  # a matrix product of its first two operands, [..., m, k] and [..., k, n]
    makes: str = ""  # word that follows the operand's name in the name of the result: "transposed", as in `x_transposed`
    written: str = ""  # Python operator: `a + b`
    is_public: bool = False  # the public function of this op is generated from this entry

    @property
    def is_plain_product(self) -> bool:
        """True for a matrix product of two operands, without scales and groups."""
        return self.is_product and self.arity == 2

    @property
    def is_cast(self) -> bool:
        return self.target == "dtype"

    @property
    def is_range(self) -> bool:
        """True for consecutive ints along a dim."""
        return OFFSET in self.attributes

    @property
    def reduces(self) -> bool:
        """True for a reshard step that combines terms of ranks."""
        return REDUCTION in self.attributes

    @property
    def reduces_to_blocks(self) -> bool:
        """True if each rank gets one block of the combined terms."""
        return self.reduces and DIM in self.attributes

    @property
    def reduces_to_all(self) -> bool:
        """True if all ranks get all combined terms."""
        return self.reduces and DIM not in self.attributes and not self.to_other_mesh

    @property
    def gathers_shards(self) -> bool:
        """True if each rank gets the shards of all ranks along a dim."""
        return self.is_reshard_step and not self.is_view and {DIM, MESH_AXES} == {*self.attributes}

    @property
    def is_attention(self) -> bool:
        """True for attention, its log-sum-exps, and its gradients."""
        return SCALE in self.attributes

    @property
    def multiplies(self) -> bool:
        """True for ops whose time is that of matrix products."""
        return self.is_product or self.is_attention

    def cpp_for(self, dtype: DType, is_fast: bool) -> str:
        """C++ for operands of this dtype. `is_fast` is True if the result is rounded to at most 16 bits."""
        if dtype.kind != "float":
            return self.cpp_of_ints or self.cpp
        return self.cpp.replace(*self.fast) if self.fast and is_fast and dtype.itemsize <= 4 else self.cpp

    @staticmethod
    @cache
    def fields(cpp: str) -> tuple[tuple[str, str], ...]:
        """Fields of a C++ template, as pairs such as ("0", ""), ("T", "0.5") and ("std", "exp")."""
        return tuple((name, spec or "") for _, name, spec, _ in Formatter().parse(cpp) if name is not None)

    def stated_type(self, shape: Callable[[], tuple[int, ...]], dtype: object) -> dict[str, Any]:
        result: dict[str, Any] = {"shape": shape()} if self.target in ("shape", "type") else {}
        return result | ({"dtype": dtype} if self.target in ("dtype", "type") else {})


def bound_attributes(op: Op, sizes: Sizes) -> dict[str, Any]:
    return {name: value.bind(sizes) if isinstance(value, Size) else value for name, value in op.attributes}


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
    a, b = (type.shape for type in sorted(types[-2:], key=lambda type: -len(type.dims)))
    if len(a) == len(b) == 2 and a == b[::-1]:
        return "transpose one of them, as in x + y.T"
    if len(b) == 1 and len(a) == 2 and a[0] == b[0]:
        return "dims are aligned from the right: give the smaller one a dim of 1 at its end, as in y[:, None]"
    return "dims are aligned from the right: make them equal or 1, as with x[:, None]"


def unsharded(type: TensorType | BufferType) -> TensorType:
    return TensorType(type.dtype, tuple(Dim(size) for size in type.shape))


def _dims_text(rank: int) -> str:
    return f"dims go from 0 to {rank - 1}" if rank else "the operand has no dims"


def checked_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if any(not 0 <= axis < rank for axis in axes):
        raise Mismatch(f"axis={axes} is out of range; {_dims_text(rank)}")
    if len(set(axes)) != len(axes):
        raise Mismatch(f"axis={axes} names a dim twice; name it once")
    return axes


def checked_axis(axis: int, x: TensorType) -> int:
    if not 0 <= axis < len(x.dims):
        raise Mismatch(f"axis={axis} of {x} is out of range; {_dims_text(len(x.dims))}")
    return axis


def elementwise(types: Types, op: Op) -> IndexMap:
    result = op.result.type.shape
    labels = numbered(result)
    return IndexMap(tuple(aligned(type.shape, result, labels) for type in types), labels)


def opaque(types: Types, op: Op) -> IndexMap:
    """Index map of an op whose dims are all unrelated."""
    return IndexMap(tuple((None,) * len(type.dims) for type in types), (None,) * len(op.result.type.dims))
