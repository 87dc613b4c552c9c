"""The pass copy_updated copies the operand of an update to the result if the two do not share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from interpret import interpret
from stages_of_passes import before_and_after, changes

import hostweave as hw
from hostweave.passes.host.copy_updated import copy_updated


def updating(read_later: bool) -> hw.Fusion:
    @hw.fusion(donate={} if read_later else {"x": 0}, x=hw.f32["M", "K"], row=hw.f32[1, "K"])
    def updating(x: Any, row: Any) -> Any:
        y = hw.dynamic_update_slice(x, row, (1, 0))
        return (y, x + 1) if read_later else y

    return updating


def test_an_operand_that_is_read_later_is_copied_first() -> None:
    assert (
        changes(copy_updated, updating(True))
        == """\
- launch @dynamic_update_slice_x %x, %row -> %y
+ copy %x -> %y
+ launch @dynamic_update_slice_x %y, %row -> %y
"""
    )
    _, after = before_and_after(copy_updated, updating(True))
    x, row = np.arange(12, dtype=np.float32).reshape(4, 3), np.full((1, 3), 9, np.float32)
    (results,) = interpret(after, {"x": x, "row": row})
    updated, more = results.values()
    np.testing.assert_array_equal(updated, np.concatenate((x[:1], row, x[2:])))
    np.testing.assert_array_equal(more, x + 1)


def test_a_donated_operand_is_updated_in_place() -> None:
    assert changes(copy_updated, updating(False)) == ""
