"""Helpers of passes over fusions: unique names, and consumers."""

from __future__ import annotations

from hostweave.base.names import claim_unique
from hostweave.fusion_ir.ir import Fusion, Op


class Names:
    """Names that no value of the fusion has."""

    def __init__(self, fusion: Fusion):
        self.taken = set(fusion.values())

    def new(self, wanted: str) -> str:
        """`wanted`, or with a number where it is taken."""
        return claim_unique(wanted, self.taken)


def consumers(fusion: Fusion) -> dict[str, list[Op | None]]:
    """For every value one entry a use: the op, or None where it is returned."""
    result: dict[str, list[Op | None]] = {name: [] for name in fusion.values()}
    for op in fusion.ops:
        for name in op.tensors:
            result[name].append(op)
    for name in fusion.outputs:
        result[name].append(None)
    return result
