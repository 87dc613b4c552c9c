"""The table of ops of the fusion IR, one entry each: operands, result type, index map, and computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.fusion_ir import index_map as maps
from hostweave.fusion_ir.index_map import ONE, IndexMap
from hostweave.fusion_ir.ir import Attribute, MeshAxes, Op, Scalar
from hostweave.fusion_ir.philox import philox
from hostweave.types.mesh import Mesh
from hostweave.types.routes import Transfer
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, DType, TensorType, bool_, f32, i64, u32

Types = Sequence[TensorType]


NO_SOURCE = -1  # of a collective permute: zeros


class Mismatch(Exception):
    """Operands that do not go together; the caller adds the op and its place."""


@dataclass(frozen=True)
class OpDef:
    """One kind of op.

    `infer(operand types, op)` gives the result's dtype and global shape, or raises Mismatch. `map(operand types, op)`
    gives the indices. `numpy(np, *arrays, **attributes)` computes it on global arrays; where the result's shape or dtype
    is part of what the user states (`target`) it also gets `shape` or `dtype`, or both where that is `type`; a call gets
    `run`, which computes its block.
    `expression` is C++ for one element over operands {0}, {1}, ... of the compute type T (float or double, or the
    integer itself); `combine` says how two elements of a reduction become one.
    """

    arity: int | None  # None: one or more
    infer: Callable[[Types, Op], TensorType]
    map: Callable[[Types, Op], IndexMap]
    numpy: Callable[..., Any]
    attributes: Mapping[str, type] = field(default_factory=dict)
    target: str = ""  # shape, dtype, type (both) or sharding: what of the result's type the user states
    expression: str = ""
    combine: str = ""
    locates: bool = False  # a reduction that gives where an element is: of one element not the element
    is_view: bool = False  # pointer arithmetic on what a rank holds, no call
    is_reshard_step: bool = False  # one communication or one local slice: its attributes are all that it does to a layout


# --- what an op gives -------------------------------------------------------------------------------------------------


def _same_dtype(types: Types) -> DType:
    for other in types[1:]:
        if other.dtype != types[0].dtype:
            raise Mismatch(f"dtypes differ: {types[0]} and {other}; use hw.astype on one of them")
    return types[0].dtype


def _require(type: TensorType, *kinds: str) -> None:
    if type.dtype.kind not in kinds:
        raise Mismatch(f"not defined for {type.dtype}; use hw.astype to a dtype that is {' or '.join(kinds)}")


def _broadcast(types: Types) -> tuple[Dim, ...]:
    rank = max(len(type.dims) for type in types)
    dims: list[Dim] = []
    for i in range(-rank, 0):
        extents = {type.shape[i] for type in types if len(type.dims) >= -i} - {ONE}
        if len(extents) > 1:
            raise Mismatch(f"shapes do not broadcast: {' and '.join(map(str, types))} differ in dim {i}; {_aligned(types)}")
        dims.append(Dim(extents.pop() if extents else ONE))
    return tuple(dims)


def _aligned(types: Types) -> str:
    """How operands that do not broadcast might: turned, or with a dim of 1 at the end."""
    a, b = (type.shape for type in sorted(types[-2:], key=lambda type: -len(type.dims)))
    if len(a) == len(b) == 2 and a == b[::-1]:
        return "transpose one of them, as in x + y.T"
    if len(b) == 1 and len(a) == 2 and a[0] == b[0]:
        return "dims are aligned from the right: give the smaller one a dim of 1 at its end, as in y[:, None]"
    return "dims are aligned from the right: make them equal or 1, as with x[:, None]"


def _arithmetic(*kinds: str) -> Callable[[Types, Op], TensorType]:
    def infer(types: Types, op: Op) -> TensorType:
        dtype = _same_dtype(types)
        _require(types[0], *kinds)
        return TensorType(dtype, _broadcast(types))

    return infer


_floats, _numbers, _signed = _arithmetic("float"), _arithmetic("float", "int", "uint"), _arithmetic("float", "int")
_bools = _arithmetic("bool")


def _comparison(types: Types, op: Op) -> TensorType:
    _same_dtype(types)
    return TensorType(bool_, _broadcast(types))


def _where(types: Types, op: Op) -> TensorType:
    if types[0].dtype != bool_:
        raise Mismatch(f"the condition must be bool, not {types[0]}; compare it first")
    return TensorType(_same_dtype(types[1:]), _broadcast(types))


def _matmul(types: Types, op: Op) -> TensorType:
    a, b = types
    if why := why_no_product(_same_dtype(types)):
        raise Mismatch(f"{why}; use hw.astype on both")
    for operand in types:
        if len(operand.dims) < 2:
            raise Mismatch(f"rank mismatch: {operand} has {len(operand.dims)} dims, at least 2 are needed; use x[None] or x[:, None]")
    if a.shape[-1] != b.shape[-2]:
        raise Mismatch(f"inner dims differ: {a} x {b}; {_transposed(a, b)}")
    batches = [TensorType(t.dtype, t.dims[:-2]) for t in types]
    try:
        batch = _broadcast(batches) if any(t.dims for t in batches) else ()
    except Mismatch:
        raise Mismatch(f"batch dims do not broadcast: {a} x {b}") from None
    dtype = op.result.type.dtype if widens(a.dtype, op.result.type.dtype) else a.dtype
    return TensorType(dtype, (*batch, Dim(a.shape[-2]), Dim(b.shape[-1])))


def _transposed(a: TensorType, b: TensorType) -> str:
    """Which operand of a matmul to turn so that the inner dims are the same."""
    if a.shape[-1] == b.shape[-1]:
        return "transpose the second one: " + ("hw.matmul(a, b.T)" if len(b.dims) == 2 else "hw.permute_dims(b, axes)")
    if a.shape[-2] == b.shape[-2]:
        return "transpose the first one: " + ("hw.matmul(a.T, b)" if len(a.dims) == 2 else "hw.permute_dims(a, axes)")
    return "the last dim of the first is the one before the last of the second: transpose or reshape one of them"


def why_no_product(dtype: DType) -> str:
    """Why no matmul is of this dtype; nothing where one is."""
    if dtype.kind == "float" and dtype.itemsize > 1:
        return ""
    return f"cuBLASLt has no product of {dtype} by {dtype} that gives {dtype}, only of f16, bf16, f32 and f64"


def widens(operands: DType, result: DType) -> bool:
    """Whether a matmul may give its sums unrounded: it adds products of 16-bit floats up in f32."""
    return result == f32 and operands.name in ("f16", "bf16")


def axes_of(op: Op, name: str = "axis") -> tuple[int, ...]:
    value = op.attribute(name)
    assert isinstance(value, tuple)
    return value


def _axes(op: Op, rank: int) -> tuple[int, ...]:
    axes = axes_of(op)
    if any(not 0 <= axis < rank for axis in axes):
        raise Mismatch(f"axis={axes} is out of range; dims go from 0 to {rank - 1}")
    if len(set(axes)) != len(axes):
        raise Mismatch(f"axis={axes} names a dim twice; name it once")
    return axes


def _reduction(*kinds: str) -> Callable[[Types, Op], TensorType]:
    def infer(types: Types, op: Op) -> TensorType:
        (x,) = types
        _require(x, *kinds)
        axes = _axes(op, len(x.dims))
        if op.kind in WITHOUT_IDENTITY and Size(0) in [x.shape[axis] for axis in axes]:
            raise Mismatch(f"{x} has no elements along axis={axes}, of which there is no {op.kind}; reduce a dim that has some")
        if op.attribute("keepdims"):
            return TensorType(x.dtype, tuple(Dim(ONE if i in axes else e) for i, e in enumerate(x.shape)))
        return TensorType(x.dtype, tuple(Dim(e) for i, e in enumerate(x.shape) if i not in axes))

    return infer


def _argmax(types: Types, op: Op) -> TensorType:
    if len(axes_of(op)) != 1:
        raise Mismatch(f"axis={axes_of(op)} is not one dim; reshape them to one first")
    return TensorType(i64, _reduction("float", "int", "uint")(types, op).dims)


def _iota(types: Types, op: Op) -> TensorType:
    _require(op.result.type, "int", "uint")
    if len(op.result.type.dims) != 1:
        raise Mismatch(f"{op.result.type} is not a vector; use hw.expand_dims on one")
    return _unsharded(op.result.type)


def _philox(types: Types, op: Op) -> TensorType:
    if _same_dtype(types) != u32:
        raise Mismatch(f"counters and keys are u32, not {types[0]}; use hw.astype")
    return TensorType(f32, _broadcast(types))


def _unsharded(type: TensorType) -> TensorType:
    return TensorType(type.dtype, tuple(Dim(extent) for extent in type.shape))


def _same(types: Types, op: Op) -> TensorType:
    return _unsharded(types[0])


def _cast(types: Types, op: Op) -> TensorType:
    return TensorType(op.result.type.dtype, tuple(Dim(extent) for extent in types[0].shape))


def _reshape(types: Types, op: Op) -> TensorType:
    if product(types[0].shape) != product(op.result.type.shape):
        raise Mismatch(f"{types[0]} does not have the elements of {_shape_text(op.result.type.shape)}; make the products of the dims equal")
    return TensorType(types[0].dtype, tuple(Dim(extent) for extent in op.result.type.shape))


def _broadcast_to(types: Types, op: Op) -> TensorType:
    have, want = types[0].shape, op.result.type.shape
    tail = want[len(want) - len(have) :]
    if len(have) > len(want) or any(h != w and h != ONE for h, w in zip(have, tail, strict=True)):
        raise Mismatch(f"{types[0]} does not broadcast to {_shape_text(want)}; dims are aligned from the right and must be equal or 1")
    return TensorType(types[0].dtype, tuple(Dim(extent) for extent in want))


def _expand_dims(types: Types, op: Op) -> TensorType:
    axes = _axes(op, len(types[0].dims) + len(axes_of(op)))
    old = iter(types[0].shape)
    return TensorType(types[0].dtype, tuple(Dim(ONE if i in axes else next(old)) for i in range(len(types[0].dims) + len(axes))))


def _transpose(types: Types, op: Op) -> TensorType:
    axes = axes_of(op, "axes")
    if sorted(axes) != list(range(len(types[0].dims))):
        raise Mismatch(f"axes={axes} is no order of the {len(types[0].dims)} dims of {types[0]}; name each once")
    return TensorType(types[0].dtype, tuple(Dim(types[0].shape[i]) for i in axes))


def _int_of(op: Op, name: str) -> int:
    value = op.attribute(name)
    assert isinstance(value, int)
    return value


def _one_axis(op: Op, x: TensorType) -> int:
    axis = _int_of(op, "axis")
    if not 0 <= axis < len(x.dims):
        raise Mismatch(f"axis={axis} is out of range; {x} has dims 0 to {len(x.dims) - 1}")
    return axis


def _select(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, index = _one_axis(op, x), _int_of(op, "index")
    if x.shape[axis].is_int and not 0 <= index < int(x.shape[axis]):
        raise Mismatch(f"index {index} of dim {axis} of {x} is out of range; it goes from 0 to {int(x.shape[axis]) - 1}")
    return TensorType(x.dtype, tuple(Dim(extent) for i, extent in enumerate(x.shape) if i != axis))


def _slice(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, start, step = _one_axis(op, x), _int_of(op, "start"), _int_of(op, "step")
    if len(op.result.type.dims) != len(x.dims):
        raise Mismatch(f"{op.result.type} does not have the {len(x.dims)} dims of {x}; use select to drop one")
    taken, whole = op.result.type.shape[axis], x.shape[axis]
    if step < 1:
        raise Mismatch(f"step={step} is not at least 1")
    if whole.is_int and taken.is_int and not 0 <= start <= start + (int(taken) - 1) * step < int(whole):
        raise Mismatch(f"{taken} from {start} by {step} are outside of dim {axis} of {x}; it goes from 0 to {int(whole) - 1}")
    return TensorType(x.dtype, tuple(Dim(taken if i == axis else extent) for i, extent in enumerate(x.shape)))


def _concat(types: Types, op: Op) -> TensorType:
    first, dtype = types[0], _same_dtype(types)
    axis = _one_axis(op, first)
    for other in types[1:]:
        if len(other.dims) != len(first.dims):
            raise Mismatch(f"{first} and {other} differ in their number of dims; use hw.expand_dims or hw.reshape")
        for i, (have, want) in enumerate(zip(other.shape, first.shape, strict=True)):
            if i != axis and have != want:
                raise Mismatch(f"{first} and {other} differ in dim {i}; only dim {axis}, along which they are joined, may differ")
    extent = Size(0)
    for type in types:
        extent = extent + type.shape[axis]
    return TensorType(dtype, tuple(Dim(extent if i == axis else e) for i, e in enumerate(first.shape)))


def _pad(types: Types, op: Op) -> TensorType:
    (x,) = types
    low, high = axes_of(op, "low"), axes_of(op, "high")
    if not len(low) == len(high) == len(x.dims):
        raise Mismatch(f"{len(low)} and {len(high)} widths for the {len(x.dims)} dims of {x}; give one a dim")
    if min((*low, *high), default=0) < 0:
        raise Mismatch(f"widths {low} and {high} are not all at least 0; use a slice to take less")
    return TensorType(x.dtype, tuple(Dim(extent + a + b) for extent, a, b in zip(x.shape, low, high, strict=True)))


def _collective_permute(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, sources = _one_axis(op, x), axes_of(op, "sources")
    named = [source for source in sources if source != NO_SOURCE]
    if not sources or any(not 0 <= source < len(sources) for source in named):
        raise Mismatch(f"sources={sources}: each is one of the {len(sources)} blocks, from 0 on, or {NO_SOURCE} for zeros")
    if len(set(named)) < len(named):
        raise Mismatch(f"sources={sources}: a block goes to one place at most; use hw.concat to repeat one")
    if x.shape[axis].is_int and int(x.shape[axis]) % len(sources):
        raise Mismatch(f"{len(sources)} blocks do not divide dim {axis} of {x}; give as many sources as divide it")
    return _unsharded(x)


def _reshard_step(types: Types, op: Op) -> TensorType:
    (x,) = types
    for name in ("dim", "to"):
        if op.attribute(name) is not None and not 0 <= _int_of(op, name) < len(x.dims):
            raise Mismatch(f"{name}={op.attribute(name)} is out of range; {x} has dims 0 to {len(x.dims) - 1}")
    return _unsharded(x)


def _numpy_collective_permute(np: Any, x: Any, axis: int, sources: tuple[int, ...]) -> Any:
    blocks = np.split(x, len(sources), axis)
    return np.concatenate([np.zeros_like(blocks[0]) if source == NO_SOURCE else blocks[source] for source in sources], axis)


def padded_dims(op: Op) -> tuple[int, ...]:
    """The dims that a pad makes longer."""
    return tuple(i for i, widths in enumerate(zip(axes_of(op, "low"), axes_of(op, "high"), strict=True)) if any(widths))


def _call(types: Types, op: Op) -> TensorType:
    block = op.callee
    assert block is not None
    if len(types) != len(block.inputs):
        raise Mismatch(f"@{block.name} takes {len(block.inputs)} tensors, not {len(types)}; pass {', '.join(v.name for v in block.inputs)}")
    for value, given in zip(block.inputs, types, strict=True):
        if (given.dtype, given.shape) != (value.type.dtype, value.type.shape):
            raise Mismatch(f"@{block.name} takes {value.type} as {value.name}, not {given}; only the mesh axes may differ")
    return _unsharded(block.output_types[0])


def _kernel(types: Types, op: Op) -> TensorType:
    source = op.source
    assert source is not None
    if len(types) != len(source.inputs):
        raise Mismatch(f"@{source.name} takes {len(source.inputs)} tensors, not {len(types)}; correct its arguments")
    for given, wanted in zip(types, source.inputs, strict=True):
        if (given.dtype, given.shape, given.mesh) != (wanted.dtype, wanted.shape, wanted.mesh):
            raise Mismatch(f"@{source.name} takes {wanted}, not {given}; only the mesh axes may differ")
    if placed := next((type for type in source.outputs if type.mesh), None):
        raise Mismatch(f"@{source.name} gives {placed}: an output is where what the kernel takes is; leave out on {placed.mesh}")
    return _unsharded(source.outputs[0])


def _output(types: Types, op: Op) -> TensorType:
    if op.callee:
        index = _int_of(op, "index")
        if not 0 < index < len(op.callee.outputs):
            raise Mismatch(f"@{op.callee.name} has no result {index} beside the one of the call; it has {len(op.callee.outputs)} in all")
        return _unsharded(op.callee.output_types[index])
    return _unsharded(op.result.type)


def _of_no_numpy(np: Any, *arrays: Any, **_: Any) -> Any:
    raise ArgumentError("kernel: NumPy does not know what the user's C++ computes; compare the program with a function of your own")


def _shape_text(shape: tuple[Size, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# --- which indices it walks -------------------------------------------------------------------------------------------


def _shapes(types: Types) -> list[tuple[Size, ...]]:
    return [type.shape for type in types]


def _map_elementwise(types: Types, op: Op) -> IndexMap:
    return maps.elementwise(_shapes(types), op.result.type.shape)


def _map_call(types: Types, op: Op) -> IndexMap:
    """All that a caller knows of a block: no dim of it is walked in step with another."""
    return IndexMap(tuple((None,) * len(type.dims) for type in types), (None,) * len(op.result.type.dims))


def _map_iota(types: Types, op: Op) -> IndexMap:
    return IndexMap((), ("i0",))


def _map_matmul(types: Types, op: Op) -> IndexMap:
    return maps.contraction(types[0].shape, types[1].shape, op.result.type.shape)


def _map_reduction(types: Types, op: Op) -> IndexMap:
    return maps.reduction(types[0].shape, axes_of(op), bool(op.attribute("keepdims")))


def _map_reshape(types: Types, op: Op) -> IndexMap:
    return maps.regrouping(types[0].shape, op.result.type.shape)


def _map_expand_dims(types: Types, op: Op) -> IndexMap:
    return maps.insertion(len(types[0].dims), axes_of(op))


def _map_transpose(types: Types, op: Op) -> IndexMap:
    return maps.permutation(axes_of(op, "axes"))


def _map_select(types: Types, op: Op) -> IndexMap:
    return maps.cut(len(types[0].dims), _int_of(op, "axis"), keeps_dim=False)


def _map_slice(types: Types, op: Op) -> IndexMap:
    return maps.cut(len(types[0].dims), _int_of(op, "axis"), keeps_dim=True)


def _map_concat(types: Types, op: Op) -> IndexMap:
    return maps.joined(len(types), len(types[0].dims), (_int_of(op, "axis"),))


def _map_pad(types: Types, op: Op) -> IndexMap:
    return maps.joined(1, len(types[0].dims), padded_dims(op))


def _map_collective_permute(types: Types, op: Op) -> IndexMap:
    return maps.blocks_permuted(len(types[0].dims), _int_of(op, "axis"), len(axes_of(op, "sources")))


def _map_opaque(types: Types, op: Op) -> IndexMap:
    """Nothing is known of how the user's C++ goes from operands to results."""
    return IndexMap(tuple((None,) * len(type.dims) for type in types), (None,) * len(op.result.type.dims))


