"""Figures of the cost model that `hostweave calibrate` measured: one JSON file per GPU name and count in the cache folder."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hostweave.build.cache import root, write_atomically
from hostweave.build.cuda import Gpu
from hostweave.types.machine import Machine


def file_of(gpus: Sequence[Gpu]) -> Path:
    name = re.sub(r"\W+", "_", gpus[0].name).strip("_")
    return root() / "machines" / f"{name}_x{len(gpus)}.json"


def measured(gpus: Sequence[Gpu]) -> Machine | None:
    return read(file_of(gpus)) if gpus else None


def save(machine: Machine, gpus: Sequence[Gpu]) -> Path:
    """Writes the figures, and returns the path."""
    path = file_of(gpus)
    write_atomically(path, machine.to_json())
    read.cache_clear()
    return path


@cache
def read(path: Path) -> Machine | None:
    try:
        return Machine.from_json(path.read_text(), str(path))
    except FileNotFoundError:
        return None
