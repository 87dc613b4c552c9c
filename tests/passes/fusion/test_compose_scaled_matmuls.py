"""The pass compose_scaled_matmuls: scaled matmuls that cuBLASLt does not support get an attribute with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from stages_of_passes import before_and_after

import hostweave as hw
from hostweave.passes.fusion.compose_scaled_matmuls import compose_scaled_matmuls
from hostweave.types.machine import H200

WITHOUT_ROWS = hw.Options(machine=H200.without_scales("row", "the GPU is old"))


def reason(a: hw.DType, b: hw.DType, inner: int, columns: int, rows: bool, options: hw.Options | None = None) -> str | None:
    """The reason that the pass adds to a matmul with scales per tensor or per row, or None."""
    of_a, of_b = (("M", 1), (1, columns)) if rows else ((1, 1), (1, 1))

    @hw.fusion(a=a["M", inner], b=b[inner, columns], s=hw.f32[of_a], t=hw.f32[of_b])
    def scaled(a: Any, b: Any, s: Any, t: Any) -> Any:
        return hw.scaled_matmul(a, b, s, t)

    _, after = before_and_after(compose_scaled_matmuls, scaled, options)
    (op,) = after.ops
    return dict(op.attributes).get("composed")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((hw.f8e4m3, hw.f8e5m2, 32, 16, False), None),
        ((hw.f8e5m2, hw.f8e5m2, 32, 16, False), "dtypes"),
        ((hw.f8e4m3, hw.f8e4m3, 24, 16, False), "sizes"),
        ((hw.f8e4m3, hw.f8e4m3, 32, 24, False), "sizes"),
        ((hw.f8e4m3, hw.f8e4m3, 32, 16, True, WITHOUT_ROWS), "machine"),
        ((hw.f8e4m3, hw.f8e4m3, 32, 16, False, WITHOUT_ROWS), None),
    ],
    ids=str,
)
def test_reasons(given: tuple[Any, ...], why: str | None) -> None:
    assert reason(*given) == why