# --- the table --------------------------------------------------------------------------------------------------------


def _unary(expression: str, numpy: Callable[..., Any], infer: Callable[[Types, Op], TensorType] = _floats) -> OpDef:
    return OpDef(1, infer, _map_elementwise, numpy, expression=expression)


def _binary(expression: str, name: str, infer: Callable[[Types, Op], TensorType] = _numbers) -> OpDef:
    return OpDef(2, infer, _map_elementwise, lambda np, a, b: getattr(np, name)(a, b), expression=expression)


def _reduce(combine: str, numpy: Callable[..., Any], *kinds: str) -> OpDef:
    return OpDef(1, _reduction(*kinds), _map_reduction, numpy, {"axis": tuple, "keepdims": bool}, combine=combine)


def _step(target: str = "", is_view: bool = False, **facts: type) -> OpDef:
    """A step of a reshard; `target` is "sharding" where the facts do not give all of the result's."""
    return OpDef(1, _reshard_step, _map_elementwise, lambda np, x, **_: x, facts, target, is_view=is_view, is_reshard_step=True)


def _erf(np: Any, x: Any) -> Any:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


def _gelu_tanh(np: Any, x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _numpy_argmax(np: Any, x: Any, axis: tuple[int, ...], keepdims: bool = False) -> Any:
    return np.argmax(x, axis=axis[0], keepdims=keepdims)


def _numpy_slice(np: Any, x: Any, axis: int, start: int, step: int, shape: tuple[int, ...]) -> Any:
    first = start if start >= 0 else x.shape[axis] + start
    return x[(slice(None),) * axis + (slice(first, first + (shape[axis] - 1) * step + 1, step),)]


def _numpy_select(np: Any, x: Any, axis: int, index: int) -> Any:
    return x[(slice(None),) * axis + (index,)]


def _numpy_pad(np: Any, x: Any, low: tuple[int, ...], high: tuple[int, ...], value: float = 0.0) -> Any:
    return np.pad(x, list(zip(low, high, strict=True)), constant_values=value)


def _bound(np: Any, x: Any, sign: int) -> Any:
    """What a max (-1) or min (1) of no elements is: a rank may hold none."""
    if x.dtype.kind == "b":
        return sign > 0
    if x.dtype.kind in "iu":
        return np.iinfo(x.dtype).max if sign > 0 else np.iinfo(x.dtype).min
    return sign * np.inf


OPS: dict[str, OpDef] = {
    "matmul": OpDef(2, _matmul, _map_matmul, lambda np, a, b: np.matmul(a, b)),
    # Pointwise.
    "add": _binary("{0} + {1}", "add"),
    "subtract": _binary("{0} - {1}", "subtract"),
    "multiply": _binary("{0} * {1}", "multiply"),
    "divide": _binary("{0} / {1}", "divide", _floats),
    "maximum": _binary("({0} > {1} || {0} != {0}) ? {0} : {1}", "maximum"),  # a NaN on either side stays
    "minimum": _binary("({0} < {1} || {0} != {0}) ? {0} : {1}", "minimum"),
    "pow": _binary("std::pow({0}, {1})", "power", _floats),
    "negative": _unary("-{0}", lambda np, x: -x, _signed),
    "abs": _unary("{0} > T(0) ? {0} : T(0) - {0}", lambda np, x: np.abs(x), _signed),  # of -0.0 it is 0.0
    "reciprocal": _unary("T(1) / {0}", lambda np, x: 1 / x),
    "exp": _unary("std::exp({0})", lambda np, x: np.exp(x)),
    "log": _unary("std::log({0})", lambda np, x: np.log(x)),
    "sqrt": _unary("std::sqrt({0})", lambda np, x: np.sqrt(x)),
    "rsqrt": _unary("T(1) / std::sqrt({0})", lambda np, x: 1 / np.sqrt(x)),
    "sin": _unary("std::sin({0})", lambda np, x: np.sin(x)),
    "cos": _unary("std::cos({0})", lambda np, x: np.cos(x)),
    "tanh": _unary("std::tanh({0})", lambda np, x: np.tanh(x)),
    "erf": _unary("std::erf({0})", _erf),
    "sigmoid": _unary("T(1) / (T(1) + std::exp(-{0}))", lambda np, x: 1 / (1 + np.exp(-x))),
    "relu": _unary("{0} < T(0) ? T(0) : {0}", lambda np, x: np.maximum(x, 0), _numbers),
    "gelu": _unary("hw::gelu({0})", lambda np, x: x / 2 * (1 + _erf(np, x / np.sqrt(2)))),
    "gelu_tanh": _unary("{0} / (T(1) + std::exp(T(-1.5957691216057308) * ({0} + T(0.044715) * {0} * {0} * {0})))", _gelu_tanh),
    "silu": _unary("{0} / (T(1) + std::exp(-{0}))", lambda np, x: x / (1 + np.exp(-x))),
    "equal": _binary("{0} == {1}", "equal", _comparison),
    "not_equal": _binary("{0} != {1}", "not_equal", _comparison),
    "less": _binary("{0} < {1}", "less", _comparison),
    "less_equal": _binary("{0} <= {1}", "less_equal", _comparison),
    "greater": _binary("{0} > {1}", "greater", _comparison),
    "greater_equal": _binary("{0} >= {1}", "greater_equal", _comparison),
    "logical_and": _binary("{0} && {1}", "logical_and", _bools),
    "logical_or": _binary("{0} || {1}", "logical_or", _bools),
    "logical_not": _unary("!{0}", lambda np, x: np.logical_not(x), _bools),
    "where": OpDef(3, _where, _map_elementwise, lambda np, c, a, b: np.where(c, a, b), expression="{0} ? {1} : {2}"),
    "astype": OpDef(1, _cast, _map_elementwise, lambda np, x, dtype: x.astype(dtype), target="dtype", expression="{0}"),
    "copy": OpDef(1, _same, _map_elementwise, lambda np, x: x.copy(), expression="{0}"),
    # Made of nothing: indices, and random numbers of a counter and a key.
    "iota": OpDef(0, _iota, _map_iota, lambda np, shape, dtype: np.arange(*shape, dtype=dtype), target="type"),
    "philox": OpDef(6, _philox, _map_elementwise, philox, expression="hw::philox({0}, {1}, {2}, {3}, {4}, {5})"),
    # Reductions over `axis`.
    "sum": _reduce("add", lambda np, x, **a: np.sum(x, dtype=x.dtype, **a), "float", "int", "uint"),
    "prod": _reduce("multiply", lambda np, x, **a: np.prod(x, dtype=x.dtype, **a), "float", "int", "uint"),
    "max": _reduce("maximum", lambda np, x, **a: np.max(x, initial=_bound(np, x, -1), **a), "float", "int", "uint", "bool"),
    "min": _reduce("minimum", lambda np, x, **a: np.min(x, initial=_bound(np, x, 1), **a), "float", "int", "uint", "bool"),
    "mean": _reduce("add", lambda np, x, **a: np.mean(x, **a), "float"),
    "argmax": replace(_reduce("first_maximum", _numpy_argmax), infer=_argmax, locates=True),
    # Shapes.
    "expand_dims": OpDef(1, _expand_dims, _map_expand_dims, lambda np, x, **a: np.expand_dims(x, **a), {"axis": tuple}, is_view=True),
    "reshape": OpDef(1, _reshape, _map_reshape, lambda np, x, shape: np.reshape(x, shape), target="shape", is_view=True),
    "permute_dims": OpDef(1, _transpose, _map_transpose, lambda np, x, **a: np.transpose(x, **a), {"axes": tuple}, is_view=True),
    "broadcast_to": OpDef(
        1, _broadcast_to, _map_elementwise, lambda np, x, shape: np.broadcast_to(x, shape), target="shape", expression="{0}"
    ),
    "select": OpDef(1, _select, _map_select, _numpy_select, {"axis": int, "index": int}, is_view=True),
    "slice": OpDef(1, _slice, _map_slice, _numpy_slice, {"axis": int, "start": int, "step": int}, target="shape", is_view=True),
    "concat": OpDef(None, _concat, _map_concat, lambda np, *arrays, axis: np.concatenate(arrays, axis), {"axis": int}),
    "pad": OpDef(1, _pad, _map_pad, _numpy_pad, {"low": tuple, "high": tuple, "value": float}),
    # A block of the program.
    "call": OpDef(None, _call, _map_call, lambda np, *arrays, run: run(*arrays)),
    # C++ of the user: its first output, and the others; as those of a block.
    "kernel": OpDef(None, _kernel, _map_opaque, _of_no_numpy),
    "output": OpDef(1, _output, _map_opaque, _of_no_numpy, {"index": int}, target="shape"),
    # Sharding.
    "collective_permute": OpDef(
        1, _collective_permute, _map_collective_permute, _numpy_collective_permute, {"axis": int, "sources": tuple}
    ),
    "reshard": OpDef(1, _same, _map_elementwise, lambda np, x: x, target="sharding"),
    # What reshards are decomposed into, in the order of preference where bytes and steps are equal.
    "shard": _step(dim=int, axes=MeshAxes, is_view=True),
    "all_gather": _step(dim=int, axes=MeshAxes),
    "permute_shards": _step("sharding", axes=MeshAxes, sources=tuple),
    "all_to_all": _step(dim=int, to=int, axes=MeshAxes),
    "all_reduce": _step(axes=MeshAxes, reduction=str),
    "reduce_scatter": _step(dim=int, axes=MeshAxes, reduction=str),
    "reduce": _step("sharding", axes=MeshAxes, reduction=str, root=int),
    "transfer": _step("sharding", blocks=Transfer),
}

RESHARD_STEPS = tuple(kind for kind, op in OPS.items() if op.is_reshard_step)
RESHARDS = ("reshard", *RESHARD_STEPS)
TO_OTHER_MESHES = ("reduce", "transfer")  # the steps whose result is on another mesh

# How the results of the ranks become one where the reduced dims are sharded; shards are even, so that means can be averaged.
# A reduction that is not here takes whole dims.
REDUCTION_OF_PARTIAL = {"matmul": "sum", "sum": "sum", "mean": "avg", "prod": "prod", "max": "max", "min": "min"}


# These give one of their elements, or its place.
WITHOUT_IDENTITY = frozenset(kind for kind, op in OPS.items() if op.combine in ("maximum", "minimum", "first_maximum"))


# --- asking the table -------------------------------------------------------------------------------------------------


def operand_types(op: Op, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """The types of all operands; a number has no dims and the dtype of the last tensor beside it. Raises ProgramError."""
    tensors = [types[name] for name in op.tensors]
    if not op.operands and OPS[op.kind].arity == 0:
        return ()
    if not tensors:
        raise ProgramError(f"{op.kind}: no operand is a tensor; compute with Python numbers instead", op.location)
    dtype = tensors[-1].dtype
    result = []
    for operand in op.operands:
        if not isinstance(operand, str) and not fits(operand, dtype):
            raise ProgramError(f"{op.kind}: {operand!r} is not a value of {tensors[-1]}; use hw.astype on the tensor", op.location)
        result.append(types[operand] if isinstance(operand, str) else TensorType(dtype, ()))
    return tuple(result)


def fits(number: Scalar, dtype: DType) -> bool:
    """Whether a Python number takes this dtype: a float needs a float tensor, an int any number in range."""
    if isinstance(number, bool) or dtype.kind == "bool":
        return isinstance(number, bool) and dtype.kind == "bool"
    if dtype.kind == "float":
        return True
    bits = 8 * dtype.itemsize - (dtype.kind == "int")
    return isinstance(number, int) and (-(1 << bits) if dtype.kind == "int" else 0) <= number < 1 << bits


def infer_type(op: Op, operands: Types) -> TensorType:
    """The unsharded type of the result, on the mesh of the operands. Raises ProgramError with the op's place."""
    try:
        return replace(OPS[op.kind].infer(operands, op), mesh=_common_mesh(op, operands))
    except Mismatch as mismatch:
        raise ProgramError(f"{op.kind}: {mismatch}", op.location) from None


def _common_mesh(op: Op, operands: Types) -> Mesh | None:
    """The mesh of an op: a reshard to another one says it, so does a block, all others have that of their operands."""
    if op.callee and op.kind == "output":
        return op.callee.output_types[_int_of(op, "index")].mesh
    if op.callee:
        for value, given in zip(op.callee.inputs, operands, strict=True):
            if given.mesh != value.type.mesh:
                where = f"{given} on the program's mesh" if given.mesh is None else str(given)
                raise Mismatch(
                    f"@{op.callee.name} takes {value.type} as {value.name}, not {where}; move it with hw.reshard(t, ..., mesh=...)"
                )
        return op.callee.output_types[0].mesh
    if op.kind in ("reshard", *TO_OTHER_MESHES) or not op.tensors:
        return op.result.type.mesh
    tensors = [type for operand, type in zip(op.operands, operands, strict=True) if isinstance(operand, str)]
    for other in tensors[1:]:
        if other.mesh != tensors[0].mesh:
            first, second = (f"{type} on the program's mesh" if type.mesh is None else str(type) for type in (tensors[0], other))
            raise Mismatch(f"operands on different meshes: {first} and {second}; move one with hw.reshard(t, ..., mesh=...)")
    return tensors[0].mesh


def index_map(op: Op, operands: Types) -> IndexMap:
    """Which iteration index each dim of the operands and of the result walks."""
    return OPS[op.kind].map(operands, op)


# What these ops do to a dim of which they need all, however a loop walks it.
_WHOLE_DIMS = {
    "reshape": "split or merged",
    "slice": "cut",
    "concat": "joined",
    "pad": "made longer",
    "collective_permute": "permuted",
    "kernel": "made",
    "output": "made",
}
_WHOLE_DIMS |= {kind: "reduced" for kind, definition in OPS.items() if definition.combine}


def needs_whole(op: Op, operands: Types, dim: int) -> str:
    """What an op does to a dim of its result that no loop can walk therefore; "" where one can."""
    indices = index_map(op, operands)
    is_walked = indices.result[dim] is not None and indices.result[dim] not in indices.outer
    return "" if is_walked else _WHOLE_DIMS.get(op.kind, "")


def attributes(**values: Attribute) -> tuple[tuple[str, Attribute], ...]:
    """The attributes of an op, without those that say nothing."""
    return tuple((name, value) for name, value in values.items() if value is not None and value is not False)
