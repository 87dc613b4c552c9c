"""The tolerance for programs whose values stay at one magnitude, as those of a transformer do."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from hostweave.cli.tolerance import Tolerance, reduced_length, tolerance, with_terms
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops import OPS, RESHARDS


def tolerance_at_scale(fusion: Fusion, name: str, sizes: Mapping[str, int]) -> Tolerance:
    """How far a value may be from the exact one in a program that keeps a magnitude of about 1: norms, and weights scaled by their rows.

    Every op errs by up to one unit roundoff u of its dtype; a sum of n products of size 1 / sqrt(n) by what `tolerance` says of
    n and of the ranks' terms, divided by sqrt(n). Of both sides of a matmul the errors are of their own and add up in the mean
    square; what is computed from one value by several pointwise ops errs together, and takes over the largest. Five standard
    deviations of the sum are allowed.
    """
    spread = with_terms(fusion)
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
