"""Random fusions from seeds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.frontend.tracing import BlockFunction
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops import pointwise
from hostweave.types.mesh import Mesh
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType

Array = NDArray[Any]


MakeOp = Callable[["Generator", list[hw.Tensor], hw.Tensor], hw.Tensor]


MESHES = ({"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"dp": 2, "tp": 2}, {"a": 2, "b": 3})


NUMBERS = (0, 1, 2, -1, 0.0, 1.0, 2.0, 0.25)  # Results with these numbers are exact.


# Algorithms for the communication of a loop: the gather of an operand, a reduction to a sharded result, and a reduction to a replicated
# result.
GATHERING = ("p2p", "ring", "broadcast", "all_gather", "put")


SCATTERING, SUMMING = ("p2p", "ring", "reduce", "reduce_scatter", "put"), ("all_reduce",)


BY_BLOCK = ("p2p", "ring", "broadcast", "reduce", "put")


SLICES = (0, -1, slice(0, 1), slice(1, None), slice(None, -1), slice(None, None, 2), slice(1, None, 3))


class Generator:
    """Generates a mesh, meshes of some of its ranks, sizes, and a function of random ops."""

    def __init__(self, seed: int, meshes: Sequence[dict[str, int]] = MESHES, ops: Sequence[MakeOp] = ()):
        self.random = Random(seed)
        self.mesh = hw.Mesh(**self.random.choice(meshes))
        self.ops = (*OPS, *ops)
        self.meshes = [self.mesh, *(self.some_ranks() for _ in range(2) if self.random.random() < 0.3)]
        even = [self.mesh.size * times for times in (1, 2, 3)]
        choices = even if self.random.random() < 0.6 else [1, 2, 5, 7, 12]
        self.sizes = {name: self.random.choice(choices) for name in "MNK"}
        self.zigzag = Random(~seed)  # With this separate generator, choices of zigzag do not change other choices of a seed.
        self.has_zigzag = self.zigzag.random() < 0.25
        if self.has_zigzag:
            self.sizes = {name: 2 * size for name, size in self.sizes.items()}
        self.dtype = self.random.choice([hw.f64, hw.f64, hw.i64])
        self.blocks: dict[Any, list[BlockFunction]] = {}

    def some_ranks(self) -> Mesh:
        ranks = self.random.sample(range(self.mesh.size), self.random.randint(1, self.mesh.size))
        return self.mesh.ranks(ranks, z=len(ranks))

    def sharded(self, shape: Sequence[Any], mesh: Mesh | None = None) -> tuple[Any, ...]:
        """Dims of a spec for the sizes in `shape`. Some dims are randomly sharded."""
        mesh = mesh or self.mesh
        axes = [name for name, _ in mesh.axes]
        self.random.shuffle(axes)
        dims, in_pieces = [], []
        for i, size in enumerate(shape):
            own = [axes.pop() for _ in tuple(axes) if self.random.random() < 0.3]
            dims.append(f"{size}@{','.join(own)}" if own else size)
            with contextlib.suppress(ValueError):  # A size such as M/2 is impossible if M is 7.
                if own and Size.of(size).bind(self.sizes) % (2 * mesh.size_of(tuple(own))) == 0:
                    in_pieces.append(i)
        for i in in_pieces if self.has_zigzag else ():
            if self.zigzag.random() < 0.6:
                dims[i] = f"{dims[i].replace('@', '@zigzag(')})"
        return tuple(dims)

    def input(self, shape: Sequence[Any]) -> TensorType:
        mesh = self.random.choice(self.meshes)
        type = self.dtype[self.sharded(shape, mesh)]
        return type if mesh is self.mesh else type.on(mesh)

    def resharded(self, t: hw.Tensor, mesh: Mesh | None = None) -> hw.Tensor:
        return hw.reshard(t, *self.sharded(t.shape, mesh or t.type.mesh), mesh=mesh)

    def other(self, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
        """A random value on the mesh of `t`, to combine with `t`."""
        return self.random.choice([value for value in values if value.type.mesh == t.type.mesh])

    def body(self, tensors: list[hw.Tensor], most: int, ops: Sequence[MakeOp]) -> tuple[hw.Tensor, ...]:
        """Applies up to `most` random ops to the tensors and to intermediate results. Returns some of the results."""
        values = list(tensors)
        for _ in range(self.random.randint(1, most)):
            with contextlib.suppress(ProgramError):  # Ops that refuse the chosen operands are skipped.
                (last,) = self.random.choices(values, range(1, len(values) + 1))  # Later values are preferred, so that results are used.
                values.append(self.random.choice(ops)(self, values, last))
        made = values[len(tensors) :] or [values[0] + 1]
        return tuple(self.random.sample(made, min(len(made), self.random.randint(1, 3))))

    def fusion(self) -> Fusion:
        sizes = [(name, self.sizes[name])[self.random.random() < 0.3] for name in "MNK" * 3]
        inputs = {f"x{i}": self.input(self.random.sample(sizes, self.random.randint(1, 3))) for i in range(self.random.randint(1, 3))}

        def random(**tensors: hw.Tensor) -> tuple[hw.Tensor, ...]:
            return self.body(list(tensors.values()), 8, (*self.ops, *OUTER_OPS))

        return hw.fusion(mesh=self.mesh, **inputs)(random)

    def arrays(self, fusion: Fusion, seed: int) -> dict[str, Array]:
        """Arrays of small integers. Sums and products are exact."""
        random = np.random.default_rng(seed)
        shapes = {v.name: [e.bind(self.sizes) for e in v.type.shape] for v in fusion.arguments}
        return {v.name: random.integers(-2, 3, shapes[v.name]).astype(numpy_dtype(v.type.dtype)) for v in fusion.arguments}


def _reduced(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    axes = tuple(g.random.sample(range(t.ndim), g.random.randint(0, t.ndim)))
    return g.random.choice([hw.sum, hw.max, hw.min, hw.mean])(t, axis=axes, keepdims=g.random.random() < 0.5)


def _with_unit_dim(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    at = g.random.randint(0, t.ndim)
    return hw.expand_dims(t, at) if at % 2 else hw.reshape(t, *t.shape[:at], 1, *t.shape[at:])


def turned(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return hw.permute_dims(t, tuple(g.random.sample(range(t.ndim), t.ndim)))


def cut(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    key: list[Any] = [slice(None)] * t.ndim
    if key:
        dim = g.random.randrange(t.ndim)
        # A slice with a step requires a divisible size. A sum such as 2M + 1 may never be divisible.
        is_sum = "(" in str(t.shape[dim])
        key[dim] = g.random.choice(SLICES[:-2] if is_sum else SLICES)
    return t[tuple(key)]


def _joined(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    others = [t * 2, t, g.other(values, t)]
    return hw.concat(g.random.sample(others, 2), axis=g.random.randrange(t.ndim or 1))


def _padded(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return hw.pad(t, [g.random.choice([0, 0, 1, 2]) for _ in range(2 * g.random.randint(0, t.ndim))], value=g.random.randint(-1, 1))


def _beside_others(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """A reduction or reshard, and an independent matmul or negation."""
    made = _reduced(g, values, t) if g.random.random() < 0.5 else g.resharded(t + 1)
    values.append(t @ g.other(values, t) if t.ndim == 2 else -t)
    return made


def _streamed(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return (-t).stream(g.random.randrange(t.ndim or 1), chunks=g.random.choice([None, 2, g.mesh.size, 2 * g.mesh.size]))


def _stream_of(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return t.stream(g.random.randrange(t.ndim or 1), chunks=g.random.choice([None, 2, g.mesh.size, 2 * g.mesh.size])) * 2


def turned_in_a_loop(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Chunk loop in which each iteration computes, transposes and reads one chunk."""
    order = g.random.sample(range(t.ndim), t.ndim)
    dim, chunks = g.random.randrange(t.ndim or 1), g.random.choice([None, 2, g.mesh.size, 2 * g.mesh.size])
    turned = hw.permute_dims((t * 2).stream(order[dim], chunks=chunks), tuple(order)).stream(dim, chunks=chunks)
    return g.random.choice([-turned, hw.reshard(turned, *turned.shape)]).stream(dim, chunks=chunks)


