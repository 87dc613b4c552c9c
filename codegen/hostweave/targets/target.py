"""Interface of targets. Each target is a file of this folder with an object `TARGET`."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hostweave.base.forks import importing
from hostweave.build.toolchain import Library, Toolchain
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.transports.transport import Transport
from hostweave.types.machine import Machine

CPU_DEVICE = -1  # device number of arrays in host memory

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "target")))


class Target(Protocol):
    """A kind of device: the toolchain that builds programs for the device, and the properties of ranks on the device."""

    name: str
    is_asynchronous: bool  # calls only enqueue work, so a watchdog must detect hangs
    is_simulated: bool = False  # measured times are not times of GPUs
    needs_one_host: bool = False  # all ranks are on one host
    dlopen_flags: int = 0  # additional dlopen flags for a program's module
    demo_size: int  # size per rank of a symbolic dim in `hostweave demo`
    wheel_requirements: tuple[str, ...]  # packages that a program's wheel needs besides NumPy
    wheel_build_requirements: tuple[str, ...] = ()  # packages that the build of the wheel needs besides scikit-build-core

    def expect_kernels(self, kernels: Sequence[UserKernel]) -> None:
        """Raises ProgramError if this target cannot run one of the user kernels."""
        return

    def toolchain(self) -> Toolchain:
        """Returns the toolchain that builds programs. Raises BuildError if a part is missing."""

    def runtime_libraries(self, toolchain: Toolchain, requested: frozenset[str]) -> tuple[Library, ...]:
        """Returns the libraries that a program links to. `requested` has optional parts of the runtime."""

    def cmake_options(self) -> list[str]:
        """CMake options of an exported project, with paths of this machine."""
        return []

    def why_not_here(self, ranks: int) -> str:
        """Reason why this process cannot run `ranks` ranks, with a remedy, or ""."""
        return ""

    def expect_memory(self) -> None:
        """Raises MemoryError if there is too little memory to load a program."""
        return

    def report(self) -> Iterator[tuple[str, str]]:
        """Yields the rows of `hostweave doctor` about this target, as (title, text)."""

    def machine(self, ranks: int) -> Machine:
        """Figures of the machine for which programs of `ranks` ranks are compiled."""

    def why_not(self, transport: Transport) -> str:
        """Reason why the communication library does not support a transport, or ""."""
        return ""

    def choose_device(self, requested: int | None, default: Callable[[], int]) -> int:
        """Device number of a rank. `requested` is the user's choice, or None."""

    def device_of_arrays(self, member: Any) -> int:
        """GPU of a rank's arrays, or CPU_DEVICE. `member` is the native object of the rank."""

    def expect_device(self, device: int) -> None:
        """Raises TypeError if arrays on that device cannot be used."""
        return

    def device_name(self) -> str:
        """Name of the devices of this machine, under which measurements are stored."""

    def stream(self, given: Any) -> int | None:
        """Handle of the argument `stream=` of a call. None for the current stream of the arrays' library. Raises TypeError if the
        target cannot use `given`."""


@cache
def find_target(name: str) -> Target:
    with importing:
        target: Target = import_module(f"hostweave.targets.{name}").TARGET
    return target


def sources_of(folders: Sequence[Path], target: str) -> list[Path]:
    """Sources for a target, without files whose names end in another target's name."""
    others = tuple(f"_{name}" for name in NAMES if name != target)
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".cu")]
    return [path for path in files if not path.stem.endswith(others)]
