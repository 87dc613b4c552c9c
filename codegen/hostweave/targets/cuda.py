"""CUDA target: one NVIDIA GPU per rank."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hostweave.base.errors import BuildError, ProgramError
from hostweave.base.forks import importing
from hostweave.base.paths import BUILDER, RUNTIME, RUNTIME_INCLUDES, RUNTIME_SOURCES
from hostweave.build import cuda, figures
from hostweave.build.cache import get_or_make, name_of, root, stamp_of
from hostweave.build.nvrtc import Nvrtc
from hostweave.build.toolchain import Library, Toolchain, find_compiler
from hostweave.fusion_ir.ops.scaled import SCALINGS, TENSOR
from hostweave.targets.target import Target, sources_of
from hostweave.transports.transport import NAMES, SIGNALS, Transport, find_transport
from hostweave.types.machine import Machine, shipped


class _Cuda(Target):
    name = "cuda"
    is_asynchronous = True
    demo_size = 1024
    wheel_requirements = ("torch",)  # loads the CUDA libraries

    def toolchain(self) -> Toolchain:
        compiler, installed = find_compiler(), cuda.find_cuda().require()
        libraries = tuple(file.path for file in installed.libraries if file.path)
        include_folders = (*RUNTIME_INCLUDES, *installed.include_folders)
        assert installed.nvrtc.path is not None
        return Toolchain(self.name, compiler, include_folders, libraries, Nvrtc(installed.nvrtc.path, cuda.arch(), include_folders))

    def runtime_libraries(self, toolchain: Toolchain, requested: frozenset[str]) -> tuple[Library, ...]:
        """A library for all programs and, if `requested` is not empty, the attention library and the requested kernels. All are
        compiled at the first use."""
        shared = _library(self.name, sources_of(RUNTIME_SOURCES, self.name), toolchain)
        libraries = [shared]
        attention = RUNTIME / "attention"
        for name in sorted(requested - {"attention"}):
            _, dtype, head = name.split("_")
            kernels = sources_of((attention / "kernels",), self.name)
            libraries.append(_library(f"{name}_{self.name}", kernels, toolchain, shared, HW_DTYPE=dtype, HW_HEAD=head))
        if requested:
            header, library = cuda.find_cuda().require_cudnn()
            folders = (*toolchain.include_folders, header.parent)
            with_cudnn = replace(toolchain, include_folders=folders, libraries=(*toolchain.libraries, library))
            libraries.append(_library(f"attention_{self.name}", sources_of((attention,), self.name), with_cudnn, shared))
        return tuple(libraries)

    def why_not_here(self, ranks: int) -> str:
        if cuda.driver_version() is None:
            return 'no GPU can be used: this machine has no NVIDIA driver, libcuda.so.1; install it, or compile with target="cpu"'
        if not (count := len(cuda.gpus())):
            return 'no GPU can be used: the driver reports none; check CUDA_VISIBLE_DEVICES, or compile with target="cpu"'
        needed = f"{ranks} GPU{'s' if ranks > 1 else ''}"
        return "" if count >= ranks else f"{needed} are needed, and this machine has {count}; compile for a smaller mesh, or for the CPU"

    def device_name(self) -> str:
        return next((gpu.name for gpu in cuda.gpus()), "")

    def report(self) -> Iterator[tuple[str, str]]:
        installed = cuda.find_cuda()
        for file in (*installed.headers, *installed.libraries, installed.nvrtc, *installed.cudnn, installed.nvtx):
            yield next((word for word in ("nccl", "cublas", "cudnn", "nvtx") if word in file.name), "toolkit"), _file(file)
        yield "gpus", _gpus(installed.major)
        if cuda.gpus():
            yield "figures", _figures()
        if len(cuda.gpus()) > 1:
            yield "peers", why_no_peers(len(cuda.gpus())) or "all GPUs reach each other's memory: chunk loops use transport peer"
        yield self.name, _readiness(installed)

    def machine(self, ranks: int) -> Machine:
        gpus = cuda.gpus()
        machine = figures.measured(gpus) or shipped(self.device_name()).with_limits(dict(gpus[0].limits if gpus else ()))
        for scaling in SCALINGS:
            machine = machine.without_scales(scaling, why) if (why := why_no_scales(scaling)) else machine
        if why := why_no_peers(ranks):
            return replace(machine, no_peers=why)
        for name in NAMES:
            machine = machine.without(name, why) if (why := self.why_not(find_transport(name))) else machine
        return machine

    def why_not(self, transport: Transport) -> str:
        """Reason why NCCL is missing or too old. Checks the header, and the library if this process has loaded it."""
        for version, where in ((_version_in("nccl.h"), "was found"), (cuda.loaded_nccl(), "is loaded already")) if transport.since else ():
            if version is not None and version < transport.since:
                actual = f"NCCL {'.'.join(map(str, version))} {where}" if version else "none was found"
                return f"puts need NCCL {'.'.join(map(str, transport.since))} or later, and {actual}"
        return ""

    def choose_device(self, requested: int | None, default: Callable[[], int]) -> int:
        return default() if requested is None else requested

    def device_of_arrays(self, member: Any) -> int:
        return int(member.device)

    def stream(self, given: Any) -> int | None:
        return None if given is None else handle_of(given)


TARGET = _Cuda()


@cache
def _version_in(header: str) -> tuple[int, ...]:
    """Version of the library of a header. Empty if the header was not found."""
    file = next(file for file in cuda.find_cuda().headers if file.name == header)
    return tuple(map(int, re.findall(r"\d+", _version(file))))


def why_no_puts(ranks: int) -> str:
    """Reason why no transport with puts can be used here, or ""."""
    return min(TARGET.why_not(transport) for transport in map(find_transport, NAMES) if transport.carries >= SIGNALS) or why_no_peers(ranks)


def why_no_scales(scaling: str) -> str:
    """Reason why cuBLASLt cannot multiply 8-bit floats with this kind of scales on the GPUs of this machine, or ""."""
    if not cuda.gpus():
        return ""
    number = min(int(gpu.arch.removeprefix("sm_")) for gpu in cuda.gpus())
    if number < 89:
        return f"tensor cores of sm_{number} have no 8-bit floats"
    if scaling != TENSOR and number // 10 != 9:
        return f"cuBLASLt supports scales of a {scaling} only on sm_90, and this is sm_{number}"
    version = _version_in("cublasLt.h")
    if scaling != TENSOR and version < (12, 9):
        return f"scales of a {scaling} need cuBLAS 12.9 or later, and {'.'.join(map(str, version)) or 'none'} was found"
    return ""


def why_no_peers(ranks: int) -> str:
    """Reason why ranks cannot access each other's memory, or "" if they can."""
    if len(cuda.gpus()) < ranks:
        return f"puts need all ranks on the GPUs of one host, and this host has {len(cuda.gpus())} for {ranks} ranks"
    if ranks > 1 and (pair := cuda.pair_without_access()):
        return f"puts need peer access, and GPU {pair[0]} has none to GPU {pair[1]}"
    return ""


