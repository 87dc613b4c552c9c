"""Public functions on tensors: matmuls, casts, constants, changes of shape, resharding and others. Most names are from the Python array API
standard or from torch.

Simple pointwise ops and reductions are generated from the op table.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, record, stated
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ir import Scalar
from hostweave.fusion_ir.ops import fits
from hostweave.fusion_ir.ops.pointwise import *  # noqa: F403
from hostweave.fusion_ir.ops.reductions import *  # noqa: F403
from hostweave.fusion_ir.ops.resharding import NO_SOURCE
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size, product
from hostweave.types.tensor import INTS, Dim, DType, TensorType, bf16, bool_, f32, i32

SizeLike = int | str | Size


@checked
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product, also written `a @ b`: [..., M, K] x [..., K, N] -> [..., M, N]. Leading dims broadcast.

    Both operands and the result have the same dtype: f16, bf16, f32, f64 or an integer dtype. 16-bit floats are summed in f32. Sums of ints
    wrap around. A matmul of ints does not use cuBLASLt, and is therefore much slower than a matmul of floats.

    If dim K is sharded, the result is a partial sum. The compiler then inserts an all-reduce, or a reduce-scatter if a `reshard` shards the
    result.

    Raises ProgramError for other dtypes, or if an operand has less than 2 dims, inner dims differ, or leading dims do not broadcast.

    Example: `x: bf16[M@dp, K]` and `w: bf16[K, N@tp]` give `bf16[M@dp, N@tp]`, without communication.
    """
    return record("matmul", a, b)


@checked
def scaled_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: DType = bf16) -> Tensor:
    """Matrix product of 8-bit floats with scales, as in torch._scaled_mm: [M, K] x [K, N] -> [M, N]. `out_dtype` is bf16, f16 or f32.

    `a` and `b` are f8e4m3 or f8e5m2. Each f32 scale multiplies one block of its operand. The sums have at most the precision of f32.
    The shapes of the scales determine the blocks:

    | scales per | scale_a | scale_b |
    |---|---|---|
    | tensor | [1, 1], or no dims | [1, 1], or no dims |
    | row and column | [M, 1] | [1, N] |
    | block | [M, K/128] or [M/128, K/128] | [K/128, N] or [K/128, N/128] |

    Shardings propagate as for `matmul`; a scale is sharded like its operand. The operands should be contiguous along K, as in
    `scaled_matmul(a, w.T, ...)` with `w: [N, K]`. Other operands are copied first. If cuBLASLt does not support the matmul, slower ops
    compute it, and `Program.explain` says so. If K or N is symbolic, its local size must be a multiple of 16.

    Raises ProgramError for other dtypes and shapes.

    Example: `a, s = hw.quantize(x, "row")`, then `hw.scaled_matmul(a, w.T, s, t.T)` with `w: f8e4m3[N, K]` and `t: f32[N, 1]`.
    """
    scale_a, scale_b = (
        reshape(scale, (1, 1)) if scale.ndim < 2 and product(scale.type.shape) == Size() else scale for scale in (scale_a, scale_b)
    )
    dims = tuple(Dim(type.shape[dim]) if len(type.shape) == 2 else Dim(Size()) for dim, type in enumerate((a.type, b.type)))
    return record("scaled_matmul", a, b, scale_a, scale_b, target=TensorType(out_dtype, dims))


# --- pointwise --------------------------------------------------------------------------------------------------------


