"""What a program holds on its devices while it is open, and that nothing stays when it is closed."""

from __future__ import annotations

import ctypes

from whole_programs import compiled, expect, fusion_of, integer_arrays, sizes_of

import hostweave as hw
from hostweave.build.paths import NATIVE

RANKS = 4


class Counters(ctypes.Structure):
    """hw_cpu_counters of hostweave_cpu.h."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("ops", "steps", "schedule", "live_bytes", "live_streams", "live_events", "live_communicators")
    ]


def held() -> dict[str, int]:
    """What all programs of this process hold on the CPU device."""
    counters = Counters()
    ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so")).hw_cpu_get_counters(ctypes.byref(counters))
    return {name: getattr(counters, name) for name, _ in Counters._fields_ if name.startswith("live_")}


def test_close_frees_everything() -> None:
    fusion = fusion_of("ag_matmul_ring", RANKS, 3, hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion), seed=0)
    compiled(fusion).run(**arrays)  # what stays: ranks and channels
    before = held()
    program = hw.compile(fusion)
    expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)
    opened = held()
    assert opened["live_bytes"] > before["live_bytes"]
    assert opened["live_events"] > before["live_events"]
    assert opened["live_communicators"] == before["live_communicators"]  # shared
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