def _with_number(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Op of a tensor and a number, alone or combined with the same op of two tensors."""
    op: Callable[[Any, Any], hw.Tensor] = g.random.choice(PAIRS)
    made = op(t, g.random.choice(NUMBERS))
    return g.random.choice([made, made - op(t, t), op(t, t) * 2 - made])


def _of_table(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Random op of one or two tensors from the op table, but only on integers, so that results are exact."""
    if t.dtype != hw.i64:
        return _with_number(g, values, t)
    kind = g.random.choice([kind for kind, op in pointwise.OPS.items() if op.is_public and op.arity in (1, 2)])
    made = getattr(hw, kind)(*(t, g.other(values, t))[: pointwise.OPS[kind].arity])
    return hw.astype(made, hw.i64) if made.dtype == hw.bool_ else made


def _located(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """argmax, sorts, scatters, scans and similar ops, but only on integers, because rounding could make floats equal."""
    if t.dtype != hw.i64:
        return _with_number(g, values, t)
    axis, is_kept, other = g.random.randrange(t.ndim or 1), g.random.random() < 0.5, g.other(values, t)
    return g.random.choice(
        [
            lambda: hw.argmax(t, axis, is_kept),
            lambda: hw.take(t, hw.argmax(t, axis, is_kept), axis),
            lambda: hw.take_along_axis(t, hw.argsort(t, axis, descending=is_kept), axis),
            lambda: hw.scatter(t, axis, hw.argsort(t, axis), other),
            lambda: hw.scatter_add(t, axis, hw.argmax(t, axis, keepdims=True), other),
            lambda: hw.scatter_add(t, axis, hw.argsort(other, axis), t),
            lambda: hw.take_along_axis(t, hw.argmax(t, axis, keepdims=True), axis) - hw.sum(t, axis, keepdims=True),
            lambda: g.random.choice([hw.scatter, hw.scatter_add])(t, axis, _one_place(t, axis), _first_of(t, axis) * 3),
            lambda: hw.cumsum(t, axis),
            lambda: hw.sort(t, axis),
            lambda: hw.reduce_xor(t, axis, is_kept),
            lambda: hw.astype(hw.any(t > 1, axis, is_kept), hw.i64),
        ]
    )()


def _one_place(t: hw.Tensor, axis: int) -> hw.Tensor:
    """Index along `axis` of the largest element of the tensor. All dims of the result have size 1."""
    last = hw.permute_dims(t, (*(dim for dim in range(t.ndim) if dim != axis), axis))
    return hw.reshape(hw.argmax(hw.max(hw.reshape(last, -1, t.shape[axis]), 0), 0), *(1 for _ in t.shape))


def _first_of(t: hw.Tensor, axis: int) -> hw.Tensor:
    return t[(*(slice(None) for _ in range(axis)), slice(0, 1))]


def _updated(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Slice or update. The position may be computed, out of range, or in a sharded dim."""
    if t.dtype != hw.i64 or not t.ndim:
        return _with_number(g, values, t)
    cut = [g.random.random() < 0.6 for _ in range(t.ndim)]
    anywhere = hw.argmax(hw.reshape(g.other(values, t), -1), 0)
    starts = [g.random.choice([0, 1, -3, 100, anywhere, 1 - anywhere]) if is_cut else 0 for is_cut in cut]
    if g.random.random() < 0.3:
        return hw.dynamic_slice(t, starts, [1 if is_cut else size for is_cut, size in zip(cut, t.shape, strict=True)])
    update = t[tuple(slice(0, g.random.choice([1, -1])) if is_cut else slice(None) for is_cut in cut)] * 3
    if t.ndim > 1 and cut[1] and not cut[0] and g.random.random() < 0.5:
        starts[1] = hw.argmax(hw.reshape(t, t.shape[0], -1), 1)  # There is one position per batch element.
    return hw.dynamic_update_slice(t, g.random.choice([update, g.resharded(update), t]), starts)


def _product_in_a_loop(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Matmuls in a chunk loop, with any algorithm. Either matmuls share a gathered operand, or partial sums of a matmul are reduced."""
    t = g.random.choice([value for value in values if value.ndim == 2] or [hw.reshape(t, 1, -1)])
    axis, size = g.random.choice(t.type.mesh_in(g.mesh).axes)
    rows, columns = t.shape
    if g.random.random() < 0.4:
        sharded, w = hw.reshard(t, f"{rows}@{axis}", columns), hw.reshard(t.T, columns, rows)
        algorithms, products = GATHERING, [sharded @ w for _ in range(g.random.choice([1, 1, 2, 3]))]
    else:
        algorithms, to = g.random.choice([(SCATTERING, (f"{rows}@{axis}", rows)), (SUMMING, (rows, rows))])
        products = [hw.reshard(hw.reshard(t, rows, f"{columns}@{axis}") @ hw.reshard(t.T, f"{columns}@{axis}", rows), *to)]
    by = g.random.choice((None, *algorithms))
    chunks = g.random.choice([size, 2 * size] if by in BY_BLOCK else [2, 3, 3, size])
    first, *others = [product.stream(0, chunks=chunks, algorithm=by if size > 1 else None) for product in products]
    return sum((other * g.random.choice([1, 2]) for other in others), start=first)


def _columns_in_a_loop(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Chunk loop over columns with a reduce-scatter of partial sums along rows."""
    t = g.random.choice([value for value in values if value.ndim == 2] or [hw.reshape(t, 1, -1)])
    axis, size = g.random.choice(t.type.mesh_in(g.mesh).axes)
    rows, columns = t.shape
    by = g.random.choice([way for way in SCATTERING if way != "ring"])  # A ring needs contiguous blocks.
    terms = hw.reshard(t, rows, f"{columns}@{axis}") @ hw.reshard(t.T, f"{columns}@{axis}", rows)
    scattered = hw.reshard(terms, rows, f"{rows}@{axis}")
    return scattered.stream(1, chunks=g.random.choice([size, 2 * size]), algorithm=by if size > 1 else None)


def of_sums(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    t = g.random.choice([value for value in values if value.ndim == 2] or [hw.reshape(t, 1, -1)])
    rows, columns = t.shape
    split = f"{columns}@{g.random.choice(t.type.mesh_in(g.mesh).axes)[0]}"
    first, second = (hw.reshard(x, rows, split) @ hw.reshard(t.T, split, rows) for x in (t, -t))
    made = first = g.random.choice([first, g.resharded(first)])
    for _ in range(g.random.randint(1, 5)):
        other = second if made.type.shape == second.type.shape else first if made.type.shape == first.type.shape else made
        made = g.random.choice(LINEAR)(g, made, other)
    return made


LINEAR: tuple[Callable[[Generator, hw.Tensor, hw.Tensor], hw.Tensor], ...] = (
    lambda g, a, b: a + b,
    lambda g, a, b: a + b,
    lambda g, a, b: b - a,
    lambda g, a, b: a * b,
    lambda g, a, b: -a * 3,
    lambda g, a, b: a * hw.iota(a, 0 if a.ndim == 1 else -1, hw.i64) if a.ndim and a.dtype == hw.i64 else a / 2 if a.dtype == hw.f64 else a,
    lambda g, a, b: turned(g, [], a),
    lambda g, a, b: cut(g, [], a),
    lambda g, a, b: _reduced(g, [], a),
    lambda g, a, b: g.resharded(a),
    lambda g, a, b: hw.reshape(a, -1),
    lambda g, a, b: hw.expand_dims(a, 0),
    lambda g, a, b: hw.concat([a, b], axis=g.random.randrange(a.ndim or 1)),
)


PAIRS: tuple[Callable[[Any, Any], hw.Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: b - a,
    lambda a, b: a * b,
    hw.maximum,
    hw.minimum,
    lambda a, b: hw.where(a > b, a, b),
    lambda a, b: hw.where(a != b, 3, a),
    lambda a, b: hw.where(a <= b, b, 7),
)


OPS: tuple[MakeOp, ...] = (
    lambda g, values, t: t + g.other(values, t),
    lambda g, values, t: t * g.other(values, t),
    lambda g, values, t: t @ g.other(values, t),
    _with_number,
    _with_number,
    _of_table,
    lambda g, values, t: hw.where(t > 0, t, 0 - t),
    _with_unit_dim,
    lambda g, values, t: g.resharded(t),
    lambda g, values, t: g.resharded(t),
    _reduced,
    _located,
    turned,
    cut,
    _joined,
    _padded,
    _beside_others,
    lambda g, values, t: hw.reshape(t, -1),
    _streamed,
    _stream_of,
    _product_in_a_loop,
    _product_in_a_loop,
    _product_in_a_loop,
)


def in_groups(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Grouped matmul, or the gradient of the matrices of a grouped matmul. Some groups may be empty, and some rows may be in no group."""
    known = [value for value in values if value.ndim > 1 and all(isinstance(size, int) or size in g.sizes for size in value.shape[-2:])]
    if not known:
        return _with_number(g, values, t)
    t = hw.astype(g.random.choice(known), hw.f64)
    t = hw.sum(t, tuple(range(t.ndim - 2))) if t.ndim > 2 else t
    experts, row = g.random.choice([1, 2, 3, 5]), hw.iota(t, 0)
    ids = g.random.choice([row % experts, row * 0 + experts - 1, hw.minimum(row, experts - 1), row % (experts + 1), row + experts - 2])
    ends = hw.astype(hw.cumsum(hw.bincount(ids, experts), 0), hw.i32)
    if g.random.random() < 0.4:
        return hw.grouped_matmul(t.T, g.resharded(t * 2), ends)
    w = hw.broadcast_to(t.T, experts, t.shape[1], t.shape[0]) * hw.expand_dims(hw.astype(hw.arange(experts) + 1, hw.f64), (1, 2))
    return hw.grouped_matmul(t, g.random.choice([w, g.resharded(w)]), ends)


def _moved(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return g.resharded(t, g.random.choice(g.meshes))


def _called(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Calls a block on two tensors. Uses an earlier block for these dtypes and shapes, or makes a new block."""
    other = g.other(values, t)
    known = g.blocks.setdefault((t.dtype, t.shape, other.dtype, other.shape), [])
    if not known:

        def block(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
            return g.body([x, y], 3, g.ops)

        block.__name__ = f"block{len(g.blocks)}"
        known.append(hw.block(x=parameter(g, t), y=parameter(g, other))(block))
    made = known[0](t, other)
    return g.random.choice(made) if isinstance(made, tuple) else made


def parameter(g: Generator, t: hw.Tensor) -> TensorType:
    """Parameter type for a block. No dim is sharded if the size of any dim is an expression."""
    whole = any(isinstance(size, str) and size not in g.sizes for size in t.shape)
    return t.dtype[t.shape if whole else g.sharded(t.shape)]


def _by_a_kernel(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """User kernel that returns 2 * t and -t. The program uses one of the two results."""
    dims = g.sharded(t.shape, t.type.mesh)
    spec = TensorType(t.dtype, t.dtype[dims].dims, mesh=t.type.mesh)
    sizes = [f"n{i}" for i in range(t.ndim)]
    name, of = f"both{t.ndim}_{t.dtype}", t.dtype.cpp
    parameters = [f"const {of}* x", f"{of}* twice", f"{of}* negated", *(f"int64_t {size}" for size in sizes)]
    source = f"""
__global__ void {name}({", ".join(parameters)}) {{
  for (int64_t i : hw::over_grid({" * ".join(["1", *sizes])})) {{
    twice[i] = 2 * x[i];
    negated[i] = -x[i];
  }}
}}
"""
    return g.random.choice(hw.kernel(source, name, dims or 1, [hw.reshard(t, *dims), spec, spec, *dims], per=256))


def collided(fusion: Fusion) -> Fusion:
    """Replaces names by names that the compiler also generates, such as `M_x` from M and x, or `product`."""
    axis = fusion.mesh.axes[0][0]
    names = {"N": f"M_{axis}", "K": f"M_block_{fusion.mesh.size}", "x1": "x0_e", "x2": "x0_i"}
    names |= {"made": "product", "last": "rows", "y": "columns", "t": "term_0", "first": "operand_0", "scattered": "operand_1"}
    return Fusion.parse(re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], str(fusion)))


def wider(seed: int) -> Generator:
    """Generator of programs on up to 8 ranks, also with dynamic slices, loops over columns, and a second mesh of the same ranks.

    `Generator` lacks these features, so that its programs for each seed stay the same.
    """
    generator = Generator(seed, (*MESHES, {"x": 8}, {"a": 2, "b": 2, "c": 2}), [*[_updated] * 6, *[_columns_in_a_loop] * 2])
    ranks = generator.zigzag.sample(range(generator.mesh.size), generator.mesh.size)
    axes = {"u": 2, "v": len(ranks) // 2} if len(ranks) % 2 == 0 else {"u": len(ranks)}
    generator.meshes.append(generator.mesh.ranks(generator.zigzag.choice([ranks, sorted(ranks)]), **axes))
    return generator


def _exchanged(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Reshard of a few elements to a replicated or sharded tensor, or of partial sums, next to pointwise ops."""
    t = g.random.choice([value for value in values if value.ndim == 2] or [hw.reshape(t, 1, -1)])
    rows, columns = t.shape
    axis, size = g.random.choice(g.mesh.axes)
    own, whole = hw.reshard(t, f"{rows}@{axis}", columns), hw.reshard(t, rows, columns)
    gathered = hw.reshard(own * 2, rows, columns)
    kind = g.random.choice(["gather", "split", "product", "sum", "sum"])
    if kind in ("gather", "split"):
        return gathered if kind == "gather" else own
    if kind == "product":
        terms = hw.reshard(t, rows, f"{columns}@{axis}") @ hw.reshard(hw.minimum(t.T, 1), f"{columns}@{axis}", rows)
    else:
        factors = hw.reshape(hw.astype(hw.arange(size), t.dtype) - 1, size, 1, 1)
        read = hw.expand_dims(g.random.choice([whole, gathered]), 0)
        terms = hw.sum(hw.reshard(read * factors, f"{size}@{axis}", rows, columns), 0)
    return hw.reshard(g.random.choice([terms, terms * 2]), g.random.choice([rows, f"{rows}@{axis}"]), terms.shape[1])


def exchanging(seed: int, meshes: Sequence[dict[str, int]] = MESHES) -> tuple[Generator, Fusion]:
    """Generator and program of small f32 matrices on one mesh. Most collectives are inside kernels."""
    g = Generator(seed, meshes)
    g.meshes, g.dtype = [g.mesh], hw.f32
    add, limit = (lambda g, values, t: t + g.other(values, t)), (lambda g, values, t: hw.maximum(t, 1))
    ops: list[MakeOp] = [*[_exchanged] * 4, add, limit, turned, cut]
    inputs = {f"x{i}": g.input(g.random.sample(["M", "N", 4, 8], 2)) for i in range(g.random.randint(1, 2))}

    def exchanging(**tensors: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return g.body(list(tensors.values()), 8, ops)

    return g, hw.fusion(mesh=g.mesh, **inputs)(exchanging)


OUTER_OPS: tuple[MakeOp, ...] = (_moved, _moved, _called, _called, _by_a_kernel)
