"""Interface of targets. Each target is one file here with an object `TARGET`; callers ask that object and never compare names."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hostweave.base.forks import importing
from hostweave.base.paths import RUNTIME_SOURCES
from hostweave.build.toolchain import Library, Toolchain
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.transports.transport import Transport
from hostweave.types.machine import Machine

CPU_DEVICE = -1  # the device of an array in host memory

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "target")))


class Target(Protocol):
    """A kind of device: the toolchain that builds programs for it, and the properties of its ranks."""

    name: str
    is_asynchronous: bool  # calls only enqueue, so a watchdog must detect calls that hang
    is_simulated: bool  # times are not times of GPUs
    needs_one_host: bool  # all ranks are on one host
    dlopen_flags: int  # additional dlopen flags for a program's module
    demo_size: int  # size of a symbolic dim per rank in demonstrations
    wheel_requirements: tuple[str, ...]  # packages that the wheel of a program needs in addition to NumPy
    wheel_build_requirements: tuple[str, ...]  # packages that its build needs in addition to scikit-build-core

    def expect_kernels(self, kernels: Sequence[UserKernel]) -> None:
        """Raises ProgramError if a user kernel cannot run on this target. By default all can."""
        return

    def toolchain(self) -> Toolchain:
        """Toolchain of this target. Raises BuildError if a part is missing, with the packages to install."""

    def runtime_libraries(self, toolchain: Toolchain, wanted: frozenset[str]) -> tuple[Library, ...]:
        """Libraries that a program links to; `wanted` lists optional parts.

        Raises BuildError if one is missing, with the packages to install.
        """

    def cmake_options(self) -> list[str]:
        """Options of CMake with the folders of this machine, to configure an exported project. By default none are needed."""
        return []

    def why_not_here(self, ranks: int) -> str:
        """Reason and remedy if `ranks` ranks cannot run in this process; "" if they can. By default they can."""
        return ""

    def expect_memory(self) -> None:
        """Raises MemoryError if there is too little to load a program. By default the libraries report a missing GPU themselves."""
        return

    def report(self) -> Iterator[tuple[str, str]]:
        """Parts of the target that were found on this machine, as (title, text). A missing part comes with the package to install."""

    def machine(self, ranks: int) -> Machine:
        """Figures for the cost model, for programs of `ranks` ranks here. They include peer access."""

    def why_not(self, transport: Transport) -> str:
        """Reason why the library of this process cannot provide a transport; "" if it can, which is the default."""
        return ""

    def choose_device(self, wanted: int | None, usual: Callable[[], int]) -> int:
        """Device number of a rank. `wanted` is the user's choice, if any."""

    def device_of_arrays(self, member: Any) -> int:
        """GPU number of a rank's arrays, or CPU_DEVICE."""

    def expect_device(self, device: int) -> None:
        """Raises TypeError with a reason if arrays on that device cannot be used. By default all can."""
        return

    def device_name(self) -> str:
        """Name of the devices here; measurements are stored by this name."""

    def stream(self, given: Any) -> int | None:
        """Native stream for the argument `stream=` of a call, or None for the current stream of the caller's library.

        Raises TypeError with a reason if the argument is not a stream.
        """


@cache
def find_target(name: str) -> Target:
    """Target of that name, which must be in NAMES."""
    with importing:
        target: Target = import_module(f"hostweave.targets.{name}").TARGET
    return target


def runtime_sources(target: str) -> list[Path]:
    """C++ and kernel sources of the runtime, without those whose file names end in another target's name."""
    return sources_of(RUNTIME_SOURCES, target)


def sources_of(folders: Sequence[Path], target: str) -> list[Path]:
    """C++ and kernel sources in these folders for a target."""
    others = tuple(f"_{name}" for name in NAMES if name != target)
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".cu")]
    return [path for path in files if not path.stem.endswith(others)]
