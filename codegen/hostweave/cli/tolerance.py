"""The error that a correct result may have."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod, sqrt

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.ops.attributes import SCALE
from hostweave.options import Options
from hostweave.passes.fusion.insert_reshards import insert_reshards
from hostweave.passes.fusion.merge_contractions import merge_contractions
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.types.tensor import DType, TensorType, f32, f64

_MAX_SEQUENTIAL = 512  # assumed maximum number of terms that are added sequentially


@dataclass(frozen=True)
class Tolerance:
    """Bound |computed - exact| <= atol + rtol * |exact|, as in numpy.testing.assert_allclose."""

    rtol: float
    atol: float


def tolerance(dtype: DType, reduction_length: int = 1, terms: int = 1, scores: float = 0.0) -> Tolerance:
    """Tolerance for a result of this dtype: 0 for integers and bools. Inputs have magnitudes of about 1 and random signs.

    - `reduction_length` n is the number of terms of a sum.
    - `terms` D is the number of partial sums, one per rank, which are rounded to the dtype before they are added.
    - `scores` adds m c (see below) over the softmaxes of a path to the result. The path with the largest sum counts.

    Let u = 2^-(mantissa bits + 1) be the unit roundoff of the dtype, and a the unit roundoff of the accumulator (f32, or f64 for f64):

    - The result is rounded once, and so are the results of up to three ops before it: rtol = 4 u.
    - A sum of n terms of magnitude 1 is a random walk of size sqrt(n). In a sequential sum, each addition has an error of up to a times the
      sum so far. The root mean square of the total error is a * n / sqrt(6), and 5 standard deviations are about 2 a n. At most b = 512
      terms are added sequentially. The n / b sums of b terms have independent errors, in total 2 a b sqrt(n / b).
    - Each of D partial sums has size sqrt(n / D) and is rounded to the dtype. The additions of the partial sums give D - 1 sums of size up
      to sqrt(n), which are also rounded. The total error is at most u (sqrt(n D) + (D - 1) sqrt(n)), which is less than 2 u D sqrt(n).
    - If terms cancel to a result near zero, the rounding errors of the terms remain: 4 u sqrt(n).
    - A score of a softmax is a sum of products times a scale c. If m sequential additions determine the error of the sum, the score has an
      error of 2 a m c. So the weight exp(score), and a mean with such weights, have a relative error of 2 a m c. A sum of n means has an
      error of 2 a m c sqrt(n).
    """
    if dtype.kind != "float":
        return Tolerance(0.0, 0.0)
    unit, accumulator = dtype.roundoff, (dtype if dtype == f64 else f32).roundoff
    n, d = reduction_length, terms
    added = _sequential_additions(n) + scores * sqrt(n)
    partial_sums = 2 * unit * d * sqrt(n) if d > 1 else 0.0
    return Tolerance(rtol=4 * unit, atol=2 * accumulator * added + 4 * unit * sqrt(n) + partial_sums)


def tolerance_of(fusion: Fusion, name: str, sizes: Mapping[str, int]) -> Tolerance:
    """Tolerance for a value of a fusion without calls. In a chain of sums and products, reduction lengths and numbers of terms multiply."""
    explicit = with_partial_sums(fusion)
    types = explicit.types
    lengths, terms, scores = dict.fromkeys(types, 1), dict.fromkeys(types, 1), dict.fromkeys(types, 0.0)
    for op in explicit.ops:
        result, inputs = op.result.name, op.tensors
        joined: Callable[[Iterable[int]], int] = prod if OPS[op.kind].is_product else partial(max, default=1)
        lengths[result] = joined(lengths[tensor] for tensor in inputs) * reduced_length(op, types, sizes)
        terms[result] = joined(terms[tensor] for tensor in inputs)
        inherited = [scores[tensor] for tensor in inputs]
        scores[result] = (sum(inherited) if OPS[op.kind].is_product else max(inherited, default=0.0)) + score_length(op, types, sizes)
        if op.result.type.partial:
            terms[result] *= op.result.type.mesh_in(explicit.mesh).size_of(op.result.type.partial.axes)
    return tolerance(types[name].dtype, lengths[name], terms[name], scores[name])


def _sequential_additions(length: int) -> float:
    """Number of sequential additions that have the same error as a sum of `length` terms."""
    return min(length, sqrt(length * _MAX_SEQUENTIAL))


@lru_cache(maxsize=1)  # cached, because the outputs of a program share a fusion
def with_partial_sums(fusion: Fusion) -> Fusion:
    """Adds shardings and partial sums to a fusion without calls."""
    options = Options()
    return insert_reshards(propagate_sharding(merge_contractions(fusion, options), options), options)


def reduced_length(op: Op, types: Mapping[str, TensorType], sizes: Mapping[str, int]) -> int:
    """Number of terms that are added for one element of the result."""
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
    """m c of `tolerance` for the softmax of an op, or 0 without a softmax."""
    operands = operand_types(op, types)
    lengths = [operands[operand].shape[dim].bind(sizes) for operand, dim in OPS[op.kind].scores_add_up]
    if not lengths:
        return 0.0
    scale = op[SCALE]
    return _sequential_additions(prod(lengths)) * abs(scale)
