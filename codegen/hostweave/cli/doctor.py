"""`hostweave doctor`: lists installed and missing requirements, and how to install the missing ones."""

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from hostweave.base.errors import BuildError
from hostweave.build import cache
from hostweave.build.processes import run
from hostweave.build.toolchain import find_compiler
from hostweave.targets.target import NAMES, find_target


def report() -> Iterator[tuple[str, str]]:
    """Yields each requirement with the part that was found, or with the package to install."""
    yield "python", f"{platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield "compiler", _or_why_not(_compiler, "missing")
    for target in NAMES:
        yield from find_target(target).report()
    yield "cache", _or_why_not(cache.summary, "cannot be used")


def _or_why_not(text: Callable[[], str], otherwise: str) -> str:
    try:
        return text()
    except BuildError as error:
        return f"{otherwise}: {error}"


def _compiler() -> str:
    compiler = find_compiler()
    said = run([str(compiler), "--version"], Path("/"))[1].splitlines()
    return f"{said[0] if said else 'unknown version'}, {compiler}"
