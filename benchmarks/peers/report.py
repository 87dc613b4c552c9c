"""Lines that benchmarks print: machine and versions, and times with their ranges and the ratio to the fastest alternative."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import metadata

import hostweave as hw
from hostweave.cli.doctor import report

QUERY = "--query-gpu=name,power.limit,driver_version"
MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # variables and values that disable multicast


@cache
def print_machine() -> None:
    print(machine(), flush=True)


def print_tools(*packages: str) -> None:
    """Prints the versions of Hostweave and `packages`, and the compilers and libraries of this machine, for benchmarks without torch."""
    print("; ".join([f"hostweave {hw.__version__}", *(f"{package} {_version(package)}" for package in packages)]))
    for part, text in report():
        print(f"{part:10} {text}", flush=True)


def machine() -> str:
    """Text with the GPUs and their power limit, the driver, versions of libraries, and disabled features."""
    listed = ""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", QUERY, "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout
    gpus = [line.split(", ") for line in listed.splitlines()]
    name, power, driver = gpus[0] if gpus else ("no GPU", "", "")
    off = [f"{name}={value}" for name, value in MULTICAST.items() if os.environ.get(name) == value]
    parts = [
        f"{len(gpus)} x {name}, {power}, driver {driver}" if gpus else name,
        f"hostweave {hw.__version__}",
        *_of_torch(),
        f"off: NVLink multicast ({', '.join(off)})" if off else "nothing switched off",
    ]
    return "; ".join(parts)


def _of_torch() -> list[str]:
    """Versions of PyTorch, NCCL, cuBLAS and cuDNN. The NCCL version is that of the loaded library."""
    try:
        import torch
    except ModuleNotFoundError:
        return ["no PyTorch"]
    if not torch.cuda.is_available():
        return [f"torch {torch.__version__}"]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return [f"torch {torch.__version__}", f"NCCL {nccl}", f"cuBLAS {_version('nvidia-cublas')}", f"cuDNN {torch.backends.cudnn.version()}"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def spread(times: Sequence[float], digits: int = 3, per: float = 1) -> str:
    """Text with the median and the range of the times, each divided by `per`."""
    low, high = min(times), max(times)
    return f"{statistics.median(times) / per:.{digits}f} ({low / per:.{digits}f} to {high / per:.{digits}f})"


def line(times: Mapping[str, Sequence[float]], ours: Collection[str], per: float = 1, unit: str = "ms", digits: int = 3) -> str:
    """Text with medians and ranges of the variants, `ours` first, and with the ratio of the fastest alternative to the fastest of `ours`.
    All times are divided by `per`."""
    medians = {name: statistics.median(ms) for name, ms in times.items()}

    def listed(names: Collection[str]) -> str:
        return ", ".join(
            f"{name} {medians[name] / per:.{digits}f} {unit} ({min(times[name]) / per:.{digits}f} to {max(times[name]) / per:.{digits}f})"
            for name in names
        )

    peers = [name for name in times if name not in ours]
    if not peers:
        return listed(ours)
    best, own = min(peers, key=medians.__getitem__), min(ours, key=medians.__getitem__)
    return f"{listed(ours)}; {listed(peers)}; {medians[best] / medians[own]:.3f} times as fast as the best peer, {best}"
