"""Worlds of several sizes live side by side in one process."""

from __future__ import annotations

import host_text
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError


def test_a_failure_leaves_other_worlds_as_they_were() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])
    def total(x: hw.Tensor) -> hw.Tensor:
        return hw.sum(x, axis="M")

    alone = host_text.parse("host @alone(%x: f32[M@x]) -> (%y: f32[M@x]) mesh(x=3) { copy %x -> %y  send %x to (rank.x + 1) % 3 on x }")
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    works = hw.compile(total)
    np.testing.assert_array_equal(works.run(x=x), x.sum(axis=0))
    with pytest.raises(ExecutionError, match="deadlock"):
        hw.compile(alone, options=hw.Options(check=False)).run(x=np.zeros(3, np.float32))
    np.testing.assert_array_equal(works.run(x=x), x.sum(axis=0))
