"""The environment variables of launchers: torchrun, mpirun (Open MPI, MPICH, Intel MPI) and srun."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hostweave.base.errors import ArgumentError

Environ = Mapping[str, str]

# Lowest base port if MASTER_PORT is not set. The ports of stores are then below 29500, torch's default, and the ephemeral ports.
_DEFAULT_PORT = 23000
_PORT_OFFSET = 3000  # distance from the base port to the first port that the stores try
_PORTS_PER_JOB = 16  # number of ports that the stores try


@dataclass(frozen=True)
class Launcher:
    """Names of a launcher's environment variables. The variable `marker` is set if the launcher has started this process."""

    marker: str
    rank: str
    count: str
    local_rank: str
    local_count: str
    job: tuple[str, ...]


LAUNCHERS = (
    Launcher("WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
    Launcher(
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("PMI_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    # A batch script outside of srun has SLURM_PROCID too, but no step.
    Launcher("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


def launched(environ: Environ) -> bool:
    return any(launcher.marker in environ for launcher in LAUNCHERS)


class LaunchedRank:
    """Rank of this process, and address of the job's store: one of a few ports of `host`."""

    def __init__(self, environ: Environ):
        launcher = next((launcher for launcher in LAUNCHERS if launcher.marker in environ), None)
        if launcher is None:
            markers = ", ".join(launcher.marker for launcher in LAUNCHERS)
            raise ArgumentError(f"hw.Environment: none of {markers} is set; start the script with torchrun, mpirun or srun")
        self.rank, self.count = _number(environ, launcher.rank), _number(environ, launcher.count)
        if not 0 <= self.rank < self.count:
            value = f"{launcher.rank}={self.rank} and {launcher.count}={self.count}"
            raise ArgumentError(f"hw.Environment: {value}: the rank must be from 0 to {self.count - 1}")
        self.local_rank = _number(environ, launcher.local_rank) if launcher.local_rank in environ else None
        self.host = _host(environ, launcher, self.count)
        self.bind = environ.get("HOSTWEAVE_BIND", self.host)  # address at which rank 0 listens
        self.token = environ.get("HOSTWEAVE_TOKEN", "")  # secret of the job
        self.ports, self.job = _ports_and_job(environ, launcher)


def _number(environ: Environ, name: str) -> int:
    value = environ.get(name)
    try:
        return int(value or "")
    except ValueError:
        why = f"{name}={value!r} is not a number" if value else f"{name} is not set"
        raise ArgumentError(f"hw.Environment: {why}; start the script with a launcher") from None


def _port(environ: Environ, name: str) -> int:
    if not 0 < (port := _number(environ, name)) < 65536:
        raise ArgumentError(f"hw.Environment: {name}={port}: a port must be from 1 to 65535; set the same port on all ranks")
    return port


def _host(environ: Environ, launcher: Launcher, count: int) -> str:
    if host := environ.get("MASTER_ADDR"):
        return host
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        return first_node(nodes)
    if environ.get(launcher.local_count) == str(count) or count == 1:
        return "127.0.0.1"
    raise ArgumentError("hw.Environment: the host of rank 0 is unknown; set MASTER_ADDR to its name on all ranks, or use hw.MPI()")


def first_node(nodes: str) -> str:
    """First node of a SLURM node list, such as gpu03 of "gpu[03-05,9],login1"."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _ports_and_job(environ: Environ, launcher: Launcher) -> tuple[tuple[int, ...], str]:
    """Ports to try, and the name of the job, equal on all ranks. MASTER_PORT is left to torch.distributed."""
    names = [name for name in (*launcher.job, "MASTER_PORT") if name in environ]
    # MPICH's launcher does not name the job, but the job's processes on a host have the same parent
    job = " ".join(environ[name] for name in names) or f"parent {os.getppid()}"
    if "HOSTWEAVE_PORT" in environ:
        return (_port(environ, "HOSTWEAVE_PORT"),), job
    base = _port(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _DEFAULT_PORT + zlib.crc32(job.encode()) % 200 * _PORTS_PER_JOB
    first = base + _PORT_OFFSET if base + _PORT_OFFSET + _PORTS_PER_JOB < 65536 else base - _PORT_OFFSET
    return tuple(range(first, first + _PORTS_PER_JOB)), job
