"""`hostweave doctor`: lists what is installed on this machine, and how to install what is missing."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator

from hostweave.base.errors import BuildError
from hostweave.base.paths import NATIVE
from hostweave.build import cache, cuda
from hostweave.build.toolchain import find_compiler, require_native


def report() -> str:
    """One line for each thing that a target needs. Lines of what is missing end in what to install."""
    return "\n".join(f"{name:<10} {text}" for name, text in _lines())


def _lines() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield "compiler", _compiler()
    yield "cpu", _cpu_target()
    found = cuda.find_cuda()
    for title, part in _cuda_parts(found):
        yield title, _part(part)
    yield "gpus", _gpus(found.major)
    yield "cuda", _cuda_target(found)
    yield "cache", _cache()


def _cache() -> str:
    try:
        return cache.summary()
    except BuildError as error:
        return f"cannot be used: {error}"


def _compiler() -> str:
    try:
        compiler = find_compiler()
    except BuildError as error:
        return f"missing: {error}"
    version = subprocess.run([str(compiler), "--version"], stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return f"{version[0] if version else 'unknown version'}, {compiler}"


def _cpu_target() -> str:
    try:
        find_compiler()
        require_native()
    except BuildError as error:
        return f"target cpu cannot be used: {error}"
    return f"target cpu is ready, {NATIVE / 'libhostweave_cpu.so'}"


def _cuda_parts(found: cuda.Cuda) -> Iterator[tuple[str, cuda.Part]]:
    for part in (*found.headers, *found.libraries, found.nvrtc):
        yield "nccl" if "nccl" in part.name else "cublas" if "cublas" in part.name else "toolkit", part


def _part(part: cuda.Part) -> str:
    if part.path is None:
        return f"{part.name} missing: pip install {part.package}"
    return f"{part.name}{_version(part)}, {part.path}"


def _version(part: cuda.Part) -> str:
    """The version that a header states."""
    macros = {
        "nccl.h": r"NCCL_(MAJOR|MINOR|PATCH)",
        "cublasLt.h": r"CUBLAS_VER_(MAJOR|MINOR|PATCH)",
        "cuda_runtime_api.h": "CUDART_VERSION",
    }
    if part.path is None or part.name not in macros:
        return ""
    folder = part.path.parent
    text = "".join(p.read_text(errors="replace") for p in (part.path, folder / "cublas_api.h") if p.exists())
    numbers = [match[-1] for match in re.findall(rf"#define ({macros[part.name]})\s+(\d+)", text)]
    if part.name == "cuda_runtime_api.h" and numbers:
        return f" {int(numbers[0]) // 1000}.{int(numbers[0]) % 1000 // 10}"
    return f" {'.'.join(numbers[:3])}" if numbers else ""


def _gpus(major: int) -> str:
    gpus, driver = cuda.gpus(), cuda.driver_version()
    if driver is None:
        return "no NVIDIA driver: libcuda.so.1 is not on this machine"
    if not gpus:
        return f"the driver (for CUDA {driver}) offers none"
    names = ", ".join(f"{sum(gpu == kind for gpu in gpus)} x {kind.name} ({kind.arch})" for kind in dict.fromkeys(gpus))
    old = f"; it is older than the CUDA {major} that was found" if int(driver.split(".")[0]) < major else ""
    return f"{names}, driver for CUDA {driver}{old}"


def _cuda_target(found: cuda.Cuda) -> str:
    try:
        found.require()
    except BuildError as error:
        return f"target cuda generates, but cannot compile: {error}"
    return "target cuda is ready" if cuda.gpus() else "target cuda generates and compiles, but nothing here can run it"
