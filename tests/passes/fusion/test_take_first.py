"""The pass take_first. If only few elements of a pointwise op's result are used, the pass takes these elements of the operands. So the
whole result is not written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.fusion_ir.reference import run_reference


def compiled(count: int, lse: Any, function: Any) -> str:
    """Host IR of a program whose results are compared with the reference."""

    def f(x: hw.Tensor, lse: hw.Tensor, index: hw.Tensor) -> hw.Tensor:
        return hw.take_along_axis(function(x, lse), index, 1)

    fusion = hw.fusion(x=hw.f32[6, 64], lse=lse, index=hw.i64[6, count])(f)
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((6, 64), np.float32), "lse": rng.random([int(size) for size in fusion.inputs[1].type.shape], np.float32)}
    arrays["index"] = rng.integers(0, 64, (6, count))
    program = hw.compile(fusion)
    np.testing.assert_allclose(program.run(**arrays), run_reference(fusion, arrays)[0], rtol=1e-6)
    return program.host_ir


@pytest.mark.parametrize("lse", [hw.f32[6, 1], hw.f32[1, 64], hw.f32[6, 64], hw.f32[()]], ids=str)
def test_few_elements(lse: Any) -> None:
    """Operands that are broadcast along the taken dim are read unchanged."""
    text = compiled(2, lse, lambda x, lse: hw.exp(x - lse))
    assert text.count("launch ") == 1
    assert "f32[6, 64] = " not in text


@pytest.mark.parametrize(("count", "lse"), [(32, hw.f32[6, 1]), (2, hw.f32[64])], ids=str)
def test_many_elements_and_vectors_stay(count: int, lse: Any) -> None:
    assert "f32[6, 64] = " in compiled(count, lse, lambda x, lse: hw.exp(x - lse))