@checked
def pow(a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
    """Power of floats: a to the power of b, also written `a ** b`. Dims broadcast.

    If the exponent is the Python int 1, 2, 3 or 4, the power is computed by multiplication. `a` may then be a tensor of ints.

    Example: `hw.pow(x, 2)`, `x ** 0.5`.
    """
    return a**b if isinstance(a, Tensor) else record("pow", a, b)


@checked
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU: x * Phi(x), where Phi is the distribution function of the standard normal distribution. x is a tensor of floats. The result has
    the shape and dtype of x.

    `approximate` is "none" (exact, by the error function) or "tanh": 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Both formulas are
    from torch.nn.functional (Hendrycks and Gimpel, "Gaussian error linear units", 2016).

    Raises ProgramError for another value of `approximate`.

    Example: `hw.gelu(x, approximate="tanh")`.
    """
    if approximate not in ("none", "tanh"):
        raise ProgramError.here(f"gelu: approximate={approximate!r} is neither 'none' nor 'tanh'")
    return record("gelu_tanh" if approximate == "tanh" else "gelu", x)


@checked
def clip(x: Tensor, min: Tensor | Scalar | None = None, max: Tensor | Scalar | None = None) -> Tensor:
    """Limits x to the range from `min` to `max`. Each bound is a number, or a tensor that broadcasts against x. One bound may be omitted.
    NaN stays NaN.

    Raises ProgramError if both bounds are omitted.

    Example: `hw.clip(x, 0, 1)`, `hw.clip(x, max=6)`.
    """
    if min is None and max is None:
        raise ProgramError.here("clip: neither min nor max is given; pass one")
    raised = x if min is None else record("maximum", x, min)
    return raised if max is None else record("minimum", raised, max)


@checked
def where(condition: Tensor, a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
    """Selects elements of `a` where the bool `condition` is true, and elements of `b` elsewhere. Dims broadcast; a and b have the same
    dtype. At most one of a and b is a Python number, unless both are bools.

    Raises ProgramError for two numbers that are not both bools.

    Example: `hw.where(x > 0, x, 0.01 * x)`.
    """
    if isinstance(a, int | float) and isinstance(b, int | float) and not (type(a) is type(b) is bool):
        dtype = "f32" if isinstance(a, float) or isinstance(b, float) else "i32"
        raise ProgramError.here(f"where: {a!r} and {b!r} are numbers without a dtype; write one as hw.full((), {b!r}, hw.{dtype})")
    return record("where", condition, a, b)


@checked
def astype(x: Tensor, dtype: DType) -> Tensor:
    """Casts x to another dtype. Casts to floats round to nearest, ties to even, as in PyTorch. Casts from floats to ints round towards
    zero.

    Returns x itself if x already has the dtype.

    A cast from int to int keeps the low bits. A cast from float to int first converts to i64, or to u64 from 2^63 on, and keeps the low
    bits. So -1.0 becomes 4294967295 in u32. NaN and floats outside the ranges of i64 and u64 become -2^63 in i64, 2^63 in u64, and 0 in
    smaller int dtypes.

    A value too large for f8e4m3 becomes 448 or -448. A value too large for another float dtype becomes infinite.

    Raises ProgramError if `dtype` is not a hostweave dtype.

    Example: `hw.astype(x, hw.f32)`.
    """
    _expect_dtype("astype", dtype)
    return x if x.dtype == dtype else record("astype", x, target=TensorType(dtype, x.type.dims))


@checked
def iota(x: Tensor, axis: Axis, dtype: DType = i32) -> Tensor:
    """Vector of the indices of x along `axis`: 0, 1, 2, ... Raises ProgramError if `dtype` is not an integer dtype."""
    size = x.type.shape[dim_of(x, axis, "iota")]
    return record("iota", target=TensorType(dtype, (Dim(size),)), beside=x)


# --- constants --------------------------------------------------------------------------------------------------------


@checked
def zeros(shape: SizeLike | Sequence[SizeLike], dtype: DType = f32) -> Tensor:
    """A tensor of zeros. `shape` is a size, or a list of sizes. A size is an int, or text such as "M".

    The tensor is replicated; `hw.reshard` shards it.

    Raises ProgramError outside of a traced function, for a name that no dim of an input has, for a size below 1, or if `dtype` is not a
    hostweave dtype.

    Example: `hw.concat([hw.zeros((1, "N")), x], axis=0)` with `x: f32[M, N]`.
    """
    return _constant("zeros", shape, 0, dtype)


@checked
def ones(shape: SizeLike | Sequence[SizeLike], dtype: DType = f32) -> Tensor:
    """A tensor of ones. Shape, dtype and errors are as in `hw.zeros`.

    Example: `hw.ones(("M", "N"), hw.bf16)`, `hw.ones("M")`.
    """
    return _constant("ones", shape, 1, dtype)


@checked
def full(shape: SizeLike | Sequence[SizeLike], fill_value: Scalar, dtype: DType = f32) -> Tensor:
    """A tensor whose elements all equal `fill_value`, a Python number. Shape, dtype and errors are as in `hw.zeros`.

    A floating `dtype` rounds `fill_value`. Also raises ProgramError if `fill_value` is not a number, or if an int or bool `dtype` cannot
    represent the value.

    Example: `hw.full(("M", "N"), -float("inf"))`.
    """
    return _constant("full", shape, fill_value, dtype)


@checked
def arange(start: SizeLike, stop: SizeLike | None = None, step: int = 1, dtype: DType = i32) -> Tensor:
    """Vector of the numbers start, start + step, ... before `stop`. A single argument is `stop`; `start` is then 0.

    `start` and `step` are ints. `stop` may be a size as text, such as "M". Then `step` must be positive, and must divide `stop - start` in
    each call. If `dtype` is floating, the numbers are computed in i32, and then cast.

    Raises ProgramError for other bounds or steps, for dtype bool, and in the cases of `hw.zeros`. If `stop` is an int, an empty range and
    numbers that the integer dtype lacks are errors too.

    Example: `hw.arange("M")` with `x: f32[M, N]` is the vector of the row indices of x.
    """
    if stop is None:
        start, stop = 0, start
    if type(start) is not int or type(step) is not int or step == 0:
        why = f"start={start!r}, step={step!r}: both must be ints, and step must not be 0"
        raise ProgramError.here(f"arange: {why}; for a start x, write hw.arange('M') + x")
    _expect_dtype("arange", dtype)
    if dtype == bool_:
        raise ProgramError.here("arange: dtype bool is not supported; use an integer or floating dtype")
    end = Size(stop) if type(stop) is int else _size_of(stop, "arange")
    known = range(start, int(end), step) if end.is_int else range(0)
    count = Size(len(known)) if end.is_int else (end - Size(start)) // step if step > 0 else None
    if count is None or count == Size(0):
        what = "the range is empty" if count else "the number of elements cannot be written as a size; count up from 0 and compute"
        raise ProgramError.here(f"arange: from {start} to before {end} by {step}, {what}")
    counted = dtype if dtype.kind in INTS else i32
    if wrong := [number for number in (*known[:1], *known[-1:]) if not fits(number, counted)]:
        raise ProgramError.here(f"arange: {counted} has no {wrong[0]}; use a wider integer dtype")
    numbers = record("iota", target=TensorType(counted, (Dim(count),)), written="arange")
    numbers = numbers if step == 1 else numbers * step
    numbers = numbers if start == 0 else numbers + start
    return numbers if counted == dtype else astype(numbers, dtype)


def _constant(name: str, shape: SizeLike | Sequence[SizeLike], value: Scalar, dtype: DType) -> Tensor:
    _expect_dtype(name, dtype)
    if isinstance(value, Tensor) or not isinstance(value, int | float):
        raise ProgramError.here(f"{name}: {value!r} is not a Python number; use hw.broadcast_to on a tensor")
    if dtype.kind in (*INTS, "bool"):
        bits = 1 if dtype == bool_ else 8 * dtype.itemsize
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.kind == "int" else (0, (1 << bits) - 1)
        if value != value or value in (float("inf"), -float("inf")) or int(value) != value or not least <= value <= most:
            raise ProgramError.here(f"{name}: {dtype} has no {value!r}; give an int from {least} to {most}, or a floating dtype")
    sizes = (shape,) if isinstance(shape, int | str | Size) else shape
    type = TensorType(dtype, tuple(Dim(_size_of(dim, name)) for dim in sizes))
    return record("fill", target=type, written=name, value=value + 0)


def _expect_dtype(name: str, dtype: object) -> None:
    if not isinstance(dtype, DType):
        raise ProgramError.here(f"{name}: {dtype!r} is not a dtype; use hw.f32, hw.bf16 and the like")


# --- reductions -------------------------------------------------------------------------------------------------------


@checked
def argmax(x: Tensor, axis: Axis | None = None, keepdims: bool = False) -> Tensor:
    """Index (i64) of the largest element along one dim, or in the flattened tensor if `axis` is None. Returns the first index if several
    elements are the largest. A NaN counts as the largest.

    A sharded reduced dim is gathered first. With `keepdims`, each reduced dim stays as a dim of one element.

    Example: `x: bf16[M, V]` gives `i64[M]` by `hw.argmax(x, axis=-1)`.
    """
    if axis is not None:
        return record("argmax", x, axis=(dim_of(x, axis, "argmax"),), keepdims=keepdims)
    flat = record("argmax", reshape(x, -1), axis=(0,))
    return reshape(flat, *(1 for _ in range(x.ndim))) if keepdims else flat


# --- shapes -----------------------------------------------------------------------------------------------------------


@checked
def expand_dims(x: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Inserts dims of one element. `axis` gives the positions of these dims in the result.

    Raises ProgramError for a position that is out of range or named twice.

    Example: `x: f32[M, N]` becomes `f32[M, 1, N]` by `hw.expand_dims(x, 1)`, also written `x[:, None]`.
    """
    axes = (axis,) if isinstance(axis, int) else axis
    rank = x.ndim + len(axes)
    wrong = [a for a in axes if not -rank <= a < rank]
    if wrong:
        raise ProgramError.here(f"expand_dims: axis {wrong[0]} is out of range: the result has {rank} dims")
    return record("expand_dims", x, axis=tuple(sorted(a % rank for a in axes)))


@checked
def reshape(x: Tensor, *dims: SizeLike | Sequence[SizeLike]) -> Tensor:
    """Reshapes x: the same elements in row-major order, with new dims.

    Each dim is an int, a name, or a size such as `M/8`. The dims may also be one tuple or list. One dim may be -1, and is then inferred.

    The result is a view if the memory layout allows a view. A dim keeps its sharding if the dim does not change, or if it is the outermost
    of the dims that are merged or split. Other sharded dims are gathered, unless the blocks of the ranks are also blocks of the result:
    `[8@y,x]` becomes `[2@y, 4@x]`.

    Raises ProgramError if a dim is invalid, if the numbers of elements differ, or if -1 cannot be inferred.

    Example: `x: bf16[M, 1024]` becomes `bf16[M, 8, 128]` by `hw.reshape(x, "M", 8, 128)`.
    """
    sizes, inferred = [stated(Size.of, dim, "reshape") for dim in _listed(dims)], Size(-1)
    known = [_size_of(size, "reshape") for size in sizes if size != inferred]
    rest = product(x.type.shape).divided_by(product(tuple(known))) if len(known) == len(sizes) - 1 else Size()
    if rest is None or len(known) < len(sizes) - 1:
        raise ProgramError.here(f"reshape: -1 cannot be inferred for {x.type} to {list(_listed(dims))}; write every dim")
    return record("reshape", x, target=TensorType(x.dtype, tuple(Dim(rest if size == inferred else size) for size in sizes)))


@checked
def permute_dims(x: Tensor, axes: tuple[Axis, ...] | None = None) -> Tensor:
    """Permutes the dims: dim i of the result is dim `axes[i]` of x. Without `axes`, the order of the dims is reversed. The result is a
    view.

    Raises ProgramError if `axes` is not a permutation of the dims.

    Example: `x: f32[S, B, E]` becomes `f32[B, S, E]` by `hw.permute_dims(x, (1, 0, 2))`.
    """
    return record("permute_dims", x, axes=tuple(dim_of(x, a, "permute_dims") for a in axes or range(x.ndim)[::-1]))


@checked
def transpose(x: Tensor, dim0: Axis, dim1: Axis) -> Tensor:
    """Swaps two dims, as in torch. The result is a view.

    Raises ProgramError if x lacks one of the two dims.

    Example: `x: f32[S, B, E]` becomes `f32[B, S, E]` by `hw.transpose(x, 0, 1)`.
    """
    one, other = dim_of(x, dim0, "transpose"), dim_of(x, dim1, "transpose")
    swapped = {one: other, other: one}
    return permute_dims(x, tuple(swapped.get(dim, dim) for dim in range(x.ndim)))


@checked
def broadcast_to(x: Tensor, *dims: SizeLike | Sequence[SizeLike]) -> Tensor:
    """Broadcasts x to the given dims. Dims are aligned from the right; dims of one element and missing dims are repeated.

    If a generated kernel reads the result, the broadcast is free. Otherwise a kernel copies the elements.

    Raises ProgramError if x does not broadcast to the dims.

    Example: with an input of `f32[M, N]`, `b: f32[N]` becomes `f32[M, N]` by `hw.broadcast_to(b, "M", "N")`.
    """
    shape = tuple(Dim(_size_of(dim, "broadcast_to")) for dim in _listed(dims))
    return record("broadcast_to", x, target=TensorType(x.dtype, shape))


@checked
def concat(tensors: Sequence[Tensor], axis: Axis | None = 0) -> Tensor:
    """Joins tensors along `axis`. All dims except `axis`, and the dtypes, must be equal. With `axis=None` the tensors are flattened first.

    If dim `axis` is sharded, the dim is gathered first. If possible, operands are computed directly in the memory of the result.

    Raises ProgramError for an empty list, or if dtypes, or dims except `axis`, differ.

    Example: `hw.concat([a, b], axis=0)` with `a: f32[M, K]` and `b: f32[N, K]` gives `f32[(M + N), K]`.
    """
    if isinstance(tensors, Tensor) or not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ProgramError.here(f"concat: {tensors!r} is not a list of tensors of this fusion; write hw.concat([a, b], axis=0)")
    if axis is None:
        tensors, axis = [reshape(tensor, -1) for tensor in tensors], 0
    return record("concat", *tensors, axis=dim_of(tensors[0], axis, "concat"))


@checked
def collective_permute(x: Tensor, axis: Axis, sources: Sequence[int | None]) -> Tensor:
    """Reorders the blocks of a dim: block i of the result is block `sources[i]` of x, or zeros if `sources[i]` is None.

    The dim is divided into as many equal blocks as there are sources.

    Raises ProgramError if `sources` names a block twice or a missing block, or if the number of sources does not divide the dim.

    Example: on 4 ranks, `hw.collective_permute(x, "M", [3, 0, 1, 2])` sends each shard to the next rank of a ring.
    """
    if NO_SOURCE in sources:
        raise ProgramError.here(f"collective_permute: sources={sources}: {NO_SOURCE} is not a block; write None for a block of zeros")
    indices = tuple(NO_SOURCE if source is None else index(source) for source in sources)
    return record("collective_permute", x, axis=dim_of(x, axis, "collective_permute"), sources=indices)


@checked
def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Scalar = 0) -> Tensor:
    """Pads dims with elements of `value`, before and after.

    `pad` is as in torch.nn.functional: the numbers of elements (before, after) of the last dim, then of the second-to-last dim, and so on.
    A sharded dim is gathered before it is padded. `mode` must be "constant".

    Raises ProgramError for another mode, a negative width, a wrong number of widths, or a value that the dtype cannot represent.

    Example: `hw.pad(x, (1, 2))` with `x: f32[M, N]` gives `f32[M, (N + 3)]`.
    """
    if mode != "constant":
        raise ProgramError.here(f"pad: mode={mode!r} is not 'constant'; build other modes from slices and hw.concat")
    if len(pad) % 2 or len(pad) > 2 * x.ndim or not all(isinstance(count, int) for count in pad):
        why = f"not a flat list of two ints per dim, for up to {x.ndim} dims of {x.type}"
        raise ProgramError.here(f"pad: {tuple(pad)} is {why}; write (before, after) of the last dim first, like (2, 3, 0, 1)")
    if x.dtype.kind == "bool" and value in (0, 1):
        value = bool(value)
    if not fits(value, x.dtype):
        raise ProgramError.here(f"pad: {value!r} is not a value of {x.type}; use hw.astype or another number")
    rest = (0,) * (x.ndim - len(pad) // 2)
    low, high = (rest + tuple(pad[i::2])[::-1] for i in (0, 1))
    exact = float(value) if x.dtype.kind == "float" else int(value)
    return record("pad", x, low=low, high=high, value=exact) if any(pad) else x


def _listed(dims: tuple[SizeLike | Sequence[SizeLike], ...]) -> tuple[Any, ...]:
    """Returns the dims as one tuple. `dims` has the separate dims, or one tuple or list of dims."""
    return tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims


def _size_of(dim: SizeLike, kind: str) -> Size:
    size = stated(Size.of, dim, kind)
    if size.coefficient < 1:
        raise ProgramError.here(f"{kind}: a dim has at least one element, not {dim}")
    return size


# --- sharding ---------------------------------------------------------------------------------------------------------


@checked
def reshard(x: Tensor, *dims: SizeLike | Sequence[SizeLike], mesh: Mesh | None = None) -> Tensor:
    """Changes the sharding of a tensor. Write the dims of x, each with the mesh axes that split the dim in the result. The compiler inserts
    the communication.

    | from | to | communication |
    |---|---|---|
    | sharded | replicated | all-gather |
    | sharded along one dim | sharded along another | all-to-all |
    | partial | replicated | all-reduce |
    | partial | sharded | reduce-scatter |
    | replicated | sharded | none, a local slice |

    `mesh` moves the tensor to another mesh. The dims then name axes of `mesh`.

    Raises ProgramError for dims that are not the dims of x, and for a sharding that the mesh does not allow.

    Example: `hw.reshard(x, "M@x", "K")`; `hw.reshard(h, "M@dp", "N", mesh=mesh.ranks([4, 5, 6, 7], dp=4))`.
    """
    if not isinstance(mesh, Mesh | None):
        raise ProgramError.here(f"reshard: mesh={mesh!r} is not an hw.Mesh; write it like hw.Mesh(x=4).ranks([0, 1])")
    given = tuple(stated(Dim.of, dim, "reshard") for dim in _listed(dims))
    wanted = TensorType(x.dtype, given, mesh=mesh or x.type.mesh)
    if wanted.shape != x.type.shape:
        remedy = "write the same dims: only the mesh axes may differ"
        if len(given) == x.ndim:
            at = next(at for at, dim in enumerate(given) if dim.size != x.type.shape[at])
            remedy = f"dim {at} is {x.type.shape[at]} and not {given[at].size}: write {str(replace(given[at], size=x.type.shape[at]))!r}"
        raise ProgramError.here(f"reshard: {x.type} cannot become {wanted}; {remedy}")
    return record("reshard", x, target=wanted)
