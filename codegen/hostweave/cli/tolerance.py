"""The tolerance for a correct result."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod, sqrt

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.ops.attributes import SCALE
from hostweave.fusion_ir.rewriting import inlined
from hostweave.options import Options
from hostweave.passes.fusion.insert_reshards import insert_reshards
from hostweave.passes.fusion.merge_contractions import merge_contractions
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.types.tensor import DType, TensorType, f32, f64

_IN_A_ROW = 512  # largest number of terms that count as added sequentially


@dataclass(frozen=True)
class Tolerance:
    """|computed - exact| <= atol + rtol * |exact|, as numpy.testing.assert_allclose reads it."""

    rtol: float
    atol: float


def tolerance(dtype: DType, reduction_length: int = 1, terms: int = 1, scores: float = 0.0) -> Tolerance:
    """Tolerance for a result of this dtype, for inputs of magnitude about 1 and either sign.

    `reduction_length` n is the number of products or elements in one sum. `terms` D is the number of partial sums, one per rank, that are
    rounded to the dtype before they are added. `scores` is the sum of m c over the softmaxes that lead to the value. Zero for integers and
    bools.

    Let u = 2^-(mantissa bits + 1) be the unit roundoff of the dtype, and a the roundoff of the accumulator (f32, or f64 for f64):

    - the result is rounded once, and so is each of up to three ops before it: rtol = 4 u;
    - a sum of n such terms is a random walk of size sqrt(n). In sequential addition, each of n additions has an error of up to a times the
      sum so far. The total is a * n / sqrt(6) in the mean square, and 5 standard deviations are below 2 a n. At most b = 512 terms are
      added sequentially. The n / b sums of b terms have independent errors: 2 a b sqrt(n / b);
    - each of D partial sums, of size sqrt(n / D), is rounded to the dtype, and so are their D - 1 sums, of size up to
      sqrt(n): at most u (sqrt(n D) + (D - 1) sqrt(n)), if all errors have the same sign: 2 u D sqrt(n);
    - a result near zero inherits the rounding of the cancelled terms: 4 u sqrt(n);
    - scores of a softmax are sums of m products, times a scale c: their error is 2 a m c. A weight exp(score) then has this relative error,
      and so has a mean with such weights. A sum of n such means has an error of 2 a m c sqrt(n).
    """
    if dtype.kind != "float":
        return Tolerance(0.0, 0.0)
    unit, accumulator = dtype.roundoff, (dtype if dtype == f64 else f32).roundoff
    n, d = reduction_length, terms
    added = _added(n) + scores * sqrt(n)
    spread = 2 * unit * d * sqrt(n) if d > 1 else 0.0
    return Tolerance(rtol=4 * unit, atol=2 * accumulator * added + 4 * unit * sqrt(n) + spread)


def tolerance_of(fusion: Fusion, name: str, sizes: Mapping[str, int]) -> Tolerance:
    """Largest error of a value of the fusion at these sizes, for any way to compute it.

    Lengths multiply along a chain of sums and products, and so do the numbers of ranks that hold terms of a sum.
    """
    spread = with_terms(fusion)
    types = {value_name: value.type for value_name, value in spread.values().items()}
    lengths, terms, scores = dict.fromkeys(types, 1), dict.fromkeys(types, 1), dict.fromkeys(types, 0.0)
    for op in spread.ops:
        result, inputs = op.result.name, op.tensors
        joined: Callable[[Iterable[int]], int] = prod if OPS[op.kind].is_product else partial(max, default=1)
        lengths[result] = joined(lengths[tensor] for tensor in inputs) * reduced_length(op, types, sizes)
        terms[result] = joined(terms[tensor] for tensor in inputs)
        inherited = [scores[tensor] for tensor in inputs]
        scores[result] = (sum(inherited) if OPS[op.kind].is_product else max(inherited, default=0.0)) + score_length(op, types, sizes)
        if op.result.type.partial:
            terms[result] *= op.result.type.mesh_in(spread.mesh).size_of(op.result.type.partial.axes)
    return tolerance(types[name].dtype, lengths[name], terms[name], scores[name])


def _added(length: int) -> float:
    """Returns the number of sequential additions that have the same error as a sum of this length."""
    return min(length, sqrt(length * _IN_A_ROW))


@lru_cache(maxsize=1)  # computed once for all outputs of a program
def with_terms(fusion: Fusion) -> Fusion:
    """The program without calls, with its shardings and its partial sums."""
    options = Options()
    return insert_reshards(propagate_sharding(merge_contractions(inlined(fusion), options), options), options)


def reduced_length(op: Op, types: Mapping[str, TensorType], sizes: Mapping[str, int]) -> int:
    """Number of elements or products that are summed for one element of the result."""
    operands = operand_types(op, types)
    walked = OPS[op.kind].map(operands, op)
    dim_sizes = {
        label: size
        for labels, type in reversed(list(zip(walked.operands, operands, strict=True)))
        for label, size in zip(labels, type.shape, strict=True)
    }
    reduced = [size for label, size in dim_sizes.items() if label and label not in (*walked.result, *walked.unwalked)]
    reduced += [operands[operand].shape[dim] for operand, dim in OPS[op.kind].adds_up]
    return prod(size.bind(sizes) for size in reduced)


def score_length(op: Op, types: Mapping[str, TensorType], sizes: Mapping[str, int]) -> float:
    """Returns the m c of `tolerance` for the softmax in an op: 0 if there is none."""
    operands = operand_types(op, types)
    lengths = [operands[operand].shape[dim].bind(sizes) for operand, dim in OPS[op.kind].scores_add_up]
    if not lengths:
        return 0.0
    scale = op[SCALE]
    return _added(prod(lengths)) * abs(scale)
