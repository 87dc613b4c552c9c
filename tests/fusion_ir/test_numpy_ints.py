"""NumPy integers as sizes, axes, permutations, positions and numbers: the fusion is the same as with ints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hostweave as hw

USES: dict[str, Callable[[Any, Any], Any]] = {
    "a reduction": lambda x, n: hw.sum(x, n(1)) + hw.max(x, (n(1),)) + hw.mean(x, n(-1)) + hw.var(x, n(1), correction=n(1)),
    "a shape": lambda x, n: hw.reshape(x, n(2), n(2), n(6)) + hw.zeros((n(2), n(2), n(6))) + hw.full((n(6),), n(3), hw.f32),
    "a permutation": lambda x, n: hw.permute_dims(x, (n(1), n(0))),
    "brackets": lambda x, n: hw.concat([x[n(1) : n(3)], x[n(-1), None], x[..., : n(6) : n(1)]], n(0)),
    "new dims": lambda x, n: hw.squeeze(hw.expand_dims(x, n(0)), n(0)) + hw.broadcast_to(x, (n(2), n(4), n(6))),
    "parts": lambda x, n: hw.split(x, n(3), n(1))[0] + hw.pad(hw.softmax(x, n(1)), (n(0), n(1)))[:, : n(3)],
    "positions": lambda x, n: hw.dynamic_slice(hw.dynamic_update_slice(x, x[: n(2)], (n(1), n(0))), (n(1), n(0)), (n(2), n(2))),
    "numbers": lambda x, n: (x * n(2) + hw.one_hot(hw.argmax(x, n(1)), n(6), hw.f32)) ** n(2),
    "a sharding": lambda x, n: hw.reshard(x, n(4), "6@x"),
}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("name", USES)
def test_numpy_ints_are_ints(name: str, kind: type[Any]) -> None:
    def number(value: int) -> Any:
        return value if value < 0 else kind(value)  # np.uint8 has no negative numbers

    with_ints, with_numpy = (
        str(hw.fusion(mesh=hw.Mesh(x=n(2)), x=hw.f32[n(4), n(6)])(lambda x, n=n: USES[name](x, n))) for n in (int, number)
    )
    assert with_numpy == with_ints


def test_ranks() -> None:
    assert hw.Threads(np.int64(2)).count == 2
    assert str(hw.f32[np.int64(3)]) == "f32[3]"
