"""Helpers of passes over fusions: unique names, consumers, and what is needed."""

from __future__ import annotations

from collections.abc import Sequence

from hostweave.base.names import claim_unique
from hostweave.fusion_ir.ir import Fusion, Op


class Names:
    """Names that no value of the fusion has."""

    def __init__(self, fusion: Fusion):
        self.taken = set(fusion.values())

    def new(self, wanted: str) -> str:
        """`wanted`, or with a number where it is taken."""
        return claim_unique(wanted, self.taken)


def eliminate_dead_code(ops: Sequence[Op], outputs: tuple[str, ...]) -> tuple[Op, ...]:
    """The ops that an output depends on. Communication without a consumer is removed, on every rank."""
    needed = set(outputs)
    for op in reversed(ops):
        if op.result.name in needed:
            needed.update(op.tensors)
    return tuple(op for op in ops if op.result.name in needed)


def consumers(fusion: Fusion) -> dict[str, list[Op | None]]:
    """For every value one entry a use: the op, or None where it is returned."""
    result: dict[str, list[Op | None]] = {name: [] for name in fusion.values()}
    for op in fusion.ops:
        for name in op.tensors:
            result[name].append(op)
    for name in fusion.outputs:
        result[name].append(None)
    return result
