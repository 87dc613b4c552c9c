"""Memory of programs on the CPU device: allocations, the arena, and buffers that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, expect, fusion_of, integer_arrays, lowered, random_arrays, sizes_of
from device_counters import counted
from numpy.typing import NDArray
from parts_of_transformers import PROGRAMS

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.check.check import check
from hostweave.cli.memory_plan import memory_plan
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.tensor import DType

RANKS = 4


def held() -> dict[str, int]:
    """Numbers of live bytes and objects of the CPU device of this process."""
    return {name: count for name, count in counted().items() if name.startswith("live_")}


def test_close_frees_everything() -> None:
    fusion = fusion_of("ag_matmul_ring", RANKS, 3, hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion), seed=0)
    compiled(fusion).run(**arrays)  # The warm-up makes ranks and channels.
    before = held()
    program = hw.compile(fusion)
    expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)
    opened = held()
    assert opened["live_bytes"] > before["live_bytes"]
    assert opened["live_events"] > before["live_events"]
    assert opened["live_communicators"] == before["live_communicators"]  # Programs share communicators.
    program.close()
    assert held() == before


def test_memory_does_not_grow_from_call_to_call() -> None:
    fusion = fusion_of("matmul_rs_flat", RANKS, 3, hw.f32)
    program = compiled(fusion)
    large, small = (integer_arrays(fusion, sizes_of(fusion, times), seed=0) for times in (8, 1))
    program.run(**large)
    after_one = held()
    for _ in range(5):
        program.run(**small)
        program.run(**large)
    assert held() == after_one


def test_a_second_call_allocates_nothing() -> None:
    """A call with other sizes also allocates nothing, if the memory is large enough."""
    fusion = PROGRAMS[2](2, hw.f32)
    program = compiled(fusion)
    large, small = ({"S": size, "E": 16, "F": 32} for size in (24, 8))
    program.run(**random_arrays(fusion, large, seed=0))
    before = counted()
    for sizes in (large, small, large, small, small):
        program.run(**random_arrays(fusion, sizes, seed=1))
    after = counted()
    assert (after["allocations"], after["live_bytes"]) == (before["allocations"], before["live_bytes"])


def test_the_arena_has_the_planned_size() -> None:
    fusion = fusion_of("two_loops", RANKS, 3, hw.bf16)
    sizes = sizes_of(fusion, 8)
    arrays = integer_arrays(fusion, sizes, seed=0)
    compiled(fusion).run(**arrays)  # The warm-up makes ranks and channels.
    program, before = hw.compile(fusion), held()["live_bytes"]
    program.run(**arrays)
    arguments = sum(held_by_rank(p.type, sizes) for p in (*lowered(fusion).inputs, *lowered(fusion).outputs))
    word = 4  # bytes that are copied to the host when the launch of a graph starts
    assert held()["live_bytes"] - before == RANKS * (memory_plan(lowered(fusion), sizes).peak + arguments + word)
    program.close()


def held_by_rank(type: hw.TensorType, sizes: dict[str, int]) -> int:
    shape = [dim.size.bind(sizes) // (RANKS if dim.axes else 1) for dim in type.dims]
    return int(np.prod(shape)) * type.dtype.itemsize


# --- larger programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_larger_programs_match_numpy(make: Callable[[int, DType], Fusion], ranks: int) -> None:
    """Temporaries and outputs are filled with NaN before every call."""
    fusion = make(ranks, hw.f32)
    arrays = {name: array / 4 for name, array in random_arrays(fusion, {"S": 12, "E": 16, "F": 24}, seed=0).items()}
    (want,) = run_reference(fusion, {name: array.astype(np.float64) for name, array in arrays.items()})
    for schedule in (parallel(check_dependencies=True), seeded(1), seeded(2)):
        with schedule:
            for call in compiled(fusion).run_in_flight([arrays, arrays], poison=True):
                for rank, got in enumerate(call):
                    block = want[np.array_split(np.arange(12), ranks)[rank]] if make is PROGRAMS[0] else want
                    np.testing.assert_allclose(got, block, 1e-4, 1e-5)


# --- missing dependencies with shared memory --------------------------------------------------------------------------

SHARED = """\
kernel @double(%a: f32[M, N]) {
  %b: f32[M, N] = add(%a, %a)
}
host @shared(%x: f32[M, N]) -> (%y: f32[M, N], %z: f32[M, N]) mesh(x=1) streams(loop[2], comm[1]) events(ready[2], used[2]) {
  fork loop
  fork comm
  %a = allocate f32[M, N]
  launch @double %x -> %a
  record ready[0]
  stream comm[0] {
    wait ready[0]
    launch @double %a -> %y
    record used[0]
  }
  wait used[0]
  deallocate %a
  %b = allocate f32[M, N]
  launch @double %x -> %b
  record ready[1]
  stream loop[1] {
    wait ready[1]
    launch @double %b -> %z
  }
  join loop
  join comm
}
"""


def without(line: str) -> HostProgram:
    return HostProgram.parse(SHARED.replace(f"    {line}\n", "").replace(f"  {line}\n", ""))


X: NDArray[Any] = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_shared_memory_is_shared() -> None:
    host = HostProgram.parse(SHARED)
    check(host)
    plan = memory_plan(host, {"M": 3, "N": 4})
    assert [row.offsets for row in plan.rows] == [(0,), (0,)]
    for seed in range(20):
        with seeded(seed):
            ((y, z),) = compiled(host).run_in_flight([{"x": X}], poison=True)[0]
        np.testing.assert_array_equal(y, 4 * X)
        np.testing.assert_array_equal(z, 4 * X)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("record used[0]", "a wait whose record may not have run: record used[0] before it in the same call"),
        ("wait used[0]", "deallocate %a frees %a while rank 0, comm[0]: launch @double %a -> %y reads it: nothing orders them"),
    ],
)
def test_a_dropped_dependency_of_shared_memory_is_found(line: str, message: str) -> None:
    mutant = without(line)
    with pytest.raises(ProgramError) as caught:
        check(mutant)
    assert message in str(caught.value)
    program = compiled(mutant, options=Options(check=False))
    for seed in range(5):
        with seeded(seed, check_dependencies=True), pytest.raises(ExecutionError) as failed:
            program.run_in_flight([{"x": X}], poison=True)
        assert "missing dependency" in str(failed.value)
