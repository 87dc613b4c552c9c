"""Counters of the CPU device."""

from __future__ import annotations

import ctypes

from hostweave.base.paths import NATIVE


class Counters(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "ops",
            "steps",
            "schedule",
            "live_bytes",
            "live_streams",
            "live_events",
            "live_communicators",
            "allocations",
            "copied_bytes",
        )
    ]


def counted() -> dict[str, int]:
    counters = Counters()
    ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so")).hw_cpu_get_counters(ctypes.byref(counters))
    return {name: getattr(counters, name) for name, _ in Counters._fields_}
