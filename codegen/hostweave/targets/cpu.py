"""CPU target: a library on the CPU executes the CUDA, NCCL and cuBLASLt calls. Ranks are threads or processes of one host."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from hostweave.base.errors import BuildError
from hostweave.base.paths import NATIVE, RUNTIME, RUNTIME_INCLUDES
from hostweave.base.shortages import expect_memory
from hostweave.build.toolchain import Library, Toolchain, find_compiler, openblas_root, require_native
from hostweave.fusion_ir.user_kernel import UserKernel, expect_one_thread
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.machine import H200, Machine

OPENBLAS = "scipy-openblas32>=0.3.27"
_THREADS = 64  # maximum threads of OpenBLAS


class _Cpu(Target):
    name = "cpu"
    is_asynchronous = False
    is_simulated = True
    needs_one_host = True
    # Another package may have made symbols of CUDA libraries global. libhostweave_cpu.so defines the same symbols.
    dlopen_flags = os.RTLD_DEEPBIND
    demo_size = 64
    wheel_requirements = ("ml_dtypes>=0.4", OPENBLAS)
    wheel_build_requirements = (OPENBLAS,)

    def expect_kernels(self, kernels: Sequence[UserKernel]) -> None:
        for kernel in kernels:
            expect_one_thread(kernel)

    def toolchain(self) -> Toolchain:
        return Toolchain(self.name, find_compiler(), (*RUNTIME_INCLUDES, RUNTIME / "cpu" / "include"), ())

    def runtime_libraries(self, toolchain: Toolchain, requested: frozenset[str]) -> tuple[Library, ...]:
        return (Library(NATIVE / "libhostweave_cpu.so", lambda: None),)

    def cmake_options(self) -> list[str]:
        return [f"-DHOSTWEAVE_OPENBLAS_ROOT={openblas_root()}"]

    @cache  # noqa: B019 -- there is only one object
    def expect_memory(self) -> None:
        """Raises MemoryError if there is too little memory for OpenBLAS, which ends the process if an allocation fails."""
        given = os.environ.get("OPENBLAS_NUM_THREADS", "")
        threads = min(int(given) if given.isdecimal() and int(given) else _THREADS, len(os.sched_getaffinity(0)), _THREADS)
        expect_memory((15 + 40 * threads) << 20)

    def device_name(self) -> str:
        return "cpu"

    def report(self) -> Iterator[tuple[str, str]]:
        try:
            find_compiler()
            require_native()
        except BuildError as error:
            yield self.name, f"target cpu cannot be used: {error}"
        else:
            yield self.name, f"target cpu is ready, {NATIVE / 'libhostweave_cpu.so'}"

    def machine(self, ranks: int) -> Machine:
        """The H200, so that programs are compiled for the CPU target as for GPUs."""
        return H200

    def choose_device(self, requested: int | None, default: Callable[[], int]) -> int:
        return default()

    def device_of_arrays(self, member: Any) -> int:
        return CPU_DEVICE

    def expect_device(self, device: int) -> None:
        if device != CPU_DEVICE:
            raise TypeError(
                f"is on GPU {device}, but the program was compiled for the CPU; pass an array in host memory, or compile for cuda"
            )

    def stream(self, given: Any) -> int | None:
        if given is not None:
            raise TypeError("stream= is for the target cuda; on the CPU a call returns when its work is done")
        return 0


TARGET = _Cpu()