def _figures() -> str:
    gpus = cuda.gpus()
    try:
        measured = figures.measured(gpus)
    except ProgramError as error:
        return str(error)
    if measured:
        return f"measured on this machine, {figures.file_of(gpus)}"
    machine = shipped(gpus[0].name)
    if machine.stands_for:
        return f"the cost model has no figures of {machine.stands_for}, and uses the figures of {machine.name}: run hostweave calibrate"
    return f"the package's figures of {machine.name}; hostweave calibrate measures this machine"


def _library(name: str, files: list[Path], toolchain: Toolchain, *needed: Library, **macros: str) -> Library:
    """A cached library of `files`, which are compiled with `macros` and linked to `needed`."""
    file = f"libhostweave_{name}.so"
    stamps = map(stamp_of, (BUILDER, Path(__file__).parent, RUNTIME))
    entry = name_of(f"runtime_{name}", *stamps, toolchain.stamp)
    soname = f"{entry}.so"

    def make(folder: Path) -> None:
        with importing:
            from hostweave.build.make import make_runtime

        make_runtime(folder, files, toolchain, file, macros, soname, needed)

    return Library(root() / entry / file, partial(get_or_make, entry, make), soname)


def handle_of(stream: Any) -> int:
    """Returns the cudaStream_t of a stream. Raises TypeError for an object of another kind."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "cuda_stream"):  # PyTorch
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    if hasattr(stream, "ptr"):  # CuPy
        return int(stream.ptr)
    raise TypeError(f"stream=: expected an int, a stream of PyTorch or CuPy, or one with __cuda_stream__, got {type(stream).__name__}")


# --- report of `hostweave doctor` -------------------------------------------------------------------------------------


def _file(file: cuda.CudaFile) -> str:
    if file.path is None:
        return f"{file.name} missing: pip install {file.package}"
    return f"{file.name}{_version(file)}, {file.path}"


def _version(file: cuda.CudaFile) -> str:
    """Version that a header defines, after a space, or ""."""
    macros = {
        "nccl.h": r"NCCL_(MAJOR|MINOR|PATCH)",
        "cublasLt.h": r"CUBLAS_VER_(MAJOR|MINOR|PATCH)",
        "cudnn.h": r"CUDNN_(MAJOR|MINOR|PATCHLEVEL)",
        "cuda_runtime_api.h": "CUDART_VERSION",
    }
    if file.path is None or file.name not in macros:
        return ""
    folder = file.path.parent
    text = "".join(p.read_text(errors="replace") for p in (file.path, folder / "cublas_api.h", folder / "cudnn_version.h") if p.exists())
    numbers = [match[-1] for match in re.findall(rf"#define ({macros[file.name]})\s+(\d+)", text)]
    if file.name == "cuda_runtime_api.h" and numbers:
        return f" {int(numbers[0]) // 1000}.{int(numbers[0]) % 1000 // 10}"
    return f" {'.'.join(numbers[:3])}" if numbers else ""


def _gpus(major: int) -> str:
    gpus, driver = cuda.gpus(), cuda.driver_version()
    if driver is None:
        return "no NVIDIA driver: libcuda.so.1 is not on this machine"
    if not gpus:
        return f"the driver (for CUDA {driver}) reports none"
    names = ", ".join(f"{sum(gpu == kind for gpu in gpus)} x {kind.name} ({kind.arch})" for kind in dict.fromkeys(gpus))
    old = f"; the driver is older than the CUDA {major} that was found" if int(driver.split(".")[0]) < major else ""
    return f"{names}, driver for CUDA {driver}{old}"


def _readiness(installed: cuda.Cuda) -> str:
    try:
        installed.require()
    except BuildError as error:
        return f"target cuda generates, but cannot compile: {error}"
    return "target cuda is ready" if cuda.gpus() else "target cuda generates and compiles, but nothing here can run it"
