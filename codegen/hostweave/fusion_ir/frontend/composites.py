"""Functions that are composed of several ops."""

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf
from typing import ParamSpec

from hostweave.base.errors import ProgramError, did_you_mean
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, dims_of, record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.index_map import broadcasts
from hostweave.fusion_ir.ops import called_function, fits
from hostweave.fusion_ir.ops.scaled import BLOCK, SCALINGS
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, DType, TensorType, f8e4m3, f8e5m2, f32, u32

_P = ParamSpec("_P")
MAX_RANDOM_DIMS = 4  # the random number generator has a counter of 4 words


def _called(word: str) -> Callable[[Callable[_P, Tensor]], Callable[_P, Tensor]]:
    """Decorator that checks the arguments. Names the result after `word`, unless the result is an argument. Errors of the recorded ops
    name the function."""

    def decorated(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
        function = checked(function)

        @wraps(function)
        def called(*args: _P.args, **options: _P.kwargs) -> Tensor:
            outer = called_function.set(called_function.get() or function.__name__)
            try:
                result = function(*args, **options)
            finally:
                called_function.reset(outer)
            return result if any(result is given for given in (*args, *options.values())) else _worded(word, result)

        return called

    return decorated


def _worded(word: str, x: Tensor) -> Tensor:
    """Makes `word` part of the tensor's name, as in `softmax_scores`. Returns the tensor."""
    x._word = word
    return x


@_called("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, as in torch.nn.functional: x [..., M, K] times the transpose of weight [N, K], plus bias [N]. The result is [..., M,
    N]. All operands have the same dtype.

    Raises ProgramError for other shapes, or if dtypes differ.

    Example: `x: bf16[M, K]`, `weight: bf16[N@tp, K]` and `bias: bf16[N@tp]` give `bf16[M, N@tp]`.
    """
    if weight.ndim != 2 or x.ndim < 2:
        raise ProgramError.here(f"linear: {x.type} and a weight of {weight.type} are not [..., M, K] and [N, K]; reshape them")
    if x.type.shape[-1] != weight.type.shape[1]:
        raise ProgramError.here(f"linear: inner dims differ: {x.type} and a weight of {weight.type}; transpose the weight to [N, K]")
    if x.dtype != weight.dtype:
        raise ProgramError.here(f"linear: dtypes differ: {x.type} and a weight of {weight.type}; use hw.astype on one of them")
    if bias is not None and bias.type.shape != weight.type.shape[:1]:
        raise ProgramError.here(f"linear: the bias is {bias.type}, and the weight {weight.type}; pass one element per row of the weight")
    product = hw.matmul(x, weight.T)
    return product if bias is None else product + bias


# --- norms ------------------------------------------------------------------------------------------------------------


@_called("var")
def var(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, correction: float = 0, keepdims: bool = False) -> Tensor:
    """Variance of floats along `axis`: the sum of squared differences from the mean, divided by N - `correction`. `axis` is as in `mean`.

    N is the number of elements along `axis`. A correction of 0 gives the population variance. A correction of 1 gives the unbiased sample
    variance. With int sizes, a correction of N or more gives inf, or NaN if the population variance is 0. Floats narrower than f32 are
    computed in f32. Source: the corrected two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample
    variance", 1983. If a reduced dim is sharded, two all-reduces are needed.

    Raises ProgramError if `correction` is not a whole number and a reduced size is symbolic.

    Example: `x: f32[M, N]` gives `f32[M]` by `hw.var(x, axis=-1, correction=1)`.
    """
    return hw.astype(_variance(x, dims_of(x, axis, "var"), correction, keepdims, "var"), x.dtype)


@_called("std")
def std(x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, correction: float = 0, keepdims: bool = False) -> Tensor:
    """Standard deviation of floats: the square root of `var`, with the same arguments and errors.

    Example: `x: f32[M, N]` gives `f32[M]` by `hw.std(x, axis=-1, correction=1)`.
    """
    return hw.astype(hw.sqrt(_variance(x, dims_of(x, axis, "std"), correction, keepdims, "std")), x.dtype)


def _variance(x: Tensor, axes: tuple[int, ...], correction: float, keepdims: bool, name: str) -> Tensor:
    wide, count = _wide(x), product(tuple(x.type.shape[axis] for axis in axes))
    distance = wide - hw.mean(wide, axes, keepdims=True)
    if correction and not count.is_int and int(correction) != correction:
        raise ProgramError.here(f"{name}: correction={correction!r} must be an int, because the size {count} is symbolic; use int sizes")
    # The means below are in one tensor, so that one all-reduce computes them.
    if not correction or count.is_int:
        rest, square = hw.concat([hw.mean(term, axes, keepdims)[None] for term in (distance, distance * distance)])
        scale = 1 if not correction else int(count) / (int(count) - correction) if int(count) > correction else inf
        variance = hw.maximum(square - rest * rest, 0)
        return variance if scale == 1 else variance * scale
    rest, scaled = hw.mean(distance, axes, keepdims), count - int(correction)
    terms = (record("mean", term, axis=axes, keepdims=keepdims, count=scaled) for term in (distance, distance * distance))
    rest, scaled_rest, square = hw.concat([term[None] for term in (rest, *terms)])
    return hw.maximum(square - rest * scaled_rest, 0)


@_called("softmax")
def softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    """Softmax over one dim: exp(x - max(x)) divided by the sum of these exponentials. x is a tensor of floats. The result has the shape and
    dtype of x. Floats narrower than f32 are computed in f32.

    A row that contains only -inf gives NaN, as in PyTorch. If the dim is sharded, two all-reduces are needed.

    Example: `hw.softmax(scores, axis=-1)`.
    """
    axis, wide = dim_of(x, axis, "softmax"), _wide(x)
    powers = hw.exp(wide - hw.max(wide, axis, keepdims=True))
    return hw.astype(powers * hw.reciprocal(hw.sum(powers, axis, keepdims=True)), x.dtype)


@_called("log_softmax")
def log_softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    """Logarithm of the softmax over one dim: x - max(x) - log(sum(exp(x - max(x)))). x is a tensor of floats. The result has the shape and
    dtype of x.

    Example: `hw.log_softmax(logits, axis=-1)`.
    """
    axis, wide = dim_of(x, axis, "log_softmax"), _wide(x)
    distance = wide - hw.max(wide, axis, keepdims=True)
    return hw.astype(distance - hw.log(hw.sum(hw.exp(distance), axis, keepdims=True)), x.dtype)


@_called("layer_norm")
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axis: Axis = -1, eps: float = 1e-5) -> Tensor:
    """Layer norm over one dim: (x - mean) / sqrt(variance + eps), times weight, plus bias. The result has the shape and dtype of x.

    Floats narrower than f32 are computed in f32. `weight` and `bias` broadcast against x from the right, for example [E] for x [..., E].
    Source: Ba, Kiros and Hinton, "Layer normalization", 2016.

    Raises ProgramError if `weight` or `bias` does not broadcast.

    Example: `hw.layer_norm(x, weight, bias)` with `x: bf16[M@tp, E]`, `weight: bf16[E]` and `bias: bf16[E]` gives `bf16[M@tp, E]`, in one
    kernel.
    """
    axis, wide = _normed_dim("layer_norm", x, axis, weight, bias), _wide(x)
    distance = wide - hw.mean(wide, axis, keepdims=True)
    variance = hw.mean(distance * distance, axis, keepdims=True)
    return _scaled(distance * hw.rsqrt(variance + eps), weight, bias, x)


@_called("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, axis: Axis = -1, eps: float = 1e-6) -> Tensor:
    """RMS norm over one dim: x / sqrt(mean(x * x) + eps), times weight. The result has the shape and dtype of x. Floats narrower than f32
    are computed in f32.

    `weight` broadcasts against x from the right, for example [E] for x [..., E]. Source: Zhang and Sennrich, "Root mean square layer
    normalization", 2019.

    Raises ProgramError if `weight` does not broadcast.

    Example: `hw.rms_norm(x, weight)` with `x: bf16[M@tp, E]` and `weight: bf16[E]` gives `bf16[M@tp, E]`, in one kernel.
    """
    axis, wide = _normed_dim("rms_norm", x, axis, weight, None), _wide(x)
    return _scaled(wide * hw.rsqrt(hw.mean(wide * wide, axis, keepdims=True) + eps), weight, None, x)


def _normed_dim(kind: str, x: Tensor, axis: Axis, weight: Tensor | None, bias: Tensor | None) -> int:
    """Index of the normalised dim. Checks the shapes of weight and bias."""
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and not broadcasts(other.type.shape, x.type.shape):
            raise ProgramError.here(f"{kind}: the {name} is {other.type}, and x {x.type}; pass a shape that broadcasts to x")
    return dim_of(x, axis, kind)


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    if weight is not None:
        normed = normed * hw.astype(weight, normed.dtype)
    if bias is not None:
        normed = normed + hw.astype(bias, normed.dtype)
    return hw.astype(normed, x.dtype)


def _wide(x: Tensor) -> Tensor:
    return hw.astype(x, f32) if x.dtype.kind == "float" and x.dtype.itemsize < f32.itemsize else x


# --- 8-bit floats -----------------------------------------------------------------------------------------------------

LARGEST = {f8e4m3: 448.0, f8e5m2: 57344.0}
LEAST_MAGNITUDE = 1e-12  # lower bound of the largest magnitude of elements that share a scale, so that no scale is 0
QUANTIZE_SCALINGS = (*SCALINGS, "block2d")


@checked
def quantize(x: Tensor, scaling: str, dtype: DType = f8e4m3, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantises floats x [..., K] to 8-bit floats of `dtype`, f8e4m3 or f8e5m2. Returns the values and their f32 scales.

    An element of x is approximately its 8-bit value times its scale. The scale is m divided by the largest finite number of the dtype. m is
    the largest magnitude of the elements that share the scale, but at least 1e-12.

    | scaling | elements that share a scale | shape of the scales |
    |---|---|---|
    | "row" | a row, along the last dim | [..., 1] |
    | "tensor" | all | [1, ..., 1] |
    | "block" | 128 along the last dim | [..., K/128] |
    | "block2d" | 128 x 128 of x [M, K] | [M/128, K/128] |

    If elements that share a scale are on several ranks, an all-reduce computes m. If `scale` is given, the values are x divided by `scale`,
    but the returned scales are the scales of x. So a step can use the scales of the previous step. Values out of range become the largest
    number of f8e4m3, or an infinity of f8e5m2.

    Raises ProgramError for an unknown scaling, another dtype or number of dims, a wrong scale, or a dim in blocks that 128 does not divide.

    Example: `values, scales = hw.quantize(x, "row")` and `w, w_scales = hw.quantize(weight, "row")`, then
    `hw.scaled_matmul(values, w.T, scales, w_scales.T)`.
    """
    if scaling not in QUANTIZE_SCALINGS:
        raise ProgramError.here(f"quantize: there is no scaling {scaling!r}; {did_you_mean(scaling, QUANTIZE_SCALINGS)}")
    if dtype not in LARGEST:
        raise ProgramError.here(f"quantize: {dtype!r} is not a dtype of 8-bit floats; use hw.f8e4m3 or hw.f8e5m2")
    if x.dtype.kind != "float" or x.ndim < (2 if scaling == "block2d" else 1):
        raise ProgramError.here(f"quantize: {x.type} is not a tensor of floats with rows; use hw.astype, and hw.reshape")
    shape = x.type.shape
    split = _in_blocks(shape, scaling)
    wide = _wide(hw.reshape(x, *split) if split != shape else x)
    inner: tuple[int, ...] = (wide.ndim - 3, wide.ndim - 1) if scaling == "block2d" else (wide.ndim - 1,)
    scales = tuple(Size() if i in inner or scaling == "tensor" else size for i, size in enumerate(split))
    merged = {"block": scales[:-1], "block2d": scales[::2]}.get(scaling, scales)
    wanted = TensorType(f32, tuple(map(Dim, merged)))
    if scale is not None and (scale.type.shape != merged or scale.dtype != f32):
        raise ProgramError.here(f"quantize: the scale is {scale.type}, but {x.type} needs {wanted}; reshape or cast it")

    def divided(by: Tensor) -> Tensor:
        values = _worded("quantized", hw.astype(wide / hw.astype(by, wide.dtype), dtype))
        return hw.reshape(values, *shape) if split != shape else values

    top = hw.max(hw.abs(wide), inner, keepdims=True)
    given = None if scale is None else divided(hw.reshape(scale, *scales) if scales != merged else scale)
    if scaling == "tensor" and wide.ndim > 1:
        # Rows are reduced first, so that the kernel of a preceding norm can compute the maxima of rows.
        top = hw.max(top, tuple(range(wide.ndim)), keepdims=True)
    own = _worded("scale", hw.astype(hw.maximum(top, LEAST_MAGNITUDE) / LARGEST[dtype], f32))
    return divided(own) if given is None else given, hw.reshape(own, *merged) if scales != merged else own


def _in_blocks(shape: tuple[Size, ...], scaling: str) -> tuple[Size, ...]:
    """Splits each dim that has blocks into two: the blocks, and the elements of a block."""
    blocked = {"block": (len(shape) - 1,), "block2d": (len(shape) - 2, len(shape) - 1)}.get(scaling, ())
    for i in blocked:
        if shape[i].is_int and int(shape[i]) % BLOCK:
            raise ProgramError.here(f"quantize: {BLOCK} does not divide dim {i} of [{', '.join(map(str, shape))}]; pad it")
    if scaling == "block2d" and len(shape) != 2:
        raise ProgramError.here(f"quantize: [{', '.join(map(str, shape))}] has {len(shape)} dims, and block2d needs 2; use hw.reshape")
    return tuple(each for i, size in enumerate(shape) for each in ((size // BLOCK, Size(BLOCK)) if i in blocked else (size,)))


# --- positions --------------------------------------------------------------------------------------------------------


@_called("rotary")
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding: rotates pairs of elements of the last dim of x [..., S, E].

    `cos` and `sin` of the angles have E/2 elements in their last dim. All other dims of `cos` and `sin` broadcast to the dims of x.

    A pair is elements i and i + E/2, as in GPT-NeoX and Llama. With `interleaved`, a pair is elements 2i and 2i + 1. The result has the
    shape and dtype of x. Floats narrower than f32 are computed in f32. Source: Su et al., "RoFormer", 2021.

    Raises ProgramError if x is not floats [..., S, E] with an even E, or if `cos` or `sin` has another shape.

    Example: `hw.rotary_embedding(q, cos, sin)` with `q: bf16[B, H@tp, S, 128]`, and `cos` and `sin` of `f32[S, 64]`.
    """
    if x.dtype.kind != "float" or x.ndim < 2 or (x.type.shape[-1].is_int and int(x.type.shape[-1]) % 2):
        raise ProgramError.here(f"rotary_embedding: {x.type} is not floats [..., S, E] with an even E; cast, reshape or pad it")
    half = x.type.shape[-1] // 2
    for name, table in (("cos", cos), ("sin", sin)):
        shape = table.type.shape
        if shape[-1:] != (half,) or not broadcasts(shape, (*x.type.shape[:-1], half)):
            raise ProgramError.here(f"rotary_embedding: {name} is {table.type}, and x {x.type}; pass one element per pair: [S, {half}]")
    of_pair = x.ndim if interleaved else x.ndim - 1  # index of the new dim: the two elements of a pair
    split = (half, Size(2)) if interleaved else (Size(2), half)
    pairs = hw.reshape(x, *x.type.shape[:-1], *split)
    before = [slice(None)] * of_pair
    first, second = (_wide(pairs[(*before, slice(i, i + 1))]) for i in (0, 1))
    c, s = (hw.expand_dims(hw.astype(table, first.dtype), -1 if interleaved else -2) for table in (cos, sin))
    both = first * c - second * s, second * c + first * s
    turned = hw.where(hw.iota(pairs, of_pair) == 0, *both) if interleaved else hw.concat(both, of_pair)
    return hw.reshape(_worded("rotary", hw.astype(turned, x.dtype)), *x.type.shape)


# --- random numbers ---------------------------------------------------------------------------------------------------


@_called("uniform")
def uniform(x: Tensor, seed: Tensor | int, draw: Tensor | int = 0) -> Tensor:
    """Random f32 numbers, uniform in [0, 1), in the shape of x, which has at most four dims.

    A number depends only on `seed`, `draw` and its index in the global tensor, and not on the target or the sharding. `seed` and `draw` are
    ints that fit u32, or u32 tensors without dims. Source: Philox4x32-10 with the index as its counter (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011).

    Raises ProgramError if x has more than four dims, or if `seed` or `draw` is not a u32 or has dims.

    Example: `hw.uniform(x, seed=7)`. With an input `step: hw.u32[()]`, `hw.uniform(x, 7, step)` gives new numbers in each step.
    """
    return _drawn(x, _indices(x), seed, draw)


def _indices(x: Tensor) -> list[Tensor]:
    """Indices along each dim of x, in shapes that broadcast to x."""
    others = [tuple(j for j in range(x.ndim) if j != i) for i in range(x.ndim)]
    return [hw.expand_dims(hw.iota(x, i, u32), rest) if rest else hw.iota(x, i, u32) for i, rest in enumerate(others)]


def _drawn(x: Tensor, counter: Sequence[Tensor], seed: Tensor | int, draw: Tensor | int) -> Tensor:
    if len(counter) > MAX_RANDOM_DIMS:
        raise ProgramError.here(f"{x.type} has {len(counter)} dims, but at most {MAX_RANDOM_DIMS} are supported; reshape it")
    for name, value in (("seed", seed), ("draw", draw)):
        if not (fits(value, u32) if isinstance(value, int) else (value.dtype, value.type.dims) == (u32, ())):
            raise ProgramError.here(f"{name}={value} is not a u32; give an int from 0 to {2**32 - 1}, or a u32 tensor without dims")
    counters = counter or [hw.iota(hw.expand_dims(x, 0), 0, u32)]  # a tensor without dims has counter 0
    numbers = record("philox", *counters, *(0 for _ in range(len(counters), MAX_RANDOM_DIMS)), seed, draw)
    return numbers if counter else hw.reshape(numbers)


def _dropped(x: Tensor, p: float, counter: Sequence[Tensor], seed: Tensor | int, draw: Tensor | int) -> Tensor:
    return hw.where(_drawn(x, counter, seed, draw) >= p, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


@_called("dropout")
def dropout(x: Tensor, p: float, seed: Tensor | int, draw: Tensor | int = 0) -> Tensor:
    """Dropout: x / (1 - p) where `uniform(x, seed, draw)` is at least p, else 0. The result has the shape and dtype of x. p is from 0 to 1.

    A backward pass that uses the same seed and draw drops the same elements. Source: Srivastava et al., "Dropout", 2014.

    Raises ProgramError if p is out of range, and in the cases of `uniform`.

    Example: `hw.dropout(x, 0.1, seed=7, draw=layer)`.
    """
    _check_probability("dropout: p", p)
    return _dropped(x, p, _indices(x), seed, draw)


def _check_probability(name: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise ProgramError.here(f"{name}={p!r} is not a probability from 0 to 1")
