"""Tolerance for programs whose values keep one magnitude, such as transformers."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from unrolling import inlined

from hostweave.cli.tolerance import Tolerance, reduced_length, tolerance, with_partial_sums
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops import OPS, RESHARDS


def tolerance_at_scale(fusion: Fusion, name: str, sizes: Mapping[str, int]) -> Tolerance:
    """Tolerance for a value in a program whose values have a magnitude of about 1, because of norms and scaled weights.

    An op that rounds has an error of up to one unit roundoff of its dtype. A matmul sums n products of size 1 / sqrt(n) on several ranks.
    The error of a matmul is taken as a quarter of the `tolerance` for terms of size 1, divided by sqrt(n). The errors of the two operands
    of a matmul are independent, so their squares add. The errors of pointwise ops on one value are correlated, so the largest error is
    used. The tolerance is five standard deviations of the total error.
    """
    spread = with_partial_sums(inlined(fusion))
    types = {value_name: value.type for value_name, value in spread.values().items()}
    squares = {value.name: 0.0 for value in spread.inputs}
    for op in spread.ops:
        dtype, taken = op.result.type.dtype, [squares[tensor] for tensor in op.tensors]
        if op.kind == "matmul":
            ranks = spread.mesh.size_of(op.result.type.partial.axes) if op.result.type.partial else 1
            length = reduced_length(op, types, sizes)
            own, inherited = tolerance(dtype, length, ranks).atol / sqrt(length) / 4, sum(taken)
        else:
            is_exact = OPS[op.kind].is_view or op.kind in (*RESHARDS, "copy", "iota")
            own, inherited = 0.0 if is_exact else tolerance(dtype).rtol / 4, max(taken, default=0.0)
        squares[op.result.name] = inherited + own**2
    return Tolerance(tolerance(types[name].dtype).rtol, 5 * sqrt(squares[name]))
