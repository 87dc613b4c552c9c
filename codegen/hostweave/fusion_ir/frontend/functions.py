"""The functions that a fusion is written with. They follow the Python array API standard, torch.nn.functional for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hostweave.base.errors import Location, ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend.trace import Tensor, dim_of, record
from hostweave.fusion_ir.ir import Scalar
from hostweave.fusion_ir.ops import NO_SOURCE, fits
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, DType, TensorType, i32

Axis = int | str


@checked
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[..., M, K] x [..., K, N] -> [..., M, N]; the leading dims broadcast."""
    return record("matmul", a, b)


# --- pointwise --------------------------------------------------------------------------------------------------------


def _unary(kind: str, doc: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return record(kind, x)

    function.__name__, function.__doc__ = kind, doc
    return checked(function)


def _binary(kind: str, doc: str) -> Callable[[Tensor | Scalar, Tensor | Scalar], Tensor]:
    def function(a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
        return record(kind, a, b)

    function.__name__, function.__doc__ = kind, f"{doc} Dims broadcast; both sides have one dtype, a Python number takes it."
    return checked(function)


add = _binary("add", "a + b.")
subtract = _binary("subtract", "a - b.")
multiply = _binary("multiply", "a * b.")
divide = _binary("divide", "a / b, of floats.")
maximum = _binary("maximum", "The larger one; NaN where either is.")
minimum = _binary("minimum", "The smaller one; NaN where either is.")
equal = _binary("equal", "a == b, a bool.")
not_equal = _binary("not_equal", "a != b, a bool.")
less = _binary("less", "a < b, a bool.")
less_equal = _binary("less_equal", "a <= b, a bool.")
greater = _binary("greater", "a > b, a bool.")
greater_equal = _binary("greater_equal", "a >= b, a bool.")
logical_and = _binary("logical_and", "a and b, of bools; also a & b.")
logical_or = _binary("logical_or", "a or b, of bools; also a | b.")
logical_not = _unary("logical_not", "not x, of bools; also ~x.")
negative = _unary("negative", "-x.")
abs = _unary("abs", "The magnitude.")
reciprocal = _unary("reciprocal", "1 / x.")
exp = _unary("exp", "e to the x.")
log = _unary("log", "The natural logarithm.")
sqrt = _unary("sqrt", "The square root.")
rsqrt = _unary("rsqrt", "1 / sqrt(x).")
sin = _unary("sin", "The sine.")
cos = _unary("cos", "The cosine.")
tanh = _unary("tanh", "The hyperbolic tangent.")
erf = _unary("erf", "The error function.")
sigmoid = _unary("sigmoid", "1 / (1 + exp(-x)).")
relu = _unary("relu", "max(x, 0).")
silu = _unary("silu", "x * sigmoid(x).")


@checked
def pow(a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
    """a to the b, also a ** b, of floats; where b is the number 2, 3 or 4 it is a product, of ints as well. Dims broadcast."""
    return a**b if isinstance(a, Tensor) else record("pow", a, b)


@checked
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x * Phi(x), with the error function, or with tanh where `approximate` is "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ProgramError(f"gelu: approximate={approximate!r} is neither 'none' nor 'tanh'", Location.of_caller())
    return record("gelu_tanh" if approximate == "tanh" else "gelu", x)


@checked
def clip(x: Tensor, min: Tensor | Scalar | None = None, max: Tensor | Scalar | None = None) -> Tensor:
    """x, but no less than `min` and no more than `max`; a NaN stays. Either may be left out."""
    if min is None and max is None:
        raise ProgramError("clip: neither min nor max is given; pass one", Location.of_caller())
    raised = x if min is None else record("maximum", x, min)
    return raised if max is None else record("minimum", raised, max)


@checked
def where(condition: Tensor, a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
    """a where the condition (bool) holds, else b. Dims broadcast."""
    return record("where", condition, a, b)


@checked
def astype(x: Tensor, dtype: DType) -> Tensor:
    """The same values in another dtype, rounded to nearest even. Raises ProgramError where that is none of hostweave's."""
    if not isinstance(dtype, DType):
        raise ProgramError(f"astype: {dtype!r} is no dtype; use hw.f32, hw.bf16 and the like", Location.of_caller())
    return record("astype", x, target=TensorType(dtype, x.type.dims))


@checked
def iota(x: Tensor, axis: Axis, dtype: DType = i32) -> Tensor:
    """0, 1, 2, ... along a dim of x: a vector of the dim's extent, of whole numbers of this dtype."""
    extent = x.type.shape[dim_of(x, axis, "iota", Location.of_caller())]
    return record("iota", target=TensorType(dtype, (Dim(extent),)), beside=x)


@checked
def copy(x: Tensor) -> Tensor:
    """The same values in memory of their own."""
    return record("copy", x)


# --- reductions -------------------------------------------------------------------------------------------------------


def dims_of(x: Tensor, axis: Axis | tuple[Axis, ...] | None, kind: str, location: Location) -> tuple[int, ...]:
    """The numbers of the dims that a reduction goes over, in order: all of them by default."""
    given = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted(dim_of(x, a, kind, location) for a in given))


def _reduction(kind: str, doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor:
        return record(kind, x, axis=dims_of(x, axis, kind, Location.of_caller()), keepdims=keepdims)

    function.__name__ = kind
    function.__doc__ = f"{doc} Over `axis`, an int, a dim name or a tuple of them; all dims by default. The dtype stays."
    return checked(function)


sum = _reduction("sum", "The sum.")
prod = _reduction("prod", "The product.")
max = _reduction("max", "The largest element.")
min = _reduction("min", "The smallest element.")
mean = _reduction("mean", "The mean, of floats.")


@checked
def argmax(x: Tensor, axis: Axis | None = None, keepdims: bool = False) -> Tensor:
    """The i64 index of the first largest element along one dim, or in the flattened tensor; a NaN counts as the largest."""
    location = Location.of_caller()
    if axis is not None:
        return record("argmax", x, axis=(dim_of(x, axis, "argmax", location),), keepdims=keepdims)
    flat = record("argmax", reshape(x, -1), axis=(0,))
    return reshape(flat, *(1 for _ in range(x.ndim))) if keepdims else flat


# --- shapes -----------------------------------------------------------------------------------------------------------


@checked
def expand_dims(x: Tensor, axis: int | tuple[int, ...]) -> Tensor:
    """New dims of one element at `axis` of the result."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    rank = x.ndim + len(axes)
    wrong = [a for a in axes if not -rank <= a < rank]
    if wrong:
        raise ProgramError(f"expand_dims: axis {wrong[0]} is out of range: the result has {rank} dims", Location.of_caller())
    return record("expand_dims", x, axis=tuple(sorted(a % rank for a in axes)))


@checked
def reshape(x: Tensor, *dims: int | str) -> Tensor:
    """The same elements in the same order. A dim is an int, a name, or an extent such as `M/8`; one may be -1, the rest."""
    location = Location.of_caller()
    known = [_extent(dim, "reshape", location) for dim in dims if dim != -1]
    rest = product(x.type.shape).divided_by(product(tuple(known))) if len(known) == len(dims) - 1 else Size()
    if rest is None or len(known) < len(dims) - 1:
        raise ProgramError(f"reshape: -1 cannot be told for {x.type} to {list(dims)}; write every dim", location)
    shape = tuple(rest if dim == -1 else Size.of(dim) for dim in dims)
    return record("reshape", x, target=TensorType(x.dtype, tuple(map(Dim, shape))))


@checked
def permute_dims(x: Tensor, axes: tuple[Axis, ...] | None = None) -> Tensor:
    """Dim i of the result is dim `axes[i]` of x; all dims reversed by default."""
    location = Location.of_caller()
    return record("permute_dims", x, axes=tuple(dim_of(x, a, "permute_dims", location) for a in axes or range(x.ndim)[::-1]))


@checked
def broadcast_to(x: Tensor, *dims: int | str) -> Tensor:
    """Dims aligned from the right; those of 1 and those that are missing repeat."""
    location = Location.of_caller()
    return record("broadcast_to", x, target=TensorType(x.dtype, tuple(Dim(_extent(dim, "broadcast_to", location)) for dim in dims)))


@checked
def concat(tensors: Sequence[Tensor], axis: Axis | None = 0) -> Tensor:
    """The tensors one after the other along a dim, in which alone they may differ; flattened where `axis` is None."""
    location = Location.of_caller()
    if isinstance(tensors, Tensor) or not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ProgramError(f"concat: {tensors!r} is not a list of tensors of this fusion; write hw.concat([a, b], axis=0)", location)
    if axis is None:
        tensors, axis = [reshape(tensor, -1) for tensor in tensors], 0
    return record("concat", *tensors, axis=dim_of(tensors[0], axis, "concat", location))


@checked
def collective_permute(x: Tensor, axis: Axis, sources: Sequence[int | None]) -> Tensor:
    """x with the blocks of a dim in other places: block i is block sources[i] of x, or zeros where that is None.

    The dim is cut into as many blocks as there are sources. Where as many ranks share it, one block each, this is a
    collective permute: each rank sends its block to at most one other. Raises ProgramError.
    """
    location = Location.of_caller()
    places = tuple(NO_SOURCE if source is None else int(source) for source in sources)
    return record("collective_permute", x, axis=dim_of(x, axis, "collective_permute", location), sources=places)


@checked
def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Scalar = 0) -> Tensor:
    """x with more elements of `value` around it. As in torch.nn.functional, `pad` is (before, after) of the last dim, then of the
    dim before it, and so on: (1, 2) makes rows longer by 3. Raises ProgramError.
    """
    location = Location.of_caller()
    if mode != "constant":
        raise ProgramError(f"pad: mode={mode!r} is not 'constant'; take other modes together by slices and hw.concat", location)
    if len(pad) % 2 or len(pad) > 2 * x.ndim or not all(isinstance(count, int) for count in pad):
        raise ProgramError(f"pad: {tuple(pad)} is not (before, after) of up to {x.ndim} dims of {x.type}, the last one first", location)
    if not fits(value, x.dtype):
        raise ProgramError(f"pad: {value!r} is not a value of {x.type}; use hw.astype on the tensor", location)
    rest = (0,) * (x.ndim - len(pad) // 2)
    low, high = (rest + tuple(pad[i::2])[::-1] for i in (0, 1))
    return record("pad", x, low=low, high=high, value=float(value)) if any(pad) else x


def _extent(dim: int | str, kind: str, location: Location) -> Size:
    try:
        extent = Size.of(dim)
    except ValueError as error:
        raise ProgramError(f"{kind}: {error}", location) from None
    if extent.coefficient < 1:
        raise ProgramError(f"{kind}: a dim has at least one element, not {dim}", location)
    return extent


# --- sharding ---------------------------------------------------------------------------------------------------------


@checked
def reshard(x: Tensor, *dims: int | str, mesh: Mesh | None = None) -> Tensor:
    """States the sharding of a tensor, one dim each: `hw.reshard(x, "M@x", "K")`. How it comes about is the compiler's work.

    `mesh` moves it to another mesh, to the ranks of which the axes then refer; without it the tensor stays where it is.
    """
    location = Location.of_caller()
    if not isinstance(mesh, Mesh | None):
        raise ProgramError(f"reshard: mesh={mesh!r} is no hw.Mesh; write it like hw.Mesh(x=4).ranks([0, 1])", location)
    try:
        stated = TensorType(x.dtype, tuple(map(Dim.of, dims)), mesh=mesh or x.type.mesh)
    except ValueError as error:
        raise ProgramError(f"reshard: {error}", location) from None
    if stated.shape != x.type.shape:
        raise ProgramError(f"reshard: {x.type} cannot become {stated}; repeat its dims, only the mesh axes may differ", location)
    return record("reshard", x, target=stated)
