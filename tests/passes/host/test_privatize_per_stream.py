"""The pass privatize_per_stream. If a stream block uses one chunk of a buffer, the block allocates only this chunk."""

from __future__ import annotations

from typing import Any

from fusions_from_files import all_fusions
from stages_of_passes import changes

import hostweave as hw
from hostweave.passes.host.privatize_per_stream import privatize_per_stream


def test_gathered_chunks() -> None:
    assert (
        changes(privatize_per_stream, all_fusions(2, 4)["ag_matmul"])
        == """\
- %x_gathered = allocate bf16[4, 2, m, K]
- %x_gathered_i = select %x_gathered[0: %i]
- all_gather %x_i -> %x_gathered_i on x
+ %x_gathered = allocate bf16[2, m, K]
+ all_gather %x_i -> %x_gathered on x
- matmul %x_gathered_i, %w -> %y_i
+ matmul %x_gathered, %w -> %y_i
"""
    )


def test_a_buffer_that_is_read_after_the_loop_is_not_changed() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32[4, "2@x", "M", "K"], w=hw.f32["K", "N"])
    def summed(x: Any, w: Any) -> Any:
        gathered = hw.reshard(x, 4, 2, "M", "K")
        return hw.matmul(gathered, w).stream(0), hw.sum(gathered, 0)

    assert changes(privatize_per_stream, summed) == ""
