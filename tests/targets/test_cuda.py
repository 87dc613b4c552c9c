"""The target cuda on machines with and without GPUs: reasons why ranks cannot run or use a feature, and handles of streams."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hostweave.build import cuda
from hostweave.build.cuda import Gpu
from hostweave.fusion_ir.ops.scaled import BLOCKS, ROW, TENSOR
from hostweave.targets.cuda import handle_of, why_no_peers, why_no_scales
from hostweave.targets.target import find_target
from hostweave.types.machine import H200


def use_gpus(monkeypatch: pytest.MonkeyPatch, arch: str, count: int, without_access: tuple[int, int] | None = None) -> None:
    monkeypatch.setattr(cuda, "driver_version", lambda: "13.0")
    monkeypatch.setattr(cuda, "gpus", lambda: (Gpu("NVIDIA H200", arch),) * count)
    monkeypatch.setattr(cuda, "pair_without_access", lambda: without_access)


class Driver:
    """Functions of libcuda.so.1 that describe one A100. Arguments of type Any are made by ctypes.byref."""

    attributes: ClassVar = {75: 8, 76: 0, 16: 108, 10: 32, 1: 1024, 82: 65536, 120: 0}

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 1
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA A100"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[attribute]
        return 0


def test_kernels_are_scheduled_for_the_limits_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without figures has the speeds of another GPU, and its own limits."""
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda name: Driver())
        (gpu,) = cuda.gpus.__wrapped__()
    assert (gpu.name, gpu.arch) == ("NVIDIA A100", "sm_80")
    use_gpus(monkeypatch, "sm_80", count=1)
    monkeypatch.setattr(cuda, "gpus", lambda: (gpu,))
    machine = find_target("cuda").machine(1)
    assert (machine.stands_for, machine.flops) == ("NVIDIA A100", H200.flops)
    assert (machine.multiprocessors, machine.cluster_blocks, machine.warp, machine.registers) == (108, 1, 32, 65536)


def test_gpus_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not_here = find_target("cuda").why_not_here
    use_gpus(monkeypatch, "sm_90", count=2)
    assert [why_not_here(ranks) for ranks in (1, 2)] == ["", ""]
    assert why_not_here(4) == "4 GPUs are needed, and this machine has 2; compile for a smaller mesh, or for the CPU"
    use_gpus(monkeypatch, "sm_90", count=0)
    assert why_not_here(1) == 'no GPU can be used: the driver reports none; check CUDA_VISIBLE_DEVICES, or compile with target="cpu"'
    monkeypatch.setattr(cuda, "driver_version", lambda: None)
    assert why_not_here(1).startswith("no GPU can be used: this machine has no NVIDIA driver, libcuda.so.1; ")


def test_puts_need_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, "sm_90", count=2)
    assert why_no_peers(2) == ""
    assert why_no_peers(4) == "puts need all ranks on the GPUs of one host, and this host has 2 for 4 ranks"
    use_gpus(monkeypatch, "sm_90", count=2, without_access=(0, 1))
    assert [why_no_peers(ranks) for ranks in (1, 2)] == ["", "puts need peer access, and GPU 0 has none to GPU 1"]


@pytest.mark.parametrize(
    ("arch", "scaling", "reason"),
    [
        ("sm_80", TENSOR, "tensor cores of sm_80 have no 8-bit floats"),
        ("sm_89", TENSOR, ""),
        ("sm_89", ROW, "cuBLASLt supports scales of a row only on sm_90, and this is sm_89"),
        ("sm_100", BLOCKS, "cuBLASLt supports scales of a block only on sm_90, and this is sm_100"),
    ],
)
def test_gpus_that_multiply_8_bit_floats(arch: str, scaling: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, arch, count=1)
    assert why_no_scales(scaling) == reason


def test_streams_of_other_libraries() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 7

    assert [handle_of(one) for one in (0, 5, SimpleNamespace(cuda_stream=6), Protocol(), SimpleNamespace(ptr=8))] == [0, 5, 6, 7, 8]
    with pytest.raises(TypeError) as caught:
        handle_of("main")
    assert str(caught.value) == "stream=: expected an int, a stream of PyTorch or CuPy, or one with __cuda_stream__, got str"
