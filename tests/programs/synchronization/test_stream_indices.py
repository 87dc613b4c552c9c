"""Stream indices are taken modulo the number of streams. The result is nonnegative, both in the check and in C++."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import compiled

from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.runtime.cpu import seeded

PROGRAM = """host @steps(%x: f32[M]) -> (%y: f32[M]) mesh(x=1) streams(loop[3]) {{
  fork loop
  for %i in 0..3 {{
    stream loop[{index}] {{
      %t = allocate f32[M]
      copy %x -> %t
      copy %t -> %y
    }}
  }}
  join loop
}}
"""


@pytest.mark.parametrize("index", ["%i * 3 - 1", "%i * 3 - 4", "0 - 3 * %i - 1"])
def test_a_negative_index_of_a_stream(index: str) -> None:
    """All iterations are on one stream, so there is no race. With the remainder of C++, some indices would be negative."""
    program = HostProgram.parse(PROGRAM.format(index=index))
    check(program)
    x = np.arange(8, dtype=np.float32)
    for seed in range(3):
        with seeded(seed):
            np.testing.assert_array_equal(compiled(program).run(x=x), x)


def test_memory_of_a_stream_with_a_negative_index() -> None:
    """The index is always less than the number of streams, but may be negative. So the C++ still needs a modulo."""
    text = PROGRAM.format(index="%i - 1").replace("%x -> %t", "%x_i -> %t").replace("%t -> %y", "%t -> %y_i")
    views = "".join(f"      %{name}_i = chunk %{name}[0: %i of 3]\n" for name in "xy")
    text = text.replace("      copy %x_i", f"{views}      copy %x_i").replace("allocate f32[M]", "allocate f32[M/3]")
    program = HostProgram.parse(text)
    check(program)
    x = np.arange(9, dtype=np.float32)
    with seeded(0):
        np.testing.assert_array_equal(compiled(program).run(x=x), x)
