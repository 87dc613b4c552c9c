"""Loads the files of benchmarks/, which is not a package."""

from __future__ import annotations

import sys
from typing import Any

from hostweave.base.paths import BENCHMARKS
from hostweave.cli.programs import load_file


def benchmark(name: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return load_file(BENCHMARKS / f"{name}.py")
    finally:
        sys.path.remove(str(BENCHMARKS))
