"""The environment variables of launchers: torchrun, mpirun (Open MPI, MPICH, Intel MPI) and srun."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hostweave.base.errors import ArgumentError

Environ = Mapping[str, str]

# Far from the ports that people give to MASTER_PORT, and below those that the system gives out.
_DEFAULT_PORT = 25000
_PORT_OFFSET = 3000
_PORTS = 16


@dataclass(frozen=True)
class Launcher:
    """The names of a launcher's variables. It started this process where the first is set."""

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
    # A batch script that srun did not start has SLURM_PROCID too, but no step.
    Launcher("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


@dataclass(frozen=True)
class Launch:
    """The place of this process, and where the ranks of its job can meet: on one of a few ports of `host`."""

    rank: int
    count: int
    local_rank: int | None
    host: str
    ports: tuple[int, ...]
    job: str
    bind: str  # where rank 0 listens
    token: str  # that ranks of the job alone know


def launched(environ: Environ) -> bool:
    """Whether a launcher started this process."""
    return any(launcher.marker in environ for launcher in LAUNCHERS)


def read_launch(environ: Environ) -> Launch:
    """Raises ArgumentError where no launcher started this process, or where it does not say enough."""
    launcher = next((launcher for launcher in LAUNCHERS if launcher.marker in environ), None)
    if launcher is None:
        markers = ", ".join(launcher.marker for launcher in LAUNCHERS)
        raise ArgumentError(f"hw.Environment: none of {markers} is set; start the script with torchrun, mpirun or srun")
    rank, count = _number(environ, launcher.rank), _number(environ, launcher.count)
    if not 0 <= rank < count:
        raise ArgumentError(f"hw.Environment: {launcher.rank}={rank} and {launcher.count}={count}: ranks go from 0 to {count - 1}")
    local_rank = _number(environ, launcher.local_rank) if launcher.local_rank in environ else None
    host = _host(environ, launcher, count)
    bind, token = environ.get("HOSTWEAVE_BIND", host), environ.get("HOSTWEAVE_TOKEN", "")
    return Launch(rank, count, local_rank, host, *_ports_and_job(environ, launcher), bind, token)


def _number(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ArgumentError(f"hw.Environment: {name}={environ.get(name, '')!r} is not a number; start the script with a launcher") from None


def _host(environ: Environ, launcher: Launcher, count: int) -> str:
    """The host of rank 0."""
    if host := environ.get("MASTER_ADDR"):
        return host
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        return first_node(nodes)
    if environ.get(launcher.local_count) == str(count) or count == 1:
        return "127.0.0.1"
    raise ArgumentError("hw.Environment: the host of rank 0 is not known; set MASTER_ADDR to it on all ranks, or use hw.MPI()")


def first_node(nodes: str) -> str:
    """The first of SLURM's list of nodes: "gpu[03-05,9],login1" begins with gpu03."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _ports_and_job(environ: Environ, launcher: Launcher) -> tuple[tuple[int, ...], str]:
    """The ports to try and the name of the job, the same on all ranks. Never MASTER_PORT itself, which is torch.distributed's."""
    names = [name for name in (*launcher.job, "MASTER_PORT") if name in environ]
    # MPICH's launcher gives the job no name; its processes on one host have one parent.
    job = " ".join(environ[name] for name in names) or f"parent {os.getppid()}"
    if "HOSTWEAVE_PORT" in environ:
        return (_number(environ, "HOSTWEAVE_PORT"),), job
    base = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _DEFAULT_PORT + zlib.crc32(job.encode()) % 200 * _PORTS
    first = base + _PORT_OFFSET if base + _PORT_OFFSET + _PORTS < 65536 else base - _PORT_OFFSET
    return tuple(range(first, first + _PORTS)), job
