"""`Options(tune=True)` with ranks that are processes.

Ranks share algorithms when they first make plans. Later, calls share algorithms only if the program communicates and the sizes
are new on all ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from two_ranks import on_two_ranks

pytestmark = pytest.mark.xdist_group("tuned")

SCRIPT = """
import ctypes
from hostweave.base.paths import NATIVE

ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so")).hw_cpu_set_algorithms(3)

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def product(x, w):
    return hw.reshard(x @ w, "M", "N")

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def local(x, w):
    return x @ w

group = anew(0, call_timeout=5)
for fusion in (product, local):
    program, w = hw.compile(fusion, options=hw.Options(tune=True)), np.ones((16, 32), np.float32)

    def call(rows):
        return program(np.full((rows, 16), rank + 1, np.float32), w)

    np.testing.assert_array_equal(call(20)[:1], np.full((1, 32), 16.0 * (rank + 1 if fusion is local else 1)))
    number = group.coordinator.number
    for attempt in range(4):  # one rank binds a new array, and the other rank binds its old array again; then both call
        bound = program.bind(w=w.copy()) if attempt % 2 == rank else program.bind(w=w)
        for _ in range(2):
            bound(np.full((20, 16), rank + 1, np.float32))
    assert group.coordinator.number == number
    call(24)
    assert (group.coordinator.number > number) == (fusion is product)
    if fusion is local and rank == 0:
        call(28)  # alone
print("done", sorted(algorithm[0] for algorithm in program.module.measured_algorithms().values()))
"""


def test_only_one_rank_binds_new_arrays(tmp_path: Path) -> None:
    """If one rank binds a new array, the ranks share no algorithms. The test has its own cache, without measurements of other tests."""
    assert on_two_ranks(SCRIPT, "two_sided", HOSTWEAVE_CACHE=str(tmp_path)) == [["done [2, 2, 2]"], ["done [2, 2]"]]
