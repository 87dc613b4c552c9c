"""What differs between targets: of each one file here, with the object `TARGET`. Whoever needs to know asks it, and compares no names."""

from __future__ import annotations

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
    """A kind of device, with what builds programs for it and what its ranks work with."""

    name: str
    is_asynchronous: bool  # calls only enqueue, and somebody has to watch whether they end
    is_simulated: bool  # times are not those of GPUs
    needs_one_host: bool  # whose memory the ranks share
    dlopen_flags: int  # of a program's module, beside the usual ones
    demo_size: int  # of a symbolic dim, for each rank of a mesh, that shows what the target can do

    def expect_kernels(self, kernels: Sequence[UserKernel]) -> None:
        """Raises ProgramError where a kernel of the user cannot run here as it is. By default any can."""
        return

    def toolchain(self) -> Toolchain:
        """Raises BuildError where a part is missing, with what to install."""

    def runtime_libraries(self, toolchain: Toolchain, wanted: frozenset[str]) -> tuple[Library, ...]:
        """What a program is linked with that wants more than all do. Raises BuildError where a part is missing, with what to install."""

    def why_not_here(self, ranks: int) -> str:
        """The reason, with a remedy, why so many ranks cannot run in this process; "" if they can. By default they can."""
        return ""

    def report(self) -> Iterator[tuple[str, str]]:
        """What was found of the target on this machine, by title. Lines of what is missing end in what to install."""

    def machine(self, ranks: int) -> Machine:
        """The figures of the cost model for programs of so many ranks here, and whether these can reach each other's memory."""

    def why_not(self, transport: Transport) -> str:
        """Why the library that this process has or would load cannot do what a transport carries; "" if it can, as by default."""
        return ""

    def choose_device(self, wanted: int | None, usual: Callable[[], int]) -> int:
        """The number of a rank's device, where the user may have said one."""

    def device_of_arrays(self, member: Any) -> int:
        """Of a rank: the number of its GPU, or CPU_DEVICE."""

    def expect_device(self, device: int) -> None:
        """Raises TypeError with a reason where arrays of that device are not for this target. By default all are."""
        return

    def device_name(self) -> str:
        """Of the devices here, which what is measured on them is kept by."""

    def stream(self, given: Any) -> int | None:
        """The native stream of a call that passes `stream=`; None: the current one of the caller's library.

        Raises TypeError with a reason where what is given is no stream.
        """


@cache
def find_target(name: str) -> Target:
    """The target of that name, which is one of NAMES."""
    with importing:
        target: Target = import_module(f"hostweave.targets.{name}").TARGET
    return target


def runtime_sources(target: str) -> list[Path]:
    """The C++ and the kernels of the runtime: all of it but what is for other targets, as the ends of file names say."""
    return sources_of(RUNTIME_SOURCES, target)


def sources_of(folders: Sequence[Path], target: str) -> list[Path]:
    """The C++ and the kernels in these folders for a target."""
    others = tuple(f"_{name}" for name in NAMES if name != target)
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".cu")]
    return [path for path in files if not path.stem.endswith(others)]
